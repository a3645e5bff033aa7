# SPDX-License-Identifier: Apache-2.0
"""Triton sparse attention, forward and gradients, against the torch reference in float64 on the same values."""

import pytest
import torch

from vime_kernels import BackendError
from vime_kernels.dsa import sparse_attention, sparse_attention_v4
from vime_kernels.testing import assert_bitwise, rel_rms

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates; a dead row takes the
# difference of two infinities there, which is masked.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
NAN = float("nan")


def setting(device):
    """(dtype, tolerance, small): float32 in the interpreter, which has no bfloat16 products."""
    return (torch.float32, 1e-5, True) if device == "cpu" else (torch.bfloat16, 6e-3, False)


def rand(device, *shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).to(device)


def guarded(device, rows, width, dtype):
    """Rows with NaN before and behind them, where an index of -1 or N would read."""
    buffer = torch.full((rows + 32, width), NAN, dtype=dtype, device=device)
    buffer[16 : 16 + rows] = rand(device, rows, width, dtype=dtype)
    return buffer[16 : 16 + rows]


def results(call, tensors, dtype=None):
    """Output, lse and the gradients of `tensors` under fixed random output gradients."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    out, lse = call(*leaves)
    torch.manual_seed(7)
    # Values that every dtype holds: autograd rounds the gradient to the dtype of the output.
    grad, lse_grad = (torch.randn(x.shape).bfloat16().float().to(x.device) for x in (out, lse))
    alive = torch.isfinite(lse)
    loss = (out.to(torch.float64) * grad).sum() + (
        torch.where(alive, lse, 0).to(torch.float64) * lse_grad
    ).sum()
    return [out, torch.where(alive, lse, 0), alive.float(), *torch.autograd.grad(loss, leaves)]


def check(call, tensors, tolerance):
    """`call(backend, *tensors)` agrees with the reference in float64 on the same values."""
    actual = results(lambda *leaves: call("triton", *leaves), tensors)
    expected = results(lambda *leaves: call("torch", *leaves), tensors, torch.float64)
    for one, other in zip(actual, expected, strict=True):
        assert torch.isfinite(one).all()
        if not other.any():
            assert not one.any()
        else:
            # The gradient of the sink is summed from float32 products, whatever the output was rounded to.
            assert rel_rms(one, other) < (min(tolerance, 1e-3) if one.ndim == 1 else tolerance)


def picks(device, S, K, N):
    torch.manual_seed(S + K)
    indices = torch.randint(-3, N + 3, (S, K), dtype=torch.int32)
    indices[S // 2] = -1
    indices[0, 0] = N
    indices[-1, 1:] = -1
    return indices.to(device)


# Sizes that only a device can run in reasonable time. In the interpreter each remaining case is there for one reason:
# slots and heads that fill no tile, a head block above 16 with a tail, and a single number of everything.
AT_SIZE = pytest.mark.gpu


@pytest.mark.parametrize(
    "sink, deterministic",
    [(False, False), (True, False), (True, True)],
    ids=["no-sink", "sink", "repeatable"],
)
@pytest.mark.parametrize(
    "S, H, K, N, tail",
    [
        pytest.param(5, 3, 7, 11, 0, id="H3"),
        pytest.param(3, 20, 33, 9, 16, id="H20-tail"),
        pytest.param(1, 1, 1, 1, 0, id="one"),
        pytest.param(70, 64, 193, 90, 64, id="H64-tail", marks=AT_SIZE),
        pytest.param(33, 128, 65, 700, 0, id="H128", marks=AT_SIZE),
    ],
)
def test_picks(device, S, H, K, N, tail, sink, deterministic):
    dtype, tolerance, small = setting(device)
    if device == "cuda" and S == 1:
        tolerance = 2e-2  # a single slot: its gradient is a difference of two nearly equal rounded numbers
    d_v = 16 if small else 512
    indices = picks(device, S, K, N)
    lengths = torch.arange(S, dtype=torch.int32, device=device) * 5 % (K + 2)
    lengths[0] = K + 5

    def call(backend, q, kv, *sinks):
        return sparse_attention(
            q, kv, indices, 0.2, d_v=d_v, attn_sink=sinks[0] if sinks else None, topk_length=lengths,
            return_lse=True, deterministic=deterministic, backend=backend,
        )  # fmt: skip

    tensors = [rand(device, S, H, d_v + tail, dtype=dtype), guarded(device, N, d_v + tail, dtype)]
    check(call, tensors + ([rand(device, H)] if sink else []), tolerance)


@pytest.mark.parametrize(
    "compressed, deterministic",
    [
        pytest.param("none", False, id="window"),
        pytest.param("none", True, id="window-repeatable", marks=AT_SIZE),
        pytest.param("picks", False, id="picks"),
        pytest.param("picks", True, id="picks-repeatable"),
        pytest.param("ranges", False, id="ranges"),
        pytest.param("ranges", True, id="ranges-repeatable", marks=AT_SIZE),
    ],
)
def test_v4(device, compressed, deterministic):
    dtype, tolerance, small = setting(device)
    # The interpreter needs: an empty sequence, rows behind the last one, and a window that a sequence cuts short.
    S, H, D, M, window = (8, 3, 16, 5, 3) if small else (300, 64, 512, 70, 128)
    cu = torch.tensor([0, 1, 1, S // 2, S - 2], dtype=torch.int32, device=device)
    indices = picks(device, S, 5 if small else 97, M)
    starts = torch.arange(S, dtype=torch.int32, device=device) % 7 - 1
    ends = torch.arange(S, dtype=torch.int32, device=device) % (M + 3)

    def call(backend, q, kv, sink, *rest):
        return sparse_attention_v4(
            q, kv, rest[0] if rest else None, 0.2, sink,
            indices=indices if compressed == "picks" else None,
            cmp_ranges=(starts, ends) if compressed == "ranges" else None,
            window=window, cu_seqlens=cu, return_lse=True, deterministic=deterministic, backend=backend,
        )  # fmt: skip

    tensors = [rand(device, S, H, D, dtype=dtype), guarded(device, S, D, dtype), rand(device, H)]
    if compressed != "none":
        tensors.append(guarded(device, M, D, dtype))
    check(call, tensors, tolerance)


def test_queries_in_any_order(device):
    dtype, tolerance, small = setting(device)
    S, H, D, window = (8, 3, 16, 3) if small else (260, 64, 512, 128)
    torch.manual_seed(0)
    positions = torch.randperm(S)[: S // 2].int().to(device)

    def call(backend, q, kv, sink):
        return sparse_attention_v4(
            q, kv, None, 0.2, sink, window=window, q_positions=positions, return_lse=True, backend=backend
        )

    tensors = [rand(device, S // 2, H, D, dtype=dtype), rand(device, S, D, dtype=dtype), rand(device, H)]
    check(call, tensors, tolerance)


def test_a_row_alone_is_the_same_bits(device):
    dtype, _, small = setting(device)
    S, H, D, N = (4, 3, 16, 11) if small else (40, 64, 512, 300)
    q, kv = rand(device, S, H, D, dtype=dtype), rand(device, N, D, dtype=dtype)
    indices = picks(device, S, 9 if small else 130, N)
    everything = sparse_attention(q, kv, indices, 0.2, backend="triton")
    assert_bitwise(everything[1:2], sparse_attention(q[1:2], kv, indices[1:2], 0.2, backend="triton"))


def test_repeatable_gradients_repeat(device):
    dtype, _, small = setting(device)
    S, H, D, N = (3, 3, 16, 2) if small else (400, 64, 512, 40)
    torch.manual_seed(1)
    q, kv = rand(device, S, H, D, dtype=dtype), rand(device, N, D, dtype=dtype)
    indices = picks(device, S, 5 if small else 64, N)

    def call(q, kv):
        return sparse_attention(q, kv, indices, 0.2, return_lse=True, deterministic=True, backend="triton")

    first = results(call, [q, kv])
    for _ in range(1 if small else 20):
        for one, other in zip(first, results(call, [q, kv]), strict=True):
            assert_bitwise(one, other)


def test_queries_as_a_strided_view(device):
    dtype, tolerance, small = setting(device)
    S, H, D, N = (4, 3, 16, 11) if small else (40, 64, 512, 300)
    indices = picks(device, S, 9 if small else 70, N)

    def call(backend, q, kv):
        return sparse_attention(q.transpose(0, 1), kv, indices, 0.2, return_lse=True, backend=backend)

    check(call, [rand(device, H, S, D, dtype=dtype), rand(device, N, D, dtype=dtype)], tolerance)


@pytest.mark.parametrize("N, K", [(0, 3), (5, 0)], ids=["no-keys", "no-slots"])
def test_nothing_to_attend_to(device, N, K):
    dtype, _, small = setting(device)
    D = 16 if small else 512
    q = rand(device, 3, 2, D, dtype=dtype).requires_grad_()
    kv = rand(device, N, D, dtype=dtype).requires_grad_()
    indices = torch.zeros(3, K, dtype=torch.int32, device=device)
    out, lse = sparse_attention(q, kv, indices, 0.2, return_lse=True, backend="triton")
    out.float().sum().backward()
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not q.grad.any()
    assert not kv.grad.any()


def test_an_unsupported_width_is_refused_by_name(device):
    q, kv = rand(device, 2, 2, 48, dtype=torch.bfloat16), rand(device, 3, 48, dtype=torch.bfloat16)
    indices = torch.zeros(2, 1, dtype=torch.int32, device=device)
    with pytest.raises(
        BackendError, match=r"does not support d_v=48 \(supported: a power of two from 16 to 512\)"
    ):
        sparse_attention(q, kv, indices, 0.2, backend="triton")


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    S, tail = 66_000, slice(-40, None)
    q = torch.randn(S, 64, 512, dtype=torch.bfloat16, device=device)
    kv = torch.randn(500, 512, dtype=torch.bfloat16, device=device)
    indices = torch.randint(0, 500, (S, 64), dtype=torch.int32, device=device)
    out = sparse_attention(q, kv, indices, 0.05, backend="triton")
    alone = sparse_attention(q[tail].clone(), kv, indices[tail].clone(), 0.05, backend="triton")
    assert_bitwise(out[tail], alone)
