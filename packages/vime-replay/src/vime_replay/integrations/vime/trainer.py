# SPDX-License-Identifier: Apache-2.0
"""vime's trainer side: rows of a rollout into the queues, tickets onto packing objects, stages under vime's names.

vime's trainer drives its routing replay through names of a class `RoutingReplay`; `IndexerReplay` has the same names
over a `ReplayManager`, so both are driven from the same lines. Layouts are those of vime's `get_batch`.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch

from vime_replay.checking import PickCheck
from vime_replay.errors import ReplayConfigError, ReplayDecodeError
from vime_replay.integrations.vime.arguments import spec_of, tickets_for
from vime_replay.layout import Order, PackLayout
from vime_replay.manager import FillReport, ReplayManager
from vime_replay.memory import Microbatch, Window
from vime_replay.metrics import ReplayMetrics
from vime_replay.pack import pack_rows as pack
from vime_replay.queues import ReplayQueue
from vime_replay.schedule import Phase, ReplayTicket, Stage
from vime_replay.spec import ReplaySpec


@dataclass(frozen=True)
class Parallel:
    """Sizes and ranks that decide which rows a rank has."""

    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0

    @classmethod
    def from_mpu(cls) -> "Parallel":
        """Those of Megatron's parallel state."""
        mpu = import_module("megatron.core.parallel_state")
        return cls(
            mpu.get_context_parallel_world_size(),
            mpu.get_context_parallel_rank(),
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_tensor_model_parallel_rank(),
        )


def batch_layout(
    args: Namespace,
    lengths: Sequence[int],
    parallel: Parallel,
    *,
    query_order: Order = "local",
    max_seqlen: int | None = None,
) -> PackLayout:
    """The layout in which vime's `get_batch` hands out samples of these lengths.

    Args:
        args: vime's arguments: `data_pad_size_multiplier`, `allgather_cp`, `qkv_format`.
        lengths: tokens of each sample.
        parallel: of this rank.
        query_order: order in which the model consumes query rows.
        max_seqlen: extent of every sample, for bshd.
    """
    bshd = getattr(args, "qkv_format", "thd") == "bshd"
    return PackLayout(
        tuple(lengths),
        "bshd" if bshd else "thd",
        cp_size=parallel.cp_size,
        cp_rank=parallel.cp_rank,
        mode="contiguous" if getattr(args, "allgather_cp", False) else "zigzag",
        pad_multiple=1 if bshd else parallel.tp_size * args.data_pad_size_multiplier,
        max_seqlen=max_seqlen if bshd else None,
        query_order=query_order,
    )


def consumed_order(config: Any) -> Order:
    """Order in which a model consumes query rows under context parallelism, from its TransformerConfig."""
    options = getattr(config, "vime_dsv4", None)
    if options is None:
        return "local"
    return "balanced" if options.cp_balance else "contiguous"


def pack_rows(
    values: Sequence[Any], tokens: Sequence[Any], *, spec: ReplaySpec, layout: PackLayout
) -> torch.Tensor:
    """int32 [rows, streams, K] of this rank: rows of all samples as the model consumes them, -1 for padding.

    Args:
        values: rows of each sample.
        tokens: tokens of each sample, which must be those of the layout.
        spec: of the rows.
        layout: of the microbatch.

    Raises:
        ReplayConfigError: another layout than the tokens have.
        ReplayDecodeError: rows that do not fit their tokens.
    """
    lengths = tuple(len(each) for each in tokens)
    if lengths != layout.lengths:
        raise ReplayConfigError(
            f"pack_rows: expected tokens of lengths {layout.lengths}, as in the layout, got {lengths}; build the "
            "layout from this microbatch"
        )
    return torch.from_numpy(pack(values, spec, layout).picks_LSK).transpose(0, 1)


def make_manager(args: Namespace, role: str = "actor") -> ReplayManager:
    """A manager as the flags say; disabled for every role but the actor. Register layers, or attach a model."""
    return ReplayManager(
        spec_of(args),
        enabled=role == "actor" and args.use_indexer_replay,
        pad_policy=args.indexer_replay_pad_policy,
        order=args.indexer_replay_order,
        tickets_for=tickets_for(args),
        check_rows=args.indexer_replay_check_rows,
    )


class LayerReplay:
    """One layer's queue under the names of vime's `RoutingReplay` objects."""

    def __init__(self, manager: ReplayManager, queue: ReplayQueue) -> None:
        self.manager, self.queue = manager, queue

    def record(self, top_indices: torch.Tensor) -> None:
        """Appends the picks of the next microbatch."""
        self.manager.record(self.queue, top_indices, None)

    def pop_forward(self, device: torch.device | None = None) -> torch.Tensor:
        """Picks of the next microbatch, forward."""
        return self._pop(Stage.REPLAY_FORWARD, device)

    def pop_backward(self, device: torch.device | None = None) -> torch.Tensor:
        """Picks of the next microbatch, recomputation."""
        return self._pop(Stage.REPLAY_BACKWARD, device)

    def _pop(self, stage: Stage, device: torch.device | None) -> torch.Tensor:
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        with self.manager.stage(stage):
            return self.manager.replayed(self.queue, None, None, device or torch.device("cpu"))[1]

    def clear(self) -> None:
        """Forgets all picks."""
        self.queue.clear()

    def clear_forward(self) -> None:
        """Forward starts again."""
        self.queue.rewind("forward")


class IndexerReplay:
    """vime's names over a manager.

    Args:
        args: vime's arguments.
        manager: whose layers are registered.
        parallel: of this rank.
        query_order: order in which the model consumes query rows, see `consumed_order`.
    """

    def __init__(
        self, args: Namespace, manager: ReplayManager, parallel: Parallel, *, query_order: Order = "local"
    ) -> None:
        self.args, self.manager, self.parallel, self.query_order = args, manager, parallel, query_order
        self.step = -1
        self.check = PickCheck.of(manager.spec)

    @property
    def all_routing_replays(self) -> list[LayerReplay]:
        """One object for each layer of this rank."""
        return [LayerReplay(self.manager, queue) for queue in self.manager.queues]

    def set_stage(self, stage: str) -> None:
        """What vime keeps in ROUTING_REPLAY_STAGE."""
        self.manager.set_stage(stage)

    def forward_step(self) -> AbstractContextManager[None]:
        """Around the forward of a training step; the stage outside of it is that of recomputation."""
        replays = self.manager.current_stage is Stage.REPLAY_BACKWARD
        return self.manager.stage("replay_forward" if replays else self.manager.current_stage)

    def begin_lazy_pass(self, release_stage: Phase) -> None:
        """A pass begins; rows on disk are dropped after use in this phase.

        vime asks for "backward" in training. Without full recomputation backward may use no row and drop none.
        """
        recomputes = getattr(self.args, "recompute_granularity", None) == "full"
        self.manager.begin_pass(release_stage if recomputes else "forward")

    def clear_all_forward(self) -> None:
        """Forward starts again."""
        self.manager.rewind_forward()

    def clear_all(self) -> None:
        """The step is over."""
        self.manager.clear()

    def register_lazy_resource(self, resource: Window) -> None:
        """The window that packs rows when they are needed; closed by `clear_all`."""
        self.manager.window = resource

    def assert_all_consumed(self, backward: Literal["all", "none", "any"] = "all") -> None:
        """Every row was used once in each phase; without full recomputation pass "any" or "none"."""
        self.manager.assert_consumed(backward=backward)

    def metrics(self) -> ReplayMetrics:
        """Comparisons of the step on this rank, for the trainer to add up over data and context parallelism.

        Tensor-parallel ranks compare the same rows: take the first. Start the next step with `clear` of the result.
        """
        return self.check.flush()

    def with_tickets(self, get_batch: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """vime's `get_batch`, whose packing objects also carry the ticket of their microbatch and its layout."""

        def wrapped(data_iterator: Any, *args: Any, **keywords: Any) -> dict[str, Any]:
            number = _number(data_iterator)
            batch = get_batch(data_iterator, *args, **keywords)
            packed = batch.get("packed_seq_params")
            if packed is not None:
                packed.replay_ticket = ReplayTicket(self.step, number)
                packed.layout = self.layout([len(tokens) for tokens in batch["unconcat_tokens"]])
                _compare(packed, packed.layout, number)
            return batch

        return wrapped

    def layout(self, lengths: Sequence[int], max_seqlen: int | None = None) -> PackLayout:
        """Of a microbatch with samples of these lengths."""
        order = self.query_order
        made = batch_layout(self.args, lengths, self.parallel, query_order=order, max_seqlen=max_seqlen)
        # Megatron's own indexers count keys of each sample of a batch; DeepSeek-V4's counts those of the whole batch.
        own = made.fmt == "bshd" and self.manager.spec.ratio == 1
        return replace(made, key_space="sample") if own else made

    def fill(
        self, data_iterator: Sequence[Any], num_microbatches: Sequence[int], rollout_data: dict[str, Any]
    ) -> FillReport:
        """See `fill_indexer_replay`."""
        key = self.manager.spec.data_key
        if key not in rollout_data:
            raise ReplayDecodeError(
                "shape.rows",
                None,
                f"{key} is required in rollout data when --use-rollout-indexer-replay is set",
            )
        _require_rows_of_loss(key, rollout_data)
        self.manager.clear()
        self.step += 1
        interval = getattr(self.args, "indexer_replay_check_interval", 0)
        self.manager.check = self.check if interval and self.step % interval == 0 else None
        # References to rows elsewhere are read when a layer needs them; rows in memory are packed and given up.
        held = np.ndarray | torch.Tensor | None
        lazily = not all(isinstance(value, held) for value in rollout_data[key])
        window = Window(getattr(self.args, "indexer_replay_prefetch_microbatches", 1)) if lazily else None
        for iterator in data_iterator:
            iterator.reset()
        # All chunks of the rank read the same order, so the first iterator speaks for all.
        batches = self._batches(data_iterator[0], sum(num_microbatches), rollout_data[key], window)
        report = self.manager.fill(batches, window)
        for iterator in data_iterator:
            iterator.reset()
        del rollout_data[key]
        return report

    def _batches(
        self, iterator: Any, count: int, source: list[Any], window: Window | None
    ) -> Iterator[Microbatch]:
        spec, bshd = self.manager.spec, getattr(self.args, "qkv_format", "thd") == "bshd"
        for _ in range(count):
            number, samples = _number(iterator), _samples(iterator)
            batch = iterator.get_next([spec.data_key, "tokens", "max_seq_lens"])
            lengths = [len(tokens) for tokens in batch["tokens"]]
            layout = self.layout(lengths, batch["max_seq_lens"][0] if bshd else None)
            local = None
            if spec.shard_rows_by_tp and self.parallel.tp_size > 1:
                share = layout.local_rows // self.parallel.tp_size
                local = slice(self.parallel.tp_rank * share, (self.parallel.tp_rank + 1) * share)
            packed = self.manager.pack(
                batch[spec.data_key],
                layout,
                ticket=None if bshd else ReplayTicket(self.step, number),
                local=local,
                lazily=window is not None,
            )
            # The trainer's reference goes as soon as the rows are packed.
            for index in samples:
                source[index] = None
            yield packed if window is None else window.add(packed)


def fill_indexer_replay(
    actor: Any, data_iterator: Sequence[Any], num_microbatches: Sequence[int], rollout_data: dict[str, Any]
) -> FillReport:
    """Puts the rollout's rows into the queues of all layers, before the first pass of the step.

    Args:
        actor: vime's trainer actor, with an `IndexerReplay` as `indexer_replay`.
        data_iterator: one iterator for each model chunk; they are reset before and after.
        num_microbatches: of each optimizer step.
        rollout_data: with "tokens" and the rows, which are removed.

    Raises:
        ReplayDecodeError: no rows, or rows that do not fit their tokens.
    """
    report: FillReport = actor.indexer_replay.fill(data_iterator, num_microbatches, rollout_data)
    return report


def _require_rows_of_loss(key: str, rollout_data: dict[str, Any]) -> None:
    """Raises for a sample without any rows whose response counts: it would be selected afresh, not replayed."""
    masks = rollout_data.get("loss_masks")
    for sample, rows in enumerate(rollout_data[key]):
        if rows is None and (masks is None or bool(torch.as_tensor(masks[sample]).any())):
            advice = "start servers with --enable-return-indexer-topk"
            detail = f"{key} is empty though the sample counts in the loss; {advice}"
            raise ReplayDecodeError("value.hole", sample, detail)


def _compare(packed: Any, layout: PackLayout, number: int) -> None:
    """Raises unless the model counts keys as the rows do. On a device that costs a round trip: once in a step."""
    cu_seqlens = packed.cu_seqlens_kv
    padded = getattr(packed, "cu_seqlens_kv_padded", None)
    cu_seqlens = cu_seqlens if padded is None else padded
    if cu_seqlens is not None and (cu_seqlens.device.type == "cpu" or number == 0):
        layout.check(cu_seqlens.cpu().numpy())


def _samples(iterator: Any) -> Sequence[int]:
    """Samples of the iterator's next microbatch."""
    if iterator.micro_batch_indices is not None:
        indices: Sequence[int] = iterator.micro_batch_indices[iterator.offset]
        return indices
    return range(iterator.offset, iterator.offset + iterator.micro_batch_size)


def _number(iterator: Any) -> int:
    """Number of the iterator's next microbatch."""
    if iterator.micro_batch_indices is not None:
        return int(iterator.offset)
    return int(iterator.offset) // int(iterator.micro_batch_size)
