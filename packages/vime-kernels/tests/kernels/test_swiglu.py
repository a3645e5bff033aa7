# SPDX-License-Identifier: Apache-2.0
"""The Triton SwiGLU, forward and backward, against float64 autograd on the same values."""

import pytest
import torch

from vime_kernels.moe import swiglu

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("limit", [0.5, float("inf")], ids=["clamped", "free"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("R, F", [(37, 20), (5, 2048), (1, 64)])
@pytest.mark.parametrize(
    "dtype",
    # The interpreter cuts a bfloat16 off instead of rounding it.
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=["float32", "bfloat16"],
)
def test_equals_float64(device, dtype, R, F, weighted, limit):
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter does not round to bfloat16")
    torch.manual_seed(R)
    x, grad = torch.randn(R, 2 * F).to(device, dtype), torch.randn(R, F).to(device, dtype)
    weight = torch.rand(R, device=device) if weighted else None
    results = []
    for wide, backend in ((torch.float64, "torch"), (None, "triton")):
        leaves = [None if t is None else t.to(wide or t.dtype).requires_grad_() for t in (x, weight)]
        out = swiglu(*leaves, limit=limit, backend=backend)
        out.backward(grad.to(out.dtype))
        results.append([out, *(leaf.grad for leaf in leaves if leaf is not None)])
    for exact, ours in zip(*results, strict=True):
        assert (ours.double() - exact).norm() <= TOLERANCES[ours.dtype] * exact.norm()


def test_no_rows(device):
    out = swiglu(torch.zeros(0, 8, device=device), torch.zeros(0, device=device), backend="triton")
    assert out.shape == (0, 4)


@pytest.mark.gpu
def test_nan_is_not_clamped():
    """A maximum of the device drops a NaN unless it is told otherwise; the interpreter's keeps it."""
    x = torch.randn(4, 64, device="cuda")
    x[1, 3] = x[2, 35] = float("nan")
    results = []
    for backend in ("torch", "triton"):
        leaf = x.clone().requires_grad_()
        out = swiglu(leaf, limit=10.0, backend=backend)
        out.sum().backward()
        results.append((out.isnan(), leaf.grad.isnan()))
    for exact, ours in zip(*results, strict=True):
        assert ours.any()
        assert ours.equal(exact)
