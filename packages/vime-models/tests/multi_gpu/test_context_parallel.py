# SPDX-License-Identifier: Apache-2.0
"""Over nccl a microbatch split over ranks computes what one GPU computes, in every order of rows, balanced or not."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness import launch
from one_rank import LIMITS, check_context_parallel
from worlds import DIST, WORLDS, record_largest

NAMES = {
    2: (
        "contiguous",
        "zigzag",
        "bshd",
        "bshd-zigzag",
        "contiguous-balanced",
        "zigzag-balanced",
        "parts-balanced",
    ),
    4: ("long", "long-balanced", "tp2-zigzag", "tp2-bshd"),
    8: (),
}
CASES = [(size, f"{name}-{precision}") for size in WORLDS for name in NAMES[size] for precision in LIMITS]
BITS = [f"balance-keeps-bits-{name}" for name in ("contiguous", "zigzag")]

pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(not WORLDS, reason="fewer than two GPUs")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of_world(size: int) -> dict[str, list[Any]]:
        cases = [case for world, case in CASES if world == size] + ([*BITS, "planted"] if size == 2 else [])
        directory: Path = tmp_path_factory.mktemp(f"world-{size}")
        return launch(DIST / "cp_worker.py", size, cases, directory, device="cuda")

    return of_world


@pytest.mark.parametrize("size, case", CASES, ids=[case for _, case in CASES])
def test_equals_one_gpu(results: Any, size: int, case: str, record_property: Any) -> None:
    ranks = results(size)[case]
    record_largest(record_property, ranks, "logits", "grads")
    check_context_parallel(ranks, case)


@pytest.mark.parametrize("case", BITS)
def test_row_balance_keeps_every_bit(results: Any, case: str) -> None:
    """Outputs and log-sum-exps of four attentions, and the logits."""
    assert results(2)[case] == [[True] * 9] * 2


def test_mistakes_at_a_border_show(results: Any) -> None:
    for result in results(2)["planted"]:
        assert len(result) >= 10
        assert min(result.values()) >= 1e-4, result
