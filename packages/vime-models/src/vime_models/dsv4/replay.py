# SPDX-License-Identifier: Apache-2.0
"""Connects the indexers of a built model with a replay of their picks (`vime_replay`).

    manager = ReplayManager(replay_spec(options))
    attach_replay(model, manager)                    # after building, one call for all chunks of this rank
    manager.fill(manager.pack(rows, layout) for ...) # every rollout step
    with manager.stage("replay_forward"): ...

Every ratio-4 layer asks the manager for the picks of all its rows before it scores any. Picks are addressed in the
key tensor of the whole stream, so they do not change with the layout of ranks; rows arrive in the order in which the
attention consumes queries, `PackLayout(query_order=query_order(options))`. Draft layers have no indexer.
"""

from typing import TYPE_CHECKING, Any, Literal

from vime_models.dsv4.config import DSv4OptionError, DSv4Options
from vime_models.host.replay import Chunks, decoders

if TYPE_CHECKING:
    from vime_replay.manager import ReplayManager
    from vime_replay.spec import ReplaySpec

RATIO = 4


def replay_spec(options: DSv4Options) -> "ReplaySpec":
    """One stream for every layer with an indexer, in layer order."""
    from vime_replay.spec import ReplaySpec

    owners = [layer for layer, ratio in enumerate(options.compress_ratios) if ratio == RATIO]
    streams = {layer: stream for stream, layer in enumerate(owners)}
    return ReplaySpec("indexer", "rollout_indexer_topk", len(owners), options.index_topk, streams, RATIO)


def query_order(options: DSv4Options) -> Literal["contiguous", "balanced"]:
    """Order in which attention consumes query rows under context parallelism."""
    return "balanced" if options.cp_balance else "contiguous"


def attach_replay(chunks: Chunks, manager: "ReplayManager") -> None:
    """Every indexer of this rank asks `manager` for its picks from now on.

    Args:
        chunks: the model chunks of this pipeline rank, in order.
        manager: with the spec of this model; a disabled one changes nothing.

    Raises:
        DSv4OptionError: an indexer that is trained on all entries picks nothing, or a spec of another model.
    """
    for number, decoder in decoders(chunks):
        for layer in decoder.layers:
            attention = layer.self_attention
            if getattr(attention, "compress_ratio", 0) == RATIO:
                _attach(attention, manager, number)


def _attach(attention: Any, manager: "ReplayManager", chunk: int) -> None:
    options, spec = attention.options, manager.spec
    if options.train_indexer == "warmup":
        raise DSv4OptionError(
            "vime_models.dsv4: --dsv4-train-indexer is 'warmup': attention then sees all entries and no picks exist "
            "to replay; train with 'joint' or 'off'"
        )
    if (spec.topk, spec.ratio) != (options.index_topk, RATIO):
        raise DSv4OptionError(
            f"vime_models.dsv4: replay of {spec.topk} picks of ratio-{spec.ratio} keys, expected {options.index_topk} "
            f"picks of ratio-{RATIO} keys; make the spec with replay_spec(config.vime_dsv4)"
        )
    # Numbers of layers count from 1 over the whole model.
    queue = manager.register(None, layer=attention.layer_number - 1, chunk=chunk)
    attention.indexer.replay = manager.seam(queue)
