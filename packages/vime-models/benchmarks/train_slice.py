# SPDX-License-Identifier: Apache-2.0
"""Training steps of four real-width DeepSeek-V4-Flash layers on one or several GPUs.

    python train_slice.py 16k --out results/slice-h200.json
    torchrun --nproc-per-node 2 train_slice.py cp2-64k --out results/multi_gpu.json

Prints a line and merges a record into the file. One case per start: hooks of Megatron's DDP keep a model alive.
bfloat16, Megatron's distributed optimizer with torch's fused Adam, weights drawn at random, packed random tokens. A
step is forward, backward, reduction of gradients and update. MFU counts three times the forward operations of the model
(recomputation is not counted) against 989 TFLOP/s.
`--dry` runs a tiny model on the CPU, without times that mean anything.
"""

import argparse
import json
import os
import shlex
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import measure
import predict
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from slices import CASES, FLASH_SLICE, PACKS, Case
from trainer import Trainer

from vime_models.dsv4 import sizes
from vime_models.host import bringup

PEAK_TFLOPS = 989.0


def run(name: str, case: Case, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The record of one case."""
    trainer = Trainer(case, config, "cuda")
    for _ in range(options.warmup):
        trainer.step()
    torch.cuda.reset_peak_memory_stats()
    ms = measure.largest(measure.median_ms(trainer.step, options.steps))
    update_ms = measure.largest(measure.median_ms(trainer.update, options.steps))
    peak = measure.largest(torch.cuda.max_memory_allocated() / 2**30)
    attention = measure.attention_kernels()
    if options.peer:
        attention |= set(import_module(options.peer).KERNEL_NAMES)
    profiled = measure.profile(trainer.step, attention)
    tokens = trainer.tokens_per_step
    flops = 3 * sizes.forward_flops(sizes.read_config(config), PACKS[case.pack]) * trainer.packs_per_step
    record = {
        "name": name,
        "case": options.case,
        "gpus": case.world,
        "layout": {key: value for key, value in case.options.items() if key not in ("kernels", "qat")},
        "kernels": options.peer or case.options.get("kernels", "auto"),
        "qat": case.options.get("qat", "off"),
        "lengths": PACKS[case.pack],
        "tokens": tokens,
        "step_ms": round(ms, 2),
        "predicted_ms": round(predict.step_ms(case, config), 1),
        "update_ms": round(update_ms, 2),
        "tokens_per_s_per_gpu": round(1e3 * tokens / ms / case.world),
        "mfu": round(flops / ms / 1e9 / PEAK_TFLOPS / case.world, 4),
        "model_tflop": round(flops / 1e12, 2),
        "peak_gib": round(peak, 2),
        "predicted_gib": round(predict.memory_gib(case, config), 2),
        "predicted_sent_gb": {g: round(gb, 2) for g, gb in predict.sent_gb(case, config).items()},
        "busy_ms": [round(ms, 2) for ms in measure.every(profiled.busy)],
        "exposed_ms": [round(ms, 2) for ms in measure.every(profiled.exposed)],
        "attention_ms": [round(ms, 2) for ms in measure.every(profiled.attention)],
        # Only the last pipeline stage has one.
        "loss": round(max(loss for loss in measure.every(trainer.loss) if loss == loss), 4),
        "kernels_ms": {n: [round(t, 2), c] for n, (t, c) in list(profiled.kernels.items())[: options.top]},
    }
    return record


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Device, versions, commit, command."""
    import triton

    describe = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    start = (
        ["python"]
        if dist.get_world_size() == 1
        else ["torchrun", f"--nproc-per-node={dist.get_world_size()}"]
    )
    words = [options.case, f"--steps={options.steps}", f"--warmup={options.warmup}"]
    words += [f"--peer={options.peer}"] if options.peer else []
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "commit": options.commit or found or "unknown",
        "command": shlex.join([*start, "train_slice.py", *words]),
    }


def merge(path: Path, records: list[dict[str, Any]]) -> None:
    """Replaces the records of the same name."""
    old = json.loads(path.read_text()) if path.exists() else []
    new = {record["name"] for record in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [record for record in old if record["name"] not in new]
    path.write_text(json.dumps([*kept, *records], indent=1) + "\n")


def line(record: dict[str, Any]) -> str:
    """What a person reads."""
    return (
        f"{record['name']:<24} {record['step_ms']:>9.1f} ms  {record['tokens_per_s_per_gpu']:>7} tokens/s/GPU  "
        f"MFU {record['mfu']:.1%}  {record['peak_gib']:>6.1f} GiB  update {record['update_ms']:.1f} ms  "
        f"busy {max(record['busy_ms']):.1f}  exposed {max(record['exposed_ms']):.1f}  "
        f"attention {record['attention_ms']}  loss {record['loss']:.3f}"
    )


def dry(name: str) -> str:
    """A step of the case on a small model on the CPU."""
    case, small = CASES[name], {"hidden_size": 64, "vocab_size": 160, "moe_intermediate_size": 32}
    small |= {"num_attention_heads": 8, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 24}
    small |= {"o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 8}
    options = {key: value for key, value in case.options.items() if key != "qat"}
    trainer = Trainer(replace(case, pack="2k", options=options), FLASH_SLICE | small, "cpu")
    trainer.step()
    return f"{name}: loss {trainer.loss:.3f}, {trainer.tokens_per_step} tokens"


def main() -> None:
    """Runs the case of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=[*CASES], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, help="file of records")
    parser.add_argument("--steps", type=int, default=5, help="timed ones; the median counts")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--top", type=int, default=12, help="kernels to list")
    parser.add_argument("--commit", default="", help="default: git describe")
    parser.add_argument(
        "--peer", default="", metavar="MODULE", help="module whose `use()` swaps the attention ops"
    )
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.dry else "cuda"
    bringup.init_world(device=device)  # type: ignore[arg-type]
    first = dist.get_rank() == 0
    case = CASES[options.case]
    if case.world != dist.get_world_size():
        raise SystemExit(f"train_slice: {options.case} needs {case.world} processes; use torchrun")
    if options.peer:
        import_module(options.peer).use()
    if options.dry:
        outcome = dry(options.case)
        if first:
            print(outcome, flush=True)
    else:
        label = f"{options.case}-{options.peer}" if options.peer else options.case
        record = run(label, case, FLASH_SLICE, options) | about(options)
        if first:
            print(line(record), flush=True)
            for kernel, (ms, count) in record["kernels_ms"].items():
                print(f"    {ms:>9.2f} ms {count:>5} x {kernel[:90]}", flush=True)
            if options.out:
                merge(options.out, [record])
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main()
