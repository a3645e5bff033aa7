# SPDX-License-Identifier: Apache-2.0
"""Over nccl every layout computes what one GPU computes: logits, losses and all gradients, over four microbatches."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from harness import Results
from layouts import LAYOUTS, NCCL_LAYOUTS
from worlds import WORLDS, record_largest

# Relative. float64 runs the torch ops and proves what is sent where; float32 runs the Triton kernels, TF32 off, but for
# the core of the attention, which has 16-bit kernels only.
LIMITS = {"float64": (1e-12, 1e-11), "float32": (2e-6, 1e-4)}
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
    precision = case.rsplit("-", 1)[1]
    logits, grads = LIMITS[precision]
    ranks = result_of(size, case, precision)
    record_largest(record_property, ranks, "logits", "grads", "losses")
    assert len(ranks) == size
    for result in ranks:
        assert result["logits"] <= logits, result
        assert result["grads"] <= grads, result
        assert result["losses"] <= 10 * logits, result
        assert result["compared"][1] > 200, "most parameters were left out"
        assert not result["unknown"], "gradients that one process does not have"
    assert any(result["compared"][0] for result in ranks), "no rank saw logits"


@pytest.mark.parametrize("case", PLANTED)
def test_a_gradient_that_is_not_summed_over_ranks_shows(result_of: Any, case: str) -> None:
    for result in result_of(2, case, "float64"):
        assert result["logits"] <= LIMITS["float64"][0]
        assert result["grads"] > 1e-2
