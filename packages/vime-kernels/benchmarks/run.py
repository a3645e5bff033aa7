# SPDX-License-Identifier: Apache-2.0
"""Runs the registry: one line per case and direction, correctness first, and a JSON record for each (see README.md).

Correctness: outputs and gradients of the Triton backend on few rows against the torch backend in float64 on the same
values. Speed: median over launches with the L2 cache flushed in between, compilation excluded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from registry import Case, Problem, Scale, cases

from vime_kernels.testing import rel_rms

# Larger than any L2 cache these kernels meet.
FLUSH_BYTES = 2**28


def main() -> int:
    """Command line; 1 when a result is wrong or a case failed."""
    options = arguments()
    for library in options.load:
        torch.ops.load_library(library)
    begin = time.monotonic()
    scale = scale_of(options)
    chosen = [case for case in cases() if options.only in f"{case.op} {case.shape}"]
    if options.worker:
        share, workers = (int(number) for number in options.worker.split("/"))
        for case in chosen[share::workers]:
            print(
                json.dumps({"case": name(case), **attempt(lambda case=case: errors(case, scale))}), flush=True
            )
        return 0
    checked = check_in_workers(options, len(chosen)) if options.workers else {}
    records: list[dict[str, Any]] = []
    left_out = []
    for measure in (ours, torch_peers) if options.torch else (ours,):
        for case in chosen:
            if time.monotonic() - begin > options.seconds:
                left_out.append(f"{measure.__name__} {name(case)}")
                continue
            error = checked.get(name(case)) or attempt(lambda case=case: errors(case, scale))
            for record in measure(case, scale, error, options.repeats, records):
                records.append(record | context(options))
                report(record)
            if options.out:
                Path(options.out).write_text(json.dumps(records, indent=1) + "\n")
            if scale.device == "cuda":
                torch.cuda.empty_cache()
    if left_out:
        print(f"left out, no time: {', '.join(left_out)}")
    return int(any(record["failure"] for record in records))


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, in Triton's interpreter"
    )
    parser.add_argument("--only", default="", help="cases whose 'op shape' holds this text")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument(
        "--tokens", type=int, default=65536, help="of gated_pool; hyper-connections take a quarter"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no case after this many seconds"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that check and compile before the timing"
    )
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--torch", action="store_true", help="also time the torch backend")
    parser.add_argument("--load", action="append", default=[], help="operator library of a peer (FlashMLA)")
    parser.add_argument("--commit", default="", help="default: git describe")
    parser.add_argument("--out", help="JSON file")
    return parser.parse_args()


def scale_of(options: argparse.Namespace) -> Scale:
    """Full size on a device; on the CPU a few rows of narrow models in float32."""
    if options.device == "cuda":
        return Scale("cuda", torch.bfloat16, options.rows, options.context, options.tokens)
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("run.py: --device cpu needs TRITON_INTERPRET=1 in the environment")
    return Scale("cpu", torch.float32, 3, 16, 16, tiny=True)


def name(case: Case) -> str:
    """The case in words."""
    return f"{case.op} {case.shape}"


def attempt(check: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """The errors, or the failure in words: one broken case must not hide the others."""
    try:
        return {"errors": check(), "failure": None}
    except Exception as failure:
        return {"errors": {}, "failure": f"{type(failure).__name__}: {failure}"[:300]}


def check_in_workers(options: argparse.Namespace, count: int) -> dict[str, dict[str, Any]]:
    """`errors` of every case, from processes that share the compilation and fill Triton's cache."""
    workers = min(options.workers, count)
    command = [sys.executable, *sys.argv, "--workers", "0", "--worker"]
    started = [
        subprocess.Popen([*command, f"{share}/{workers}"], stdout=subprocess.PIPE, text=True)
        for share in range(workers)
    ]
    results = {}
    deadline = time.monotonic() + options.seconds
    for process in started:
        try:
            output = process.communicate(timeout=max(1.0, min(deadline - time.monotonic(), 1e6)))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        for line in output.splitlines():
            if line.startswith("{"):
                result = json.loads(line)
                results[result["case"]] = result
    return results


def errors(case: Case, scale: Scale) -> dict[str, float]:
    """Largest relative error of each direction, on few rows; infinite when integers differ."""
    torch.manual_seed(0)
    small = scale if scale.tiny else replace(scale, rows=64, tokens=4 * 256)
    problem = case.make(small)
    exact = {
        kind: results(problem, "torch", torch.float64, kind) for kind in {d[:3] for d in case.directions}
    }
    found = {}
    for direction in case.directions:
        pairs = list(zip(results(problem, "triton", None, direction), exact[direction[:3]], strict=True))
        if problem.exact:
            found[direction] = 0.0 if all(torch.equal(*pair) for pair in pairs) else float("inf")
        else:
            found[direction] = max(
                rel_rms(*(torch.nan_to_num(x, neginf=0.0) for x in pair)) for pair in pairs
            )
    return found


def results(problem: Problem, backend: str, dtype: torch.dtype | None, direction: str) -> list[torch.Tensor]:
    """The outputs, or for backward directions the gradients under fixed output gradients."""
    leaves = [leaf.detach().to(dtype or leaf.dtype) for leaf in problem.leaves]
    if direction == "fwd":
        return list(problem.call(backend, *leaves))
    outputs, leaves = differentiable(problem, backend, leaves, direction)
    return list(torch.autograd.grad(outputs, leaves, output_grads(outputs)))


def differentiable(
    problem: Problem, backend: str, leaves: list[torch.Tensor], direction: str
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Outputs with a graph, and the leaves that it hangs on. The lse of attention stays outside the loss."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    extra = {"repeatable": True} if direction.endswith("repeatable") else {}
    outputs = problem.call(backend, *leaves, **extra)
    keep = outputs[:1] if outputs[-1].ndim == 2 and len(outputs) == 2 else outputs
    return keep, leaves


def output_grads(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Random output gradients, the same values for every dtype."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    shapes = [output.shape for output in outputs]
    grads = [torch.randn(shape, device=outputs[0].device, generator=generator).bfloat16() for shape in shapes]
    return [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]


def ours(
    case: Case, scale: Scale, error: dict[str, Any], repeats: int, _: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Records of the Triton backend, alone and beside the peers that stand ready."""
    made = []
    for direction in case.directions:
        record = blank(case, scale, direction, error)
        try:
            problem = case.make(scale)
            record |= timed(launch(problem, "triton", direction), scale, repeats)
            made.append(record)
            peers = problem.peers if direction == "fwd" else {}
            for peer, run in peers.items():
                peer_ms = timed(run, scale, repeats)["ours_ms"]
                made.append(record | {"peer": peer, "peer_ms": peer_ms, "ratio": peer_ms / record["ours_ms"]})
        except Exception as failure:
            made.append(record | {"failure": f"{type(failure).__name__}: {failure}"[:300]})
    return made


def torch_peers(
    case: Case, scale: Scale, error: dict[str, Any], repeats: int, records: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Records of the torch backend, against what `ours` measured."""
    made = []
    for direction in case.directions[:2]:
        known = [
            r for r in records if (r["op"], r["shape"], r["direction"]) == (case.op, case.shape, direction)
        ]
        if not known or known[0]["failure"] or known[0]["ours_ms"] is None:
            continue
        record = known[0] | {"peer": "torch"}
        try:
            peer_ms = timed(launch(case.make(scale), "torch", direction), scale, max(1, repeats // 5))[
                "ours_ms"
            ]
            made.append(record | {"peer_ms": peer_ms, "ratio": peer_ms / record["ours_ms"]})
        except torch.OutOfMemoryError:
            made.append(record | {"peer": "torch, out of memory"})
    return made


def blank(case: Case, scale: Scale, direction: str, error: dict[str, Any]) -> dict[str, Any]:
    """A record before anything was timed."""
    return {
        "op": case.op, "shape": case.shape, "dtype": str(scale.dtype).removeprefix("torch."), "direction": direction,
        "ours_ms": None, "peer": None, "peer_ms": None, "ratio": None,
        "rel_error": error["errors"].get(direction), "peak_mib": None, "failure": error["failure"],
    }  # fmt: skip


def launch(problem: Problem, backend: str, direction: str) -> Callable[[], object]:
    """What is timed: the call, or the backward pass of a call made before."""
    if direction == "fwd":
        return lambda: problem.call(backend, *problem.leaves)
    outputs, leaves = differentiable(problem, backend, problem.leaves, direction)
    grads = output_grads(outputs)
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def timed(run: Callable[[], object], scale: Scale, repeats: int) -> dict[str, float]:
    """Median milliseconds, and the peak of what a launch adds to the memory in use."""
    if scale.device == "cpu":
        begin = time.perf_counter()
        run()
        return {"ours_ms": 1e3 * (time.perf_counter() - begin), "peak_mib": 0.0}
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    spans = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return {"ours_ms": statistics.median(a.elapsed_time(b) for a, b in spans), "peak_mib": peak / 2**20}


def context(options: argparse.Namespace) -> dict[str, Any]:
    """Where the numbers come from."""
    import triton

    cuda = options.device == "cuda"
    describe = ["git", "describe", "--always", "--dirty"]
    commit = (
        options.commit or subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    )
    return {
        "commit": commit or "unknown",
        "device": torch.cuda.get_device_name() if cuda else "cpu, interpreter",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        # File names without their folders, which mean nothing elsewhere.
        "command": " ".join(["run.py", *(Path(word).name for word in sys.argv[1:])]),
    }


def report(record: dict[str, Any]) -> None:
    """One line."""
    label = f"{record['op']:20s} {record['shape']:20s} {record['direction']:14s}"
    if record["failure"]:
        print(f"{label} FAILED {record['failure']}", flush=True)
        return
    peer = f" {record['peer']} {record['peer_ms']:.3f} ms, {record['ratio']:.2f}x" if record["ratio"] else ""
    error = "-" if record["rel_error"] is None else f"{record['rel_error']:.1e}"
    print(
        f"{label} {record['ours_ms']:9.3f} ms  error {error}  {record['peak_mib']:7.0f} MiB{peer}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
