# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_context_parallel.py: a microbatch split over ranks against the same microbatch on one of them."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from cp_balance import balance_keeps_bits, balance_moves_rows
from cp_microbatch import (
    MICROBATCHES,
    TABLE,
    build,
    logits_of,
    loss_of,
    packing,
    real_rows,
    split_over,
    split_step,
    tokens,
    whole,
)
from cp_mistakes import MISTAKES
from harness import serve
from step import COMPARED, worst_gradient
from worker import indexer_gaps

from vime_convert.megatron.exporter import export_tensors
from vime_convert.verify.compare import relative
from vime_convert.verify.margins import Margins
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.host import cpu
from vime_replay.layout import LayoutError, PackLayout


@cache
def alone(precision: str, name: str, tp: int = 1) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """Logits, gradients, and how close a selection came to a tie, on one rank with plain autograd."""
    model = build(precision)
    layout = split_over(PackLayout(**MICROBATCHES[name]), tp)
    ids, labels = tokens(layout)
    rows = torch.arange(layout.total)
    with running_in(PRECISIONS[precision]):
        with Margins() as margins, indexer_gaps(model) as gaps:
            logits = logits_of(model, layout, rows, ids)
        loss_of(logits, labels, rows).backward()
        grads = dict(export_tensors([model], TABLE, value=lambda p: p.grad))
    return logits.detach()[torch.cat(real_rows(layout))], grads, min(margins.topk, *gaps)


def equals_one_rank(
    precision: str, name: str, tp: int = 1, attach: str = "", **options: Any
) -> dict[str, Any]:
    """Largest relative differences, with data parallelism's sum of gradients."""
    expected, expected_grads, gap = alone(precision, name, tp)
    layout = split_over(PackLayout(**MICROBATCHES[name]), tp)
    model = build(precision, cp=layout.cp_size, tp=tp, cp_layout=layout.mode, **options)
    ids, labels = tokens(layout)
    rows = torch.from_numpy(layout.rows("local"))
    with running_in(PRECISIONS[precision]), cpu.cuda_literals_to_cpu():
        attached = replace(layout, query_order=attach) if attach else None
        logits, grads = split_step(
            model, layout, labels, lambda wrapped: logits_of(wrapped, layout, rows, ids, attached)
        )
    return {
        "logits": relative(whole(layout, rows, logits), expected),
        "gap": gap,
        "compared": len(expected_grads),
        **worst_gradient(grads, expected_grads),
    }


def one_by_one() -> dict[str, list[float]]:
    """Largest difference of a logit between packed sequences on all ranks and each sequence on its own, per set."""
    draw = random.Random(4)
    sets = [[1, 3, 127, 128, 129, *(draw.randint(1, 200) for _ in range(2))] for _ in range(10)]
    for lengths in sets:
        draw.shuffle(lengths)
    expected = []
    model = build("float64")
    with running_in(PRECISIONS["float64"]), torch.no_grad():
        for lengths in sets:
            layout = PackLayout(tuple(lengths))
            ids, _ = tokens(layout)
            parts = [logits_of(model, PackLayout((len(r),)), r, ids) for r in real_rows(layout)]
            expected.append(torch.cat(parts))
    worst: dict[str, list[float]] = {}
    for mode in ("contiguous", "zigzag"):
        model = build("float64", cp=dist.get_world_size(), cp_layout=mode)
        worst[mode] = []
        with running_in(PRECISIONS["float64"]), torch.no_grad():
            for lengths, reference in zip(sets, expected, strict=True):
                layout = split_over(PackLayout(tuple(lengths), mode=mode))
                rows = torch.from_numpy(layout.rows("local"))
                found = whole(layout, rows, logits_of(model, layout, rows, tokens(layout)[0]))
                worst[mode].append((found - reference).abs().max().item())
    return worst


def planted() -> dict[str, float]:
    """How far each mistake moves the logits of packed sequences."""
    expected, _, _ = alone("float64", "contiguous")
    layout = split_over(PackLayout(**MICROBATCHES["contiguous"]))
    model = build("float64", cp=layout.cp_size, cp_layout="contiguous")
    rows = torch.from_numpy(layout.rows("local"))
    found = {}
    for mistake, (owner, name, replacement) in MISTAKES.items():
        original = vars(owner)[name]
        setattr(owner, name, replacement)
        try:
            with running_in(PRECISIONS["float64"]), torch.no_grad():
                logits = whole(layout, rows, logits_of(model, layout, rows, tokens(layout)[0]))
        finally:
            setattr(owner, name, original)
        found[mistake] = relative(logits, expected)
    return found


def refusals() -> dict[str, str]:
    """What is said to microbatches that this split cannot compute."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = build("float32", cp=size, cp_layout="zigzag")
    layout = split_over(PackLayout((512,), mode="zigzag"))

    def wrong_layout(**fields: Any) -> Callable[[], Any]:
        given = {"lengths": (512,), "mode": "zigzag", "query_order": "contiguous"} | fields
        packed = packing(layout, PackLayout(**given, cp_size=size, cp_rank=rank))
        ids = torch.zeros(1, layout.local_rows, dtype=torch.int64)
        return lambda: model(ids, None, None, packed_seq_params=packed)

    def unpacked(length: int) -> Callable[[], Any]:
        return lambda: model(torch.zeros(1, length, dtype=torch.int64), None, None)

    said = {}
    for name, call in {
        "fewer rows than the window": unpacked(64),
        "groups straddle ranks": unpacked(192),
        "another order": wrong_layout(mode="contiguous"),
        "another order of queries": wrong_layout(query_order="local"),
        "other lengths": wrong_layout(lengths=(256, 256)),
    }.items():
        try:
            call()
            said[name] = ""
        except (LayoutError, ValueError) as error:
            said[name] = str(error)
    return said


CASES: dict[str, Callable[[], Any]] = {
    **{
        f"{name}{suffix}-{precision}": partial(equals_one_rank, precision, name, cp_balance=bool(suffix))
        for name in MICROBATCHES
        for suffix in ("", "-balanced")
        for precision in COMPARED
    },
    **{
        f"tp2-{name}-{precision}": partial(equals_one_rank, precision, name, tp=2)
        for name in MICROBATCHES
        for precision in COMPARED
    },
    "zigzag-attached-float64": partial(equals_one_rank, "float64", "zigzag", attach="contiguous"),
    "one-by-one": one_by_one,
    "balance-moves-rows": balance_moves_rows,
    **{f"balance-keeps-bits-{name}": partial(balance_keeps_bits, name) for name in MICROBATCHES},
    "planted": planted,
    "refusals": refusals,
}

if __name__ == "__main__":
    serve(CASES)
