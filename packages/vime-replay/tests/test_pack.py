# SPDX-License-Identifier: Apache-2.0
"""Packing: the written-out example in every layout, random layouts against a loop over elements, and the inverse."""

import numpy as np
import packing
import pytest

from vime_replay.codec import EncodedSource, encode_rows
from vime_replay.errors import ReplayConfigError, ReplayDecodeError
from vime_replay.layout import PackLayout
from vime_replay.pack import pack_rows, unpack_rows
from vime_replay.sources import ArraySource

LENGTHS = (5, 3, 7)
# What each rank holds, written out by hand; "." is a row without picks.
EXAMPLE = {
    ("zigzag", "padded", 1): (
        "0 | 1 0 | . | . | 8 | . | 12 | 13 12 | . | . | . | .",
        "2 1 0 | 3 2 1 | . | . | 9 8 | . | 14 13 12 | 15 14 13 | 16 15 14 | 17 16 15 | . | .",
    ),
    ("zigzag", "compact", 1): (
        "0 | 1 0 | . | . | 5 | . | 8 | 9 8 | . | . | . | .",
        "2 1 0 | 3 2 1 | . | . | 6 5 | . | 10 9 8 | 11 10 9 | 12 11 10 | 13 12 11 | . | .",
    ),
    ("contiguous", "compact", 1): (
        "0 | 1 0 | 2 1 0 | 3 2 1 | . | 5 | 6 5 | .",
        "8 | 9 8 | 10 9 8 | 11 10 9 | 12 11 10 | 13 12 11 | . | .",
    ),
    ("zigzag", "padded", 4): (
        ". | . | . | . | . | . | . | . | . | . | . | .",
        ". | 0 | . | . | . | . | . | 3 | 3 | 3 | . | .",
    ),
    ("zigzag", "compact", 4): (
        ". | . | . | . | . | . | . | . | . | . | . | .",
        ". | 0 | . | . | . | . | . | 1 | 1 | 1 | . | .",
    ),
    ("contiguous", "compact", 4): (
        ". | . | . | 0 | . | . | . | .",
        ". | . | . | 1 | 1 | 1 | . | .",
    ),
}
# Unpadded streams have one key space.
EXAMPLE |= {("contiguous", "padded", r): EXAMPLE["contiguous", "compact", r] for r in (1, 4)}


def words(rows_SK):
    return " | ".join(" ".join(str(e) for e in row if e >= 0) or "." for row in rows_SK)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mode, key_space, ratio", EXAMPLE, ids=lambda v: str(v))
def test_the_written_out_example(mode, key_space, ratio, tp, rank):
    spec = packing.spec_of(ratio=ratio)
    samples = [packing.newest_first(n, spec) for n in LENGTHS]
    layout = PackLayout(LENGTHS, cp_size=2, cp_rank=rank, mode=mode, pad_multiple=4 * tp, key_space=key_space)
    packed = pack_rows(samples, spec, layout, order="keep")
    expected = EXAMPLE[mode, key_space, ratio][rank].split(" | ")
    # A larger padding multiple adds rows at the end; tensor parallelism takes none away.
    expected += ["."] * (-len(expected) % (4 * tp))
    if (mode, tp) == ("contiguous", 2):
        assert layout.local_rows == len(expected) == 8
    assert words(packed.picks_LSK[0]) == " | ".join(expected)


@pytest.mark.parametrize("mode", ["contiguous", "zigzag"])
def test_the_example_unpacked_has_a_key_space_per_sample(mode):
    spec = packing.spec_of()
    samples = [packing.newest_first(n, spec) for n in LENGTHS]
    ranks = [
        words(
            pack_rows(
                samples,
                spec,
                PackLayout(
                    LENGTHS,
                    "bshd",
                    cp_size=2,
                    cp_rank=rank,
                    mode=mode,
                    max_seqlen=8,
                    key_space="sample",
                ),
                order="keep",
            ).picks_LSK[0]
        )
        for rank in (0, 1)
    ]
    if mode == "contiguous":
        assert ranks == [
            "0 | 1 0 | 2 1 0 | 3 2 1 | 0 | 1 0 | . | . | 0 | 1 0 | 2 1 0 | 3 2 1",
            ". | . | . | . | . | . | . | . | 4 3 2 | 5 4 3 | . | .",
        ]
    else:
        assert ranks == [
            "0 | 1 0 | . | . | 0 | 1 0 | . | . | 0 | 1 0 | . | .",
            "2 1 0 | 3 2 1 | . | . | . | . | . | . | 2 1 0 | 3 2 1 | 4 3 2 | 5 4 3",
        ]


def random_case(rng):
    """A layout's fields, and what the loop says."""
    cp = int(rng.integers(1, 5))
    fmt, mode = rng.choice(["thd", "thd", "bshd"]), rng.choice(["contiguous", "zigzag"])
    lengths = tuple(int(n) for n in rng.integers(1, 18, size=rng.integers(1, 5)))
    extent = 2 * cp * -(-max(lengths) // (2 * cp)) if fmt == "bshd" else None
    fields = {
        "lengths": lengths,
        "fmt": str(fmt),
        "mode": str(mode),
        "cp_size": cp,
        "pad_multiple": int(rng.integers(1, 4)) * 2,
        "max_seqlen": extent,
        "key_space": str(rng.choice(["padded", "compact", "sample"])),
    }
    shared = {"cp": cp, "pad_multiple": fields["pad_multiple"], "fmt": fmt, "max_seqlen": extent}
    ranks, extents = packing.stream_of(lengths, mode=mode, **shared)
    order = str(rng.choice(["local", "contiguous", "balanced"]))
    if order != "local":
        # The stream in order, as one rank would hold it.
        size, local = cp, len(ranks[0])
        whole = [row for n, e in zip(lengths, extents, strict=True) for row in [*range(n), *[None] * (e - n)]]
        sample_of = [i for i, e in enumerate(extents) for _ in range(e)]
        stream = [packing.PAD if p is None else (i, p) for i, p in zip(sample_of, whole, strict=True)] + [
            packing.PAD
        ] * (size * local - len(whole))
        rows_of_batch = len(lengths) if fmt == "bshd" else 1
        per_row = len(stream) // rows_of_batch
        ranks = [[] for _ in range(cp)]
        for b in range(rows_of_batch):
            row = stream[b * per_row : (b + 1) * per_row]
            pieces = (
                packing.balanced(row, cp)
                if order == "balanced" and cp > 1
                else [row[r * per_row // cp : (r + 1) * per_row // cp] for r in range(cp)]
            )
            for r in range(cp):
                ranks[r] += pieces[r]
    return fields | {"query_order": order}, ranks, extents


def check_random_layouts(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        fields, ranks, extents = random_case(rng)
        spec = packing.spec_of(streams=2, ratio=int(rng.choice([1, 1, 4])))
        samples = [packing.random_rows(rng, n, spec) for n in fields["lengths"]]
        parts = []
        for rank, rows in enumerate(ranks):
            layout = PackLayout(**fields, cp_rank=rank)
            part = pack_rows(samples, spec, layout, order="keep")
            expected = packing.packed(
                rows, samples, layout.lengths, extents, ratio=spec.ratio, key_space=layout.key_space
            )
            assert part.picks_LSK.tolist() == expected.tolist(), fields
            assert (part.empty_LS == (expected < 0).all(axis=2)).all()
            ordered = pack_rows(samples, spec, layout).picks_LSK
            assert (ordered.view(np.uint32) == np.sort(expected.astype(np.uint32), axis=2)).all()
            parts.append(part)
        for sample, back in zip(samples, unpack_rows(parts), strict=True):
            assert (sample == back).all()


def test_random_layouts_equal_the_loop():
    check_random_layouts(seed=0, count=300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_ten_thousand_layouts_equal_the_loop(seed):
    check_random_layouts(seed, count=500)


def test_every_entry_stays_in_its_own_sample_and_causal():
    rng = np.random.default_rng(5)
    spec = packing.spec_of(streams=2, topk=4, ratio=4)
    lengths = (13, 3, 40, 9)
    samples = [packing.random_rows(rng, n, spec, full=True) for n in lengths]
    for rank in range(3):
        layout = PackLayout(lengths, cp_size=3, cp_rank=rank, mode="zigzag", pad_multiple=4)
        part = pack_rows(samples, spec, layout)
        sample, position = layout.owners()
        first = layout.key_offsets(4)[np.maximum(sample, 0)]
        valid = part.picks_LSK >= 0
        assert (part.picks_LSK >= first[:, None])[valid].all()
        assert (part.picks_LSK < (first + (position + 1) // 4)[:, None])[valid].all()
        recorded = (sample >= 0) & (position < np.asarray([*lengths, 0])[sample] - 1)
        assert (part.available_S == np.where(recorded, (position + 1) // 4, -1)).all()


@pytest.mark.parametrize("order", ["keep", "sorted"])
def test_wide_rows_that_use_every_slot(order):
    """Rows wider than a cache block, with and without a rebase."""
    rng = np.random.default_rng(6)
    spec = packing.spec_of(streams=3, topk=600)
    lengths = (900, 700)
    samples = [packing.random_rows(rng, n, spec, full=True) for n in lengths]
    layout = PackLayout(lengths)
    part = pack_rows(samples, spec, layout, order=order)
    unordered = part.picks_LSK.copy()
    for sample, back in zip(samples, unpack_rows([part]), strict=True):
        if order == "keep":
            assert (sample == back).all()
        else:
            assert (np.sort(sample.view(np.uint32), axis=2) == back.view(np.uint32)).all()
    assert (part.picks_LSK == unordered).all()


def test_streams_and_local_rows_are_chosen():
    rng = np.random.default_rng(7)
    spec = packing.spec_of(streams=5)
    samples = [packing.random_rows(rng, n, spec) for n in LENGTHS]
    layout = PackLayout(LENGTHS, pad_multiple=8)
    whole = pack_rows(samples, spec, layout, order="keep")
    for streams in [(4, 1, 2), (1, 3), (2,), ()]:
        out = np.zeros((len(streams), layout.local_rows, spec.topk), np.int32)
        part = pack_rows(samples, spec, layout, streams=streams, out=out, order="keep")
        assert part.picks_LSK is out
        assert (out == whole.picks_LSK[list(streams)]).all()
    halves = [pack_rows(samples, spec, layout, local=slice(a, a + 8), order="keep") for a in (0, 8)]
    assert (np.concatenate([half.picks_LSK for half in halves], axis=1) == whole.picks_LSK).all()
    assert (np.concatenate([half.available_S for half in halves]) == whole.available_S).all()
    for sample, back in zip(samples, unpack_rows(halves), strict=True):
        assert (sample == back).all()


def test_a_sample_without_rows_and_one_without_passes():
    spec = packing.spec_of()
    layout = PackLayout((4, 1, 3))
    part = pack_rows([None, packing.newest_first(1, spec), packing.newest_first(3, spec)], spec, layout)
    assert words(part.picks_LSK[0]) == ". | . | . | . | . | 5 | 5 6 | ."
    assert part.available_S.tolist() == [-1, -1, -1, -1, -1, 1, 2, -1]


REFUSED = {
    "key-of-the-query-after": (1, "value.range] sample 1: row 1 stream 0 holds 2, allowed -1..1"),
    "below-minus-one": (1, "value.range] sample 1: row 1 stream 0 holds -7"),
    "smallest": (1, "value.range] sample 1: row 1 stream 0 holds -2147483648"),
    "largest": (4, "value.range] sample 1: row 1 stream 0 holds 2147483647, allowed -1..-1"),
}
VALUES = {
    "key-of-the-query-after": 2,
    "below-minus-one": -7,
    "smallest": -(2**31),
    "largest": 2**31 - 1,
}


@pytest.mark.parametrize("order", ["keep", "sorted"])
@pytest.mark.parametrize("case", REFUSED)
def test_an_entry_that_its_query_may_not_pick_is_refused(case, order):
    ratio, message = REFUSED[case]
    spec = packing.spec_of(ratio=ratio)
    samples = [packing.newest_first(n, spec) for n in LENGTHS]
    samples[1][1, 0, 1] = VALUES[case]
    with pytest.raises(ReplayDecodeError) as error:
        pack_rows(samples, spec, PackLayout(LENGTHS), order=order)
    assert message in str(error.value)
    trusted = [ArraySource(rows, validated=True) for rows in samples]
    pack_rows(trusted, spec, PackLayout(LENGTHS), order=order)
    pack_rows(samples, spec, PackLayout(LENGTHS), order=order, level="off")


def test_rows_of_another_length_or_model_are_refused():
    spec = packing.spec_of()
    samples = [packing.newest_first(n, spec) for n in LENGTHS]
    layout = PackLayout(LENGTHS)
    with pytest.raises(
        ReplayDecodeError, match=r"shape.rows\] sample 2: expected .* = \[6, 1, 3\] for 7 tokens"
    ):
        pack_rows([*samples[:2], samples[2][:-1]], spec, layout)
    with pytest.raises(ReplayDecodeError, match=r"shape\.topk"):
        pack_rows([*samples[:2], samples[2][:, :, :2]], spec, layout)
    with pytest.raises(ReplayConfigError, match="expected rows of 3 samples, as in the layout, got 2"):
        pack_rows(samples[:2], spec, layout)
    with pytest.raises(ReplayConfigError, match=r"different streams below 1, got \[1\]"):
        pack_rows(samples, spec, layout, streams=[1])
    with pytest.raises(ReplayConfigError, match=r"int32 of shape \[1, 15, 3\] in C order"):
        pack_rows(samples, spec, layout, out=np.zeros((1, 14, 3), np.int32))


def test_a_part_that_is_missing_or_given_twice_is_refused():
    spec = packing.spec_of()
    samples = [packing.newest_first(n, spec) for n in LENGTHS]
    parts = [
        pack_rows(samples, spec, PackLayout(LENGTHS, cp_size=2, cp_rank=rank, pad_multiple=4))
        for rank in (0, 1)
    ]
    with pytest.raises(ReplayConfigError, match="sample 2 row 0 stream 0 in one part, found it in 0"):
        unpack_rows(parts[:1])
    with pytest.raises(ReplayConfigError, match="sample 0 row 0 stream 0 in one part, found it in 2"):
        unpack_rows([*parts, parts[0]])


@pytest.mark.parametrize("word", [{"level": "full"}, {"order": "sort"}], ids=["level", "order"])
def test_an_unknown_word_does_not_turn_a_check_off(word):
    spec = packing.spec_of(streams=1, topk=2)
    (name,) = word
    with pytest.raises(ReplayConfigError, match=f"pack_rows: {name}: expected one of"):
        pack_rows([packing.newest_first(4, spec)], spec, PackLayout((4,)), **word)


def test_encoded_rows_that_start_late_are_no_rows_of_a_whole_sample():
    spec = packing.spec_of(streams=1, topk=2)
    rows = packing.newest_first(9, spec)
    late = EncodedSource(encode_rows(rows[3:], spec, "u16", start=3), spec)
    with pytest.raises(ReplayDecodeError, match="expected rows from position 0, got encoded rows from 3"):
        pack_rows([late], spec, PackLayout((len(rows) - 2,)))
