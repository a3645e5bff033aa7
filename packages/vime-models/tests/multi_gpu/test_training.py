# SPDX-License-Identifier: Apache-2.0
"""Training in bfloat16 with the distributed optimizer stays in the band of one GPU, whatever the layout.

The band is what rounding alone does to one GPU's loss: the same 20 steps with gradients of the four microbatches summed
from another one on.
"""

from typing import Any

import pytest
from layouts import LAYOUTS, NCCL_LAYOUTS
from worlds import DIST, WORLDS

WORKER = DIST / "train_worker.py"
ONE = [f"one-{first}" for first in range(4)]
LAYOUT_OF = {
    2: ("tp2-ep2", "ep2", "pp2-3+2", "pp2-vpp2"),
    4: ("tp2-pp2-4+1", "ep4"),
    8: ("tp2-ep8",),
}
CASES = [(size, name) for size in WORLDS for name in LAYOUT_OF[size]]

pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(not WORLDS, reason="fewer than two GPUs")]


@pytest.fixture(scope="module")
def band(ranks: Any) -> list[list[float]]:
    """Losses of one GPU: four runs, 20 steps."""
    results = ranks(1, ONE, WORKER)
    return [results[name][0] for name in ONE]


@pytest.fixture(scope="module")
def curves(ranks: Any) -> dict[str, list[Any]]:
    return {name: curve for size in WORLDS for name, curve in ranks(size, LAYOUT_OF[size], WORKER).items()}


@pytest.mark.parametrize("size, name", CASES, ids=[name for _, name in CASES])
def test_losses_stay_in_the_band(band: Any, curves: Any, size: int, name: str) -> None:
    means = [sum(losses) / len(losses) for losses in zip(*band, strict=True)]
    spread = max(abs(run[step] - mean) for run in band for step, mean in enumerate(means))
    assert 0 < spread < 0.02 * means[0], "the premise: rounding moves the losses, and only a little"
    assert means[-1] < 0.95 * means[0], "the premise: the model learns"
    assert (LAYOUTS | NCCL_LAYOUTS)[name][0] == size
    for losses in curves[name]:
        assert len(losses) == len(means)
        assert max(abs(loss - mean) for loss, mean in zip(losses, means, strict=True)) <= 2 * spread
