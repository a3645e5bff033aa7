# SPDX-License-Identifier: Apache-2.0
"""Bugs that packing could have, and the check that finds each of them."""

import numpy as np
import packing
import pytest
import test_pack

from vime_replay import pack
from vime_replay.errors import ReplayDecodeError
from vime_replay.layout import PackLayout
from vime_replay.rows import check_rows

pytestmark = pytest.mark.mutation


def before(counts):
    return np.cumsum(counts) - counts


def cp_local_offset(layout, ratio=1):
    return before(np.asarray(layout.padded_lengths) // layout.cp_size // ratio)


def token_len_in_padded_space(layout, ratio=1):
    return before(np.asarray(layout.lengths) // ratio)


def floor_of_the_sum(layout, ratio=1):
    return before(np.asarray(layout.padded_lengths)) // ratio


def tokens_for_groups(layout, ratio=1):
    return before(np.asarray(layout.padded_lengths))


def row_after(layout, window):
    for dst, sample, rows in original_recorded(layout, window):
        yield dst, sample, slice(rows.start + 1, rows.stop + 1) if rows.start else rows


def without_the_last_row(layout, window):
    for dst, sample, rows in original_recorded(layout, window):
        yield dst, sample, slice(rows.start, rows.stop - 1)


original_recorded = pack._recorded
OFFSETS = [cp_local_offset, token_len_in_padded_space, floor_of_the_sum, tokens_for_groups]


@pytest.mark.parametrize("bug", OFFSETS, ids=lambda bug: bug.__name__)
def test_wrong_key_offsets_are_found(bug, monkeypatch):
    monkeypatch.setattr(PackLayout, "key_offsets", bug)
    with pytest.raises(AssertionError):
        test_pack.check_random_layouts(seed=0, count=60)
    found = 0
    for key, ranks in test_pack.EXAMPLE.items():
        for rank in range(len(ranks)):
            try:
                test_pack.test_the_written_out_example(*key, tp=1, rank=rank)
            except AssertionError:
                found += 1
    assert found


@pytest.mark.parametrize("bug", [row_after, without_the_last_row], ids=lambda bug: bug.__name__)
def test_wrong_rows_are_found(bug, monkeypatch):
    monkeypatch.setattr(pack, "_recorded", bug)
    with pytest.raises((AssertionError, ValueError)):
        test_pack.check_random_layouts(seed=0, count=60)


def test_a_tensor_parallel_slice_is_found(monkeypatch):
    """Every tensor-parallel rank needs all rows of its context-parallel rank."""
    local_rows = PackLayout.local_rows.fget
    monkeypatch.setattr(PackLayout, "local_rows", property(lambda layout: local_rows(layout) // 2))
    with pytest.raises((AssertionError, ValueError)):
        test_pack.test_the_written_out_example("zigzag", "padded", 1, tp=2, rank=0)


def test_a_hole_that_was_filled_with_zeros_is_found():
    spec = packing.spec_of(ratio=4)
    rows = packing.newest_first(30, spec)
    rows[12] = 0
    with pytest.raises(ReplayDecodeError, match=r"value\.hole"):
        check_rows(rows, spec, num_tokens=30)


def test_rows_of_the_neighbouring_query_are_found():
    """One row late is causal: only a comparison of whole sets finds it, and level range does not."""
    spec = packing.spec_of(topk=8)
    rows = packing.newest_first(30, spec)
    late = np.concatenate([rows[:1], rows[:-1]])
    check_rows(late, spec, num_tokens=30)
    with pytest.warns(UserWarning, match=r"row 1 stream 0 selects 1 of 2 available keys"):
        check_rows(late, spec, num_tokens=30, level="full")
    early = np.concatenate([rows[1:], rows[-1:]])
    with pytest.raises(ReplayDecodeError, match=r"value\.range"):
        check_rows(early, spec, num_tokens=30)
