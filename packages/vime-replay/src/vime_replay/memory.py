# SPDX-License-Identifier: Apache-2.0
"""Where rows wait: one host buffer per microbatch, and a copy to the device one layer ahead of the layer that asks.

A microbatch is one int32 tensor [L, S, K], stream-major, so that a layer's rows are contiguous, in pinned memory where
there is CUDA. It holds the streams of this pipeline rank only. Buffers too many for the host's memory are packed when
they are needed and dropped when all their layers have used them (`Window`). Without CUDA nothing is pinned or copied.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch

from vime_replay.errors import ReplayConfigError
from vime_replay.layout import PackLayout
from vime_replay.schedule import Phase, ReplayTicket


@dataclass(frozen=True, eq=False)
class MicrobatchRows:
    """Rows of one microbatch in the order in which this rank's layers consume them.

    Attributes:
        picks_LSK: int32 [L, S, K] on the CPU; keys of the microbatch, -1 for none. L are the rank's streams.
        redo: for each stream, the rows (int64) whose picks must be computed anew: padding and rows without capture.
        width: columns that hold a pick in some row; the rest is -1.
    """

    picks_LSK: torch.Tensor
    redo: tuple[torch.Tensor, ...] = ()
    width: int | None = None


class Microbatch:
    """`MicrobatchRows` that are there, or that a function returns when they are needed.

    Args:
        packed: rows, or a function that packs them; it may be called again after `release`.
        shape: (L, S, K), what `packed` has or returns.
        ticket: of the microbatch, or None.
        layout: by which the rows were packed; None for recorded rows.
        local: the local rows that were packed; None for all.

    Attributes:
        written: event behind which rows that the device recorded are in host memory; None without such rows.
    """

    written: Any = None

    def __init__(
        self,
        packed: MicrobatchRows | Callable[[], MicrobatchRows],
        shape: tuple[int, int, int],
        ticket: ReplayTicket | None = None,
        layout: PackLayout | None = None,
        local: slice | None = None,
    ) -> None:
        self.shape, self.ticket, self.layout, self.local = shape, ticket, layout, local
        self._load = packed if callable(packed) else None
        self._packed = None if callable(packed) else packed
        self._future: Future[MicrobatchRows] | None = None
        self._lock = Lock()

    @classmethod
    def of(cls, packed: MicrobatchRows, ticket: ReplayTicket | None = None) -> "Microbatch":
        """A microbatch that stays in memory."""
        streams, rows, width = packed.picks_LSK.shape
        return cls(packed, (streams, rows, width), ticket)

    def rows(self) -> MicrobatchRows:
        """The rows; packs them, or waits for a prefetch. What fails there is raised here."""
        with self._lock:
            if self._packed is None:
                assert self._load is not None
                future, self._future = self._future, None
                packed = future.result() if future is not None else self._load()
                if tuple(packed.picks_LSK.shape) != self.shape:
                    raise ReplayConfigError(
                        f"packed rows: expected shape {self.shape}, got {tuple(packed.picks_LSK.shape)}; pack every "
                        "microbatch with the layout and the streams that it was announced with"
                    )
                self._packed = packed
            return self._packed

    def prefetch(self, executor: ThreadPoolExecutor) -> None:
        """Starts packing on another thread, unless the rows are there or on their way."""
        with self._lock:
            if self._packed is None and self._future is None:
                self._future = executor.submit(self._load)  # type: ignore[arg-type]

    def release(self) -> None:
        """Drops the rows if they can be packed again."""
        with self._lock:
            future, self._future = self._future, None
            if self._load is not None:
                self._packed = None
        if future is not None:
            future.cancel()


@dataclass(frozen=True)
class Slot:
    """One layer's part of a microbatch: rows [S, K]."""

    batch: Microbatch
    index: int

    @property
    def shape(self) -> tuple[int, int]:
        """(S, K)."""
        return self.batch.shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return 4 * self.shape[0] * self.shape[1]

    @property
    def redo(self) -> torch.Tensor | None:
        """int64 rows to compute anew; None if there are none."""
        redo = self.batch.rows().redo
        return redo[self.index] if redo and len(redo[self.index]) else None

    @property
    def picks(self) -> torch.Tensor:
        """int32 [S, K'] on the host, without the columns that nothing uses."""
        packed = self.batch.rows()
        return packed.picks_LSK[self.index, :, : packed.width]


@dataclass
class Window:
    """A bounded number of packed microbatches: packs ahead on two threads, drops what its layers have used.

    Attributes:
        ahead: microbatches to pack before they are asked for; 0 packs on the thread that asks.
        release: phase after which a microbatch is dropped. "backward" only if backward recomputes layers: otherwise
            nothing would ever be dropped.
    """

    ahead: int = 1
    release: Phase = "forward"
    batches: list[Microbatch] = field(default_factory=list)
    _used: dict[int, set[int]] = field(default_factory=dict)
    _threads: ThreadPoolExecutor | None = None

    def add(self, batch: Microbatch) -> Microbatch:
        """The microbatch, which this window looks after from now on; in order of use."""
        self.batches.append(batch)
        return batch

    def begin_pass(self, release: Phase) -> None:
        """Sets the phase that drops microbatches, and packs the first ones of the pass."""
        self.release = release
        self._used.clear()
        self._ahead_of(-1)

    def used(self, slot: Slot, phase: Phase) -> None:
        """A layer has used its rows."""
        if slot.batch not in self.batches:
            return
        number = self.batches.index(slot.batch)
        self._ahead_of(number)
        if phase == self.release:
            layers = self._used.setdefault(number, set())
            layers.add(slot.index)
            if len(layers) == slot.batch.shape[0]:
                slot.batch.release()
                layers.clear()

    def close(self) -> None:
        """Stops the threads and drops everything; may be called again."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        for batch in self.batches:
            batch.release()
        self.batches.clear()
        self._used.clear()

    def _ahead_of(self, number: int) -> None:
        if not self.ahead:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, thread_name_prefix="vime-replay")
        for batch in self.batches[number + 1 : number + 1 + self.ahead]:
            batch.prefetch(self._threads)


class Transfer:
    """Brings slots to a device, and the slot that will be asked for next on its way meanwhile.

    The copy runs on a stream of its own from pinned memory; the stream that uses the rows waits for an event. Memory
    of the source is safe: the host allocator reuses a pinned block only when copies out of it have ended.

    Args:
        device: where layers compute. On the CPU a slot's rows are returned as they are, not copied.
    """

    DEPTH = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: dict[Slot, tuple[torch.Tensor, Any]] = {}

    def fetch(self, slot: Slot, following: Slot | None = None) -> torch.Tensor:
        """int32 [S, K'] on the device.

        Args:
            slot: whose rows.
            following: the slot that will probably be asked for next.

        Raises:
            ReplayConfigError: called while a CUDA graph is captured, which would freeze the rows of one microbatch.
        """
        if self._stream is None:
            return slot.picks
        if torch.cuda.is_current_stream_capturing():
            raise ReplayConfigError(
                "replay inside a CUDA graph: expected eager execution, got a capture; leave the layers with an indexer "
                "out of the captured scope"
            )
        rows, ready = self._pending.pop(slot) if slot in self._pending else self._start(slot)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ready)
        rows.record_stream(current)
        if following is not None and following not in self._pending:
            while len(self._pending) >= self.DEPTH:
                del self._pending[next(iter(self._pending))]
            self._pending[following] = self._start(following)
        return rows

    def _start(self, slot: Slot) -> tuple[torch.Tensor, Any]:
        with torch.cuda.stream(self._stream):
            if slot.batch.written is not None:
                torch.cuda.current_stream().wait_event(slot.batch.written)
            rows = slot.picks.to(self.device, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return rows, ready

    def clear(self) -> None:
        """Forgets what is on its way."""
        self._pending.clear()


def host_rows(streams: int, rows: int, width: int) -> torch.Tensor:
    """Uninitialised int32 [L, S, K] in host memory, pinned where there is CUDA."""
    return torch.empty(streams, rows, width, dtype=torch.int32, pin_memory=torch.cuda.is_available())
