# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251
"""Scheduler, connectors, store and output processor together: every row is that of its token, whatever happened."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

PROMPT = list(range(100, 140))


def test_one_request(rig: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    one = rig()
    one.add("a", PROMPT)
    found = one.run()["a"].indexer_topk
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, wanted(44))
    assert one.finished["a"].routed_experts is None


def test_chunked_prefill_beside_decoding(rig: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    one = rig()
    one.add("a", PROMPT, 12)
    one.step()
    one.add("b", list(range(300)), 5)  # 64 tokens a step
    done = one.run()
    np.testing.assert_array_equal(done["a"].indexer_topk, wanted(52))
    np.testing.assert_array_equal(done["b"].indexer_topk, wanted(305))
    assert len(one.computed["b"]) > 5


def test_rows_of_cached_blocks_come_from_the_store(
    rig: Callable[..., Any], wanted: Callable[..., Any]
) -> None:
    one = rig()
    one.add("a", list(range(90)))
    one.run()
    one.add("b", [*range(90), 7, 8, 9])
    np.testing.assert_array_equal(one.run()["b"].indexer_topk, wanted(97))
    assert one.computed["b"][0] == (80, 13)


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 79, 80, 81, 92, 93], ids=str)
def test_prompt_start(rig: Callable[..., Any], wanted: Callable[..., Any], start: int) -> None:
    one = rig()
    one.add("a", list(range(90)))
    one.run()
    one.add("b", [*range(90), 7, 8, 9], indexer_topk_prompt_start=start)
    np.testing.assert_array_equal(one.run()["b"].indexer_topk, wanted(97, start))


def test_a_start_at_the_end_of_a_prompt_with_one_output_leaves_no_rows(rig: Callable[..., Any]) -> None:
    one = rig()
    one.add("a", PROMPT, 1, indexer_topk_prompt_start=40)
    assert one.run()["a"].indexer_topk.shape == (0, 2, 8)


def test_opting_out_changes_nothing_for_the_next(rig: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    one = rig()
    one.add("a", list(range(90)), return_indexer_topk=False)
    one.add("b", PROMPT)
    done = one.run()
    assert done["a"].indexer_topk is None
    np.testing.assert_array_equal(done["b"].indexer_topk, wanted(44))
    one.add("c", [*range(90), 7], return_indexer_topk=True)
    np.testing.assert_array_equal(one.run()["c"].indexer_topk, wanted(95))
    assert one.computed["c"][0][0] == 80


@pytest.mark.parametrize("picks, experts", [(0, 0), (20, 0), (0, 20), (20, 33), (33, 20)], ids=str)
def test_both_channels_with_their_own_starts(
    rig: Callable[..., Any], wanted: Callable[..., Any], picks: int, experts: int
) -> None:
    one = rig(enable_return_routed_experts=True)
    one.add("a", PROMPT, indexer_topk_prompt_start=picks, routed_experts_prompt_start=experts)
    one.add("b", PROMPT[::-1], return_indexer_topk=False)
    done = one.run()
    np.testing.assert_array_equal(done["a"].indexer_topk, wanted(44, picks))
    positions = np.arange(43)
    every = np.stack([positions % 251, positions % 13, positions * 0 + 9], 1)[..., None]
    np.testing.assert_array_equal(done["a"].routed_experts, every[experts:])
    assert done["b"].indexer_topk is None
    np.testing.assert_array_equal(done["b"].routed_experts, every)


def test_preempted_requests_get_all_rows(rig: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    one = rig(num_blocks=10)
    prompts = {name: [ord(name) + 7 * at for at in range(30)] for name in "abc"}
    for name, prompt in prompts.items():
        one.add(name, prompt, 40)
    done = one.run()
    assert one.preempted
    for name in prompts:
        np.testing.assert_array_equal(done[name].indexer_topk, wanted(70))


def test_after_a_weight_update_old_rows_are_not_served(
    rig: Callable[..., Any], wanted: Callable[..., Any]
) -> None:
    one = rig()
    one.add("a", list(range(90)))
    one.run()
    assert one.scheduler.reset_prefix_cache()
    one.add("b", list(range(90)))
    np.testing.assert_array_equal(one.run()["b"].indexer_topk, wanted(94))
    assert one.computed["b"][0][0] == 0


def test_a_stop_token_in_the_middle_drops_its_rows(
    rig: Callable[..., Any], wanted: Callable[..., Any]
) -> None:
    one = rig()
    one.add("a", PROMPT, 20, stop_token_ids=[543])
    done = one.run()["a"]
    assert list(done.token_ids) == [540, 541, 542, 543]
    np.testing.assert_array_equal(done.indexer_topk, wanted(44))


def test_rejected_drafts_leave_no_rows(rig: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata
    from vllm.utils.indexer_topk import widen_picks

    one = rig()
    found = []
    # (first position, positions computed, drafts rejected); the second step is 1 token and 2 drafts.
    for start, count, rejected in [(0, 15, 0), (15, 3, 2), (16, 3, 1), (18, 1, 0)]:
        one.worker.begin_step(AuxOutputConnectorMetadata(0, {"a": start}, {}, ()))
        one.capture(list(range(start, start + count)))
        batch = SimpleNamespace(req_ids=["a"], query_start_loc_np=np.array([0, count]))
        batch.num_computed_tokens_np = np.array([start])
        pending = one.worker.prepare_output(batch)
        pending.enqueue_cpu_copy(np.array([1]), np.array([rejected]))
        output = pending.process_output()["a"]
        found.append(widen_picks(output.layout.unpack(output.rows)["indexer_topk"]))
    np.testing.assert_array_equal(np.concatenate(found), wanted(20))


def test_many_at_once(rig: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    one = rig(num_blocks=14)
    random = np.random.default_rng(5)
    lengths = {}
    for number in range(24):
        base = 1000 * int(random.integers(2))
        stem = range(base, base + int(random.integers(3, 90)))
        prompt = [*stem, number + 1]
        start, count = int(random.integers(len(prompt) + 1)), int(random.integers(1, 30))
        one.add(str(number), prompt, count, indexer_topk_prompt_start=start)
        lengths[str(number)] = (len(prompt) + count, start)
        one.step()
    done = one.run()
    assert one.preempted
    assert any(parts[0][0] for parts in one.computed.values())
    for name, (tokens, start) in lengths.items():
        np.testing.assert_array_equal(done[name].indexer_topk, wanted(tokens, start))
