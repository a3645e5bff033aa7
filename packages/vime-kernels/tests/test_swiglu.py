# SPDX-License-Identifier: Apache-2.0
"""Clamped SwiGLU in torch: the formula by hand, derivatives, messages."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from vime_kernels.moe import swiglu


def by_hand(gate, up, limit, weight):
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return gate / (1 + math.exp(-gate)) * up * weight


def test_equals_the_formula():
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    weight = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    out = swiglu(x, weight, limit=1.5)
    for i in range(3):
        for j in range(5):
            for f in range(4):
                expected = by_hand(x[i, j, f].item(), x[i, j, 4 + f].item(), 1.5, weight[i, j].item())
                assert out[i, j, f].item() == pytest.approx(expected, rel=1e-12)
    assert swiglu(x, limit=1.5).mul(weight[..., None]).equal(out)


def test_numeric_derivatives():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w: swiglu(x, w, limit=0.7), (x, weight))


def test_one_rounding_in_bfloat16():
    x, weight = torch.randn(9, 16).bfloat16(), torch.rand(9)
    assert swiglu(x, weight, limit=1.0).equal(swiglu(x.float(), weight, limit=1.0).bfloat16())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(3, 5),), "x of shape \\[..., 2F\\], got \\[3, 5\\]"),
        ((torch.zeros(3, 4), torch.zeros(4)), "weight of shape \\[3\\], got \\[4\\]"),
        ((torch.zeros(3, 4).int(),), "x in bfloat16"),
        (([1.0],), "x to be a tensor, got list"),
    ],
    ids=["odd", "weight", "integers", "list"],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        swiglu(*arguments)


def test_the_limit_is_positive():
    with pytest.raises(ValueError, match="a positive limit, got 0"):
        swiglu(torch.zeros(2, 4), limit=0)


@pytest.mark.parametrize("shape", [(3, 0), (0, 8), (0, 0), (2, 0, 8), (8,)], ids=str)
def test_empty_results_and_single_rows(shape):
    x, weight = torch.ones(shape), torch.ones(shape[:-1])
    assert swiglu(x, weight).shape == (*shape[:-1], shape[-1] // 2)
