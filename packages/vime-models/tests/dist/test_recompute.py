# SPDX-License-Identifier: Apache-2.0
"""Recomputing activations changes no bit, also when layers and microbatches are spread over ranks."""

from typing import Any

import pytest
from layouts import RECOMPUTATIONS, RECOMPUTED_LAYOUTS

CASES = [f"{layout}-recompute-{name}" for layout in RECOMPUTED_LAYOUTS for name in RECOMPUTATIONS]


@pytest.fixture(scope="module")
def results(ranks: Any) -> dict[str, list[Any]]:
    return ranks(2, CASES)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_recomputation_repeats_every_gradient_bit(results: dict[str, list[Any]], case: str) -> None:
    assert results[case] == [[], []]
