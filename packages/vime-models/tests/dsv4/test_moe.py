# SPDX-License-Identifier: Apache-2.0
"""Routers and experts: scores, hash tables, token ids, the clamp, and what a cast must not round."""

import pytest
import torch

from vime_models.dsv4.moe import HashRouter, ScoreRouter, router_scores
from vime_models.host.microbatch import VimePackedSeqParams


def routers(model):
    return [layer.mlp.router for layer in model.decoder.layers]


def test_leading_layers_hash_and_the_rest_score(twin):
    assert [type(router) for router in routers(twin("flash").ours)] == [HashRouter] * 2 + [ScoreRouter] * 3


@pytest.mark.parametrize("logit", [-1e4, -200.0, -104.0, 0.0, 50.0])
def test_score_gradient_is_finite_where_softplus_underflows(logit):
    x = torch.tensor(logit, requires_grad=True)
    score = router_scores(x)
    score.backward()
    assert torch.isfinite(score)
    assert torch.isfinite(x.grad)


def test_score_is_the_root_of_softplus():
    x = torch.linspace(-20, 20, 101, dtype=torch.float64)
    torch.testing.assert_close(router_scores(x), torch.log1p(x.exp()).sqrt(), rtol=1e-9, atol=0)


def test_bias_selects_and_does_not_weigh(build):
    router = routers(build("flash"))[-1]
    hidden = torch.randn(5, 1, 64)
    router.expert_bias.zero_()
    router.expert_bias[3] = 100.0
    weights, chosen = router(hidden)
    assert chosen[:, 3].all()
    scores = router_scores(hidden.flatten(0, 1) @ router.weight.T)
    expected = 1.5 * scores / (scores * chosen).sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected * chosen)


def test_router_product_is_float32_under_bfloat16(build):
    router = routers(build("flash"))[-1]
    router.bfloat16()
    hidden = torch.randn(7, 1, 64, dtype=torch.bfloat16)
    logits = router.gating(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ router.weight.float().T)


def test_a_cast_to_bfloat16_does_not_round_the_bias(build):
    model = build("flash")
    before = routers(model)[-1].expert_bias.clone()
    model.bfloat16()
    after = routers(model)[-1]
    assert after.weight.dtype == torch.bfloat16
    assert after.expert_bias.dtype == after.local_tokens_per_expert.dtype == torch.float32
    assert torch.equal(after.expert_bias, before)
    assert not torch.equal(before.bfloat16().float(), before)


def test_hash_layers_route_by_the_table_and_leave_a_gradient_in_the_gate(build):
    router = routers(build("flash"))[0]
    ids = torch.tensor([[3], [77], [3]])
    weights, chosen = router(torch.randn(3, 1, 64), token_ids=ids)
    for row, token in enumerate(ids.flatten().tolist()):
        assert chosen[row].nonzero().flatten().tolist() == sorted(router.tid2eid[token].tolist())
    (weights.square().sum()).backward()
    assert router.weight.grad.norm() > 0
    assert not hasattr(router, "expert_bias")


def test_another_table_moves_the_logits(build):
    model = build("flash")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids, None, None)
        routers(model)[1].tid2eid.copy_(routers(model)[1].tid2eid.roll(1, 0))
        assert (model(ids, None, None) - before).abs().max() >= 1e-2


def test_hash_layer_without_ids_raises(twin):
    layer = twin("flash").ours.decoder.layers[0]
    with pytest.raises(ValueError, match="layer 1 routes by token id but got no ids"):
        layer(torch.zeros(4, 1, 64))


def test_ids_travel_in_the_packing_object(twin):
    model = twin("flash").ours
    ids = torch.arange(12)[None]
    decoder_input = model.embedding(ids, None)
    with torch.no_grad():
        given = model(None, None, None, decoder_input, packed_seq_params=VimePackedSeqParams(token_ids=ids))
        assert torch.equal(given, model(ids, None, None))


@pytest.mark.parametrize("bad", [-1, 160], ids=["negative", "past-the-vocabulary"])
def test_ids_outside_the_table_raise_unless_they_are_padding(build, bad):
    router = routers(build("flash"))[0]
    hidden, ids = torch.randn(3, 1, 64), torch.tensor([[5], [bad], [6]])
    with pytest.raises(ValueError, match=rf"expected token ids in \[0, 160\), got \[{bad}\]"):
        router(hidden, token_ids=ids)
    _, chosen = router(hidden, padding_mask=torch.tensor([[False], [True], [False]]), token_ids=ids)
    assert chosen.sum(-1).tolist() == [3, 3, 3]


def test_ids_of_another_shape_raise(twin):
    with pytest.raises(ValueError, match=r"shape \(3, 1\) .* got \(4, 1\)"):
        routers(twin("flash").ours)[0](torch.zeros(3, 1, 64), token_ids=torch.zeros(4, 1, dtype=torch.int64))


def test_a_table_that_was_never_loaded_raises(build):
    router = routers(build("flash"))[0]
    router.tid2eid.fill_(-1)
    with pytest.raises(ValueError, match="tid2eid of layer 1 is not loaded"):
        router(torch.zeros(2, 1, 64), token_ids=torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("part", ["routed", "shared"])
def test_both_halves_of_the_swiglu_input_are_clamped(build, part):
    mlp = build("flash").decoder.layers[-1].mlp
    expert = mlp.shared_experts if part == "shared" else mlp.experts.local_experts[2]
    x = 3 * torch.randn(40, 64)
    counts = torch.tensor([0, 0, 40, 0, 0, 0, 0, 0])
    output = expert(x) if part == "shared" else mlp.experts(x, counts, torch.ones(40))[0]
    gate, up = (x @ expert.linear_fc1.weight.T).chunk(2, -1)
    clamped = torch.nn.functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)
    torch.testing.assert_close(output, clamped @ expert.linear_fc2.weight.T)
    for wrong in (
        torch.nn.functional.silu(gate) * up.clamp(-0.5, 0.5),
        torch.nn.functional.silu(gate.clamp(max=0.5)) * up,
    ):
        assert (output - wrong @ expert.linear_fc2.weight.T).abs().max() > 0.1


def test_load_is_counted_only_when_the_bias_follows_it(build):
    for rate, expected in ((0.0, 0), (1e-3, 5 * 3)):
        router = routers(build("flash", moe_router_bias_update_rate=rate))[-1]
        router(torch.randn(5, 1, 64))
        with torch.no_grad():
            router(torch.randn(5, 1, 64))
        assert router.local_tokens_per_expert.sum() == expected
