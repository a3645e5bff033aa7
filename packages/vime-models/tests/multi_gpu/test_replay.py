# SPDX-License-Identifier: Apache-2.0
"""Over nccl: picks of single sequences, replayed in a microbatch split over two GPUs."""

from functools import cache
from typing import Any

import pytest
from harness import launch
from one_rank import check_replay
from worlds import DIST, WORLDS, record_largest

CASES = [
    "contiguous-float64",
    "zigzag-balanced-float32",
    "zigzag-float64",
    "bshd-float64",
    "tp2-contiguous-float64",
    "recompute-zigzag-float32",
    "by-score-zigzag-float32",
]

pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(not WORLDS, reason="fewer than two GPUs")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("replay")
    return launch(DIST / "replay_worker.py", 2, [*CASES, "without"], directory, device="cuda")


@pytest.mark.parametrize("case", CASES)
def test_outputs_gradients_and_picks_are_those_of_single_sequences(
    two: Any, case: str, record_property: Any
) -> None:
    record_largest(record_property, two[case], "logits", "grads")
    check_replay(two[case], case)


def test_the_comparison_sees_other_picks(two: Any) -> None:
    for result in two["without"]:
        assert result["logits"] >= 1e-3


# Interleaved chunks have both indexers on the second rank.
PIPELINES = ["pp2-tickets-full", "vpp2-cursors-full", "vpp2-tickets-full"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of_schedule(schedule: str) -> dict[str, list[Any]]:
        cases = [case for case in PIPELINES if case.startswith(schedule)]
        directory = tmp_path_factory.mktemp(schedule)
        return launch(DIST / "replay_pipeline_worker.py", 2, cases, directory, device="cuda")

    return of_schedule


@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_replays_under_megatrons_schedule(stages: Any, case: str, record_property: Any) -> None:
    schedule = case.partition("-")[0]
    results = stages(schedule)[case]
    record_largest(record_property, results, "logits", "grads")
    for result in results:
        assert result["logits"] <= 1e-12, result
        assert result["grads"] <= 1e-11, result
    queues = {"pp2": [[[2, 0, 0]], [[4, 1, 0]]], "vpp2": [[], [[2, 0, 0], [4, 1, 1]]]}
    assert [result["queues"] for result in results] == queues[schedule]
