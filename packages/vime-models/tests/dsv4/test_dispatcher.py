# SPDX-License-Identifier: Apache-2.0
"""Tokens spread over experts and summed again are Megatron's permutation, in exact arithmetic."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from vime_models.dsv4.dispatcher import (
    _Place,
    _Spread,
    _Sum,
    by_expert,
    by_local_expert,
    by_source,
    row_multiple,
)

T, E, K, C = 37, 8, 3, 16


@pytest.fixture
def routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Routing map [T, E], the order of the rows by expert, and where the rows of a token are."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.rand(T, E, generator=generator).topk(K).indices
    routing_map = torch.zeros(T, E, dtype=torch.bool).scatter(1, picks, True)
    return routing_map, *by_expert(routing_map, K)[1:]


def test_rows_and_weights_are_in_megatrons_order(routing: tuple[torch.Tensor, ...]) -> None:
    routing_map, order, places = routing
    probs = torch.rand(T, E, dtype=torch.float64, requires_grad=True)
    _, weights, expected, _, _ = permute(torch.zeros(T, 1), routing_map, probs, num_out_tokens=T * K)
    assert order.equal(expected)
    assert places.equal(expected.argsort(stable=True).view(T, K))
    ours = _Place.apply(probs.gather(1, by_expert(routing_map, K)[0]).flatten(), places.flatten(), T * K)
    assert ours.equal(weights)
    grad = torch.rand(T * K, dtype=torch.float64)
    assert torch.autograd.grad(ours, probs, grad)[0].equal(torch.autograd.grad(weights, probs, grad)[0])


def test_a_token_with_too_few_experts_is_not_routed_to_others(routing: tuple[torch.Tensor, ...]) -> None:
    routing_map = routing[0].clone()
    routing_map[5] = False
    with pytest.raises((RuntimeError, IndexError)):
        torch.rand(T, E).gather(1, by_expert(routing_map, K)[0])


def test_values_and_gradients_are_megatrons(routing: tuple[torch.Tensor, ...]) -> None:
    routing_map, order, places = routing
    generator = torch.Generator().manual_seed(1)
    tokens, scale, grad = (torch.randn(n, C, dtype=torch.float64, generator=generator) for n in (T, T * K, T))
    outcomes = []
    for ours in (True, False):
        x = tokens.clone().requires_grad_()
        rows = (
            _Spread.apply(x, order, places, None)
            if ours
            else permute(x, routing_map, num_out_tokens=T * K)[0]
        )
        assert rows.equal(tokens[order])
        summed = (
            _Sum.apply(rows * scale, order, places, None)
            if ours
            else unpermute(rows * scale, order, tokens.shape)
        )
        summed.backward(grad)
        outcomes.append((summed, x.grad))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_each_expert_begins_at_a_multiple_and_rows_in_between_have_no_weight(
    routing: tuple[torch.Tensor, ...],
) -> None:
    routing_map, order, _ = routing
    _, filled, moved = by_expert(routing_map, K, 4)
    weights = _Place.apply(torch.ones(T * K), moved.flatten(), len(filled))
    counts = routing_map.sum(0).tolist()
    begin = start = 0
    for count in counts:
        assert begin % 4 == 0
        assert filled[begin : begin + count].equal(order[start : start + count])
        begin, start = begin + count + -count % 4, start + count
        assert weights[begin - (-count % 4) : begin].sum() == 0
    assert begin <= len(filled)
    assert filled[moved].equal(torch.arange(T)[:, None].expand(T, K))


def test_chunks_of_several_ranks_are_sorted_filled_and_put_back() -> None:
    chunks = [[2, 0, 3], [1, 4, 0]]
    rows = torch.arange(10.0)[:, None].requires_grad_()
    filled = by_local_expert(rows, chunks, 4)
    assert filled[:, 0].tolist() == [0, 1, 5, 0, 6, 7, 8, 9, 2, 3, 4, 0]
    back = by_source(filled, chunks, 4)
    assert back.equal(rows)
    (grad,) = torch.autograd.grad(back, rows, rows.detach())
    assert grad.equal(rows)


@pytest.mark.parametrize("rows, multiple", [(1, 1), (63, 1), (64, 2), (5000, 128), (10**6, 128)], ids=str)
def test_filling_up_adds_little(rows: int, multiple: int) -> None:
    assert row_multiple(rows) == multiple
