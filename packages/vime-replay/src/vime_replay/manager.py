# SPDX-License-Identifier: Apache-2.0
"""What a trainer calls: registers layers, fills their queues, sets stages, and asks whether all rows were used.

One manager serves one kind of selection on one pipeline rank; picks of indexers and routes of experts are two
managers that do not know of each other. A rollout step is:

    manager.fill(manager.pack(rows, layout, ticket=...) for rows, layout in microbatches)
    with manager.stage("replay_forward"): log-probabilities         # fallthrough for a reference
    manager.begin_pass("backward")
    with manager.stage("replay_backward"): training                 # "replay_forward" inside the forward step
    manager.assert_consumed(); manager.clear()

Left out: how layers get their picks (`selection`), and the order of the rows (`pack`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "vime_replay.manager needs torch, which is not installed; pip install 'vime-replay[torch]'",
        name="torch",
    ) from error

from vime_replay import topk
from vime_replay.errors import ReplayConfigError
from vime_replay.layout import PackLayout
from vime_replay.memory import Microbatch, Slot, Window
from vime_replay.pack import Order
from vime_replay.padding import PadPolicy, microbatch_packer
from vime_replay.queues import ReplayQueue, ReplayQueueError
from vime_replay.schedule import Phase, ReplayTicket, Stage
from vime_replay.selection import Check, Selection
from vime_replay.spec import ReplaySpec


@dataclass(frozen=True)
class FillReport:
    """What a fill put into the queues of this rank."""

    microbatches: int
    rows: int
    redone_rows: int
    nbytes: int


class ReplayManager(Selection):
    """Queues of all layers of this pipeline rank, and the stage they are in.

    Args:
        spec: which layers have which stream.
        enabled: False (a critic) makes every call do nothing, and registers nothing.
        pad_policy: what rows without picks do, see `padding`.
        order: "sorted" makes the picks of a row ascend, "keep" leaves them as recorded.
        tickets_for: why cursors will not do, such as "combined 1F1B"; empty if they will.
        check: compares a sample of rows with fresh picks; needs pad_policy "recompute".
        check_rows: rows per layer and microbatch that are compared.
    """

    def __init__(
        self,
        spec: ReplaySpec,
        *,
        enabled: bool = True,
        pad_policy: PadPolicy = "recompute",
        order: Order = "sorted",
        tickets_for: str = "",
        check: Check | None = None,
        check_rows: int = 64,
    ) -> None:
        super().__init__(
            enabled=enabled,
            pad_policy=pad_policy,
            tickets_for=tickets_for,
            check=check,
            check_rows=check_rows,
        )
        self.spec, self.order = spec, order

    # Registration

    def register(self, module: torch.nn.Module | None, *, layer: int, chunk: int = 0) -> ReplayQueue | None:
        """The queue of a layer; None while the manager is disabled.

        Args:
            module: gets hooks, for functions wrapped by `wrap_topk` that run inside its forward; None for a caller of
                `select`.
            layer: number in the whole model, from 0: the framework's pipeline offset plus the local index.
            chunk: model chunk of this rank.

        Raises:
            ReplayConfigError: a layer twice, or one without a stream.
        """
        if not self.enabled:
            return None
        if any((queue.layer, queue.chunk) == (layer, chunk) for queue in self.queues):
            raise ReplayConfigError(
                f"layer {layer} of chunk {chunk} is registered twice; register each layer once"
            )
        stream = self.spec.stream_of_layer.get(layer)
        if stream is None:
            raise ReplayConfigError(
                f"layer {layer}: expected one of the layers with a replay stream {list(self.spec.layer_ids)}; register "
                "layers that own an indexer, by their number in the whole model"
            )
        queue = ReplayQueue(layer, stream, chunk)
        self.queues.append(queue)
        if module is not None:
            topk.hook(module, self, queue)
        return queue

    @contextmanager
    def suspend_registration(self) -> Iterator[None]:
        """Around the construction of draft layers: nothing registers, and then the previous setting holds again."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    @property
    def streams(self) -> tuple[int, ...]:
        """Wire stream of every queue: what a microbatch of this rank is packed from, in this order."""
        return tuple(queue.stream for queue in self.queues)

    # Stages

    @contextmanager
    def stage(self, stage: Stage | str) -> Iterator[None]:
        """Inside, layers are in this stage; then in the previous one, whatever happens."""
        previous, self.current_stage = self.current_stage, Stage(stage)
        try:
            yield
        finally:
            self.current_stage = previous

    def set_stage(self, stage: Stage | str) -> None:
        """The stage from now on."""
        self.current_stage = Stage(stage)

    def begin_pass(self, release: Phase = "forward") -> None:
        """A pass over all microbatches begins: forward cursors start again.

        Args:
            release: phase after whose use a microbatch of a `Window` is dropped: "backward" for training with
                recomputation of layers that own picks.
        """
        self.rewind_forward()
        if self.window is not None:
            self.window.begin_pass(release)

    def rewind_forward(self) -> None:
        """Forward cursors start again.

        Raises:
            ReplayQueueError: layers have unequal numbers of microbatches.
        """
        self._require_equal_queues()
        for queue in self.queues:
            queue.rewind("forward")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A step that can be repeated: an exception takes back what layers used and recorded inside."""
        states = [queue.state() for queue in self.queues]
        try:
            yield
        except BaseException:
            for queue, state in zip(self.queues, states, strict=True):
                queue.restore(state)
            self.forget()
            raise

    # Contents

    def pack(
        self,
        sources: Sequence[Any],
        layout: PackLayout,
        *,
        ticket: ReplayTicket | None = None,
        local: slice | None = None,
        lazily: bool = False,
    ) -> Microbatch:
        """A microbatch of this rank's streams, for `fill`.

        Args:
            sources: rows of each sample; anything that `vime_replay.pack.pack_rows` takes.
            layout: of the microbatch.
            ticket: that its packing object carries; None for cursors.
            local: part of the rows that this rank's layers see; None for all. Indexers see all rows of their
                context-parallel rank, whatever tensor parallelism does.
            lazily: pack when the first layer asks.
        """
        shape, pack = microbatch_packer(
            sources, self.spec, layout, self.streams, policy=self.pad_policy, order=self.order, local=local
        )
        return Microbatch(pack if lazily else pack(), shape, ticket, layout, local)

    def fill(self, microbatches: Iterable[Microbatch], window: Window | None = None) -> FillReport:
        """Appends microbatches to all queues, in the order of the step.

        Args:
            microbatches: packed for `streams`.
            window: what packs them when needed, if it is not done yet.

        Raises:
            ReplayConfigError: a microbatch of other streams, or two with one ticket.
        """
        count = rows = redone = nbytes = 0
        tickets: set[ReplayTicket] = set()
        self.window = window or self.window
        for batch in microbatches:
            if batch.shape[0] != len(self.queues):
                raise ReplayConfigError(
                    f"microbatch {count}: expected rows of {len(self.queues)} streams {self.streams}, got "
                    f"{batch.shape[0]}; pack with streams=manager.streams"
                )
            if batch.ticket in tickets:
                raise ReplayConfigError(
                    f"microbatch {count}: expected a ticket of its own, got {batch.ticket} again; number the "
                    "microbatches over all optimizer steps of the rollout step"
                )
            if batch.ticket is not None:
                tickets.add(batch.ticket)
            for index, queue in enumerate(self.queues):
                queue.push(Slot(batch, index), key=batch.ticket)
            count, rows, nbytes = count + 1, rows + batch.shape[1], nbytes + 4 * prod(batch.shape)
            if window is None:
                redone += max((len(each) for each in batch.rows().redo), default=0)
        return FillReport(count, rows, redone, nbytes)

    @property
    def microbatches(self) -> list[Microbatch]:
        """What was filled or recorded, in order; recorded rows are complete once the device is synchronised."""
        return [slot.batch for slot in self.queues[0].slots()] if self.queues else []

    def assert_consumed(
        self, *, forward: bool = True, backward: Literal["all", "none", "any"] = "any"
    ) -> None:
        """After a step: every row was used exactly once in the phases that must use it.

        Args:
            forward: whether all rows must have been used forward.
            backward: "all" with full recomputation, "none" without, "any" if only some layers are recomputed.

        Raises:
            ReplayQueueError: naming up to 16 layers.
        """
        self._require_equal_queues()
        wrong = []
        for queue in self.queues:
            stats = queue.stats()
            bad = forward and queue.unused("forward") > 0
            bad |= backward == "all" and queue.unused("backward") > 0
            bad |= backward == "none" and stats.backward > 0
            if bad:
                n = stats.recorded
                wrong.append(f"layer {queue.layer} forward {stats.forward}/{n} backward {stats.backward}/{n}")
        if wrong:
            raise ReplayQueueError("replay not consumed exactly once: " + "; ".join(wrong[:16]))

    def clear(self) -> None:
        """After a step, and before the trainer gives memory back: no rows, all cursors at the start."""
        if self.window is not None:
            self.window.close()
            self.window = None
        for queue in self.queues:
            queue.clear()
        self.forget()

    def _require_equal_queues(self) -> None:
        counts = {queue.layer: len(queue) for queue in self.queues}
        if len(set(counts.values())) > 1:
            raise ReplayQueueError(
                f"queues disagree: {counts}; every layer must record every microbatch of the pass"
            )
