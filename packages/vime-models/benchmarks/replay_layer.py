# SPDX-License-Identifier: Apache-2.0
"""What replay costs a layer: selecting picks natively against getting recorded ones, at the width of V4-Flash.

    python packages/vime-models/benchmarks/replay_layer.py --pack 16k

One indexer stands for several layers, so that rows are copied ahead as in a model. Prints milliseconds per layer and
the ratio to the native selection, for rows that are complete but for last tokens and padding.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from slices import FLASH_SLICE, PACKS

from vime_convert.dsv4.hf_config import read_config
from vime_models.dsv4.config import transformer_config
from vime_models.dsv4.context_parallel import ContextParallel
from vime_models.dsv4.indexer import Indexer
from vime_models.dsv4.rope import RotaryTable
from vime_models.dsv4.thd import token_layout
from vime_models.host.bringup import init_world
from vime_replay.layout import PackLayout
from vime_replay.manager import ReplayManager
from vime_replay.spec import ReplaySpec

LAYERS = 8
SMALL = {"hidden_size": 64, "q_lora_rank": 32, "index_n_heads": 4, "head_dim": 64, "index_topk": 16}


def newest_rows(length: int, topk: int) -> np.ndarray:
    """Legal rows: the newest entries that each query sees."""
    seen = (np.arange(length - 1)[:, None] + 1) // 4
    picks = seen - 1 - np.arange(topk)
    return np.ascontiguousarray(
        np.repeat(np.where(picks >= 0, picks, -1)[:, None].astype(np.int32), LAYERS, 1)
    )


def per_layer_ms(step: Any, device: torch.device, rounds: int = 5) -> float:
    """Time of a pass over all layers, by layer; the first pass warms up."""
    times = []
    for number in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        if number:
            times.append(begin.elapsed_time(end) / LAYERS)
    return sorted(times)[rounds // 2]


def main() -> None:
    """Measures and prints one JSON record per way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", choices=PACKS, default="16k")
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU, no times")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry else "cuda")
    lengths = (300, 200) if options.dry else PACKS[options.pack]
    init_world(device=device.type)
    hf = read_config(FLASH_SLICE | (SMALL if options.dry else {}))
    dtype = torch.float32 if options.dry else torch.bfloat16
    config = transformer_config(hf, dtype=dtype, device=device.type)
    chosen = config.vime_dsv4
    cp = ContextParallel(ProcessGroupCollection.use_mpu_process_groups(["cp"]).cp, "contiguous", False, 128)
    indexer = Indexer(config, cp).to(device)
    table = RotaryTable(chosen.rope_dim, chosen.compress_rope_theta, chosen.yarn)
    pack = PackLayout(lengths, pad_multiple=128)
    cu_seqlens = torch.from_numpy(pack.cu_seqlens).to(device)
    packed = PackedSeqParams("thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    hidden = torch.randn(pack.total, 1, config.hidden_size, dtype=dtype, device=device)
    q_lora = torch.randn(pack.total, chosen.q_lora_rank, dtype=dtype, device=device)
    layout = token_layout(hidden, packed)
    tokens = layout.pack(hidden)

    spec = ReplaySpec("indexer", "rows", LAYERS, chosen.index_topk, {n: n for n in range(LAYERS)}, 4)
    ways: dict[str, Any] = {"native": None}
    for policy in ("recompute", "empty"):
        manager = ways[policy] = ReplayManager(spec, pad_policy=policy)
        for layer in range(LAYERS):
            manager.register(None, layer=layer)
        rows = [newest_rows(n, chosen.index_topk) for n in lengths]
        manager.fill([manager.pack(rows, replace(pack, query_order="contiguous"))])

    def run(manager: Any) -> list[torch.Tensor]:
        picks = []
        for layer in range(LAYERS):
            indexer.replay = None if manager is None else manager.seam(manager.queues[layer])
            picks.append(indexer.select(tokens, q_lora, layout, table))
        if manager is not None:
            manager.rewind_forward()
        return picks

    native = 0.0
    for way, manager in ways.items():
        if manager is not None:
            manager.set_stage("replay_forward")
        if options.dry:
            print(way, [tuple(each.shape) for each in run(manager)][:1])
            continue
        ms = per_layer_ms(lambda manager=manager: run(manager), device)
        native = native or ms
        record = {
            "name": f"indexer {way}",
            "pack": options.pack,
            "ms_per_layer": round(ms, 3),
            "of_native": round(ms / native, 3),
            "device": torch.cuda.get_device_name(device),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
