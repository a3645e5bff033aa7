# SPDX-License-Identifier: Apache-2.0
"""Step times, memory and where the time of a step goes, on CUDA devices."""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Span = tuple[float, float]

# Whose kernels count as attention: core, indexer and selection, which is what row balance moves.
ATTENTION = tuple(f"vime_kernels.ops.{op}" for op in ("sparse_attention", "indexer", "topk"))


@dataclass(frozen=True)
class Profile:
    """One step on one rank, in milliseconds.

    Attributes:
        busy: some kernel ran.
        exposed: only communication ran.
        attention: kernels of the attention, summed.
        kernels: name to (sum, launches), longest first.
    """

    busy: float
    exposed: float
    attention: float
    kernels: dict[str, tuple[float, int]]


def median_ms(step: Callable[[], object], steps: int) -> float:
    """Median of a step; every rank waits for the slowest."""
    times = []
    for _ in range(steps):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def largest(value: float) -> float:
    """Over all ranks."""
    found = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def every(value: float) -> list[float]:
    """Of all ranks."""
    seen: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(seen, value)
    return seen


def attention_kernels() -> set[str]:
    """Names of the Triton and Gluon functions that the modules of `ATTENTION` define or use."""
    import triton

    modules = [module for name, module in sys.modules.items() if name.startswith(ATTENTION)]
    functions = [each for module in modules for each in vars(module).values()]
    return {each.__name__ for each in functions if isinstance(each, triton.runtime.jit.JITFunction)}


def profile(step: Callable[[], object], attention: Collection[str]) -> Profile:
    """Runs a step under the profiler; `attention` names the kernels that count as such."""
    torch.cuda.synchronize()
    # What runs on the CPU is many more events, and nobody asks for it.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        step()
        torch.cuda.synchronize()
    wires: list[Span] = []
    work: list[Span] = []
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in run.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        # Ranges of the CPU side that the profiler mirrors onto the device are no kernels.
        if event.name.startswith(("nccl:", "gloo:", "ProfilerStep", "Optimizer.")):
            continue
        span = (event.time_range.start, event.time_range.end)
        (wires if event.name.startswith("nccl") else work).append(span)
        sums[event.name] += (span[1] - span[0]) / 1e3
        counts[event.name] += 1
    busy = length(wires + work) / 1e3
    names = sorted(sums, key=lambda name: -sums[name])
    return Profile(
        busy,
        busy - length(work) / 1e3,
        sum(sums[name] for name in names if name in attention),
        {name: (sums[name], counts[name]) for name in names},
    )


def length(spans: Iterable[Span]) -> float:
    """Of the union."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
