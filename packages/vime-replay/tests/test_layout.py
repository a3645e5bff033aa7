# SPDX-License-Identifier: Apache-2.0
"""PackLayout: the written-out example, properties over random layouts, balance of work, and refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_replay.layout import LayoutError, PackLayout, Span, balance_folds

EXAMPLE = (5, 3, 7)
PAD = "pad"


def names(layout: PackLayout) -> list[str]:
    """Each local row as sample and position, in words."""
    return [
        f"s{s}p{p}" if s >= 0 and p < layout.lengths[s] else PAD
        for s, p in zip(*layout.owners(), strict=True)
    ]


# Written out by hand: three samples of 5, 3 and 7 tokens on two ranks, rows padded to multiples of 4.
ZIGZAG = {
    0: ["s0p0", "s0p1", PAD, PAD, "s1p0", PAD, "s2p0", "s2p1", "s2p6", PAD, PAD, PAD],
    1: ["s0p2", "s0p3", "s0p4", PAD, "s1p1", "s1p2", "s2p2", "s2p3", "s2p4", "s2p5", PAD, PAD],
}
CONTIGUOUS = {
    0: ["s0p0", "s0p1", "s0p2", "s0p3", "s0p4", "s1p0", "s1p1", "s1p2"],
    1: ["s2p0", "s2p1", "s2p2", "s2p3", "s2p4", "s2p5", "s2p6", PAD],
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode, rows", [("zigzag", ZIGZAG), ("contiguous", CONTIGUOUS)])
def test_rows_of_the_example(mode, rows, rank):
    layout = PackLayout(EXAMPLE, cp_size=2, cp_rank=rank, mode=mode, pad_multiple=4)
    assert names(layout) == rows[rank]
    assert layout.local_rows == len(rows[rank])


@pytest.mark.parametrize(
    "key_space, ratio, offsets",
    [
        ("compact", 1, [0, 5, 8]),
        ("padded", 1, [0, 8, 12]),
        ("compact", 4, [0, 1, 1]),  # floor(cumulative / 4) would say 2
        ("padded", 4, [0, 2, 3]),
        ("sample", 4, [0, 0, 0]),
    ],
)
def test_key_offsets_of_the_example(key_space, ratio, offsets):
    layout = PackLayout(EXAMPLE, cp_size=2, mode="zigzag", pad_multiple=4, key_space=key_space)
    assert layout.key_offsets(ratio).tolist() == offsets
    assert layout.cu_seqlens.tolist() == [0, 8, 12, 20, 24]


def test_spans_of_the_example():
    layout = PackLayout(EXAMPLE, cp_size=2, cp_rank=1, mode="zigzag", pad_multiple=4)
    assert layout.query_spans == [
        Span(dst_start=0, sample=0, src_start=2, n_real=3, n_pad=1),
        Span(dst_start=4, sample=1, src_start=1, n_real=2, n_pad=0),
        Span(dst_start=6, sample=2, src_start=2, n_real=4, n_pad=0),
        Span(dst_start=10, sample=-1, src_start=1, n_real=0, n_pad=2),
    ]


@st.composite
def layouts(draw):
    size = draw(st.integers(1, 5))
    fmt, mode = draw(st.sampled_from(["thd", "bshd"])), draw(st.sampled_from(["contiguous", "zigzag"]))
    lengths = draw(st.lists(st.integers(0 if fmt == "thd" else 1, 40), min_size=1, max_size=5))
    unit = 2 * size
    extent = -(-max(lengths) // unit) * unit if fmt == "bshd" else None
    pad = draw(st.integers(1, 6)) * 2
    return {
        "lengths": tuple(lengths),
        "fmt": fmt,
        "mode": mode,
        "cp_size": size,
        "pad_multiple": pad,
        "max_seqlen": extent,
    }


def on_every_rank(fields, order):
    return [PackLayout(**fields, cp_rank=rank, query_order=order) for rank in range(fields["cp_size"])]


@pytest.mark.parametrize("order", ["local", "contiguous", "balanced"])
@settings(deadline=None, max_examples=60)
@given(fields=layouts())
def test_ranks_together_hold_every_row_once(order, fields):
    ranks = on_every_rank(fields, order)
    rows = np.concatenate([layout.rows() for layout in ranks])
    assert sorted(rows.tolist()) == list(range(ranks[0].total))
    pairs = [pair for layout in ranks for pair in zip(*layout.owners(), strict=True)]
    real = sorted((s, p) for s, p in pairs if s >= 0 and p < fields["lengths"][s])
    assert real == [(s, p) for s, n in enumerate(fields["lengths"]) for p in range(n)]


@settings(deadline=None, max_examples=60)
@given(fields=layouts())
def test_spans_are_the_rows(fields):
    for layout in on_every_rank(fields, "balanced"):
        sample, position = layout.owners()
        covered = 0
        for span in layout.query_spans:
            rows = slice(span.dst_start, span.dst_start + span.n_real + span.n_pad)
            assert span.dst_start == covered
            assert (sample[rows] == span.sample).all()
            assert position[rows].tolist() == list(
                range(span.src_start, span.src_start + rows.stop - rows.start)
            )
            covered = rows.stop
        assert covered == layout.local_rows


@settings(deadline=None, max_examples=60)
@given(fields=layouts(), source=st.sampled_from(["local", "balanced"]))
def test_an_exchange_delivers_the_wanted_rows(fields, source):
    ranks = on_every_rank(fields, "local")
    plans = [layout.exchange(source, "contiguous") for layout in ranks]
    sent = []
    for layout, plan in zip(ranks, plans, strict=True):
        ordered = layout.rows(source)[plan.send_order]
        sent.append(np.split(ordered, np.cumsum(plan.send_counts)[:-1]))
    for rank, (layout, plan) in enumerate(zip(ranks, plans, strict=True)):
        received = np.concatenate([parts[rank] for parts in sent])
        assert [len(parts[rank]) for parts in sent] == list(plan.recv_counts)
        assert received[plan.recv_order].tolist() == layout.rows("contiguous").tolist()


@settings(deadline=None, max_examples=60)
@given(fields=layouts(), ratio=st.sampled_from([1, 4, 128]))
def test_keys_of_a_sample_follow_those_of_the_one_before(fields, ratio):
    layout = PackLayout(**fields)
    groups = [(i, g) for i, n in enumerate(layout.padded_lengths) for g in range(n // ratio)]
    for sample, offset in enumerate(layout.key_offsets(ratio)):
        if (sample, 0) in groups:
            assert groups[offset] == (sample, 0)


@settings(deadline=None, max_examples=60)
@given(fields=layouts())
def test_a_layout_agrees_with_its_own_lengths_and_no_others(fields):
    layout = PackLayout(**fields)
    layout.check(layout.cu_seqlens)
    # The trainer may count the tail to the last sample.
    layout.check([*layout.cu_seqlens[: len(layout.lengths)], layout.total])
    with pytest.raises(LayoutError, match="build both from one PackLayout"):
        layout.check([*layout.cu_seqlens[:-1], layout.total + 1])
    if layout.fmt == "thd":
        again = PackLayout.from_cu_seqlens(
            layout.cu_seqlens.tolist(), cp_size=layout.cp_size, cp_rank=0, mode=layout.mode
        )
        assert again.rows().tolist() == layout.rows().tolist()


@pytest.mark.parametrize(
    "key_space, right, wrong",
    [("padded", [0, 8, 12, 20, 24], [0, 5, 8, 15]), ("compact", [0, 5, 8, 15], [0, 8, 12, 20, 24])],
)
def test_keys_with_and_without_padding_are_told_apart(key_space, right, wrong):
    """The lengths of the model's keys decide: the rebase must use the same ones."""
    layout = PackLayout(EXAMPLE, cp_size=2, mode="zigzag", pad_multiple=4, key_space=key_space)
    layout.check(right)
    with pytest.raises(LayoutError, match=f"{key_space} key space"):
        layout.check(wrong)
    # Rank-local lengths, and lengths in groups instead of tokens.
    for other in ([0, 4, 6, 10, 12], [0, 2, 3, 5, 6]):
        with pytest.raises(LayoutError):
            layout.check(other)


def work(layout):
    """Keys that the rank's queries read or score in one ratio-4 and one ratio-128 layer of DeepSeek-V4-Flash."""
    _, position = layout.owners()
    csa, hca = (position + 1) // 4, (position + 1) // 128
    window = np.minimum(position + 1, 128)
    return int((csa + np.minimum(csa, 512) + hca + 2 * window).sum())


SAMPLES = {
    "one": (65536,),
    "two": (32768,) * 2,
    "eight": (8192,) * 8,
    "unequal": (32768, 16384, 10240, 6144),
    "odd": (29999, 1, 511, 18000, 9001, 4000, 4024),
}


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("samples", SAMPLES)
def test_balance_evens_out_the_work(samples, size):
    fields = {"lengths": SAMPLES[samples], "cp_size": size}
    ratios = {}
    for order in ("contiguous", "balanced"):
        costs = [work(layout) for layout in on_every_rank(fields, order)]
        ratios[order] = max(costs) / (sum(costs) / size)
    assert ratios["balanced"] <= 1.05
    if samples == "one":
        assert ratios["contiguous"] > 1.3


@pytest.mark.parametrize(
    "extent, size, folds",
    [(512, 2, 1), (2047, 2, 1), (2048, 2, 4), (65536, 2, 16), (65536, 8, 16), (65536, 16, 16), (65544, 2, 2)],
)
def test_chunks_stay_wider_than_a_window(extent, size, folds):
    assert balance_folds(extent, size) == folds
    assert folds == 1 or extent // (2 * size * folds) >= 128


REFUSED = {
    "bshd-cp": ({"lengths": (7,), "fmt": "bshd", "cp_size": 2}, "a multiple of 2 (cp_size), got 7; pass 8"),
    "bshd-zigzag": (
        {"lengths": (6,), "fmt": "bshd", "cp_size": 2, "mode": "zigzag"},
        "a multiple of 4 (2 * cp_size), got 6; pass 8",
    ),
    "bshd-short": ({"lengths": (9,), "fmt": "bshd", "max_seqlen": 8}, "at least 9, got 8; pass 9"),
    "rank": ({"lengths": (4,), "cp_size": 2, "cp_rank": 2}, "0 <= cp_rank < 2, got 2"),
    "negative": ({"lengths": (4, -1)}, "whole numbers from 0, got (4, -1)"),
    "fraction": ({"lengths": (4.5,)}, "whole numbers from 0, got (4.5,)"),
    "size": ({"lengths": (4,), "cp_size": 0}, "cp_size: expected at least 1, got 0"),
    "tail-negative": ({"lengths": (4,), "tail": -3}, "tail: expected None, or rows from 0"),
    "tail-bshd": ({"lengths": (4,), "tail": 2, "fmt": "bshd"}, "got 2 with bshd"),
    "mode": ({"lengths": (4,), "mode": "ring"}, "one of contiguous, zigzag, got 'ring'"),
    "odd": (
        {"lengths": (6,), "cp_size": 2, "query_order": "balanced"},
        "a multiple of 2 * cp_size (4), got 6; pad to 8",
    ),
    "tail": ({"lengths": (6,), "cp_size": 4, "tail": 0}, "a multiple of cp_size (4), got 6; pad to 8"),
    "overflow": ({"lengths": (2**31,)}, "fewer than 2**31"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_numbers_that_do_not_fit_are_refused(case):
    fields, message = REFUSED[case]
    with pytest.raises(LayoutError) as error:
        PackLayout(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"lengths": (250,), "pad_multiple": 1},
            "at least the window (128), got 125; pad to 256 rows, or use",
        ),
        (
            {"lengths": (512, 300), "fmt": "bshd", "max_seqlen": 640, "mode": "zigzag"},
            "a multiple of 512 (2 * cp_size * 128), got 640; pass 1024",
        ),
        (
            {"lengths": (300,), "fmt": "bshd", "max_seqlen": 320},
            "a multiple of 256 (cp_size * 128), got 320; pass 512",
        ),
    ],
    ids=["thd", "bshd-zigzag", "bshd"],
)
def test_splits_that_a_windowed_model_cannot_compute_are_refused(fields, message):
    layout = PackLayout(**fields, cp_size=2)
    with pytest.raises(LayoutError) as error:
        layout.require(window=128, group=128)
    assert message in str(error.value)


def test_splits_that_it_can_compute_are_not():
    PackLayout((1, 255), cp_size=2).require(window=128, group=128)
    PackLayout((512,), "bshd", cp_size=2, mode="zigzag").require(window=128, group=128)
    PackLayout((5,)).require(window=128, group=128)


def test_a_zigzag_sample_must_fall_into_chunks():
    with pytest.raises(LayoutError, match=r"sample 0: .* multiple of 2 \* cp_size \(4\), got 3; pad it to 4"):
        PackLayout.from_cu_seqlens([0, 3, 8], cp_size=2, mode="zigzag")
