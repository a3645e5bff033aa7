# SPDX-License-Identifier: Apache-2.0
"""Rotation of heads in torch: complex numbers, the inverse, numeric derivatives, messages."""

import pytest
import torch
from torch.autograd import gradcheck

from vime_kernels.dsa import rotate

T, H, D, P = 7, 3, 10, 4


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, D, generator=generator, dtype=torch.float64)
    angles = torch.randn(T, P, generator=generator, dtype=torch.float64)
    return x, angles


def test_pairs_turn_as_complex_numbers(inputs):
    x, angles = inputs
    out = rotate(x, angles.cos(), angles.sin())
    numbers = torch.view_as_complex(x[..., 2:].unflatten(-1, (P, 2)).contiguous())
    expected = torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
    torch.testing.assert_close(out[..., 2:], expected, rtol=1e-13, atol=1e-13)
    assert out[..., :2].equal(x[..., :2])


def test_the_inverse_turns_back(inputs):
    x, angles = inputs
    there = rotate(x, angles.cos(), angles.sin())
    back = rotate(there, angles.cos(), angles.sin(), inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-13, atol=1e-13)
    assert (there - x).abs().max() > 0.1


def test_the_norm_comes_first_and_has_no_weight(inputs):
    x, angles = inputs
    out = rotate(x, angles.cos(), angles.sin(), norm_eps=0.5)
    normed = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt()
    torch.testing.assert_close(out, rotate(normed, angles.cos(), angles.sin()), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("norm_eps", [None, 0.5], ids=["plain", "norm"])
def test_numeric_derivatives(inputs, norm_eps):
    x, angles = inputs
    turn = lambda x: rotate(x, angles.cos(), angles.sin(), inverse=True, norm_eps=norm_eps)  # noqa: E731
    assert gradcheck(turn, (x.requires_grad_(),))


def test_one_rounding_in_bfloat16(inputs):
    x, angles = (t.float() for t in inputs)
    cos, sin = angles.cos(), angles.sin()
    low = rotate(x.bfloat16(), cos, sin, norm_eps=1e-6)
    assert low.equal(rotate(x.bfloat16().float(), cos, sin, norm_eps=1e-6).bfloat16())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, c: (x, c[:3], c), "cos_TP.shape\\[0\\] == x_THD.shape\\[0\\] \\(7\\), got 3"),
        (lambda x, c: (x[..., :6], c, c), "at most D / 2 = 3 pairs, got 4"),
        (lambda x, c: (x[0], c, c), "x_THD of shape \\[T, H, D\\], got \\[3, 10\\]"),
        (lambda x, c: (x, c.bfloat16(), c), "cos_TP in float32"),
        (lambda x, c: (x.int(), c, c), "x_THD in bfloat16"),
    ],
    ids=["tokens", "pairs", "rank", "narrow-cos", "integers"],
)
def test_what_does_not_fit_is_named(inputs, change, message):
    x, angles = inputs
    with pytest.raises((ValueError, TypeError), match=message):
        rotate(*change(x, angles))


def test_no_pairs_turn_nothing_and_angles_get_no_gradient(inputs):
    x, angles = inputs
    assert rotate(x, angles[:, :0], angles[:, :0]).equal(x)
    assert not rotate(x, angles.cos().requires_grad_(), angles.sin()).requires_grad
