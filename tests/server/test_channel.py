# SPDX-License-Identifier: Apache-2.0
"""The picks of a real server: shape, completeness and equality over prompts, caches, turns, endpoints and endings."""

import threading
from typing import Any

import numpy as np
import pytest
from serving import BLOCK, LAYER_IDS, MAX_NUM_BATCHED_TOKENS, TOPK, Server, incomplete_rows, token_ids

from vime_vllm_patch import wire
from vime_vllm_patch.client import Picks, picks_of

pytestmark = pytest.mark.slow
GENERATE = "/inference/v1/generate"


def checked(choice: dict[str, Any], prompt: int, *, prompt_start: int = 0) -> np.ndarray:
    """The choice's array, after the checks that hold for every answer."""
    tokens = prompt + len(choice["token_ids"])
    picks = picks_of(choice, num_tokens=tokens, prompt_start=prompt_start, layer_ids=LAYER_IDS, topk=TOPK)
    assert picks is not None
    assert incomplete_rows(picks, prompt_start) == []
    return picks


def as_sets(picks: np.ndarray) -> np.ndarray:
    """Rows in one order: the wire's order means nothing."""
    return np.sort(picks, -1)


@pytest.mark.parametrize("length", [1, 3, 40, 256, 257], ids="{}-tokens".format)
def test_short_prompt(server: Server, length: int) -> None:
    (choice,) = server.generate(token_ids(length, seed=length))
    picks = checked(choice, length)
    assert picks.shape == (length + 5, len(LAYER_IDS), TOPK)
    assert choice["routed_experts"] is not None


def test_long_prompt_in_chunks_then_a_turn_on_the_prefix_cache(server: Server) -> None:
    # Ten blocks and the last sampled token: all rows of the first turn are in the store, so no row is computed again
    # in a batch of another shape, where bfloat16 may round to another pick.
    prompt = token_ids(10 * BLOCK + 1 - 6, seed=1)
    assert len(prompt) > 2 * MAX_NUM_BATCHED_TOKENS
    (choice,) = server.generate(prompt)
    first = checked(choice, len(prompt))

    talk = Picks(layer_ids=LAYER_IDS, topk=TOPK)
    talk.request(len(prompt))
    talk.add(choice, len(prompt) + len(choice["token_ids"]))
    longer = prompt + choice["token_ids"] + token_ids(20, seed=2)
    options = talk.request(len(longer))
    assert options == {wire.PROMPT_START_OPTION: 10 * BLOCK}
    (turn,) = server.generate(longer, **options)
    talk.add(turn, len(longer) + len(turn["token_ids"]))

    (whole,) = server.generate(longer)
    assert whole["token_ids"] == turn["token_ids"]
    full = checked(whole, len(longer))
    np.testing.assert_array_equal(as_sets(talk.array), as_sets(full))
    np.testing.assert_array_equal(as_sets(full[: len(first)]), as_sets(first))


def test_several_requests_in_one_batch(server: Server) -> None:
    prompts = [token_ids(length, seed=10 + length) for length in (700, 40, 1100, 5)]
    alone: dict[int, Any] = {}

    def ask(index: int) -> None:
        alone[index] = server.generate(prompts[index], max_tokens=12)[0]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, prompt in enumerate(prompts):
        picks = checked(alone[index], len(prompt))
        (again,) = server.generate(prompt, max_tokens=12)
        shared = len(prompt)
        np.testing.assert_array_equal(as_sets(checked(again, shared)[:shared]), as_sets(picks[:shared]))


@pytest.mark.parametrize("start", [0, 1, 32, 39, 40], ids="start-{}".format)
def test_prompt_start(server: Server, start: int) -> None:
    prompt = token_ids(40, seed=3)
    (choice,) = server.generate(prompt, indexer_topk_prompt_start=start)
    picks = checked(choice, len(prompt), prompt_start=start)
    assert len(picks) == 45 - start
    (full,) = server.generate(prompt)
    np.testing.assert_array_equal(as_sets(picks), as_sets(checked(full, len(prompt))[start:]))


def test_nothing_generated_leaves_an_empty_array(server: Server) -> None:
    prompt = token_ids(40, seed=3)
    (choice,) = server.generate(prompt, max_tokens=1, indexer_topk_prompt_start=40)
    assert checked(choice, len(prompt), prompt_start=40).shape == (0, len(LAYER_IDS), TOPK)


def test_start_of_one_channel_leaves_the_other_whole(server: Server) -> None:
    prompt = token_ids(40, seed=3)
    (plain,) = server.generate(prompt)
    (late,) = server.generate(prompt, indexer_topk_prompt_start=30)
    (other,) = server.generate(prompt, routed_experts_prompt_start=30)
    assert late["routed_experts"] == plain["routed_experts"] != other["routed_experts"]
    assert other["indexer_topk"] == plain["indexer_topk"] != late["indexer_topk"]


def test_two_samples_of_one_prompt(server: Server) -> None:
    prompt = token_ids(300, seed=4)
    choices = server.generate(prompt, n=2, temperature=1.0, seed=5, max_tokens=8)
    first, second = (checked(choice, len(prompt)) for choice in choices)
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    np.testing.assert_array_equal(as_sets(first[:300]), as_sets(second[:300]))


def test_stop_string(server: Server) -> None:
    prompt = token_ids(60, seed=6)
    (free,) = server.generate(prompt, max_tokens=8)
    stop = f"t{free['token_ids'][3]}"
    (choice,) = server.generate(prompt, max_tokens=8, stop=[stop], detokenize=True)
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == free["token_ids"][:4]
    checked(choice, len(prompt))


def test_abort_keeps_the_rows_of_the_tokens_kept(server: Server) -> None:
    prompt = token_ids(50, seed=8)
    body = {"request_id": "to-abort", "token_ids": prompt}
    body |= {"sampling_params": {"max_tokens": 3000, "temperature": 0, "ignore_eos": True}}
    tokens: list[int] = []
    for chunk in server.stream(GENERATE, body):
        tokens += chunk["token_ids"] or []
        if len(tokens) == 3:
            # The endpoint puts its name before the caller's id.
            ids = ["generate-tokens-to-abort"]
            assert server.post("/inference/v1/abort_requests", {"request_ids": ids})[0] == 200
    assert chunk["finish_reason"] == "abort"
    assert 3 <= len(tokens) < 3000
    checked(chunk | {"token_ids": tokens}, len(prompt))


def test_client_that_leaves_does_not_disturb_the_next(server: Server) -> None:
    body = {"token_ids": token_ids(50, seed=9), "stream": True}
    body |= {"sampling_params": {"max_tokens": 3000, "temperature": 0, "ignore_eos": True}}
    with server.open(GENERATE, body) as response:
        response.readline()
    (choice,) = server.generate(token_ids(50, seed=9))
    checked(choice, 50)


def test_stream_carries_the_picks_in_the_last_chunk(server: Server) -> None:
    prompt = token_ids(40, seed=3)
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    chunks = list(server.stream(GENERATE, {"token_ids": prompt, "sampling_params": params}))
    assert [chunk["indexer_topk"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    tokens = [token for chunk in chunks for token in chunk["token_ids"]]
    streamed = checked(chunks[-1] | {"token_ids": tokens}, len(prompt))
    (choice,) = server.generate(prompt)
    np.testing.assert_array_equal(as_sets(streamed), as_sets(checked(choice, len(prompt))))


def test_opt_out(server: Server) -> None:
    prompt = token_ids(300, seed=11)
    (out,) = server.generate(prompt, return_indexer_topk=False)
    assert out["indexer_topk"] is None
    assert out["indexer_topk_layer_ids"] is None
    assert out["routed_experts"] is not None
    # Its rows are in the store: a later request that hits its blocks gets them.
    (choice,) = server.generate(prompt, return_indexer_topk=True)
    checked(choice, len(prompt))


@pytest.mark.parametrize("start", [0, 7], ids="start-{}".format)
def test_completions(server: Server, start: int) -> None:
    prompt = token_ids(40, seed=3)
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    status, response = server.post("/v1/completions", body | {"indexer_topk_prompt_start": start})
    assert status == 200, response
    picks = checked(response["choices"][0], len(prompt), prompt_start=start)
    (choice,) = server.generate(prompt)
    np.testing.assert_array_equal(as_sets(picks), as_sets(checked(choice, len(prompt))[start:]))


def test_chat(server: Server) -> None:
    words = " ".join(f"t{token}" for token in token_ids(40, seed=3))
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 6, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    status, response = server.post("/v1/chat/completions", body)
    assert status == 200, response
    picks = checked(response["choices"][0], len(response["prompt_token_ids"]))
    (choice,) = server.generate(response["prompt_token_ids"])
    np.testing.assert_array_equal(as_sets(picks), as_sets(checked(choice, len(response["prompt_token_ids"]))))
    status, response = server.post("/v1/chat/completions", body | {"return_indexer_topk": False})
    assert status == 200
    assert response["choices"][0]["indexer_topk"] is None
