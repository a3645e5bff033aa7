# SPDX-License-Identifier: Apache-2.0
"""The rows of one layer, one item per microbatch, and the account of which were used.

An item is found by its ticket or, without one, by a cursor that counts uses in order of arrival. Either way its use
is written down, so that after a step it can be said whether every item was used in each phase. A step that failed
half-way can be taken back (`state`, `restore`).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch.distributed as dist

from vime_replay.errors import ReplayError
from vime_replay.memory import Slot
from vime_replay.schedule import Phase, Stage


class ReplayQueueError(ReplayError):
    """Rows that were asked for are not there, or rows that are there were not asked for."""


@dataclass(frozen=True)
class QueueStats:
    """Counts of one queue: items, how many were used in each phase, and bytes."""

    recorded: int
    forward: int
    backward: int
    nbytes: int


@dataclass
class _Account:
    used: dict[Phase, set[Hashable]] = field(default_factory=lambda: {p: set() for p in get_args(Phase)})
    cursor: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(get_args(Phase), 0))

    def copy(self) -> "_Account":
        return _Account({phase: set(keys) for phase, keys in self.used.items()}, dict(self.cursor))


class ReplayQueue:
    """Rows of one layer.

    Attributes:
        layer: number in the whole model, from 0.
        stream: column block on the wire.
        chunk: model chunk of this pipeline rank that owns the layer.
    """

    def __init__(self, layer: int, stream: int, chunk: int = 0) -> None:
        self.layer, self.stream, self.chunk = layer, stream, chunk
        self._items: dict[Hashable, Slot] = {}
        self._order: list[Hashable] = []
        self._account = _Account()

    def __len__(self) -> int:
        return len(self._order)

    def __repr__(self) -> str:
        return f"layer {self.layer} (stream {self.stream})"

    def push(self, slot: Slot, *, key: Hashable | None = None) -> None:
        """Appends the rows of the next microbatch, or replaces those of the same ticket.

        Args:
            slot: its rows.
            key: its ticket; None numbers it by arrival.
        """
        key = len(self._order) if key is None else key
        if key not in self._items:
            self._order.append(key)
        self._items[key] = slot

    def slots(self) -> list[Slot]:
        """All items in order."""
        return [self._items[key] for key in self._order]

    def pop(
        self, stage: Stage, *, key: Hashable | None = None, rows: int | None = None
    ) -> tuple[Slot, Phase]:
        """The rows of a microbatch, and for which phase they were taken; they stay in the queue.

        Args:
            stage: replay_forward or replay_backward.
            key: ticket of the microbatch; None takes the next one of the phase.
            rows: how many query rows the layer has; None does not compare.

        Raises:
            ReplayQueueError: no such item, or one of another number of rows. Nothing counts as used then.
        """
        phase = self._phase(stage, key)
        account = self._account
        number = account.cursor[phase] if key is None else None
        if number is not None:
            if number >= len(self):
                shapes = sorted({tuple(slot.shape) for slot in self._items.values()})
                raise ReplayQueueError(
                    f"{self!r} popped {stage} #{number} but only {len(self)} microbatches were queued; "
                    f"shapes {shapes[:8]}; fill or record every microbatch of the step, and rewind between passes"
                )
            key = self._order[number]
        elif key not in self._items:
            raise ReplayQueueError(
                f"{self!r} has no rows for {key}; {len(self)} microbatches are queued, among them "
                f"{self._order[:4]}; fill the queues of this step before its first pass"
            )
        slot = self._items[key]
        if rows is not None:
            self.require_rows(slot.shape[0], rows)
        account.cursor[phase] += number is not None
        account.used[phase].add(key)
        return slot, phase

    def require_rows(self, replayed: int, asked: int) -> None:
        """Raises unless a layer has as many query rows as its recorded rows."""
        if replayed != asked:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            raise ReplayQueueError(
                f"rank {rank}: {self!r}: replay has {replayed} rows, scores have {asked}; check CP/SP/padding layout"
            )

    def _phase(self, stage: Stage, key: Hashable | None) -> Phase:
        if stage is Stage.REPLAY_FORWARD:
            return "forward"
        # A planned schedule runs forward layers outside the forward step. Forward comes first, so a ticket tells.
        return "forward" if key is not None and key not in self._account.used["forward"] else "backward"

    def rewind(self, which: Phase | Literal["both"] = "forward") -> None:
        """Starts a phase again: nothing was used in it."""
        for phase in get_args(Phase) if which == "both" else (which,):
            self._account.used[phase].clear()
            self._account.cursor[phase] = 0

    def unused(self, phase: Phase) -> int:
        """Items that the phase has not used."""
        return len(self) - len(self._account.used[phase])

    def clear(self) -> None:
        """Forgets all items and uses."""
        self._items, self._order, self._account = {}, [], _Account()

    def state(self) -> Any:
        """For `restore`."""
        return len(self), self._account.copy()

    def restore(self, state: Any) -> None:
        """Takes back all uses and items since `state`."""
        length, account = state
        for key in self._order[length:]:
            del self._items[key]
        del self._order[length:]
        self._account = account.copy()

    def stats(self) -> QueueStats:
        """Counts for logs."""
        used = self._account.used
        nbytes = sum(slot.nbytes for slot in self._items.values())
        return QueueStats(len(self), len(used["forward"]), len(used["backward"]), nbytes)
