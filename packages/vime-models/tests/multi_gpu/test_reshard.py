# SPDX-License-Identifier: Apache-2.0
"""torch_dist checkpoints of the distributed optimizer: resumed in their own layout, and loaded into any other."""

from pathlib import Path

import pytest
from harness import Results, launch
from worlds import DIST, WORLDS

RESUMED = ("tp2-ep2", "tp2-etp2", "pp2")
# With the optimizer's state: the second loss comes after a step and shows it. The others: weights only.
LOADED = {
    "tp2-etp2-to-pp2": 2,
    "tp2-etp2-to-dp2": 2,
    "pp2-to-tp2-etp2": 2,
    "tp2-ep2-to-ep2": 2,
    "tp2-ep2-to-pp2": 1,
}

pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(not WORLDS, reason="fewer than two GPUs")]


@pytest.fixture(scope="module")
def results(one_gpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    saved = tmp_path_factory.mktemp("saved")
    cases = [*(f"resume-{layout}" for layout in RESUMED), *LOADED, "moments-lost"]
    return launch(DIST / "reshard_worker.py", 2, cases, one_gpu, saved, device="cuda")


@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_repeats_the_remaining_steps(results: Results, layout: str) -> None:
    for result in results[f"resume-{layout}"]:
        assert result["iteration"] == 2
        assert result["resumed"] == pytest.approx(result["rest"], rel=1e-6)
        assert len(result["moved"]) > 200, "the premise: the steps after the save move the weights"


@pytest.mark.parametrize("case", LOADED)
def test_weights_and_moments_load_into_another_layout(results: Results, case: str) -> None:
    for result in results[case]:
        assert result["differ"] == []
        assert len(result["losses"]) == LOADED[case]
        assert max(result["losses"]) <= 1e-6


def test_the_second_loss_shows_moments_that_were_left_behind(results: Results) -> None:
    for result in results["moments-lost"]:
        first, second = result["losses"]
        assert first <= 1e-6
        assert second > 1e-4
