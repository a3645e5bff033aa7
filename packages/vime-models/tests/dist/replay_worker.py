# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_replay.py: picks recorded sequence by sequence, replayed in a microbatch that is split over ranks.

The recording model picks at random, so nothing but the replay can bring the same picks about. The last token of a
sample has no row: it is compared only where the recording model picks by score.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
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
from harness import DEVICE, serve
from megatron.core import parallel_state
from step import COMPARED, worst_gradient

from vime_convert.megatron.exporter import export_tensors
from vime_convert.verify.compare import relative
from vime_convert.verify.margins import Margins
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_kernels.dsa import topk
from vime_models.dsv4.replay import attach_replay, query_order, replay_spec
from vime_models.host import cpu
from vime_replay import padding
from vime_replay.errors import ReplayError
from vime_replay.layout import PackLayout
from vime_replay.manager import ReplayManager
from vime_replay.schedule import ReplayTicket
from vime_replay.spec import ReplaySpec

NAMES = ("contiguous", "zigzag", "bshd", "bshd-zigzag")
TICKET = ReplayTicket(step=3, microbatch=0)


@dataclass
class Recording:
    """Rows [N - 1, L, K] of each sample as on the wire, and what the model that picked them computed.

    `compared` are the tokens whose picks are known; `gap` and `clamp` how close a router came to a tie and a value to
    the bound of its clamp, where rounding decides a gradient.
    """

    rows: list[np.ndarray]
    compared: torch.Tensor
    logits: torch.Tensor
    grads: dict[str, torch.Tensor]
    gap: float
    clamp: float


def indexers(model: Any) -> list[Any]:
    attentions = [layer.self_attention for layer in model.decoder.layers]
    return [each.indexer for each in attentions if each.compress_ratio == 4]


def at_random(
    layer: int, scores: torch.Tensor, k: int, *ranges: torch.Tensor, row_offset: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * layer + scores.shape[1])
    noise = torch.rand(row_offset + len(scores), scores.shape[1], generator=generator)[row_offset:]
    return topk(noise.to(scores.device), k, *ranges)


@cache
def recorded(precision: str, name: str, by_score: bool = False) -> Recording:
    model = build(precision)
    layout = PackLayout(**MICROBATCHES[name])
    manager = ReplayManager(replay_spec(model.config.vime_dsv4))
    attach_replay(model, manager)
    if not by_score:
        for layer, indexer in enumerate(indexers(model)):
            indexer.topk_fn = partial(at_random, layer)
    ids, labels = tokens(layout)
    logits = []
    compared = []
    with running_in(PRECISIONS[precision]), torch.no_grad():
        # Rotation tables are made on first use, and their ramp touches its bounds.
        logits_of(model, PackLayout((8,)), torch.arange(8), ids)
    with running_in(PRECISIONS[precision]), manager.stage("record"), Margins() as margins:
        for rows in real_rows(layout):
            compared.append(torch.arange(len(rows)) < len(rows) - 1 + by_score)
            logits.append(logits_of(model, PackLayout((len(rows),)), rows, ids))
            loss_of(logits[-1], labels, rows).backward()
    grads = dict(export_tensors([model], TABLE, value=lambda p: p.grad))
    mask = torch.cat(compared).to(DEVICE)
    return Recording(
        on_the_wire(manager), mask, torch.cat(logits).detach()[mask], grads, margins.topk, margins.clamp
    )


def on_the_wire(manager: ReplayManager) -> list[np.ndarray]:
    """Rows of each sample: the last query has none, short rows end with -1."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    wire = []
    for batch in manager.microbatches:
        picks = batch.rows().picks_LSK[:, :-1].numpy().transpose(1, 0, 2)
        missing = manager.spec.topk - picks.shape[2]
        wire.append(np.pad(picks, ((0, 0), (0, 0), (0, missing)), constant_values=-1))
    return wire


def replaying(
    model: Any, layout: PackLayout, rows: list[np.ndarray], *, spec: ReplaySpec | None = None, **options: Any
) -> ReplayManager:
    """A manager that the model's indexers ask, with one microbatch for this rank."""
    chosen = model.config.vime_dsv4
    manager = ReplayManager(spec or replay_spec(chosen), **options)
    attach_replay(model, manager)
    manager.fill([manager.pack(rows, replace(layout, query_order=query_order(chosen)), ticket=TICKET)])
    return manager


@contextmanager
def watched(model: Any) -> Iterator[list[torch.Tensor]]:
    """Picks of every layer, in order of use."""
    seen: list[torch.Tensor] = []
    originals = [indexer.select for indexer in indexers(model)]

    def watch(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def select(*args: Any) -> torch.Tensor:
            seen.append(original(*args))
            return seen[-1]

        return select

    for indexer, original in zip(indexers(model), originals, strict=True):
        indexer.select = watch(original)
    try:
        yield seen
    finally:
        for indexer in indexers(model):
            del indexer.select


def ticketed(layout: PackLayout) -> Any:
    packed = packing(layout)
    if packed is not None:
        packed.replay_ticket = TICKET
    return packed


def replayed(
    precision: str, name: str, tp: int = 1, by_score: bool = False, **options: Any
) -> dict[str, Any]:
    """How far the split microbatch is from the sequences on their own."""
    expected = recorded(precision, name, by_score)
    layout = split_over(PackLayout(**MICROBATCHES[name]), tp)
    model = build(precision, cp=layout.cp_size, tp=tp, cp_layout=layout.mode, **options)
    manager = replaying(model, layout, expected.rows)
    ids, labels = tokens(layout)
    rows = torch.from_numpy(layout.rows("local"))

    def forward(wrapped: Any) -> torch.Tensor:
        with manager.stage("replay_forward"):
            return logits_of(wrapped, layout, rows, ids)

    precise, kept_on_cpu = running_in(PRECISIONS[precision]), cpu.cuda_literals_to_cpu()
    with precise, kept_on_cpu, watched(model) as picks, manager.stage("replay_backward"):
        logits, grads = split_step(model, layout, labels, forward)
    recompute = options.get("recompute_granularity") == "full"
    manager.assert_consumed(backward="all" if recompute else "none")
    return {
        "logits": relative(whole(layout, rows, logits)[expected.compared], expected.logits),
        **worst_gradient(grads, expected.grads),
        "gap": expected.gap,
        "clamp": expected.clamp,
        "same picks": same_picks(layout, model, picks, expected.rows),
        "selections": len(picks),
    }


def same_picks(
    layout: PackLayout, model: Any, picks: list[torch.Tensor], wire: list[np.ndarray]
) -> list[bool]:
    """Whether each selection holds the recorded entries, row for row, by a plain loop over samples."""
    ordered = replace(layout, query_order=query_order(model.config.vime_dsv4))
    sample, position = ordered.owners()
    offsets = ordered.key_offsets(4)
    streams = len(indexers(model))
    found = []
    for number, selected in enumerate(picks):
        # Recomputation goes through the layers backwards.
        stream = number if number < streams else 2 * streams - 1 - number
        ok = True
        for row, (s, p) in enumerate(zip(sample, position, strict=True)):
            if s >= 0 and p < layout.lengths[s] - 1:
                entries = wire[s][p, stream]
                ok &= sorted(entries[entries >= 0] + offsets[s]) == [
                    e for e in selected[row].tolist() if e >= 0
                ]
        found.append(bool(ok))
    return found


def without_replay(precision: str, name: str) -> dict[str, float]:
    """How far the same microbatch is when every row is selected anew: what the comparison is able to see."""
    expected = recorded(precision, name)
    layout = split_over(PackLayout(**MICROBATCHES[name]))
    model = build(precision, cp=layout.cp_size, cp_layout=layout.mode)
    return {"logits": distance(model, layout, precision, expected)}


def distance(model: Any, layout: PackLayout, precision: str, expected: Recording) -> float:
    rows = torch.from_numpy(layout.rows("local"))
    with running_in(PRECISIONS[precision]), torch.no_grad():
        logits = logits_of(model, layout, rows, tokens(layout)[0])
    return relative(whole(layout, rows, logits)[expected.compared], expected.logits)


def shifted(rows: list[np.ndarray]) -> list[np.ndarray]:
    """Row r for the query at r + 1: still causal, so nothing complains."""
    return [np.concatenate([np.full_like(each[:1], -1), each[:-1]]) for each in rows]


def with_offsets(change: Callable[[PackLayout], list[int]]) -> Callable[..., Any]:
    """Packing with other key offsets."""

    def pack(sources: Any, spec: ReplaySpec, layout: PackLayout, **keywords: Any) -> Any:
        original = PackLayout.key_offsets
        PackLayout.key_offsets = lambda self, ratio=1: np.asarray(change(self))  # type: ignore[method-assign]
        try:
            return PACK(sources, spec, layout, **keywords)
        finally:
            PackLayout.key_offsets = original  # type: ignore[method-assign]

    return pack


PACK = padding.pack_rows


def before(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


# Each makes packing return other rows.
MISTAKES: dict[str, Callable[..., Any]] = {
    "offsets of the rank's rows": with_offsets(
        lambda self: before([n // self.cp_size // 4 for n in self.padded_lengths])
    ),
    "offsets of token counts": with_offsets(lambda self: before(list(self.lengths))),
    "one division of the sum": with_offsets(lambda self: [n // 4 for n in before(list(self.padded_lengths))]),
    "rows of the next token": lambda sources, *args, **kw: PACK(shifted(sources), *args, **kw),
    "streams in another order": lambda sources, *args, **kw: PACK(
        [each[:, ::-1] for each in sources], *args, **kw
    ),
    "rows in the trainer's order": lambda sources, spec, layout, **kw: PACK(
        sources, spec, replace(layout, query_order="local"), **kw
    ),
}


def planted(name: str) -> dict[str, float]:
    """How far each mistake moves the logits, and how far they are without one."""
    expected = recorded("float64", name)
    layout = split_over(PackLayout(**MICROBATCHES[name]))
    model = build("float64", cp=layout.cp_size, cp_layout=layout.mode)
    found = {}
    for mistake, pack in {"none": PACK, **MISTAKES}.items():
        padding.pack_rows = pack
        try:
            manager = replaying(model, layout, expected.rows)
        finally:
            padding.pack_rows = PACK
        with manager.stage("replay_forward"):
            found[mistake] = distance(model, layout, "float64", expected)
    return found


def tp_slice() -> str:
    """What a layer says whose rows were cut as those of a router are."""
    name = "contiguous"
    layout = split_over(PackLayout(**MICROBATCHES[name]), tp=2)
    expected = recorded("float64", name)
    model = build("float64", tp=2, cp=layout.cp_size, cp_layout=layout.mode)
    manager = ReplayManager(replay_spec(model.config.vime_dsv4))
    attach_replay(model, manager)
    share = layout.local_rows // 2
    rank = parallel_state.get_tensor_model_parallel_rank()
    ordered = replace(layout, query_order="contiguous")
    manager.fill([manager.pack(expected.rows, ordered, local=slice(rank * share, (rank + 1) * share))])
    try:
        with manager.stage("replay_forward"):
            distance(model, layout, "float64", expected)
    except ReplayError as error:
        return str(error)
    return ""


CASES: dict[str, Callable[[], Any]] = {
    **{
        f"{name}{suffix}-{precision}": partial(replayed, precision, name, cp_balance=bool(suffix))
        for name in NAMES
        for suffix in ("", "-balanced")
        for precision in COMPARED
    },
    **{
        f"tp2-contiguous-{precision}": partial(replayed, precision, "contiguous", tp=2)
        for precision in COMPARED
    },
    **{
        f"recompute-{name}-{precision}": partial(
            replayed,
            precision,
            name,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
        for name in ("zigzag",)
        for precision in COMPARED
    },
    **{
        f"by-score-{name}-{precision}": partial(replayed, precision, name, by_score=True, cp_balance=True)
        for name in ("zigzag",)
        for precision in COMPARED
    },
    "without": partial(without_replay, "float64", "zigzag"),
    **{f"planted-{name}": partial(planted, name) for name in ("contiguous", "zigzag")},
    "tp-slice": tp_slice,
}

if __name__ == "__main__":
    serve(CASES)
