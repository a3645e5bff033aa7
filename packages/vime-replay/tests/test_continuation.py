# SPDX-License-Identifier: Apache-2.0
"""Rows that several requests build, against the rows of one request for all tokens."""

import numpy as np
import packing
import pytest

from vime_replay.continuation import append_rows, fill_tail, request_start, trim_rows
from vime_replay.errors import ReplayDecodeError

SPEC = packing.spec_of(streams=2, topk=4)
WHOLE = packing.random_rows(np.random.default_rng(1), 40, SPEC, full=True)


def response(start, tokens):
    """What a server returns for a request from `start` that ends with so many tokens."""
    return WHOLE[start : max(tokens - 1, 0)]


def test_turns_add_up_to_one_request():
    """Prompt, answer, tool tokens, answer, an abort before any pass, resume, tool tokens, answer."""
    held = None
    # (prompt of the request, tokens after it); the prompt grows by tool tokens that have no rows yet.
    for prompt, tokens in [(5, 9), (14, 20), (20, 20), (20, 28), (33, 40)]:
        start = request_start(held, prompt)
        assert start == (0 if held is None else len(held)) <= prompt - 1
        new = None if tokens == prompt else response(start, tokens)
        held = append_rows(held, new, spec=SPEC, num_tokens=tokens, start=start)
        if new is not None:
            assert len(held) == tokens - 1
    assert (held == WHOLE).all()


def test_full_responses_replace_what_is_held():
    held = append_rows(None, response(0, 10), spec=SPEC, num_tokens=10, start=0, mode="full")
    held = append_rows(held, response(0, 25), spec=SPEC, num_tokens=25, start=0, mode="full")
    assert (held == WHOLE[:24]).all()
    with pytest.raises(ReplayDecodeError, match="expected all rows, at least the 24 held, got 9"):
        append_rows(held, response(0, 10), spec=SPEC, num_tokens=10, start=0, mode="full")
    with pytest.raises(ReplayDecodeError, match="expected all rows"):
        append_rows(held, response(24, 30), spec=SPEC, num_tokens=30, start=24, mode="full")


def test_an_overlap_is_replaced():
    held = np.full((20, 2, 4), 0, np.int32)
    held = append_rows(held, response(5, 30), spec=SPEC, num_tokens=30, start=5)
    assert (held[5:] == WHOLE[5:29]).all()
    assert (held[:5] == 0).all()


def test_an_abort_keeps_what_is_held():
    held = WHOLE[:7]
    assert append_rows(held, None, spec=SPEC, num_tokens=12, start=7) is held
    assert append_rows(None, None, spec=SPEC, num_tokens=12, start=0) is None


@pytest.mark.parametrize(
    "start, tokens, rows, message",
    [
        (8, 20, WHOLE[8:19], r"rows 7\.\.7 are missing: 7 held, the response starts at 8"),
        # Off by one: N tokens of the turn before, instead of its N - 1 rows.
        (7, 20, WHOLE[8:19], r"shape\.rows\].*= \[12, 2, 4\] for 20 tokens from start 7, got \[11, 2, 4\]"),
        (7, 20, WHOLE[7:20], r"shape\.rows"),
        (21, 20, WHOLE[:0], "start: expected 0 <= start <= 19"),
        (7, 20, WHOLE[7:19, :1], r"shape\.streams"),
    ],
    ids=["gap", "off-by-one", "a-row-more", "start", "streams"],
)
def test_responses_that_do_not_continue_are_refused(start, tokens, rows, message):
    with pytest.raises(ReplayDecodeError, match=message):
        append_rows(WHOLE[:7], rows, spec=SPEC, num_tokens=tokens, start=start)


def test_held_rows_of_another_model_are_refused():
    with pytest.raises(ReplayDecodeError, match="both must come from one model"):
        append_rows(WHOLE[:7, :1], WHOLE[7:19], spec=SPEC, num_tokens=20, start=7)


def test_more_rows_than_the_prompt_has_are_refused():
    assert request_start(WHOLE[:19], 20) == 19
    with pytest.raises(
        ReplayDecodeError, match="20 rows held for a prompt of 20 tokens, expected at most 19"
    ):
        request_start(WHOLE[:20], 20)


@pytest.mark.parametrize("dropped", [0, 1, 5, 39, 40])
def test_rows_are_trimmed_with_tokens(dropped):
    assert (trim_rows(WHOLE, 40 - dropped) == WHOLE[: max(39 - dropped, 0)]).all()
    assert trim_rows(None, 4) is None


def test_a_tail_without_rows_is_filled_if_no_loss_is_taken_on_it():
    # 30 tokens, 24 rows held: tokens 25..29 have none. Response of 20 tokens.
    mask = np.ones(20)
    mask[-5:] = 0
    filled = fill_tail(WHOLE[:24], spec=SPEC, num_tokens=30, loss_mask=mask)
    assert (filled[:24] == WHOLE[:24]).all()
    assert (filled[24:] == -1).all()
    assert len(filled) == 29
    mask[-5] = 1
    with pytest.raises(ReplayDecodeError, match="1 of the 5 tokens without rows count in the loss"):
        fill_tail(WHOLE[:24], spec=SPEC, num_tokens=30, loss_mask=mask)
    whole = WHOLE[:29]
    assert fill_tail(whole, spec=SPEC, num_tokens=30, loss_mask=np.ones(20)) is whole
    assert (fill_tail(None, spec=SPEC, num_tokens=3, loss_mask=[0]) == -1).all()
    with pytest.raises(ReplayDecodeError, match="30 rows for 30 tokens, expected at most 29"):
        fill_tail(WHOLE[:30], spec=SPEC, num_tokens=30, loss_mask=mask)
