# SPDX-License-Identifier: Apache-2.0
"""Context parallelism computes what one rank computes, whichever way the trainer hands out rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import launch
from one_rank import LIMITS, check_context_parallel

TWO = [
    f"{name}-{precision}"
    for name in (
        "contiguous",
        "zigzag",
        "bshd",
        "bshd-zigzag",
        "contiguous-balanced",
        "bshd-zigzag-balanced",
        "parts-balanced",
    )
    for precision in LIMITS
] + ["zigzag-attached-float64"]
FOUR = [f"{name}-{p}" for name in ("long", "long-balanced", "tp2-zigzag", "tp2-bshd") for p in LIMITS]
BITS = [f"balance-keeps-bits-{name}" for name in ("contiguous", "zigzag", "bshd")]
MISTAKES = (
    "no rows from the neighbour",
    "oldest key of the window lost",
    "windows cross sequences",
    "groups restart at the cut",
    "group before the cut missing",
    "entries counted over the sum of lengths",
    "entry owned by its first token",
    "positions restart at the cut",
    "queries see by local row",
    "entries left as gathered",
)
REFUSALS = {
    "fewer rows than the window": "at least the window (128), got 64; pad to 512 rows, or use",
    "groups straddle ranks": "a multiple of 512 (2 * cp_size * 128), got 384; pass 512",
    "another order": "--dsv4-cp-layout must be the order in which the trainer hands out rows",
    "another order of queries": "('zigzag', 'zigzag', 2, ",
    "other lengths": "expected [0, 256, 512] (padded key space), got [0, 512]; build both from one PackLayout",
}

pytestmark = pytest.mark.dist
Results = dict[str, Any]


def ranks(world: int, cases: Sequence[str], directory: Path) -> Results:
    return launch(Path(__file__).with_name("cp_worker.py"), world, cases, directory, timeout=300)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = [*TWO, *BITS, "balance-moves-rows", "one-by-one", "planted", "refusals"]
    return ranks(2, cases, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ranks(4, [*FOUR, "balance-moves-rows"], tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_equal_one(two: Results, case: str) -> None:
    check_context_parallel(two[case], case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_equal_one(four: Results, case: str) -> None:
    check_context_parallel(four[case], case)


@pytest.mark.parametrize("mode", ["contiguous", "zigzag"])
def test_packed_equals_one_by_one(two: Results, mode: str) -> None:
    for result in two["one-by-one"]:
        assert len(result[mode]) == 10
        assert max(result[mode]) <= 1e-11


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_at_a_border_shows(two: Results, mistake: str) -> None:
    for result in two["planted"]:
        assert result[mistake] >= 1e-4


@pytest.mark.parametrize("case", BITS)
def test_row_balance_keeps_every_bit(two: Results, case: str) -> None:
    """Outputs and log-sum-exps of four attentions, and the logits."""
    assert two[case] == [[True] * 9] * 2


@pytest.mark.parametrize("fmt", ["thd", "bshd", "thd-parts", "bshd-parts"])
def test_row_balance_moves_rows_where_the_layout_says_and_back(two: Results, fmt: str) -> None:
    assert all(result[fmt] for result in two["balance-moves-rows"])


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["thd", "bshd", "thd-parts", "bshd-parts"])
def test_row_balance_over_four_ranks(four: Results, fmt: str) -> None:
    assert all(result[fmt] for result in four["balance-moves-rows"])


@pytest.mark.parametrize("case", REFUSALS)
def test_a_split_that_cannot_work_is_refused(two: Results, case: str) -> None:
    for result in two["refusals"]:
        assert REFUSALS[case] in result[case]
