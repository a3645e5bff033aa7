# SPDX-License-Identifier: Apache-2.0
"""Replay for hosts whose selection is a function of scores: wrapping it, and a selection that looks at ranges first.

A wrapped function does not know its layer or microbatch. Hooks on the layer's module tell: while the module runs, its
queue and the ticket of its packing object are on top of a stack. A module that scores its rows in chunks gets the
chunk's part of the recorded rows, and records one item when it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from vime_replay.queues import ReplayQueue, ReplayQueueError
from vime_replay.schedule import ReplayTicket, Stage, ticket_of

if TYPE_CHECKING:
    from vime_replay.selection import Selection


def masked_topk(scores: torch.Tensor, k: int, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """int32 [S, k]: columns of the k best scores inside [starts, ends), ascending; -1 where fewer than k exist.

    Ties go to the smaller column; -inf and NaN are never picked. `scores` is not changed.

    Args:
        scores: [S, N], floating; outside the ranges it may hold anything.
        k: picks per row; may exceed N.
        starts: [S], first column that a row may pick.
        ends: [S], one past the last.
    """
    columns = scores.shape[1]
    column = torch.arange(columns, device=scores.device)
    outside = (column < starts[:, None]) | (column >= ends[:, None]) | scores.isnan()
    best, order = scores.masked_fill(outside, float("-inf")).sort(dim=1, descending=True, stable=True)
    picks = order[:, :k].masked_fill(best[:, :k] == float("-inf"), columns).sort(dim=1).values
    picks = picks.masked_fill(picks == columns, -1).to(torch.int32)
    return torch.nn.functional.pad(picks, (0, k - picks.shape[1]), value=-1)


@dataclass
class Running:
    """A registered module in its forward.

    Attributes:
        queue: of the layer.
        ticket: of the microbatch, or None.
        recorded: picks of the chunks so far.
        replayed: picks of all rows, and the rows to compute anew, once they were asked for.
        asked: rows that chunks have asked for so far, up to the end of the last one.
    """

    queue: ReplayQueue
    ticket: ReplayTicket | None
    recorded: list[torch.Tensor] = field(default_factory=list)
    replayed: tuple[torch.Tensor, torch.Tensor | None] | None = None
    asked: int = 0


def hook(module: torch.nn.Module, manager: "Selection", queue: ReplayQueue) -> None:
    """Makes `module` announce itself to `manager` while it runs."""

    def enter(_module: Any, _args: Any, keywords: dict[str, Any]) -> None:
        ticket = ticket_of(keywords.get("packed_seq_params"))
        manager.running.append(Running(queue, ticket or (manager.tickets[-1] if manager.tickets else None)))

    def leave(_module: Any, _args: Any, output: Any) -> None:
        ended = manager.running.pop()
        # A module that raised has no output, and perhaps only some of its rows.
        if ended.recorded and output is not None:
            manager.record(ended.queue, torch.cat(ended.recorded), ended.ticket)
        if ended.replayed is not None and output is not None:
            ended.queue.require_rows(len(ended.replayed[0]), ended.asked)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    # Also when the module raises: the step may be repeated.
    module.register_forward_hook(leave, always_call=True)


def hook_ticket(module: torch.nn.Module, manager: "Selection") -> None:
    """For modules inside `module` that do not see the packing object: they take the ticket of the one given to it."""

    def enter(_module: Any, _args: Any, keywords: dict[str, Any]) -> None:
        manager.tickets.append(ticket_of(keywords.get("packed_seq_params")))

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        manager.tickets.pop()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def wrap_topk(manager: "Selection", fn: Callable[..., Any], *, return_values: bool) -> Callable[..., Any]:
    """See `Selection.wrap_topk`."""

    def topk(scores: torch.Tensor, k: int, *args: Any, **keywords: Any) -> Any:
        stage = manager.current_stage
        if not manager.running or not manager.enabled or stage is Stage.FALLTHROUGH:
            return fn(scores, k, *args, **keywords)
        layer, lead = manager.running[-1], scores.shape[:-1]

        def native() -> torch.Tensor:
            result = fn(scores, k, *args, **keywords)
            picks: torch.Tensor = result[1] if return_values else result
            return picks.reshape(prod(lead), -1).to(torch.int32)

        if stage is Stage.RECORD:
            picks = native()
            layer.recorded.append(picks)
        else:
            picks = _replayed(manager, layer, native, scores, k, keywords.get("row_offset"))
        picks = picks.reshape(*lead, picks.shape[-1])
        if not return_values:
            return picks
        values = scores.gather(-1, picks.clamp_min(0).long())
        return values.masked_fill(picks < 0, float("-inf")), picks

    return topk


def _replayed(
    manager: "Selection",
    layer: Running,
    native: Callable[[], torch.Tensor],
    scores: torch.Tensor,
    k: int,
    row_offset: int | None,
) -> torch.Tensor:
    """int32 [rows, k] of the rows that `scores` has."""
    rows, first = prod(scores.shape[:-1]), row_offset or 0
    if layer.replayed is None:
        # A chunk does not know how many rows there are.
        asked = rows if row_offset is None else None
        slot, picks, _ = manager.replayed(layer.queue, asked, layer.ticket, scores.device)
        redo = slot.redo if manager.computes else None
        layer.replayed = _fit(picks, k, layer.queue), None if redo is None else redo.to(scores.device)
    picks, redo = layer.replayed
    part = picks[first : first + rows]
    layer.queue.require_rows(len(part), rows)
    layer.asked = max(layer.asked, first + rows)
    if redo is None:
        return part
    inside = redo[(redo >= first) & (redo < first + rows)] - first
    return part.index_copy(0, inside, native()[inside]) if len(inside) else part


def _fit(picks: torch.Tensor, k: int, queue: ReplayQueue) -> torch.Tensor:
    """[S, k] of [S, K']: with more columns of -1, or without columns that hold nothing."""
    width = picks.shape[1]
    if width > k and bool((picks[:, k:] >= 0).any()):
        raise ReplayQueueError(
            f"{queue!r}: expected rows of at most {k} picks, got {width} columns with picks behind column {k}; "
            "the rollout selects more than the trainer"
        )
    return torch.nn.functional.pad(picks[:, :k], (0, max(0, k - width)), value=-1)
