# SPDX-License-Identifier: Apache-2.0
"""What one process measures: the errors of a case on both sides, then the times, side by side."""

import fcntl
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from models import Scale
from peers import Peer, Rival
from problem import Case, Problem, difference

from vime_kernels._backend import IMPLEMENTED

# Larger than any L2 cache these kernels meet.
FLUSH_BYTES = 2**28
# Operations whose rows take much memory, compared on fewer of them.
LONG_ROWS = ("sparse_attention", "topk", "indexer_kl")
Launch = Callable[[], object]
Record = dict[str, Any]


@dataclass
class Checked:
    """Errors of one case: ours by direction, the peer's by direction and name; what failed, in words."""

    case: Case
    ours: dict[str, float] = field(default_factory=dict)
    theirs: dict[tuple[str, str], float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # ours, by direction


def check(case: Case, peer: Peer, scale: Scale, alone: bool) -> Checked:
    """Compares both sides with float64 torch on the same tensors; compiles both on the way.

    Tokens are fewer than where it is timed, and so are rows that take much memory, except for peers that compile for a
    number of rows. All the processes compare at the same time, and share the device.
    """
    found = Checked(case)
    if case.large and not alone:
        return found
    few = replace(scale, tokens=min(scale.tokens, 4096), most=64 if case.large else 2**30)
    if not peer.STATIC and case.op.startswith(LONG_ROWS):
        few = replace(few, rows=min(scale.rows, 512), most=min(few.most, 512))
    problem = problem_of(case, few)
    problem.sampled = True
    exact: dict[str, list[torch.Tensor]] = {}
    for direction in case.directions:
        kind = direction[:3]
        offers = [] if case.large else rivals(peer, case, problem, direction)
        if not (offers or alone):
            continue
        try:
            with turn(case):
                ours = problem.results(direction)
            if kind not in exact:
                exact[kind] = problem.kept(problem.exact_results(kind))
            found.ours[direction] = difference(problem.kept(ours), exact[kind], problem.exact)
            del ours
        except Exception as failure:
            found.failures[direction] = words(failure)
            continue
        for rival in offers:
            try:
                errors = [rival.check(run(), exact[kind]) for run in rival.variants.values()]
                found.theirs[direction, rival.name] = max(errors)
            except Exception as failure:
                print(f"absent: {rival.name}, {case.name} {direction}: {words(failure)}", flush=True)
    return found


@contextmanager
def turn(case: Case) -> Iterator[None]:
    """One process compiles our kernels for a case, the others find them in Triton's cache."""
    path = Path(tempfile.gettempdir()) / f"vime-bench-{os.getppid()}-{case.name.replace(' ', '-')}"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)


def rivals(peer: Peer, case: Case, problem: Problem, direction: str) -> list[Rival]:
    """The peer's offers; one that cannot even be set up is reported as absent."""
    try:
        return list(peer.rivals(case, problem, direction))
    except Exception as failure:
        print(f"absent: {peer.__name__}, {case.name} {direction}: {words(failure)}", flush=True)  # type: ignore[attr-defined]
        return []


def measure(checked: Checked, peer: Peer, scale: Scale, repeats: int, alone: bool) -> list[Record]:
    """Records of all directions: with `alone` one of ours without a peer, then one for every rival."""
    case, made = checked.case, []
    problem = problem_of(case, scale)
    for direction in case.directions:
        record = blank(checked, problem, direction)
        if direction in checked.failures:
            made += [record] if alone else []
            continue
        if direction not in checked.ours and not case.large:
            continue
        try:
            ours = problem.launch("triton", direction)
            record["peak_mib"] = peak(ours, scale)
            record |= rates(problem.work(direction), 1.0)  # the units; the rate follows with the time
            if alone:
                made.append(timed(record, race([ours], scale, repeats)))
            for rival in rivals(peer, case, problem, direction):
                if (direction, rival.name) in checked.theirs or case.large:
                    made.append(beside(record, checked, rival, ours, scale, repeats))
            del ours
        except Exception as failure:
            made.append(record | {"failure": words(failure)})
    for record in made:
        record.pop("work", None)
    return made


def beside(
    record: Record, checked: Checked, rival: Rival, ours: Launch, scale: Scale, repeats: int
) -> Record:
    """Ours and the fastest variant of the rival, launched in turns."""
    variant = next(iter(rival.variants))
    if len(rival.variants) > 1:
        spans = race(list(rival.variants.values()), scale, 7)
        variant = min(zip(spans, rival.variants, strict=True))[1]
    theirs = rival.variants[variant]
    used = peak(theirs, scale)
    ours_ms, peer_ms = race([ours, theirs], scale, repeats)
    return timed(record, [ours_ms]) | {
        "peer": rival.name, "variant": variant, "peer_ms": peer_ms, "ratio": peer_ms / ours_ms,
        "peer_error": checked.theirs.get((record["direction"], rival.name)), "peer_peak_mib": used,
    }  # fmt: skip


def blank(checked: Checked, problem: Problem, direction: str) -> Record:
    """A record before anything was timed."""
    return {
        "op": checked.case.op, "shape": checked.case.shape,
        "dtype": str(problem.leaves[0].dtype).removeprefix("torch."), "direction": direction,
        "ours_ms": None, "peer": None, "variant": "", "peer_ms": None, "ratio": None,
        "rel_error": checked.ours.get(direction), "peer_error": None, "peak_mib": None, "peer_peak_mib": None,
        "rate": None, "unit": None, "failure": checked.failures.get(direction),
    }  # fmt: skip


def rates(work: dict[str, float], seconds: float) -> Record:
    """The unit in which the case is judged, and the work in it."""
    (kind, amount), *_ = work.items()
    unit = {"flops": "TFLOP/s", "bytes": "GB/s"}[kind]
    return {"unit": unit, "work": amount / seconds / (1e12 if kind == "flops" else 1e9)}


def timed(record: Record, spans: list[float]) -> Record:
    """The record with our time and rate."""
    return record | {"ours_ms": spans[0], "rate": record["work"] / (spans[0] / 1e3)}


def race(runs: list[Launch], scale: Scale, repeats: int) -> list[float]:
    """Median milliseconds of each, launched in turns with a cold L2.

    In front of every launch the device waits as long as the host needs to queue it: what counts is the device's time.
    """
    if scale.device == "cpu":
        begin = time.perf_counter()
        for run in runs:
            run()
        return [1e3 * (time.perf_counter() - begin) / len(runs)] * len(runs)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    waits, longest = [], 0.0
    for run in runs:
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        waits.append(min(3e-4 + 2 * (time.perf_counter() - begin), 0.02))
        torch.cuda.synchronize()
        longest = max(longest, time.perf_counter() - begin)
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for _ in range(repeats if longest < 0.02 else max(3, int(0.3 / longest))):
        for run, wait, found in zip(runs, waits, spans, strict=True):
            flush.zero_()
            torch.cuda._sleep(int(2e9 * wait))
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            found.append((start, end))
        torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) for a, b in found) for found in spans]


def peak(run: Launch, scale: Scale) -> float:
    """MiB that one launch adds to the memory in use, its results included. Runs it twice."""
    run()
    if scale.device == "cpu":
        return 0.0
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def ceilings(scale: Scale, repeats: int) -> list[Record]:
    """What this device reaches at all: a copy, and a matrix product."""
    if scale.device == "cpu":
        return []
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    empty = dict.fromkeys(("peer", "peer_ms", "ratio", "peer_error", "peer_peak_mib", "failure"))
    made = []
    for shape, run, work in (
        ("copy", lambda: target.copy_(source), {"bytes": 2.0 * source.numel() * 4}),
        ("bf16 product", lambda: a @ b, {"flops": 2.0 * 8192**3}),
    ):
        record = {"op": "ceiling", "shape": shape, "dtype": "", "direction": "", "variant": "", **empty}
        record |= {"rel_error": 0.0, "peak_mib": 0.0, **rates(work, 1.0)}
        made.append(timed(record, race([run], scale, repeats)))
        made[-1].pop("work")
    return made


def problem_of(case: Case, scale: Scale) -> Problem:
    """The same values every time."""
    torch.manual_seed(0)
    return case.make(scale)


def implemented(case: Case) -> bool:
    """Whether this version has a Triton kernel for it. `indexer_topk` is made of two."""
    return case.op == "indexer_topk" or "triton" in IMPLEMENTED[case.op]


def words(failure: Exception) -> str:
    """One line."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
