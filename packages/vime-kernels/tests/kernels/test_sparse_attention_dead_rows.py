# SPDX-License-Identifier: Apache-2.0
"""Query rows without a key: whatever arrives behind them, they give and get no gradient."""

import pytest
import torch

from vime_kernels.dsa import sparse_attention
from vime_kernels.testing import rel_rms

# As in `test_sparse_attention`: what NumPy says in Triton's interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.mark.parametrize("tail", [0, 64], ids=["512", "576"])
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("of", ["q", "q-and-kv"])
def test_gradients_may_be_anything_there(device, of, heads, tail):
    """What joins the lse of two parts by `logaddexp` gives NaN where both are empty."""
    torch.manual_seed(5)
    small = device == "cpu"
    dtype, tolerance = (torch.float32, 1e-5) if small else (torch.bfloat16, 6e-3)
    S, N, K, D = (6, 7, 5, 16) if small else (60, 300, 100, 512)
    heads, tail = (heads // 4, tail // 4) if small else (heads, tail)
    rand = lambda *shape: torch.randn(*shape).to(dtype).to(device)  # noqa: E731
    q, kv, grad = rand(S, heads, D + tail), rand(N, D + tail), rand(S, heads, D)
    indices = torch.randint(0, N, (S, K), dtype=torch.int32)
    indices[::3] = -1
    grad_lse = torch.randn(S, heads)
    grad_lse[::3] = float("nan")
    grad[3::6] = float("nan")

    def gradients(backend, kind):
        leaves = [q.to(kind).requires_grad_(), kv.to(kind).requires_grad_(of != "q")]
        out, lse = sparse_attention(*leaves, indices.to(device), 0.1, d_v=D, return_lse=True, backend=backend)
        given = (grad.to(out.dtype), grad_lse.to(device, lse.dtype))
        return torch.autograd.grad((out, lse), [x for x in leaves if x.requires_grad], given)

    ours, expected = gradients("triton", dtype), gradients("torch", torch.float64)
    for one, exact in zip(ours, expected, strict=True):
        assert exact.isfinite().all()
        assert rel_rms(one, exact) < tolerance
    assert not ours[0][::3].any()


@pytest.mark.parametrize("heads", [2, 64])
def test_a_row_with_a_nan_is_not_one_without_keys(device, heads):
    dtype, D = (torch.float32, 16) if device == "cpu" else (torch.bfloat16, 512)
    q, kv = torch.ones(2, heads, D, dtype=dtype, device=device), torch.ones(4, D, dtype=dtype, device=device)
    q[1] = float("nan")
    indices = torch.zeros(2, 3, dtype=torch.int32, device=device)
    # Deterministic: no row shares a program with another.
    _, lse = sparse_attention(q, kv, indices, 0.1, return_lse=True, backend="triton", deterministic=True)
    assert lse[0].isfinite().all()
    assert lse[1].isnan().all()
