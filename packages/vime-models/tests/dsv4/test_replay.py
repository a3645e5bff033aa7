# SPDX-License-Identifier: Apache-2.0
"""Connecting replays with a DeepSeek-V4 model: streams, refusals, and routes of experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime_convert.dsv4.hf_config import read_config
from vime_convert.verify.precision import PRECISIONS, running_in
from vime_models.dsv4.config import DSv4OptionError, DSv4Options
from vime_models.dsv4.plugin import PLUGIN
from vime_models.dsv4.replay import attach_replay, query_order, replay_spec
from vime_models.dsv4.tiny import TINY_CASES
from vime_models.host.microbatch import attach_token_ids
from vime_models.host.replay import attach_router_replay
from vime_replay.checking import PickCheck
from vime_replay.layout import PackLayout
from vime_replay.manager import ReplayManager
from vime_replay.metrics import COLUMNS
from vime_replay.routing import RoutingReplayManager, routing_spec
from vime_replay.schedule import ReplayTicket
from vime_replay.spec import indexer_spec

CONFIGS = {case.name: case.config for case in TINY_CASES}
RELEASED = {
    "flash": ([0, 0, *[4, 128] * 20, 4, 0], 512, 21),
    "pro": ([128, 128, *[4, 128] * 29, 4, 0], 1024, 30),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_a_stream_for_every_indexer(name: str) -> None:
    """The spec that the trainer makes from its options is the one that the rollout makes from `config.json`."""
    ratios, topk, streams = RELEASED[name]
    sizes = {"compress_ratios": ratios, "num_hidden_layers": len(ratios) - 1, "index_topk": topk}
    config = CONFIGS["flash"] | sizes | {"num_hash_layers": 0}
    spec = replay_spec(DSv4Options.from_hf(read_config(config)))
    assert (spec.num_streams, spec.topk, spec.ratio) == (streams, topk, 4)
    assert spec.digest == indexer_spec(config).digest


def test_streams_of_a_model_are_those_of_the_whole_model(build: Any) -> None:
    model = build("flash")
    options = model.config.vime_dsv4
    manager = ReplayManager(replay_spec(options))
    attach_replay(model, manager)
    assert [(queue.layer, queue.stream) for queue in manager.queues] == [(2, 0), (4, 1)]
    assert query_order(options) == "contiguous"
    assert query_order(replace(options, cp_balance=True)) == "balanced"


def test_a_critic_is_left_alone(build: Any) -> None:
    model = build("flash")
    attach_replay(model, ReplayManager(replay_spec(model.config.vime_dsv4), enabled=False))
    assert all(getattr(module, "replay", None) is None for module in model.modules())


def test_an_indexer_that_sees_everything_has_nothing_to_replay(build: Any) -> None:
    model = build("csa", train_indexer="warmup")
    with pytest.raises(DSv4OptionError, match="--dsv4-train-indexer is 'warmup'"):
        attach_replay(model, ReplayManager(replay_spec(model.config.vime_dsv4)))


def test_a_spec_of_another_model_is_refused(build: Any) -> None:
    model = build("csa")
    spec = replace(replay_spec(model.config.vime_dsv4), topk=99)
    with pytest.raises(DSv4OptionError, match="replay of 99 picks of ratio-4 keys, expected 5 picks"):
        attach_replay(model, ReplayManager(spec))


def test_a_check_learns_how_much_score_the_replayed_picks_miss(build: Any) -> None:
    """By the scores of now, after the indexer has moved since the picks were recorded."""
    model = build("flash", "float64")
    spec = replay_spec(model.config.vime_dsv4)
    check = PickCheck.of(spec)
    manager = ReplayManager(spec, check=check, check_rows=10**6)
    attach_replay(model, manager)
    ids = torch.randint(160, (1, 120), generator=torch.Generator().manual_seed(0))
    indexer = model.decoder.layers[2].self_attention.indexer
    shown: list[tuple[torch.Tensor, torch.Tensor]] = []

    def topk(scores: torch.Tensor, k: int, *args: Any, **keywords: Any) -> torch.Tensor:
        picks = native(scores, k, *args, **keywords)
        shown.append((scores.clone(), picks))
        return picks

    native, indexer.topk_fn = indexer.topk_fn, topk
    with running_in(PRECISIONS["float64"]), torch.no_grad():
        with manager.stage("record"):
            PLUGIN.forward([model], ids)
        recorded = shown[-1][1]
        for batch in manager.microbatches:
            batch.layout = PackLayout((120,))
        indexer.linear_weights_proj.weight.neg_()
        PLUGIN.forward([model], ids)
        now, fresh = shown[-1]
        with manager.stage("replay_forward"):
            PLUGIN.forward([model], ids)
    found = check.flush()
    first = dict(zip(COLUMNS, found.table[spec.layer_ids.index(2)].sum((0, 1)), strict=True))
    lost = ties = 0.0
    for row in range(119):
        a, b = (set(picks[row].tolist()) - {-1} for picks in (fresh, recorded))
        if (row + 1) // 4 > spec.topk:
            shares = now[row, : (row + 1) // 4].softmax(-1)
            lost += sum(shares[pick].item() for pick in a - b)
            smallest = min(now[row, pick].item() for pick in a)
            ties += sum(now[row, pick].item() == smallest for pick in a ^ b)
    assert first["scored"] == first["rows"] > 50
    assert first["mass_lost"] == pytest.approx(lost, rel=1e-5)
    assert lost > 1
    assert first["ties"] == ties


def test_a_ticket_survives_the_token_ids() -> None:
    packed = PackedSeqParams(qkv_format="thd")
    packed.replay_ticket = ReplayTicket(1, 2)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert attach_token_ids(packed, ids).replay_ticket == ReplayTicket(1, 2)
    assert attach_token_ids(None, ids).replay_ticket is None


def test_routes_are_replayed_whatever_the_gate_says(build: Any, checkpoint: Any) -> None:
    """Layers that route by token id take no part."""
    model, case = build("flash"), next(case for case in TINY_CASES if case.name == "flash")
    sizes = {"topk": case.config["num_experts_per_tok"], "num_experts": case.config["n_routed_experts"]}
    manager = RoutingReplayManager(routing_spec(5, layers=[2, 3, 4], **sizes))
    attach_router_replay(model, manager)
    assert [queue.layer for queue in manager.queues] == [2, 3, 4]
    maps: list[torch.Tensor] = []
    routers = [layer.mlp.router for layer in model.decoder.layers]
    handles = [r.register_forward_hook(lambda _m, _i, output: maps.append(output[1])) for r in routers]
    ids = torch.randint(case.config["vocab_size"], (1, 200), generator=torch.Generator().manual_seed(0))
    gates = [router.weight for router in routers[2:]]
    before = [gate.clone() for gate in gates]
    with torch.no_grad():
        with manager.stage("record"):
            PLUGIN.forward([model], ids)
        for gate in gates:
            gate.copy_(torch.randn_like(gate))
        PLUGIN.forward([model], ids)
        with manager.stage("replay_forward"):
            PLUGIN.forward([model], ids)
        for gate, value in zip(gates, before, strict=True):
            gate.copy_(value)
    for handle in handles:
        handle.remove()
    for router in routers:
        router.router_replay = None
    recorded, native, replayed = maps[:5], maps[5:10], maps[10:]
    for layer in (2, 3, 4):
        assert not native[layer].equal(recorded[layer])
    assert all(a.equal(b) for a, b in zip(recorded, replayed, strict=True))
    manager.assert_consumed()
