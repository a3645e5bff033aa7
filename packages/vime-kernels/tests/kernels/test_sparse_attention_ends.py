# SPDX-License-Identifier: Apache-2.0
"""Where a row's keys end: the kernels stop there, and read nothing behind it."""

import pytest
import torch

from vime_kernels.dsa import sparse_attention, sparse_attention_v4
from vime_kernels.testing import assert_bitwise, rel_rms

# As in `test_sparse_attention`: what NumPy says in Triton's interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
NAN = float("nan")


def rows_that_end(K, N, ends):
    """Picks int32 [rows, K]: row r has its last key in slot ends[r] - 1 and gaps before it."""
    torch.manual_seed(K)
    indices = torch.randint(0, N, (len(ends), K), dtype=torch.int32)
    indices[torch.rand(len(ends), K) < 0.3] = -1
    for row, end in enumerate(ends):
        indices[row, end:] = -1
        if end:
            indices[row, end - 1] = row % N
    return indices


@pytest.mark.parametrize(
    "banded, tail", [(False, 0), (False, 64), (True, 0)], ids=["picks", "picks-tail", "window-and-picks"]
)
def test_picks_end_anywhere(device, banded, tail):
    small = device == "cpu"
    dtype, tolerance = (torch.float32, 1e-5) if small else (torch.bfloat16, 6e-3)
    D, N, K, H, window = (16, 7, 9, 3, 4) if small else (512, 300, 2300, 64, 128)
    tail = min(tail, 16) if small else tail
    # Both sides of a tile, of a pair, and of what one look at the picks covers; long rows before and behind short ones.
    ends = [2300, 0, 1, 63, 64, 65, 127, 128, 129, 192, 2047, 2048, 2049, 0, 2300, 2113]
    ends = [9, 0, 1, 4] if small else ends
    indices = rows_that_end(K, N, ends).to(device)
    q = torch.randn(len(ends), H, D + tail).to(dtype).to(device)
    kv = torch.randn(N, D + tail).to(dtype).to(device)
    sink = torch.randn(H).to(device)
    if banded:
        band = torch.randn(len(ends), D).to(dtype).to(device)

        def call(backend, kind):
            return sparse_attention_v4(
                q.to(kind), band.to(kind), kv.to(kind), 0.1, sink, indices=indices, window=window, return_lse=True,
                backend=backend,
            )  # fmt: skip
    else:

        def call(backend, kind):
            return sparse_attention(
                q.to(kind), kv.to(kind), indices, 0.1, d_v=D, attn_sink=sink, return_lse=True, backend=backend
            )

    out, lse = call("triton", dtype)
    expected, expected_lse = call("torch", torch.float64)
    alive = torch.isfinite(expected_lse)
    assert torch.equal(torch.isfinite(lse), alive)
    for row in range(len(ends)):
        if alive[row].any():
            assert rel_rms(out[row], expected[row]) < tolerance, ends[row]
            assert rel_rms(lse[row], expected_lse[row]) < tolerance, ends[row]
        else:
            assert not out[row].any()


def test_a_row_without_a_key_is_zero_whatever_its_queries(device):
    small = device == "cpu"
    D, H = (16, 3) if small else (512, 64)
    dtype = torch.float32 if small else torch.bfloat16
    q = torch.randn(3, H, D).to(dtype).to(device)
    kv = torch.randn(5, D).to(dtype).to(device)
    indices = torch.tensor([[0, 1], [-1, 5], [2, 2]], dtype=torch.int32, device=device)
    calm, calm_lse = sparse_attention(q, kv, indices, 0.1, return_lse=True, backend="triton")
    q[1] = NAN
    out, lse = sparse_attention(q, kv, indices, 0.1, return_lse=True, backend="triton")
    assert_bitwise(out, calm)
    assert_bitwise(lse, calm_lse)
    assert not out[1].any()


def test_a_window_wider_than_its_rows_is_their_number(device):
    """Also where the backward pass holds a number for every slot of a window."""
    small = device == "cpu"
    S, D, H = 5, 16 if small else 512, 40
    q, band = (
        torch.randn(S, *n, D).to(torch.float32 if small else torch.bfloat16).to(device) for n in ((H,), ())
    )
    results = []
    for window in (S, 2**31 - 1):
        leaves = [t.clone().requires_grad_() for t in (q, band)]
        out = sparse_attention_v4(
            *leaves, None, 0.1, None, window=window, deterministic=True, backend="triton"
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for wide, exact in zip(*results, strict=True):
        assert_bitwise(wide, exact)
