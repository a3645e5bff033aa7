# SPDX-License-Identifier: Apache-2.0
"""The selection rule against a sort written with Python tuples, and everything that must never be picked."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_kernels import _rows
from vime_kernels.dsa import get_topk_fn, topk
from vime_kernels.testing import assert_bitwise, randn

NAN, INF = float("nan"), float("inf")


def by_sorting(row, k, start, end):
    usable = [(-s, c) for c, s in enumerate(row) if start <= c < end and not math.isnan(s) and s != -INF]
    picks = sorted(c for _, c in sorted(usable)[:k])
    return picks + [-1] * (k - len(picks))


def ranges(*pairs):
    starts, ends = zip(*pairs, strict=True)
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)


values = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1e30, -3e38, 1e-45, -1e-45, 1.0, 2.0, -1.0])
rows = st.integers(1, 9).flatmap(
    lambda n: st.lists(
        st.tuples(st.lists(values, min_size=n, max_size=n), st.integers(-2, n + 2), st.integers(-2, n + 2)),
        min_size=1,
        max_size=4,
    )
)


@given(rows, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_canonical_equals_sorting_tuples(rows, k):
    logits = torch.tensor([r for r, _, _ in rows])
    starts, ends = ranges(*((s, e) for _, s, e in rows))
    picks = topk(logits, k, starts, ends)
    assert picks.dtype == torch.int32
    assert picks.tolist() == [
        by_sorting(r, k, s, e) for r, s, e in zip(logits.tolist(), starts, ends, strict=True)
    ]


@pytest.mark.parametrize("garbage", [NAN, INF, 1e30], ids=["nan", "inf", "large"])
@pytest.mark.parametrize("rule", ["canonical", "torch", "fast"])
def test_columns_outside_row_range_never_win(rule, garbage):
    logits = torch.full((3, 8), garbage)
    logits[0, 2:5] = torch.tensor([1.0, 3.0, 2.0])
    logits[1, 7] = -5.0
    starts, ends = ranges((2, 5), (7, 8), (4, 4))
    picks = topk(logits, 2, starts, ends, rule=rule)
    assert [sorted(row) for row in picks.tolist()] == [[3, 4], [-1, 7], [-1, -1]]


@pytest.mark.parametrize(
    "row, k, expected",
    [
        ([1.0] * 6, 3, [0, 1, 2]),
        ([0.0, -0.0, 0.0, -0.0], 2, [0, 1]),
        ([-0.0, 0.0], 1, [0]),
        ([1.0, NAN, 3.0, NAN], 3, [0, 2, -1]),
        ([NAN, NAN], 2, [-1, -1]),
        ([-INF, 5.0], 2, [1, -1]),
        ([INF, 1.0], 1, [0]),
        ([1e-45, 0.0, 2e-45], 2, [0, 2]),
        ([2.0, 1.0], 5, [0, 1, -1, -1, -1]),
        ([7.0], 1, [0]),
    ],
    ids=["all-equal", "zeros", "minus-zero-first", "nan", "all-nan", "-inf", "inf", "denormal", "k>N", "N1"],
)
def test_special_rows(row, k, expected):
    assert topk(torch.tensor([row]), k, *ranges((0, len(row)))).tolist() == [expected]


@pytest.mark.parametrize("rule", ["torch", "fast"])
def test_other_rules_pick_the_same_scores(rule):
    logits = randn(20, 50, seed=0)
    starts, ends = torch.zeros(20, dtype=torch.int32), torch.arange(20, dtype=torch.int32) * 3
    canonical, other = topk(logits, 7, starts, ends), topk(logits, 7, starts, ends, rule=rule)
    assert torch.equal(canonical.sort().values, other.sort().values)
    if rule == "torch":
        chosen = logits.gather(1, other.clamp(min=0).long()).masked_fill(other < 0, -INF)
        assert (chosen.diff(dim=1).nan_to_num(0.0) <= 0).all()


def test_rows_in_chunks_are_bitwise_rows_at_once(monkeypatch):
    logits = randn(33, 40, seed=0).round(decimals=1)  # many ties
    starts, ends = torch.arange(33, dtype=torch.int32) // 4, torch.arange(33, dtype=torch.int32) + 5
    whole = topk(logits, 6, starts, ends)
    monkeypatch.setattr(_rows, "CHUNK_BYTES", 1)
    assert_bitwise(topk(logits, 6, starts, ends), whole)


def test_strided_rows_and_half_precision():
    logits = randn(4, 16, seed=0, dtype=torch.bfloat16)
    starts, ends = torch.zeros(4, dtype=torch.int32), torch.full((4,), 10, dtype=torch.int32)
    assert_bitwise(
        topk(logits[:, :10], 3, starts, ends), topk(logits[:, :10].float().contiguous(), 3, starts, ends)
    )


def test_empty_inputs():
    none = torch.zeros(0, dtype=torch.int32)
    assert topk(torch.zeros(0, 5), 3, none, none).shape == (0, 3)
    assert topk(torch.zeros(2, 0), 3, *ranges((0, 0), (0, 4))).tolist() == [[-1] * 3] * 2


def test_topk_fn_takes_the_row_offset():
    starts, ends = ranges((0, 3))
    assert get_topk_fn("canonical")(
        torch.tensor([[1.0, 3.0, 2.0]]), 2, starts, ends, row_offset=7
    ).tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="get_topk_fn: expected rule to be one of"):
        get_topk_fn("flashinfer")
