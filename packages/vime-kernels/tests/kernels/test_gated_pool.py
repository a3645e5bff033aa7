# SPDX-License-Identifier: Apache-2.0
"""Triton gated pooling, forward and backward, against float64 autograd on the same values."""

import pytest
import torch

from vime_kernels import dsa
from vime_kernels.ops.gated_pool import config

CASES = {  # ratio, D, overlap, halo
    "overlap": (4, 20, True, False),
    "overlap-halo": (4, 20, True, True),
    "plain": (4, 24, False, False),
    "ratio-not-a-power-of-two": (5, 8, False, False),
    "ratio-1": (1, 8, False, False),
    "long": (20, 8, False, False),
}

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.mark.parametrize("ratio, D, overlap, halo", CASES.values(), ids=CASES.keys())
def test_against_float64(device, ratio, D, overlap, halo):
    torch.manual_seed(ratio)
    T, C = 47, 2 * D if overlap else D
    # A sequence shorter than a pool, an empty one, leftovers, and rows of no sequence at the end.
    cu = torch.tensor([0, 3, 3, 25, 44], dtype=torch.int32, device=device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = [(T, C), (T, C), (ratio, C)] + ([(ratio, C)] * 2 if halo else [])
    leaves = [
        torch.randn(s, device=device).to(torch.float32 if i == 2 else dtype) for i, s in enumerate(shapes)
    ]
    results = []
    for double, backend in ((True, "torch"), (False, "triton")):
        x, score, ape, *rest = [(t.double() if double else t.clone()).requires_grad_() for t in leaves]
        pooled, cu_pools = dsa.gated_pool(
            x, score, ape, cu, ratio, overlap=overlap, halo=tuple(rest) or None, backend=backend
        )
        torch.manual_seed(1)
        pooled.backward(torch.randn(pooled.shape).to(device, dtype).to(pooled.dtype))
        results.append(([cu_pools], [pooled, x.grad, score.grad, ape.grad, *(t.grad for t in rest)]))
    (expected_counts, expected), (counts, got) = results
    assert torch.equal(counts[0], expected_counts[0])
    tolerance = 2e-6 if device == "cpu" else 4e-3
    for mine, reference in zip(got, expected, strict=True):
        error = (mine.double() - reference).norm()
        assert error <= tolerance * reference.norm() + 1e-12
    # Where no pool reads, the gradient is exactly zero.
    assert not got[1][44:].any()
    assert not got[2][44:].any()


@pytest.mark.parametrize("ratio, overlap", [(2, True), (3, False)], ids=["overlap", "plain"])
def test_many_sequences(device, monkeypatch, ratio, overlap):
    """More than are counted at a time, most without a pool: the next pool of a program may be far behind."""
    monkeypatch.setattr(config, "SEQUENCES", 4)
    lengths = torch.tensor([1, 7, 0, 1, 1, 0, 2, 9, 1, 1, 1, 1, 1, 0, 5, 1, 3, 0, 0, 8])
    cu = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    torch.manual_seed(0)
    inputs = [torch.randn(s, device=device) for s in ((70, 8), (70, 8), (ratio, 8))]
    results = []
    for backend in ("torch", "triton"):
        leaves = [t.clone().requires_grad_() for t in inputs]
        pooled, cu_pools = dsa.gated_pool(*leaves, cu, ratio, overlap=overlap, backend=backend)
        results.append((cu_pools, pooled, *torch.autograd.grad(pooled.square().sum(), leaves)))
    assert results[0][0][-1] >= 9
    for mine, reference in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [4, 40], ids=["short", "long"])
def test_hf_rounding_equals_the_reference(device, ratio):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, score = torch.randn(2, 40, 16, device=device).to(dtype)
    ape = torch.randn(ratio, 16, device=device)
    cu = torch.tensor([0, 40], dtype=torch.int32, device=device)
    mine, _ = dsa.gated_pool(x, score, ape, cu, ratio, rounding="hf", backend="triton")
    reference, _ = dsa.gated_pool(x, score, ape, cu, ratio, rounding="hf", backend="torch")
    torch.testing.assert_close(mine, reference, rtol=1e-6 if device == "cpu" else 8e-3, atol=1e-6)


def test_gradients_repeat_bitwise(device):
    torch.manual_seed(0)
    leaves = [torch.randn(s, device=device) for s in ((24, 16), (24, 16), (4, 16))]
    cu = torch.tensor([0, 10, 24], dtype=torch.int32, device=device)
    runs = []
    for _ in range(2):
        inputs = [t.clone().requires_grad_() for t in leaves]
        pooled, _ = dsa.gated_pool(*inputs, cu, 4, overlap=True, backend="triton")
        runs.append(torch.autograd.grad(pooled.square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
