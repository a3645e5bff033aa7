# SPDX-License-Identifier: Apache-2.0
"""What a layer calls: its picks, recorded or fresh.

A layer that owns an indexer has a queue. It asks before it selects, with a function that selects natively:

    picks = manager.select(queue, compute, rows=len(q), ticket=ticket_of(packed_seq_params), device=q.device)

Depending on the stage (`schedule`) the function runs on all rows, on none, or on the few rows that have no recorded
pick. A model whose selection is a plain function of scores is wrapped instead (`wrap_topk`). What a trainer calls is
in `manager`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, get_args

import torch

from vime_replay import topk
from vime_replay.errors import ReplayConfigError
from vime_replay.memory import Microbatch, MicrobatchRows, Slot, Transfer, Window, host_rows
from vime_replay.padding import PadPolicy
from vime_replay.queues import ReplayQueue
from vime_replay.schedule import Phase, ReplayTicket, Stage


class Compute(Protocol):
    """Selects natively."""

    def __call__(self, rows: torch.Tensor | None, width: int | None) -> torch.Tensor:
        """int32 [S, K] picks of all rows (None), or [n, width] of the given ones, int64 [n].

        On every rank of the model's groups it is called equally often in equal order, because it may communicate.
        """


# Score of each fresh and of each replayed pick [n, K], and the log of all keys' mass [n], as in `metrics.PickScores`.
Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Check(Protocol):
    """Compares replayed picks with fresh ones; `checking.PickCheck` is one."""

    def __call__(
        self,
        layer: int,
        batch: Microbatch,
        rows: torch.Tensor,
        replayed: torch.Tensor,
        fresh: torch.Tensor,
        scores: Scores | None,
    ) -> None:
        """Is given some rows of a layer, once in each forward.

        Args:
            layer: number over the whole model.
            batch: the microbatch.
            rows: int64 [n], rows of the microbatch.
            replayed: int32 [n, K], -1 for none; not filled in where nothing was recorded.
            fresh: int32 [n, K], picks by the scores of now.
            scores: these scores, of a layer that tells them.
        """


class Selection:
    """Queues of this pipeline rank's layers, as the layers see them; the arguments are those of `ReplayManager`."""

    def __init__(
        self, *, enabled: bool, pad_policy: PadPolicy, tickets_for: str, check: Check | None, check_rows: int
    ) -> None:
        if pad_policy not in get_args(PadPolicy):
            raise ReplayConfigError(
                f"ReplayManager: pad_policy: expected one of {', '.join(get_args(PadPolicy))}, got {pad_policy!r}; "
                "pass one of these"
            )
        if check_rows < 1:
            raise ReplayConfigError(
                f"ReplayManager: check_rows: expected at least 1, got {check_rows}; pass check=None to compare none"
            )
        if check is not None and pad_policy != "recompute":
            raise ReplayConfigError(
                f"ReplayManager: expected pad_policy 'recompute' with a check, got {pad_policy!r}; a check compares "
                "with fresh picks"
            )
        self.enabled, self.pad_policy, self.tickets_for = enabled, pad_policy, tickets_for
        self.check, self.check_rows = check, check_rows
        self.queues: list[ReplayQueue] = []
        self.current_stage = Stage.FALLTHROUGH
        self.window: Window | None = None
        self.running: list[topk.Running] = []
        self.tickets: list[ReplayTicket | None] = []
        self._recording: dict[Any, Microbatch] = {}
        self._transfers: dict[torch.device, Transfer] = {}

    @property
    def computes(self) -> bool:
        """Whether layers are asked for fresh picks when replaying.

        It does not depend on the rows: layers of context-parallel ranks communicate for it, so all do or none.
        """
        return self.pad_policy == "recompute"

    def seam(self, queue: ReplayQueue | None) -> Callable[..., torch.Tensor] | None:
        """`select` for one queue, for a module to keep; None for None."""
        return None if queue is None else partial(self.select, queue)

    def select(
        self,
        queue: ReplayQueue,
        compute: Compute,
        *,
        rows: int,
        ticket: ReplayTicket | None,
        device: torch.device,
        scores: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """int32 [rows, K] picks of a layer, by the current stage; -1 for none. Not to be changed in place.

        Args:
            queue: of the layer.
            compute: the layer's own selection.
            rows: query rows that the layer has.
            ticket: of the microbatch, or None for the next one.
            device: where the picks are used.
            scores: what `compute` chooses by: floating [n, N] of the given rows, -inf where a row may not pick. Asked
                for right after it, for the few rows that a check compares; None leaves scores out of the check.

        Raises:
            ReplayQueueError: no rows for this microbatch, or a different number of them.
            ReplayConfigError: a ticket is needed and missing.
        """
        stage = self.current_stage
        if not self.enabled or stage is Stage.FALLTHROUGH:
            return compute(None, None)
        if stage is Stage.RECORD:
            picks = compute(None, None)
            self.record(queue, picks, ticket)
            return picks
        slot, picks, phase = self.replayed(queue, rows, ticket, device)
        if not self.computes:
            return picks
        redo = torch.empty(0, dtype=torch.int64, device=device)
        if slot.redo is not None:
            redo = slot.redo.to(device, non_blocking=True)
        check = self.check if phase == "forward" else None
        checked = redo[:0] if check is None else self._sampled(rows, device)
        fresh = compute(torch.cat([redo, checked]), picks.shape[1])
        if check is not None:
            recorded, found = picks[checked], fresh[len(redo) :]
            known = None if scores is None else _scores_of(scores(checked), found, recorded)
            check(queue.layer, slot.batch, checked, recorded, found, known)
        # The host's rows are returned as they are on a CPU, and stay for the next pass.
        return picks.index_copy(0, redo, fresh[: len(redo)]) if len(redo) else picks

    def wrap_topk(self, fn: Callable[..., Any], *, return_values: bool = False) -> Callable[..., Any]:
        """A function like `fn` that replays or records when it runs inside a registered module.

        Args:
            fn: `fn(scores, k, ..., **keywords)`: picks [S, k] (or [b, s, k]) of scores [S, N] (or [b, s, N]); with
                `row_offset=` for a caller that scores rows in chunks.
            return_values: `fn` returns (values, picks); replayed values are those of `scores` at the picks, -inf for
                none.
        """
        return topk.wrap_topk(self, fn, return_values=return_values)

    def _require_ticket(self, ticket: ReplayTicket | None) -> None:
        if self.tickets_for and ticket is None:
            raise ReplayConfigError(
                f"{self.tickets_for} needs keyed replay tickets; set packed_seq_params.replay_ticket on every stage"
            )

    def record(self, queue: ReplayQueue, picks: torch.Tensor, ticket: ReplayTicket | None) -> None:
        """Keeps a copy of a layer's picks [S, K] in host memory, in one buffer for all layers of the microbatch."""
        self._require_ticket(ticket)
        key = len(queue) if ticket is None else ticket
        batch = self._recording.get(key)
        if batch is None:
            rows, width = picks.shape
            empty = MicrobatchRows(host_rows(len(self.queues), rows, width))
            batch = self._recording[key] = Microbatch.of(empty, ticket)
        queue.require_rows(batch.shape[1], len(picks))
        index = self.queues.index(queue)
        batch.rows().picks_LSK[index].copy_(picks, non_blocking=True)
        if picks.is_cuda:
            batch.written = torch.cuda.current_stream(picks.device).record_event()
        queue.push(Slot(batch, index), key=ticket)

    def replayed(
        self, queue: ReplayQueue, rows: int | None, ticket: ReplayTicket | None, device: torch.device
    ) -> tuple[Slot, torch.Tensor, Phase]:
        """A layer's slot of the microbatch, its picks [S, K'] on the device without unused columns, and the phase.

        Args: as for `select`; rows: None does not compare.
        """
        self._require_ticket(ticket)
        slot, phase = queue.pop(self.current_stage, key=ticket, rows=rows)
        transfer = self._transfers.get(device) or self._transfers.setdefault(device, Transfer(device))
        # The next layer's rows, in the direction of the phase.
        step = 1 if phase == "forward" else -1
        neighbour = slot.index + step
        following = None
        if 0 <= neighbour < len(self.queues) and self.queues[neighbour].chunk == queue.chunk:
            following = Slot(slot.batch, neighbour)
        picks = transfer.fetch(slot, following)
        if self.window is not None:
            self.window.used(slot, phase)
        return slot, picks, phase

    def _sampled(self, rows: int, device: torch.device) -> torch.Tensor:
        step = max(1, rows // self.check_rows)
        return torch.arange(step // 2, rows, step, device=device)

    def forget(self) -> None:
        """Drops what is being recorded or copied, and modules that did not end."""
        self._recording.clear()
        self.running.clear()
        self.tickets.clear()
        for transfer in self._transfers.values():
            transfer.clear()


def _scores_of(scores_nN: torch.Tensor, *picks: torch.Tensor) -> Scores:
    keys = scores_nN.shape[1]

    def of(each: torch.Tensor) -> torch.Tensor:
        # Recorded picks may name keys that are not there, where nothing has validated them.
        exists = (each >= 0) & (each < keys)
        if not keys:
            return scores_nN.new_full(each.shape, float("-inf"))
        return scores_nN.gather(1, each.where(exists, 0).long()).masked_fill(~exists, float("-inf"))

    fresh, replayed = map(of, picks)
    return fresh, replayed, scores_nN.logsumexp(1)
