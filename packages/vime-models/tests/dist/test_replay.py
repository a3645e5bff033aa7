# SPDX-License-Identifier: Apache-2.0
"""Picks of single sequences, replayed in a packed microbatch on two ranks: same outputs, gradients and picks."""

from pathlib import Path
from typing import Any

import pytest
from harness import launch
from one_rank import LIMITS, check_replay

LAYOUTS = [
    f"{name}{suffix}-{precision}"
    for name in ("contiguous", "zigzag", "bshd", "bshd-zigzag")
    for suffix in ("", "-balanced")
    for precision in LIMITS
    if precision == "float64" or name == "zigzag"
]
RUNS = [*LAYOUTS, "tp2-contiguous-float64", "recompute-zigzag-float64", "by-score-zigzag-float64"]
# Where each mistake can be seen: padded to even chunks, one division is right; contiguous rows have one order.
MISTAKES = {
    "offsets of the rank's rows": ("contiguous", "zigzag"),
    "offsets of token counts": ("contiguous", "zigzag"),
    "one division of the sum": ("contiguous",),
    "rows of the next token": ("contiguous", "zigzag"),
    "streams in another order": ("contiguous", "zigzag"),
    "rows in the trainer's order": ("zigzag",),
}
PLANTED = [(mistake, name) for mistake, names in MISTAKES.items() for name in names]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [*RUNS, "without", "planted-contiguous", "planted-zigzag", "tp-slice"]
    return launch(Path(__file__).with_name("replay_worker.py"), 2, cases, tmp_path_factory.mktemp("replay"))


@pytest.mark.parametrize("case", RUNS)
def test_outputs_gradients_and_picks_are_those_of_single_sequences(ranks: Any, case: str) -> None:
    check_replay(ranks[case], case)


def test_the_comparison_sees_other_picks(ranks: Any) -> None:
    for result in ranks["without"]:
        assert result["logits"] >= 1e-3


@pytest.mark.parametrize("mistake, name", PLANTED, ids=[f"{name}-{mistake}" for mistake, name in PLANTED])
def test_a_mistake_in_packing_shows(ranks: Any, mistake: str, name: str) -> None:
    for result in ranks[f"planted-{name}"]:
        assert result["none"] <= 1e-12
        assert result[mistake] >= 1e-3


def test_rows_cut_by_tensor_parallel_rank_are_refused(ranks: Any) -> None:
    for rank, message in enumerate(ranks["tp-slice"]):
        assert f"rank {rank}: layer 1 (stream 0): replay has 256 rows, scores have 512" in message


PIPELINES = [f"pp2-{keys}{again}" for keys in ("cursors", "tickets") for again in ("", "-full", "-moe")]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [*PIPELINES, "planted-streams", "planted-tickets"]
    worker = Path(__file__).with_name("replay_pipeline_worker.py")
    return launch(worker, 2, cases, tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_replays_under_megatrons_schedule(stages: Any, case: str) -> None:
    for result in stages[case]:
        assert result["logits"] <= 1e-12, result
        assert result["grads"] <= 1e-11, result
    assert [result["queues"] for result in stages[case]] == [[[2, 0, 0]], [[4, 1, 0]]]


@pytest.mark.parametrize("mistake", ["streams", "tickets"])
def test_a_mistake_in_a_pipeline_shows(stages: Any, mistake: str) -> None:
    assert max(result["grads"] for result in stages[f"planted-{mistake}"]) >= 1e-3
