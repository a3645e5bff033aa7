# SPDX-License-Identifier: Apache-2.0
"""Every layout computes what one process computes: logits, losses and all gradients, over four microbatches."""

import re
from typing import Any

import pytest
from layouts import LAYOUTS
from one_rank import LIMITS, check_step

PLANTED = ("unsummed-streams", "unsummed-keys")

pytestmark = pytest.mark.dist


def cases(world: int) -> list[str]:
    return [f"{name}-{p}" for name, (size, _) in LAYOUTS.items() if size == world for p in LIMITS]


@pytest.fixture(scope="module")
def two(ranks: Any) -> dict[str, list[Any]]:
    return ranks(2, [*cases(2), *PLANTED, "interleaved", "refusals"])


@pytest.fixture(scope="module")
def four(ranks: Any) -> dict[str, list[Any]]:
    return ranks(4, cases(4))


@pytest.mark.parametrize("case", cases(2))
def test_two_ranks_equal_one(two: dict[str, list[Any]], case: str) -> None:
    check_step(two[case], case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(4))
def test_four_ranks_equal_one(four: dict[str, list[Any]], case: str) -> None:
    check_step(four[case], case)


@pytest.mark.parametrize("case", PLANTED)
def test_a_gradient_that_is_not_summed_over_ranks_shows(two: dict[str, list[Any]], case: str) -> None:
    for result in two[case]:
        assert result["logits"] <= LIMITS["float64"][0]
        assert result["grads"] > 1e-2


def test_chunks_of_interleaved_stages_are_the_model(two: dict[str, list[Any]]) -> None:
    assert two["interleaved"][1]["logits"] <= LIMITS["float64"][0]


@pytest.mark.parametrize(
    "layout, message",
    [
        ("odd", "--num-layers is 5: .*--decoder-last-pipeline-num-layers 2"),
        ("virtual", "--num-layers-per-virtual-pipeline-stage is 2: must not be given with gloo"),
    ],
)
def test_layouts_that_cannot_work_are_refused(two: dict[str, list[Any]], layout: str, message: str) -> None:
    for said in two["refusals"]:
        assert re.search(message, said[layout])
