# SPDX-License-Identifier: Apache-2.0
"""Turns of a conversation against a server in a few lines, which holds all rows and sends what is asked for."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_vllm_patch import wire
from vime_vllm_patch.client import Picks, picks_of
from vime_vllm_patch.wire import WireError

LAYERS = [2, 5, 9]
TOPK = 4
# Row r is the same whenever it is asked for, as with a fixed policy.
ROWS = np.random.default_rng(3).integers(-1, 500, (400, len(LAYERS), TOPK), np.int32)


def answer(num_tokens: int, options: dict[str, int], **other: Any) -> dict[str, Any]:
    rows = ROWS[options.get("indexer_topk_prompt_start", 0) : num_tokens - 1]
    choice = {"indexer_topk": wire.encode(rows), "indexer_topk_layer_ids": LAYERS, "finish_reason": "stop"}
    return choice | other


def picks() -> Picks:
    return Picks(layer_ids=LAYERS, topk=TOPK)


# (tokens that the environment adds, tokens that the model samples, tokens that the client then cuts off)
TURNS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(st.integers(1, 20), TURNS)
def test_any_conversation_ends_with_the_rows_of_one_full_request(
    first: int, turns: list[tuple[int, int, int]]
) -> None:
    held, tokens = picks(), first
    for added, sampled, cut in turns:
        prompt = tokens + added
        options = held.request(prompt)
        assert options["indexer_topk_prompt_start"] <= prompt
        tokens = prompt + sampled
        held.add(answer(tokens, options), tokens)
        cut = min(cut, sampled)
        tokens -= cut
        held.strip(cut)
        assert held.held == tokens - 1
    np.testing.assert_array_equal(held.array, ROWS[: tokens - 1])
    assert not held.array.flags.writeable


def test_the_second_turn_starts_at_the_row_of_the_last_sampled_token() -> None:
    held = picks()
    assert held.request(40) == {"indexer_topk_prompt_start": 0}
    held.add(answer(46, {}), 46)
    assert held.request(62) == {"indexer_topk_prompt_start": 45}


def test_a_shorter_prompt_replaces_the_rows_after_it() -> None:
    held = picks()
    held.add(answer(46, {}), 46)
    assert held.request(30) == {"indexer_topk_prompt_start": 30}
    held.add(answer(33, {"indexer_topk_prompt_start": 30}), 33)
    np.testing.assert_array_equal(held.array, ROWS[:32])


def test_a_request_aborted_before_it_ran_changes_nothing() -> None:
    held = picks()
    held.add(answer(46, {}), 46)
    held.request(62)
    held.add({"indexer_topk": None, "finish_reason": "abort"}, 62)
    assert held.held == 45
    np.testing.assert_array_equal(held.array, ROWS[:45])


REFUSED = {
    "not_patched": ({"finish_reason": "stop"}, "client.missing"),
    "flag_off": ({"indexer_topk": None, "finish_reason": "stop"}, "client.null"),
    "other_layers": (answer(46, {}, indexer_topk_layer_ids=[2, 5, 8]), "client.layers"),
    "one_row_short": (answer(45, {}), "shape.rows"),
    "start_ignored": (answer(47, {}), "shape.rows"),
    "streams": ({"indexer_topk": wire.encode(ROWS[:45, :2])}, "shape.streams"),
    "topk": ({"indexer_topk": wire.encode(ROWS[:45, :, :3])}, "shape.topk"),
    "broken": ({"indexer_topk": "%%%%"}, "wire.base64"),
}


@pytest.mark.parametrize("choice, code", REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_answer_leaves_what_is_held(choice: dict[str, Any], code: str) -> None:
    held = picks()
    held.add(answer(10, {}), 10)
    held.request(5)
    with pytest.raises(WireError) as caught:
        held.add(choice, 46 + 5)
    assert caught.value.code == code
    assert held.held == 9


def test_without_expectations_the_first_answer_sets_them() -> None:
    held = Picks()
    held.add(answer(10, {}), 10)
    held.request(10)
    with pytest.raises(WireError, match="did the server change its model") as caught:
        held.add({"indexer_topk": wire.encode(ROWS[9:12, :2])}, 13)
    assert caught.value.code == "shape.streams"


@pytest.mark.parametrize("count", [-1, 10], ids=["negative", "too_many"])
def test_strip_needs_the_rows(count: int) -> None:
    held = picks()
    held.add(answer(10, {}), 10)
    with pytest.raises(WireError, match="cannot drop"):
        held.strip(count)


def test_nothing_received_is_said() -> None:
    picks().strip(0)
    with pytest.raises(WireError, match="none were received"):
        _ = picks().array


def test_no_rows_is_an_array_too() -> None:
    found = picks_of(answer(1, {}), num_tokens=1, layer_ids=LAYERS, topk=TOPK)
    assert found is not None
    assert found.shape == (0, 3, 4)
