# SPDX-License-Identifier: Apache-2.0
"""Indexer scores against scalar loops, their gradients, and selection that does not depend on chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from vime_kernels import _rows
from vime_kernels.dsa import (
    causal_ranges,
    indexer_logits,
    indexer_scores,
    indexer_topk,
    lightning_indexer,
    topk,
)
from vime_kernels.ops.indexer import config
from vime_kernels.testing import assert_bitwise, cu_seqlens_of, randn, rel_rms

INF = float("inf")


def inputs(S=4, H=3, D=5, N=6, dtype=torch.float64, grad=False):
    shapes = (S, H, D), (N, D), (S, H)
    return tuple(randn(*shape, seed=i, dtype=dtype, grad=grad) for i, shape in enumerate(shapes))


def full(S, N):
    return torch.zeros(S, dtype=torch.int32), torch.full((S,), N, dtype=torch.int32)


def by_loops(q, k, w, use_relu=True):
    S, H, _ = q.shape
    out = torch.zeros(S, len(k), dtype=torch.float64)
    for t in range(S):
        for n in range(len(k)):
            for h in range(H):
                x = sum(a * b for a, b in zip(q[t, h].tolist(), k[n].tolist(), strict=True))
                out[t, n] += (1.0 if w is None else w[t, h].item()) * (max(x, 0.0) if use_relu else x)
    return out


@pytest.mark.parametrize("use_relu", [True, False], ids=["relu", "linear"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "unit"])
@pytest.mark.parametrize("H", [1, 3, 8], ids=["H1", "H3", "H8"])
def test_logits_and_scores_equal_loops(H, weighted, use_relu):
    q, k, w = inputs(H=H)
    w = w if weighted else None
    expected = by_loops(q, k, w, use_relu)
    actual = indexer_logits(q, k, w, *full(4, 6), use_relu=use_relu)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    indices = torch.tensor([[5, -1, 0], [2, 2, 6], [-7, 1, 3], [4, 0, 1]], dtype=torch.int32)
    valid = (indices >= 0) & (indices < 6)
    at_picks = expected.gather(1, indices.clamp(0, 5).long()).masked_fill(~valid, -INF)
    torch.testing.assert_close(
        indexer_scores(q, k, w, indices, use_relu=use_relu), at_picks, rtol=1e-12, atol=1e-12
    )


def test_ranges_are_cleaned_or_left():
    q, k, w = inputs(dtype=torch.float32)
    starts, ends = (
        torch.tensor([0, 2, 5, -3], dtype=torch.int32),
        torch.tensor([6, 4, 5, 99], dtype=torch.int32),
    )
    clean = indexer_logits(q, k, w, starts, ends)
    everything = indexer_logits(q, k, w, starts, ends, clean_logits=False)
    visible = clean != -INF
    assert visible.sum(1).tolist() == [6, 2, 0, 6]
    assert_bitwise(clean[visible], everything[visible])
    assert everything.isfinite().all()


def test_out_is_written_and_returned():
    q, k, w = inputs(dtype=torch.float32)
    out = torch.empty(4, 6)
    assert indexer_logits(q, k, w, *full(4, 6), out=out) is out
    assert_bitwise(out, indexer_logits(q, k, w, *full(4, 6)))


def test_fp8_scales_dequantise():
    q, k, w = inputs(D=16, dtype=torch.float32)
    q8, k8 = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
    q_scale, k_scale = torch.rand(4, 3) + 0.5, torch.rand(6) + 0.5
    actual = indexer_logits(q8, k8, w, *full(4, 6), q_scale=q_scale, k_scale=k_scale)
    expected = by_loops(q8.double() * q_scale[..., None], k8.double() * k_scale[:, None], w)
    assert rel_rms(actual, expected) < 1e-6
    unit = indexer_logits(q8, k8, None, *full(4, 6), q_scale=q_scale)
    assert rel_rms(unit, by_loops(q8.double() * q_scale[..., None], k8.double(), None)) < 1e-6


@pytest.mark.parametrize("chunk_bytes", [2**28, 1], ids=["one-chunk", "row-chunks"])
def test_gradients(monkeypatch, chunk_bytes):
    monkeypatch.setattr(_rows, "CHUNK_BYTES", chunk_bytes)
    q, k, w = inputs(grad=True)
    indices = torch.tensor([[0, 3, 3, -1], [5, 1, 2, 6], [-1, -1, -1, -1], [4, 0, -9, 2]], dtype=torch.int32)

    def finite(*tensors):
        return indexer_scores(*tensors, indices).masked_fill(indices < 0, 0.0)[:, :3]

    assert gradcheck(finite, (q, k, w), fast_mode=chunk_bytes == 1)


def test_padding_has_no_gradient_and_relu_none_at_zero():
    q, k = torch.zeros(1, 2, 3, requires_grad=True), randn(2, 3, seed=0, grad=True)
    w = torch.ones(1, 2, requires_grad=True)
    scores = indexer_scores(q, k, w, torch.tensor([[-1, 0]], dtype=torch.int32))
    scores.backward(torch.tensor([[INF, 1.0]]))
    for tensor in (q, k, w):
        assert (tensor.grad == 0).all()


def test_a_row_alone_is_bitwise_the_row_in_a_batch():
    for H, D, N in ((8, 64, 33), (3, 16, 128), (1, 8, 5)):
        q, k, w = inputs(S=17, H=H, D=D, N=N, dtype=torch.float32)
        starts, ends = full(17, N)
        batch = indexer_logits(q, k, w, starts, ends)
        for t in range(17):
            row = slice(t, t + 1)
            assert_bitwise(
                indexer_logits(q[row], k, w[row], starts[row], ends[row]), batch[row], f"H={H} row {t}"
            )


def test_nan_stays_in_its_row_or_column():
    q, k, w = inputs(dtype=torch.float32)
    expected = indexer_logits(q, k, w, *full(4, 6))
    q[1, 0, 0], k[4, 2] = float("nan"), float("nan")
    actual = indexer_logits(q, k, w, *full(4, 6))
    assert actual[1].isnan().all()
    assert actual[:, 4].isnan().all()
    keep = torch.ones_like(actual, dtype=torch.bool)
    keep[1], keep[:, 4] = False, False
    assert_bitwise(actual[keep], expected[keep])
    picks = indexer_topk(q, k, w, *full(4, 6), 6)
    assert picks[1].tolist() == [-1] * 6
    assert picks[0].tolist() == [0, 1, 2, 3, 5, -1]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 2**12))
@settings(max_examples=40, deadline=None)
def test_picks_do_not_depend_on_the_chunk(S, k, max_logits_bytes):
    q, keys, w = inputs(
        S=S, H=2, D=4, N=max(1, S // 4), dtype=torch.float32
    )  # two heads: many exact zeros, many ties
    starts, ends = causal_ranges(cu_seqlens_of([S]), ratio=4)
    ends = ends.clamp(max=len(keys))
    whole = topk(indexer_logits(q, keys, w, starts, ends), k, starts, ends)
    assert_bitwise(indexer_topk(q, keys, w, starts, ends, k, max_logits_bytes=max_logits_bytes), whole)


def test_topk_fn_sees_every_row_once_and_replays():
    q, k, w = inputs(S=5, dtype=torch.float32)
    starts, ends = full(5, 6)
    seen, recorded = [], torch.full((5, 2), -1, dtype=torch.int32)

    def record(logits, count, starts, ends, *, row_offset=0):
        seen.append((row_offset, len(logits), len(starts), len(ends)))
        recorded[row_offset : row_offset + len(logits)] = topk(logits, count, starts, ends)
        return recorded[row_offset : row_offset + len(logits)]

    scores, picks = lightning_indexer(q, k, w, starts, ends, 2, topk_fn=record, max_logits_bytes=2 * 6 * 4)
    assert seen == [(0, 2, 2, 2), (2, 2, 2, 2), (4, 1, 1, 1)]
    replayed_scores, replayed = lightning_indexer(q, k, w, starts, ends, 2, indices=recorded)
    assert_bitwise(replayed, picks)
    assert_bitwise(replayed_scores, scores)
    with pytest.raises(
        ValueError,
        match=r"indexer_topk: expected topk_fn to return torch.int32 \[5, 2\] on cpu, got torch.int64",
    ):
        indexer_topk(
            q, k, w, starts, ends, 2, topk_fn=lambda logits, n, s, e, row_offset: logits.topk(n).indices
        )


def test_lightning_indexer_scores_what_it_picks():
    q, k, w = inputs(S=6, dtype=torch.float64)
    starts, ends = causal_ranges(cu_seqlens_of([6]))
    scores, picks = lightning_indexer(q, k, w, starts, ends, 3)
    logits = by_loops(q, k, w)
    for t in range(6):
        best = sorted(logits[t, : t + 1].tolist(), reverse=True)[:3]
        assert scores[t, : len(best)].sort(descending=True).values.tolist() == pytest.approx(best)
        assert (scores[t, len(best) :] == -INF).all()
        assert picks[t].tolist() == [*sorted(picks[t, : len(best)].tolist()), *[-1] * (3 - len(best))]


def test_bfloat16_inputs_accumulate_in_float32():
    q, k, w = inputs(S=8, H=4, D=64, N=8, dtype=torch.bfloat16)
    actual = indexer_logits(q, k, w.float(), *full(8, 8))
    assert actual.dtype == torch.float32
    assert rel_rms(actual, indexer_logits(q.double(), k.double(), w.double(), *full(8, 8))) < 1e-6
    k.requires_grad_()
    every = torch.arange(8, dtype=torch.int32).repeat(8, 32)  # each key 256 times: bfloat16 sums would stall
    indexer_scores(q, k, w.float(), every).sum().backward()
    exact = k.detach().double().requires_grad_()
    indexer_scores(q.double(), exact, w.double(), every).sum().backward()
    assert k.grad.dtype == torch.bfloat16
    assert_bitwise(k.grad, exact.grad.float().to(torch.bfloat16))


@pytest.mark.parametrize("S, N, K", [(0, 4, 2), (3, 0, 2), (3, 4, 0)], ids=["S0", "N0", "K0"])
def test_empty_inputs(S, N, K):
    q, k, w = inputs(S=S, N=N)
    assert indexer_logits(q, k, w, *full(S, N)).shape == (S, N)
    assert indexer_topk(q, k, w, *full(S, N), 2).shape == (S, 2)
    assert indexer_scores(q, k, w, torch.full((S, K), -1, dtype=torch.int32)).shape == (S, K)


RANGES = [([7], 1), ([7], 4), ([5, 0, 9, 3], 1), ([5, 0, 9, 3], 4), ([3, 2], 4), ([0, 0, 4], 2)]


@pytest.mark.parametrize("lengths, ratio", RANGES, ids=[f"{lengths}-r{r}" for lengths, r in RANGES])
def test_causal_ranges_equal_loops(lengths, ratio):
    expected, base = [], 0
    for length in lengths:
        expected += [(base, base + (p + 1) // ratio) for p in range(length)]
        base += length // ratio
    cu = cu_seqlens_of(lengths)
    starts, ends = causal_ranges(cu, ratio=ratio)
    assert starts.dtype == ends.dtype == torch.int32
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == expected
    order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    some_starts, some_ends = causal_ranges(cu, ratio=ratio, q_positions=order)
    assert_bitwise(some_starts, starts[order])
    assert_bitwise(some_ends, ends[order])


def test_causal_ranges_of_rows_outside_are_empty():
    positions = torch.tensor([-1, 0, 4, 5, 100], dtype=torch.int32)
    starts, ends = causal_ranges(cu_seqlens_of([5]), q_positions=positions)
    assert (ends - starts).tolist() == [0, 1, 5, 0, 0]


def test_expanded_keys_are_left_to_the_plain_kernels():
    q, k = torch.zeros(4, 32, 128).bfloat16(), torch.zeros(6, 128).bfloat16()
    assert config._aligned(q, k, 8)
    assert not config._aligned(q, k[:1].expand(6, 128), 8)


def test_rows_that_triton_cannot_copy_in_pieces_are_left_to_the_plain_kernels():
    q, k = torch.zeros(4, 32, 128).bfloat16(), torch.zeros(6, 136).bfloat16()[:, :128]
    assert config._aligned(q, k, 8)
    assert not config._aligned(q, k, 16)
