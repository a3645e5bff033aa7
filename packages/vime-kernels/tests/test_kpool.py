# SPDX-License-Identifier: Apache-2.0
"""Pool selection against loops over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_kernels.dsa import causal_ranges, gated_pool, indexer_logits, indexer_topk, kpool_select
from vime_kernels.testing import assert_bitwise, cu_seqlens_of, randn


def inputs(lengths, r, H=3, D=4):
    T, cu = sum(lengths), cu_seqlens_of(lengths)
    q, k, score, w = (randn(*s, seed=i) for i, s in enumerate([(T, H, D), (T, D), (T, D), (T, H)]))
    pooled, _ = gated_pool(k, score, randn(r, D, seed=9), cu, r)
    return q, pooled, w, cu


def by_loops(q, pooled, w, lengths, index_topk, r, tail):
    logits = indexer_logits(q, pooled, w, torch.zeros(len(q), dtype=torch.int32),
                            torch.full((len(q),), len(pooled), dtype=torch.int32)).tolist()  # fmt: skip
    result, start, base = [], 0, 0
    for length in lengths:
        for p in range(length):
            if p + 1 <= index_topk:
                tokens = list(range(start, start + p + 1))
            else:
                visible = [
                    g
                    for g in range(base, base + (p + 1) // r)
                    if logits[start + p][g] == logits[start + p][g]
                ]
                best = sorted(visible, key=lambda g: (-logits[start + p][g], g))[: index_topk // r]
                tokens = sorted(start + (g - base) * r + m for g in best for m in range(r))
                if tail:
                    tokens += range(start + (p + 1) // r * r, start + p + 1)
            result.append(tokens)
        start, base = start + length, base + length // r
    return result


@given(
    st.lists(st.integers(0, 21), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_equals_loops(lengths, r, tail, poisoned):
    q, pooled, w, cu = inputs(lengths, r)
    if poisoned and len(pooled):
        pooled[len(pooled) // 2] = float("nan")
    picks = kpool_select(q, pooled, w, cu, 8, r, always_tail=tail, pad_to=1)
    assert picks.dtype == torch.int32
    assert picks.shape[1] == 8 + (r - 1 if tail else 0)
    expected = by_loops(q, pooled, w, lengths, 8, r, tail)
    assert picks.tolist() == [row + [-1] * (picks.shape[1] - len(row)) for row in expected]


def test_one_token_per_pool_is_the_plain_indexer():
    lengths = [5, 12]
    cu = cu_seqlens_of(lengths)
    q, k, w = randn(17, 3, 4, seed=0), randn(17, 4, seed=1), randn(17, 3, seed=2)
    starts, ends = causal_ranges(cu)
    plain = indexer_topk(q, k, w, starts, ends, 4)
    assert_bitwise(kpool_select(q, k, w, cu, 4, 1, pad_to=1), plain)


def test_the_width_is_padded():
    q, pooled, w, cu = inputs([30], 4)
    assert kpool_select(q, pooled, w, cu, 8, 4).shape == (30, 64)
    assert kpool_select(q, pooled, w, cu, 64, 4).shape == (30, 128)
    assert kpool_select(q, pooled, w, cu, 64, 4, always_tail=False).shape == (30, 64)


def test_every_row_keeps_its_own_history_and_only_the_tail_survives_nan():
    q, pooled, w, cu = inputs([30], 4)
    pooled[:] = float("nan")
    picks = kpool_select(q, pooled, w, cu, 8, 4, pad_to=1)
    assert [t for t in picks[29].tolist() if t >= 0] == [28, 29]
    assert [t for t in picks[27].tolist() if t >= 0] == []
    assert [t for t in picks[5].tolist() if t >= 0] == [0, 1, 2, 3, 4, 5]


def test_some_rows_and_rows_of_no_sequence():
    q, pooled, w, cu = inputs([9, 14], 4)
    whole = kpool_select(q, pooled, w, cu, 8, 4)
    rows = torch.tensor([22, 3, 9, 20], dtype=torch.int32)
    some = kpool_select(q[rows], pooled, w[rows], cu, 8, 4, q_positions=rows)
    assert_bitwise(some, whole[rows])
    outside = torch.tensor([-1, 23], dtype=torch.int32)
    assert (kpool_select(q[:2], pooled, w[:2], cu, 8, 4, q_positions=outside) == -1).all()


def test_a_budget_that_no_pool_fills_is_refused():
    q, pooled, w, cu = inputs([9], 4)
    with pytest.raises(
        ValueError, match=r"kpool_select: expected index_topk to be a multiple of kpool \(4\), got 6"
    ):
        kpool_select(q, pooled, w, cu, 6, 4)
