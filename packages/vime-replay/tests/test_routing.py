# SPDX-License-Identifier: Apache-2.0
"""Routes of experts through the same manager: a router's share of the rows, native routes for rows without any."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vime_replay.errors import ReplayConfigError
from vime_replay.layout import PackLayout
from vime_replay.routing import RoutingReplayManager, routing_spec
from vime_replay.schedule import ReplayTicket

LAYERS, TOPK, EXPERTS = 3, 2, 8
# The first layer is dense: it has a stream and no router.
SPEC = routing_spec(LAYERS, TOPK, EXPERTS, [1, 2], sequence_parallel=True)
LENGTHS = (6, 9)
LAYOUT = PackLayout(LENGTHS, pad_multiple=4)


class Router(torch.nn.Module):
    """As Megatron's: asks `router_replay` if it has one."""

    router_replay = None

    def forward(self, scores):
        def native(scores, topk, num_groups=None, group_topk=None):
            assert (num_groups, group_topk) == (4, 2)
            return scores.topk(topk, dim=1)

        if self.router_replay is None:
            return native(scores, TOPK, 4, 2)
        return self.router_replay.get_replay_topk(scores, TOPK, 4, 2, native)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()

    def forward(self, scores, packed_seq_params=None):
        return self.router(scores)


def packed(number):
    return SimpleNamespace(replay_ticket=ReplayTicket(0, number))


def routed(**options):
    manager = RoutingReplayManager(SPEC, **options)
    layers = [Layer() for _ in range(2)]
    for number, layer in enumerate(layers, 1):
        manager.attach(layer, layer.router, layer=number)
    return manager, layers


def scores(seed):
    return torch.rand(8, EXPERTS, generator=torch.Generator().manual_seed(seed))


def rows(seed, dtype=np.uint8):
    """Routes of each sample as vime keeps them: all layers, expert ids of one byte."""
    rng = np.random.default_rng(seed)
    picks = [[rng.permutation(EXPERTS)[:TOPK] for _ in range((n - 1) * LAYERS)] for n in LENGTHS]
    return [np.array(each, dtype).reshape(-1, LAYERS, TOPK) for each in picks]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_router_sees_its_share_of_the_rollouts_routes(rank):
    manager, layers = routed()
    routes = rows(0)
    manager.fill(
        [manager.pack(routes, LAYOUT, ticket=ReplayTicket(0, 0), local=slice(8 * rank, 8 * rank + 8))]
    )
    native = scores(1).topk(TOPK).indices
    with manager.stage("replay_forward"):
        for number, layer in enumerate(layers, 1):
            values, picks = layer(scores(1), packed_seq_params=packed(0))
            for local, (sample, position) in enumerate(zip(*LAYOUT.owners(), strict=True)):
                row = local - 8 * rank
                if 0 <= row < 8:
                    recorded = sample >= 0 and position < LENGTHS[sample] - 1
                    wanted = routes[sample][position, number] if recorded else native[row]
                    assert sorted(picks[row].tolist()) == sorted(wanted.tolist())
            assert values.equal(scores(1).gather(1, picks))
            assert picks.dtype == torch.int64
    manager.assert_consumed()


def test_an_expert_that_does_not_exist_is_refused():
    manager, _ = routed()
    routes = rows(0)
    routes[1][3, 1, 0] = EXPERTS
    with pytest.raises(ValueError, match="holds 8, allowed"):
        manager.pack(routes, LAYOUT)


def test_routes_of_a_microbatch_follow_its_packing_object():
    """Also when only the experts are recomputed: then the layer does not run, and backward takes its turn."""
    manager, layers = routed()
    recorded = {}
    with manager.stage("record"):
        for m in range(3):
            recorded[m] = [layer(scores(m), packed_seq_params=packed(m))[1] for layer in layers]
    with manager.stage("replay_backward"):
        for m in (2, 0, 1):
            with manager.stage("replay_forward"):
                for layer, expected in zip(layers, recorded[m], strict=True):
                    assert layer(scores(9), packed_seq_params=packed(m))[1].equal(expected)
        for m in range(3):
            for layer, expected in zip(layers, recorded[m], strict=True):
                assert layer.router(scores(9))[1].equal(expected)
    manager.assert_consumed(backward="all")


def test_gradients_reach_the_scores_of_replayed_experts():
    manager, layers = routed()
    with manager.stage("record"):
        picks = layers[0](scores(0), packed_seq_params=packed(0))[1]
    other = scores(1).requires_grad_()
    with manager.stage("replay_forward"):
        values, _ = layers[0](other, packed_seq_params=packed(0))
    values.sum().backward()
    assert other.grad.equal(torch.zeros(8, EXPERTS).scatter(1, picks, 1.0))


def test_a_critic_routes_by_itself():
    _, layers = routed(enabled=False)
    assert layers[0].router.router_replay is None
    assert not layers[0]._forward_pre_hooks


def test_layers_without_a_stream_are_refused():
    manager, layers = routed()
    with pytest.raises(
        ReplayConfigError, match=r"layer 0: expected one of the layers with a replay stream \[1, 2\]"
    ):
        manager.attach(layers[0], layers[0].router, layer=0)
