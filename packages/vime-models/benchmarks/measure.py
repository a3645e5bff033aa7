# SPDX-License-Identifier: Apache-2.0
"""Step times, memory and where the time of a step goes, on CUDA devices."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Span = tuple[float, float]

# Kernels of attention core, indexer and selection: what row balance moves. Names of vime-kernels.
ATTENTION = (
    "forward_kernel",
    "backward_kernel",
    "query_kernel",
    "scatter_kernel",
    "range_kernel",
    "bounds_kernel",
    "_logits_kernel",
    "_guess_kernel",
    "_gather_kernel",
    "_select_kernel",
)


@dataclass(frozen=True)
class Profile:
    """One step on one rank, in milliseconds.

    Attributes:
        busy: some kernel ran.
        exposed: only communication ran.
        attention: kernels in `ATTENTION`, summed.
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


def profile(step: Callable[[], object]) -> Profile:
    """Runs a step under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as run:
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
        sum(sums[name] for name in names if name in ATTENTION),
        {name: (sums[name], counts[name]) for name in names},
    )


def length(spans: Iterable[Span]) -> float:
    """Of the union."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
