# SPDX-License-Identifier: Apache-2.0
"""The Triton rotation of heads, forward and backward, against float64 autograd on the same values."""

import pytest
import torch

from vime_kernels.dsa import rotate

# One rounding of the result; the gradient of a norm has two terms of opposite sign.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("norm_eps", [None, 1e-3], ids=["plain", "norm"])
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("T, H, D, P", [(37, 3, 24, 8), (5, 64, 512, 32), (300, 1, 16, 8)])
@pytest.mark.parametrize(
    "dtype",
    # The interpreter cuts a bfloat16 off instead of rounding it.
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=["float32", "bfloat16"],
)
def test_equals_float64(device, dtype, T, H, D, P, inverse, norm_eps):
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter does not round to bfloat16")
    torch.manual_seed(T)
    x, grad = (torch.randn(T, H, D).to(device, dtype) for _ in range(2))
    angles = torch.randn(T, P, device=device)
    results = []
    for wide, backend in ((torch.float64, "torch"), (dtype, "triton")):
        leaf = x.to(wide).requires_grad_()
        cos, sin = (
            table.to(torch.promote_types(wide, torch.float32)) for table in (angles.cos(), angles.sin())
        )
        out = rotate(leaf, cos, sin, inverse=inverse, norm_eps=norm_eps, backend=backend)
        out.backward(grad.to(wide))
        results.append((out, leaf.grad))
    for exact, ours in zip(*results, strict=True):
        assert ours.dtype is dtype
        assert (ours.double() - exact).norm() <= TOLERANCES[dtype] * exact.norm()


def test_channels_that_do_not_turn_keep_their_bits(device):
    x = torch.randn(9, 2, 48, device=device)
    if device == "cuda":  # NumPy warns of 0 · inf, which the interpreter computes and drops
        x[3, 0, 6] = float("inf")
    angles = torch.randn(9, 4, device=device)
    out = rotate(x, angles.cos(), angles.sin(), backend="triton")
    assert out[..., :40].equal(x[..., :40])
    assert not out[..., 40:].equal(x[..., 40:])


@pytest.mark.parametrize("H, D", [(4, 32), (3, 24), (64, 512)], ids=["narrow", "uneven", "wide"])
def test_bits_of_a_head_do_not_depend_on_its_place(device, H, D):
    """Row balance moves rows between ranks, and their bits must not change by it."""
    T = 41 if device == "cuda" else 5
    x, grad = (torch.randn(T, H, D, device=device) for _ in range(2))
    angles = torch.randn(T, D // 4, device=device)
    cos, sin = angles.cos(), angles.sin()

    def of_rows(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x[first:].clone().requires_grad_()
        out = rotate(leaf, cos[first:], sin[first:], norm_eps=1e-6, backend="triton")
        return out, torch.autograd.grad(out, leaf, grad[first:])[0]

    whole = of_rows(0)
    for first in range(1, T):
        for rows, part in zip(whole, of_rows(first), strict=True):
            assert part.equal(rows[first:]), f"rows from {first} on"
