# SPDX-License-Identifier: Apache-2.0
"""Tokens spread over experts and summed again are Megatron's permutation, in exact arithmetic."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from vime_models.dsv4.dispatcher import _Spread, _Sum

T, E, K, C = 37, 8, 3, 16


@pytest.fixture
def routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Routing map [T, E], Megatron's order of the rows, and where the rows of a token are."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.rand(T, E, generator=generator).topk(K).indices
    routing_map = torch.zeros(T, E, dtype=torch.bool).scatter(1, picks, True)
    order = permute(torch.zeros(T, 1), routing_map, num_out_tokens=T * K)[2]
    return routing_map, order, order.argsort(stable=True).view(T, K)


def test_values_and_gradients_are_megatrons(routing: tuple[torch.Tensor, ...]) -> None:
    routing_map, order, places = routing
    generator = torch.Generator().manual_seed(1)
    tokens, scale, grad = (torch.randn(n, C, dtype=torch.float64, generator=generator) for n in (T, T * K, T))
    outcomes = []
    for ours in (True, False):
        x = tokens.clone().requires_grad_()
        rows = _Spread.apply(x, order, places) if ours else permute(x, routing_map, num_out_tokens=T * K)[0]
        assert rows.equal(tokens[order])
        summed = (
            _Sum.apply(rows * scale, order, places) if ours else unpermute(rows * scale, order, tokens.shape)
        )
        summed.backward(grad)
        outcomes.append((summed, x.grad))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
