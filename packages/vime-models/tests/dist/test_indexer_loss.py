# SPDX-License-Identifier: Apache-2.0
"""The indexer's loss has the same gradients on two ranks as on one, whether they share heads or rows."""

from pathlib import Path
from typing import Any

import pytest
from harness import launch

pytestmark = pytest.mark.dist
CASES = [f"{mode}-{name}" for mode in ("joint", "warmup") for name in ("tp2", "cp2", "cp2-balanced")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = Path(__file__).with_name("indexer_worker.py")
    return launch(worker, 2, [*CASES, "planted"], tmp_path_factory.mktemp("indexer"), timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_rank(case: str, results: dict[str, Any]) -> None:
    for rank in results[case]:
        assert len(rank) == 12
        assert max(rank.values()) < 1e-11, rank


def test_a_teacher_that_sees_its_own_heads_only_is_found(results: dict[str, Any]) -> None:
    for rank in results["planted"]:
        assert min(rank.values()) > 1e-3
