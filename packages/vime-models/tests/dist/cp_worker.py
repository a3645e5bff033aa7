# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_context_parallel.py: a microbatch split over ranks against the same microbatch on one of them.

Longer than 350 lines, because one process start serves all cases, and each planted bug stands beside its case.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE, serve
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from step import COMPARED
from worker import indexer_gaps

from vime_convert.megatron.exporter import export_tensors
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.reader import CheckpointReader
from vime_convert.tiny import make_tiny
from vime_convert.verify.compare import relative
from vime_convert.verify.margins import Margins
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_kernels.dsa import causal_ranges
from vime_models.dsv4 import attention, row_balance
from vime_models.dsv4.context_parallel import ContextParallel
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.thd import TokenLayout, token_layout
from vime_models.host import bringup, cpu
from vime_models.host.microbatch import VimePackedSeqParams
from vime_replay.layout import LayoutError, PackLayout

HERE = Path(sys.argv[1])
# Every kind of layer, and a window as wide as the released one: a halo that is one row short shows.
CONFIG = next(case.config for case in PLUGIN.tiny_cases if case.name == "large-eps") | {
    "compress_ratios": [0, 4, 128, 4],
    "num_hidden_layers": 4,
    "sliding_window": 128,
}
TABLE = PLUGIN.rules(CONFIG)

MICROBATCHES: dict[str, dict[str, Any]] = {
    # The cut at row 256 is inside a sequence and, for both ratios, inside a group.
    "contiguous": {"lengths": (37, 259, 130, 86)},
    "zigzag": {"lengths": (37, 259, 130, 83), "mode": "zigzag", "pad_multiple": 3},
    "bshd": {"lengths": (301, 512), "fmt": "bshd", "max_seqlen": 512},
    "bshd-zigzag": {"lengths": (512, 400), "fmt": "bshd", "max_seqlen": 512, "mode": "zigzag"},
    # Long enough on two ranks for row balance to cut it into two parts.
    "parts": {"lengths": (90, 571, 1130, 257)},
    "long": {"lengths": (90, 571, 130, 225)},
}
# Draws that keep every selection away from ties; by rows of the stream.
SEEDS = {2048: 18}


def build(precision: str, **options: Any) -> Any:
    chosen = PRECISIONS[precision]
    with running_in(chosen):
        (model,) = PLUGIN.build(CONFIG, dtype=chosen.dtype, device=DEVICE, **options)
    directory = HERE / "checkpoint"
    if not directory.exists():
        dist.barrier()
        if dist.get_rank() == 0:
            make_tiny(CONFIG, directory, seed=0, plugin=PLUGIN)
        dist.barrier()
    load_checkpoint([model], CheckpointReader(directory), TABLE)
    return model.train()


def split_over(layout: PackLayout, tp: int = 1) -> PackLayout:
    """The layout as this rank of context parallelism sees it."""
    size, rank = dist.get_world_size() // tp, dist.get_rank() // tp
    return replace(layout, cp_size=size, cp_rank=rank)


def packing(layout: PackLayout, attached: PackLayout | None = None) -> PackedSeqParams | None:
    if layout.fmt == "bshd":
        return None
    cu_seqlens = torch.from_numpy(layout.cu_seqlens).to(DEVICE)
    return VimePackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, layout=attached
    )


def real_rows(layout: PackLayout) -> list[torch.Tensor]:
    """Rows of the stream that hold the tokens of each sample."""
    starts = layout.cu_seqlens.tolist()
    return [torch.arange(start, start + n) for start, n in zip(starts, layout.lengths, strict=False)]


def tokens(layout: PackLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the whole stream, padding included, and labels: -100 where there is nothing to predict."""
    generator = torch.Generator().manual_seed(SEEDS.get(layout.total, 0))
    # Tokens first: they do not depend on how the samples are padded.
    real = torch.randint(CONFIG["vocab_size"], (sum(layout.lengths),), generator=generator)
    ids = torch.randint(CONFIG["vocab_size"], (layout.total,), generator=generator)
    ids[torch.cat(real_rows(layout))] = real
    labels = torch.full_like(ids, -100)
    for rows in real_rows(layout):
        labels[rows[:-1]] = ids[rows[1:]]
    return ids.to(DEVICE), labels.to(DEVICE)


def logits_of(
    model: Any, layout: PackLayout, rows: torch.Tensor, ids: torch.Tensor, attached: PackLayout | None = None
) -> torch.Tensor:
    """[rows, vocabulary] of the given rows of the stream; `attached` goes along with the microbatch."""
    batch = len(layout.lengths) if layout.fmt == "bshd" else 1
    logits = model(ids[rows].view(batch, -1), None, None, packed_seq_params=packing(layout, attached))
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        logits = gather_from_tensor_model_parallel_region(logits)
    return logits.flatten(0, 1)[:, : CONFIG["vocab_size"]]


def loss_of(logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """This part of the mean over all tokens of the microbatch."""
    total = torch.nn.functional.cross_entropy(logits, labels[rows], ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum()


def whole(layout: PackLayout, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Logits of the tokens of all ranks."""
    stream = logits.new_zeros(layout.total, logits.shape[1])
    stream[rows] = logits.detach()
    dist.all_reduce(stream, group=parallel_state.get_context_parallel_group())
    return stream[torch.cat(real_rows(layout))]


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
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        wrapped.zero_grad_buffer()
        attached = replace(layout, query_order=attach) if attach else None
        logits = logits_of(wrapped, layout, rows, ids, attached)
        # Gradients are averaged over context-parallel ranks; Megatron's schedule multiplies losses as this does.
        (loss_of(logits, labels, rows) * layout.cp_size).backward()
        finalize_model_grads([wrapped])
        grads = dict(export_tensors([wrapped], TABLE, value=lambda p: getattr(p, "main_grad", None)))
    floor = 1e-8 * torch.stack([grad.norm() for grad in expected_grads.values()]).norm().item()
    errors = {key: relative(grads[key], grad, floor) for key, grad in expected_grads.items()}
    worst = max(errors, key=lambda key: errors[key])
    error = relative(whole(layout, rows, logits), expected)
    return {"logits": error, "grads": errors[worst], "worst": worst, "gap": gap, "compared": len(errors)}


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


def balance_moves_rows() -> dict[str, bool]:
    """Row numbers as contents: where they arrive, and that they come back."""
    size, rank = dist.get_world_size(), dist.get_rank()
    bringup.init_world(cp=size)
    group = parallel_state.get_context_parallel_group()
    found = {}
    for name, layout in {
        "thd": PackLayout((size * 150,), cp_size=size, cp_rank=rank),
        "bshd": PackLayout((size * 128,) * 2, "bshd", cp_size=size, cp_rank=rank),
        "thd-parts": PackLayout((size * 4096,), cp_size=size, cp_rank=rank),
        "bshd-parts": PackLayout((size * 1024,) * 2, "bshd", cp_size=size, cp_rank=rank),
    }.items():
        batch = len(layout.lengths)
        hidden = torch.zeros(layout.local_rows // batch, batch, 1, device=DEVICE)
        given = token_layout(hidden, packing(layout), cp_size=size, cp_rank=rank, halo=128)
        moved = row_balance.balance(given.rows, given, group)
        keys = given._slice_rows(given.halo)
        target = row_balance.balanced(given, size, rank)
        found[name] = (
            torch.equal(given.rows.cpu(), torch.from_numpy(layout.rows("contiguous")).int())
            and torch.equal(moved.cpu(), torch.from_numpy(layout.rows("balanced")).int())
            and torch.equal(moved, target.rows)
            and torch.equal(row_balance.restore(moved, given, group), given.rows)
            and torch.equal(row_balance.balance_keys(keys, given, group), target._slice_rows(target.halo))
        )
    return found


def balance_keeps_bits(name: str) -> list[bool]:
    """Whether outputs and log-sum-exps of every attention, and all logits, are the same bits with row balance."""
    layout = split_over(PackLayout(**MICROBATCHES[name]))
    rows = torch.from_numpy(layout.rows("local"))
    # On GPUs Megatron's experts add up in whatever order, unless told otherwise.
    torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)
    runs = []
    for balanced in (False, True):
        model = build("float32", cp=layout.cp_size, cp_layout=layout.mode, cp_balance=balanced)
        with torch.no_grad(), cores(model) as seen:
            logits = logits_of(model, layout, rows, tokens(layout)[0])
        runs.append([*seen, logits])
    torch.use_deterministic_algorithms(False)
    return [torch.equal(a, b) for a, b in zip(*runs, strict=True)]


@contextmanager
def cores(model: Any) -> Iterator[list[torch.Tensor]]:
    """Outputs and log-sum-exps of every attention core, in contiguous order."""
    seen: list[torch.Tensor] = []
    cp = model.decoder.layers[0].self_attention.cp
    layouts: list[TokenLayout] = []

    def core(*args: Any, **keywords: Any) -> Any:
        results = CORE(*args, **keywords)
        seen.extend(cp.restore(result, layouts[-1]) for result in results)
        return results

    def layout(self: ContextParallel, *args: Any) -> TokenLayout:
        layouts.append(LAYOUT(self, *args))
        return layouts[-1]

    attention.sparse_attention_v4, ContextParallel.layout = core, layout  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        attention.sparse_attention_v4, ContextParallel.layout = CORE, LAYOUT  # type: ignore[method-assign]


CORE, LAYOUT = attention.sparse_attention_v4, ContextParallel.layout


def oldest_key_lost(self: ContextParallel, x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    keep = x.new_ones(layout.halo + layout.length, 1)
    keep[1] = 0
    return ORIGINAL["with_halo"](self, x, layout) * keep


def rows_of(layout: TokenLayout) -> torch.Tensor:
    """0, 1, … as if the rank's rows were all there is."""
    return torch.arange(layout.length, dtype=torch.int32, device=layout.starts.device)


def pools_from_the_cut(self: TokenLayout, ratio: int, *, overlap: bool) -> Any:
    reach, cu_seqlens, first = ORIGINAL["pools"](self, ratio, overlap=overlap)
    # Entry 1 is where the cut sequence begins.
    return reach, torch.where(cu_seqlens == cu_seqlens[1], reach, cu_seqlens), first * 0 + reach // ratio


def without_previous_group(self: TokenLayout, ratio: int, *, overlap: bool) -> Any:
    reach, cu_seqlens, first = ORIGINAL["pools"](self, ratio, overlap=overlap)
    if overlap and self.starts[0]:
        # One group later: its pool is then one that is skipped.
        cu_seqlens = torch.where(cu_seqlens == cu_seqlens[1], cu_seqlens + ratio, cu_seqlens)
    return reach, cu_seqlens, first


ORIGINAL: dict[str, Any] = {
    "with_halo": ContextParallel.with_halo,
    "pools": TokenLayout.pools,
    "entries_before": TokenLayout.entries_before,
}
# What goes wrong at a border, of a sequence or of a rank; every one must move the logits.
MISTAKES: dict[str, tuple[type, str, Any]] = {
    "no rows from the neighbour": (
        ContextParallel,
        "with_halo",
        lambda self, x, layout: torch.cat([x.new_zeros(layout.halo, x.shape[1]), x]),
    ),
    "oldest key of the window lost": (ContextParallel, "with_halo", oldest_key_lost),
    "windows cross sequences": (
        TokenLayout,
        "window",
        property(
            lambda self: {
                "cu_seqlens": self.starts.new_tensor([0, self.halo + self.length]),
                "q_positions": rows_of(self) + self.halo,
            }
        ),
    ),
    "groups restart at the cut": (TokenLayout, "pools", pools_from_the_cut),
    "group before the cut missing": (TokenLayout, "pools", without_previous_group),
    "entries counted over the sum of lengths": (
        TokenLayout,
        "_cu_entries",
        lambda self, ratio: self.cu_seqlens // ratio,
    ),
    "entry owned by its first token": (
        TokenLayout,
        "entries_before",
        lambda self, rows, ratio: ORIGINAL["entries_before"](self, rows + (ratio - 1) * (rows > 0), ratio),
    ),
    "positions restart at the cut": (
        TokenLayout,
        "positions",
        property(lambda self: rows_of(self).long()),
    ),
    "queries see by local row": (
        TokenLayout,
        "visible",
        lambda self, ratio: causal_ranges(self.cu_seqlens, ratio=ratio, q_positions=rows_of(self)),
    ),
    "entries left as gathered": (
        ContextParallel,
        "gather_entries",
        lambda self, entries, layout, ratio: torch.cat(all_rows(entries))[: 512 // ratio],
    ),
}


def all_rows(entries: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(entries) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, entries.contiguous())
    return parts


def planted(mistakes: dict[str, tuple[type, str, Any]]) -> dict[str, float]:
    """How far each mistake moves the logits of packed sequences."""
    expected, _, _ = alone("float64", "contiguous")
    layout = split_over(PackLayout(**MICROBATCHES["contiguous"]))
    model = build("float64", cp=layout.cp_size, cp_layout="contiguous")
    rows = torch.from_numpy(layout.rows("local"))
    found = {}
    for mistake, (owner, name, replacement) in mistakes.items():
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
    "planted": partial(planted, MISTAKES),
    "refusals": refusals,
}

if __name__ == "__main__":
    serve(CASES)
