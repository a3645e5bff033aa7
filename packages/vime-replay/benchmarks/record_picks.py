# SPDX-License-Identifier: Apache-2.0
"""Records the picks of a tiny DeepSeek-V4 on one long sample, for benchmarks that need real selections.

Real in kind, not in quality: released widths of the selection (512 picks of groups of 4), tiny widths elsewhere, random
weights and random tokens. Neighbouring rows then differ more than in a trained model, which attends to content.
"""

import argparse
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np


def record(tokens: int, seed: int = 0) -> tuple[np.ndarray, float]:
    """Rows int32 [tokens - 1, L, 512] of one sample, and seconds of the forward pass that picked them."""
    import torch

    from vime_convert.megatron.loader import load_checkpoint
    from vime_convert.reader import CheckpointReader
    from vime_convert.tiny import make_tiny
    from vime_models.dsv4.indexer import Indexer
    from vime_models.dsv4.plugin import PLUGIN
    from vime_models.host import bringup

    config = next(case.config for case in PLUGIN.tiny_cases if case.name == "flash") | {
        "index_topk": 512,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": tokens,
        "num_nextn_predict_layers": 0,
        "num_hidden_layers": 5,
        "compress_ratios": [0, 4, 4, 128, 4],
    }
    picks: list[np.ndarray] = []
    PLUGIN.setup("cpu")
    bringup.init_world()
    (model,) = PLUGIN.build(config, dtype=torch.float32, device="cpu")
    with TemporaryDirectory() as directory:
        make_tiny(config, Path(directory) / "tiny", seed=seed, plugin=PLUGIN)
        load_checkpoint([model], CheckpointReader(Path(directory) / "tiny"), PLUGIN.rules(config))
    for module in model.modules():
        if isinstance(module, Indexer):
            select = module.topk_fn

            def recorded(*args: Any, _select: Any = select, **keywords: Any) -> torch.Tensor:
                found = _select(*args, **keywords)
                picks.append(found.numpy().copy())
                return found

            module.topk_fn = recorded
    ids = torch.randint(config["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(seed))
    begin = time.perf_counter()
    with torch.no_grad():
        model(ids, None, None)
    seconds = time.perf_counter() - begin
    layers = sum(ratio == 4 for ratio in config["compress_ratios"])
    rows = np.stack(np.split(np.concatenate(picks), layers), axis=1)[: tokens - 1]
    return np.ascontiguousarray(rows, np.int32), seconds


def load_or_record(path: Path | None, tokens: int) -> tuple[np.ndarray, float]:
    """What `record` returned, from `path` if it is there, else recorded now and kept in `path` if one is given."""
    if path is not None and path.exists():
        with np.load(path) as kept:
            return kept["rows"], float(kept["seconds"])
    rows, seconds = record(tokens)
    if path is not None:
        np.savez(path, rows=rows, seconds=seconds)
    return rows, seconds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help=".npz file")
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    rows, seconds = load_or_record(options.out, options.tokens)
    print(f"{options.out}: rows {rows.shape}, {rows.nbytes / 2**20:.0f} MiB, forward pass {seconds:.1f} s")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
