# SPDX-License-Identifier: Apache-2.0
"""Over nccl every layout computes what one GPU computes: logits, losses and all gradients, over four microbatches."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from harness import Results
from layouts import LAYOUTS, NCCL_LAYOUTS
from one_rank import LIMITS, check_step
from worlds import WORLDS, record_largest

CASES = [
    (size, f"{name}-{precision}")
    for name, (size, _) in (LAYOUTS | NCCL_LAYOUTS).items()
    for precision in LIMITS
    if size in WORLDS
]
PLANTED = ("unsummed-streams", "unsummed-keys")

pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(not WORLDS, reason="fewer than two GPUs")]


@pytest.fixture(scope="module")
def result_of(ranks: Any) -> Any:
    """`result_of(size, case, precision)`: what the ranks returned."""

    @cache
    def starts(size: int) -> dict[str, Results]:
        # Both precisions at once: the models are small, and most of the time is spent on the host.
        with ThreadPoolExecutor() as pool:
            started = pool.map(lambda precision: ranks(size, cases(size, precision)), LIMITS)
            return dict(zip(LIMITS, started, strict=True))

    return lambda size, case, precision: starts(size)[precision][case]


def cases(size: int, precision: str) -> list[str]:
    planted = PLANTED if (size, precision) == (2, "float64") else ()
    return [*planted, *(case for world, case in CASES if world == size and case.endswith(precision))]


@pytest.mark.parametrize("size, case", CASES, ids=[case for _, case in CASES])
def test_equals_one_gpu(result_of: Any, size: int, case: str, record_property: Any) -> None:
    ranks = result_of(size, case, case.rsplit("-", 1)[1])
    record_largest(record_property, ranks, "logits", "grads", "losses")
    assert len(ranks) == size
    check_step(ranks, case)


@pytest.mark.parametrize("case", PLANTED)
def test_a_gradient_that_is_not_summed_over_ranks_shows(result_of: Any, case: str) -> None:
    for result in result_of(2, case, "float64"):
        assert result["logits"] <= LIMITS["float64"][0]
        assert result["grads"] > 1e-2
