# SPDX-License-Identifier: Apache-2.0
"""Gated pooling against per-group loops, and its laws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from vime_kernels.dsa import gated_pool
from vime_kernels.testing import assert_bitwise, cu_seqlens_of, randn

LENGTHS = {
    "one": [12],
    "packed": [5, 9, 4],
    "empty-inside": [4, 0, 8],
    "shorter-than-r": [3, 2, 7],
    "all-short": [3, 1],
    "one-below-and-above": [7, 9],
}


def by_loops(x, score, ape, lengths, r, overlap):
    """One pool after another, one channel after another."""
    pools, start = [], 0
    for length in lengths:
        for g in range(length // r):
            own = range(start + g * r, start + (g + 1) * r)
            if overlap:
                D = x.shape[1] // 2
                previous = [] if g == 0 else [(t - r, m, 0) for m, t in enumerate(own)]
                slots = previous + [(t, m, D) for m, t in enumerate(own)]
            else:
                D, slots = x.shape[1], [(t, m, 0) for m, t in enumerate(own)]
            row = []
            for d in range(D):
                a = torch.stack([score[t, h + d] + ape[m, h + d] for t, m, h in slots])
                w = torch.exp(a - a.max())
                row.append((w / w.sum() * torch.stack([x[t, h + d] for t, m, h in slots])).sum())
            pools.append(torch.stack(row))
        start += length
    return torch.stack(pools) if pools else x.new_zeros(0, x.shape[1] // (2 if overlap else 1))


def inputs(lengths, r, C=6, dtype=torch.float64, grad=False):
    T = sum(lengths)
    x, score = (randn(T, C, seed=s, dtype=dtype, grad=grad) for s in (0, 1))
    ape_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return x, score, randn(r, C, seed=2, dtype=ape_dtype, grad=grad)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_equals_loops(lengths, overlap):
    x, score, ape = inputs(lengths, 4)
    pooled, cu_pools = gated_pool(x, score, ape, cu_seqlens_of(lengths), 4, overlap=overlap)
    expected = by_loops(x, score, ape, lengths, 4, overlap)
    assert cu_pools.dtype == torch.int32
    assert cu_pools.tolist() == cu_seqlens_of([n // 4 for n in lengths]).tolist()
    assert pooled.shape[0] == sum(lengths) // 4
    torch.testing.assert_close(pooled[: len(expected)], expected, rtol=1e-12, atol=1e-13)
    assert (pooled[len(expected) :] == 0).all()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_gradients(overlap):
    lengths = [9, 2, 5]  # three pools of a capacity of four, leftovers, a short sequence
    x, score, ape = inputs(lengths, 4, C=4, grad=True)
    cu = cu_seqlens_of(lengths)
    assert gradcheck(lambda *a: gated_pool(*a, cu, 4, overlap=overlap)[0], (x, score, ape))


def test_gradient_through_the_halo():
    x, score, ape = inputs([8], 4, C=4, grad=True)
    halo = tuple(randn(4, 4, seed=s, dtype=torch.float64, grad=True) for s in (7, 8))
    cu = cu_seqlens_of([8])
    assert gradcheck(lambda x, z, a, hx, hz: gated_pool(x, z, a, cu, 4, overlap=True, halo=(hx, hz))[0],
                     (x, score, ape, *halo))  # fmt: skip


def test_a_sequence_cut_at_a_group_and_joined_by_its_halo_is_bitwise_whole():
    x, score, ape = inputs([20], 4, dtype=torch.float32)
    whole, _ = gated_pool(x, score, ape, cu_seqlens_of([20]), 4, overlap=True)
    left, _ = gated_pool(x[:8], score[:8], ape, cu_seqlens_of([8]), 4, overlap=True)
    halo = (x[4:8], score[4:8])
    right, _ = gated_pool(x[8:], score[8:], ape, cu_seqlens_of([12]), 4, overlap=True, halo=halo)
    assert_bitwise(torch.cat([left, right]), whole)


def test_a_halo_before_no_pool_stays_out_of_the_result():
    x, score, ape = inputs([3, 3], 4, dtype=torch.float32)
    halo = (torch.full((4, 6), float("nan")), torch.zeros(4, 6))
    pooled, cu_pools = gated_pool(x, score, ape, cu_seqlens_of([3, 3]), 4, overlap=True, halo=halo)
    assert cu_pools.tolist() == [0, 0, 0]
    assert (pooled == 0).all()


@given(st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(1, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_packed_is_bitwise_one_call_per_sequence(lengths, r, overlap):
    x, score, ape = inputs(lengths, r, dtype=torch.float32)
    pooled, cu_pools = gated_pool(x, score, ape, cu_seqlens_of(lengths), r, overlap=overlap)
    start = 0
    for b, length in enumerate(lengths):
        part = slice(start, start + length)
        alone, _ = gated_pool(x[part], score[part], ape, cu_seqlens_of([length]), r, overlap=overlap)
        assert_bitwise(pooled[cu_pools[b] : cu_pools[b + 1]], alone)
        start += length


def test_zero_gate_and_zero_bias_is_the_mean():
    x = randn(12, 6, seed=0, dtype=torch.float64)
    pooled, _ = gated_pool(
        x, torch.zeros_like(x), torch.zeros(4, 6, dtype=torch.float64), cu_seqlens_of([12]), 4
    )
    torch.testing.assert_close(pooled, x.view(3, 4, 6).mean(1), rtol=1e-14, atol=1e-15)


def test_ratio_one_returns_the_rows():
    x, score, ape = inputs([5], 1, dtype=torch.float32)
    assert_bitwise(gated_pool(x, score, ape, cu_seqlens_of([5]), 1)[0], x)


def test_leftovers_and_rows_of_no_sequence_do_not_matter():
    x, score, ape = inputs([11], 4, dtype=torch.float32)
    clean, _ = gated_pool(x, score, ape, cu_seqlens_of([9]), 4)
    x[8:], score[8:] = float("nan"), float("nan")
    x.requires_grad_()
    pooled, _ = gated_pool(x, score, ape, cu_seqlens_of([9]), 4)
    assert_bitwise(pooled, clean)
    pooled.sum().backward()
    assert (x.grad[8:] == 0).all()
    assert x.grad.isfinite().all()


def test_capacity_rows_give_no_gradient_even_beside_nan():
    x, score, ape = (t.requires_grad_() for t in inputs([3, 5], 4, dtype=torch.float32))
    with torch.no_grad():
        x[0] = float("nan")  # the row that a careless clamp would read
    pooled, cu_pools = gated_pool(x, score, ape, cu_seqlens_of([3, 5]), 4)
    assert cu_pools[-1] == 1
    assert pooled.shape[0] == 2
    pooled.sum().backward()
    assert x.grad.isfinite().all()
    assert ape.grad.isfinite().all()


def test_extreme_scores_select_one_token():
    x = randn(4, 2, seed=0)
    score = torch.full((4, 2), -1e30)
    score[2] = 1e30
    assert_bitwise(gated_pool(x, score, torch.zeros(4, 2), cu_seqlens_of([4]), 4)[0][0], x[2])


def test_rounding_modes_differ_only_below_float32():
    for dtype, equal in ((torch.float32, True), (torch.bfloat16, False)):
        x, score, ape = inputs([64], 4, C=32, dtype=dtype)
        a, _ = gated_pool(x, score, ape, cu_seqlens_of([64]), 4, rounding="fp32")
        b, _ = gated_pool(x, score, ape, cu_seqlens_of([64]), 4, rounding="hf")
        assert torch.equal(a, b) is equal
        exact, _ = gated_pool(x.double(), score.double(), ape.double(), cu_seqlens_of([64]), 4)
        if dtype == torch.bfloat16:
            assert_bitwise(a, exact.to(dtype))
