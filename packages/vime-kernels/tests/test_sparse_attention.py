# SPDX-License-Identifier: Apache-2.0
"""Attention over index lists: scalar loops, torch's dense attention, gradients, laws and hostile inputs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.nn.functional import scaled_dot_product_attention

from vime_kernels import _rows
from vime_kernels.dsa import sparse_attention
from vime_kernels.testing import assert_bitwise, causal_picks, randn, rel_rms

NAN, INF = float("nan"), float("inf")
# Duplicates, -1 in the middle, a dead row, indices far outside, N itself.
INDICES = torch.tensor(
    [[0, 3, 3, -1, 6, 1], [2, 2, 2, 5, -1, -1], [-1] * 6, [-100, 7, 4, 0, 2**31 - 1, 6], [1, 0, 2, 3, 5, 4]],
    dtype=torch.int32,
)


def inputs(S=5, H=3, N=7, D=6, dtype=torch.float64, grad=False):
    return randn(S, H, D, seed=0, dtype=dtype, grad=grad), randn(N, D, seed=1, dtype=dtype, grad=grad)


def by_loops(q, kv, indices, scale, d_v, sink=None):
    S, H, _ = q.shape
    out, lse = torch.zeros(S, H, d_v, dtype=torch.float64), torch.full((S, H), -INF, dtype=torch.float64)
    for t in range(S):
        rows = [i for i in indices[t].tolist() if 0 <= i < len(kv)]
        for h in range(H):
            weights = [math.exp(scale * float(q[t, h].double() @ kv[i].double())) for i in rows]
            if rows:
                lse[t, h] = math.log(sum(weights))
                total = sum(weights) + (0.0 if sink is None else math.exp(sink[h]))
                for i, w in zip(rows, weights, strict=True):
                    out[t, h] += w / total * kv[i, :d_v].double()
    return out, lse


@pytest.mark.parametrize("chunk_bytes", [2**28, 1], ids=["one-chunk", "row-chunks"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["no-sink", "sink"])
@pytest.mark.parametrize("H", [1, 3, 8], ids=["H1", "H3", "H8"])
def test_equals_loops(monkeypatch, H, with_sink, chunk_bytes):
    monkeypatch.setattr(_rows, "CHUNK_BYTES", chunk_bytes)
    q, kv = inputs(H=H)
    sink = randn(H, seed=2, dtype=torch.float64) if with_sink else None
    out, lse = sparse_attention(q, kv, INDICES, 0.7, d_v=4, attn_sink=sink, return_lse=True)
    expected, expected_lse = by_loops(q, kv, INDICES, 0.7, 4, sink)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-13)
    assert (out[2] == 0).all()
    assert (lse[2] == -INF).all()


@pytest.mark.parametrize("chunk_bytes", [2**28, 1], ids=["one-chunk", "row-chunks"])
def test_gradients(monkeypatch, chunk_bytes):
    monkeypatch.setattr(_rows, "CHUNK_BYTES", chunk_bytes)
    q, kv = inputs(grad=True)
    sink = randn(3, seed=2, dtype=torch.float64, grad=True)

    def out_and_lse(q, kv, sink):
        out, lse = sparse_attention(q, kv, INDICES, 0.7, d_v=4, attn_sink=sink, return_lse=True)
        return out, lse.masked_fill(lse == -INF, 0.0)

    fast = chunk_bytes == 1  # recomputing every row for every element takes long
    assert gradcheck(out_and_lse, (q, kv, sink), fast_mode=fast)
    assert gradcheck(lambda q, kv: sparse_attention(q, kv, INDICES, 0.7), (q, kv), fast_mode=fast)


def test_all_keys_is_dense_causal_attention():
    S, H, D = 33, 4, 8
    q, kv = inputs(S=S, H=H, N=S, D=D)
    every = torch.arange(S, dtype=torch.int32).repeat(S, 1)
    causal = every.masked_fill(every > torch.arange(S)[:, None], -1)
    dense = scaled_dot_product_attention(
        q.transpose(0, 1), kv.expand(H, S, D), kv.expand(H, S, D), is_causal=True, scale=0.3
    )
    torch.testing.assert_close(
        sparse_attention(q, kv, causal, 0.3), dense.transpose(0, 1), rtol=1e-12, atol=1e-13
    )


def test_dead_rows_give_zero_gradients():
    q, kv = inputs(dtype=torch.float32, grad=True)
    sink = randn(3, seed=2, grad=True)
    nothing = torch.full((5, 4), -1, dtype=torch.int32)
    out, lse = sparse_attention(q, kv, nothing, 1.0, attn_sink=sink, return_lse=True)
    (out.sum() + lse.masked_fill(lse == -INF, 0.0).sum()).backward()
    for tensor in (q, kv, sink):
        assert (tensor.grad == 0).all()


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_arrives_behind_a_dead_row_reaches_nothing(value):
    q, kv = inputs(grad=True)
    sink = randn(3, seed=2, dtype=torch.float64, grad=True)
    out, lse = sparse_attention(q, kv, INDICES, 0.5, attn_sink=sink, return_lse=True)
    grad, grad_lse = torch.ones_like(out), torch.ones_like(lse)
    expected = torch.autograd.grad((out, lse), (q, kv, sink), (grad, grad_lse), retain_graph=True)
    grad[2], grad_lse[2] = value, value
    for one, other in zip(
        torch.autograd.grad((out, lse), (q, kv, sink), (grad, grad_lse)), expected, strict=True
    ):
        assert_bitwise(one, other)


@pytest.mark.parametrize("poison", [NAN, INF], ids=["nan", "inf"])
def test_the_row_before_the_buffer_is_never_read(poison):
    q, buffer = inputs(N=8, dtype=torch.float32)
    expected = sparse_attention(q, buffer[1:].clone(), INDICES, 1.0)
    buffer[0] = poison
    kv = buffer[1:].requires_grad_()  # the poisoned page lies right before row 0
    out = sparse_attention(q, kv, INDICES, 1.0)
    assert_bitwise(out, expected)
    (gradient,) = torch.autograd.grad(out.sum(), kv)
    assert gradient.isfinite().all()


def test_a_poisoned_row_reaches_only_those_who_list_it():
    q, kv = inputs(dtype=torch.float32)
    expected = sparse_attention(q, kv, INDICES, 1.0)
    kv[0] = NAN  # also the row that a clamped -1 would read
    out = sparse_attention(q, kv, INDICES, 1.0)
    lists_it = (INDICES == 0).any(1)
    assert out[lists_it].isnan().all()
    assert_bitwise(out[~lists_it], expected[~lists_it])


def test_sink_limits():
    q, kv = inputs(dtype=torch.float32)
    none = sparse_attention(q, kv, INDICES, 1.0)
    assert_bitwise(sparse_attention(q, kv, INDICES, 1.0, attn_sink=torch.full((3,), -INF)), none)
    out, lse = sparse_attention(q, kv, INDICES, 1.0, attn_sink=torch.full((3,), 1e30), return_lse=True)
    assert (out == 0).all()
    assert_bitwise(lse, sparse_attention(q, kv, INDICES, 1.0, return_lse=True)[1])


@pytest.mark.parametrize("value", [-INF, 1e30], ids=["-inf", "large"])
def test_extreme_sinks_have_finite_gradients(value):
    q, kv = inputs(dtype=torch.float32, grad=True)
    sink = torch.full((3,), value, requires_grad=True)
    sparse_attention(q, kv, INDICES, 1.0, attn_sink=sink).sum().backward()
    for tensor in (q, kv, sink):
        assert tensor.grad.isfinite().all()
    assert (sink.grad == 0).all()


def test_order_of_slots_and_padding_change_rounding_at_most():
    q, kv = inputs(S=16, N=40, D=32, dtype=torch.float32)
    indices = causal_picks(16, 40, 12, seed=3)
    out = sparse_attention(q, kv, indices, 0.2)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert rel_rms(sparse_attention(q, kv, indices[:, order], 0.2), out) < 3e-7
    padded = torch.cat([indices, torch.full((16, 64), -1, dtype=torch.int32)], 1)
    assert rel_rms(sparse_attention(q, kv, padded, 0.2), out) < 3e-7


@given(st.integers(1, 11), st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_two_halves_merge_by_lse(cut, seed):
    q, kv = inputs(S=4, N=9)
    indices = torch.randint(-1, 10, (4, 12), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    whole, whole_lse = sparse_attention(q, kv, indices, 0.5, return_lse=True)
    parts = [
        sparse_attention(q, kv, part, 0.5, return_lse=True) for part in (indices[:, :cut], indices[:, cut:])
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum((part_lse - lse).exp().nan_to_num(0.0)[..., None] * out for out, part_lse in parts)
    torch.testing.assert_close(lse, whole_lse)
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-13)


def test_topk_length_equals_padding():
    q, kv = inputs(dtype=torch.float32)
    lengths = torch.tensor([3, 0, 6, 99, -2], dtype=torch.int32)
    cut = INDICES.masked_fill(torch.arange(6) >= lengths[:, None], -1)
    assert_bitwise(
        sparse_attention(q, kv, INDICES, 1.0, topk_length=lengths), sparse_attention(q, kv, cut, 1.0)
    )


@pytest.mark.parametrize(
    "H, D, K", [(8, 64, 32), (3, 16, 7), (1, 8, 1)], ids=["H8-D64-K32", "H3-D16-K7", "H1-D8-K1"]
)
def test_a_row_alone_is_bitwise_the_row_in_a_batch(H, D, K):
    q, kv = inputs(S=19, H=H, N=40, D=D, dtype=torch.float32)
    indices, sink = causal_picks(19, 40, K, seed=3), randn(H, seed=4)
    out, lse = sparse_attention(q, kv, indices, 0.2, attn_sink=sink, return_lse=True)
    for t in range(19):
        row = slice(t, t + 1)
        alone = sparse_attention(q[row], kv, indices[row], 0.2, attn_sink=sink, return_lse=True)
        assert_bitwise(alone[0], out[row], f"out of row {t}")
        assert_bitwise(alone[1], lse[row], f"lse of row {t}")


def test_chunks_are_bitwise_the_whole_and_the_gradient_repeats(monkeypatch):
    q, kv = inputs(S=19, N=40, D=16, dtype=torch.float32, grad=True)
    indices = causal_picks(19, 40, 8, seed=3)
    whole = sparse_attention(q, kv, indices, 0.2)
    dq, dkv = torch.autograd.grad(whole.square().sum(), (q, kv))
    monkeypatch.setattr(_rows, "CHUNK_BYTES", 20_000)
    for _ in range(2):
        out = sparse_attention(q, kv, indices, 0.2)
        assert_bitwise(out, whole)
        chunked = torch.autograd.grad(out.square().sum(), (q, kv))
        assert_bitwise(chunked[0], dq)
        assert rel_rms(chunked[1], dkv) < 3e-7


def test_chunks_bound_what_backward_keeps(monkeypatch):
    """Tensors saved for backward: with several chunks, none as large as the gathered rows."""
    S, N, D, K = 64, 32, 16, 16
    q, kv = inputs(S=S, N=N, D=D, dtype=torch.float32, grad=True)
    indices = causal_picks(S, N, K, seed=3)
    saved = []

    def largest():
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            sparse_attention(q, kv, indices, 1.0)
        return max(saved)

    assert largest() >= S * K * D
    monkeypatch.setattr(_rows, "CHUNK_BYTES", 2**15)
    assert largest() < S * K * D


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_accumulates_in_float32(dtype):
    q, kv = inputs(S=16, N=16, D=64, dtype=dtype, grad=True)
    indices = torch.arange(16, dtype=torch.int32).repeat(16, 8)  # every key 128 times
    out, lse = sparse_attention(q, kv, indices, 0.1, return_lse=True)
    out.sum().backward()
    exact_q, exact_kv = (t.detach().double().requires_grad_() for t in (q, kv))
    exact = sparse_attention(exact_q, exact_kv, indices, 0.1)
    exact.sum().backward()
    assert out.dtype == q.grad.dtype == kv.grad.dtype == dtype
    assert lse.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    for actual, expected in ((out, exact), (q.grad, exact_q.grad), (kv.grad, exact_kv.grad)):
        assert rel_rms(actual, expected) < eps / 2


def test_non_contiguous_queries():
    q, kv = inputs(S=5, H=6, dtype=torch.float32)
    view = q.view(5, 2, 3, 6)[:, 1]
    swapped = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_bitwise(
        sparse_attention(view, kv, INDICES, 1.0), sparse_attention(view.contiguous(), kv, INDICES, 1.0)
    )
    assert_bitwise(sparse_attention(swapped, kv, INDICES, 1.0), sparse_attention(q, kv, INDICES, 1.0))


def test_scale_zero_is_the_mean_of_the_listed_rows():
    q, kv = inputs()
    out, lse = sparse_attention(q[4:], kv, INDICES[4:], 0.0, return_lse=True)
    torch.testing.assert_close(out[0, 0], kv[:6].mean(0))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(6)))


def test_one_key_is_copied():
    q, kv = inputs(S=1, N=1, dtype=torch.float32)
    assert_bitwise(sparse_attention(q, kv, torch.zeros(1, 1, dtype=torch.int32), 1.0)[0, 2], kv[0])


@pytest.mark.parametrize("size", [1e30, 1e-42], ids=["huge-scores", "denormal"])
def test_extreme_scores(size):
    q, kv = torch.full((1, 1, 2), 1.0), torch.tensor([[1.0, 0.0], [0.0, -1.0], [1.0, 0.0]]) * size
    out, lse = sparse_attention(q, kv, torch.tensor([[0, 1, 2]], dtype=torch.int32), 1.0, return_lse=True)
    assert out.isfinite().all()
    assert lse.item() == pytest.approx(size if size > 1 else math.log(3))


@pytest.mark.parametrize(
    "S, N, K", [(0, 4, 3), (3, 0, 3), (3, 4, 0), (0, 0, 0)], ids=["S0", "N0", "K0", "all0"]
)
def test_empty_inputs(S, N, K):
    q, kv = inputs(S=S, N=N, grad=True)
    indices = torch.zeros(S, K, dtype=torch.int32)
    out, lse = sparse_attention(q, kv, indices, 1.0, return_lse=True)
    assert out.shape == (S, 3, 6)
    assert (out == 0).all()
    assert (lse == -INF).all()
    out.sum().backward()
    assert (q.grad == 0).all()
