# SPDX-License-Identifier: Apache-2.0
"""torch_dist checkpoints: training resumes to the bit in its own layout, and weights load into any other."""

from pathlib import Path
from typing import Any

import pytest
from harness import launch

RESUMED = ("tp2-ep2", "pp2", "pp2-draft")
LOADED = (
    "tp2-ep2-to-pp2",
    "tp2-ep2-to-tp2-etp2",
    "tp2-ep2-to-dp2",
    "pp2-to-tp2-ep2",
    "pp2-draft-to-dp2-draft",
)

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results(one_process: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    worker, saved = Path(__file__).with_name("reshard_worker.py"), tmp_path_factory.mktemp("saved")
    cases = [*(f"resume-{layout}" for layout in RESUMED), *LOADED]
    return launch(worker, 2, cases, one_process, saved, timeout=400)


@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_repeats_the_remaining_steps(results: dict[str, list[Any]], layout: str) -> None:
    for result in results[f"resume-{layout}"]:
        assert result["iteration"] == 2
        assert result["resumed"] == result["rest"]
        assert result["differ"] == []
        assert len(result["moved"]) > 200, "the premise: the steps after the save move the weights"


@pytest.mark.parametrize("case", LOADED)
def test_weights_of_one_layout_load_into_another(results: dict[str, list[Any]], case: str) -> None:
    for result in results[case]:
        assert result["differ"] == []
        assert max(result["losses"]) <= 1e-6
