# SPDX-License-Identifier: Apache-2.0
"""What one rank computes, and how close to it several must come; for the tests here and for those over nccl."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Device, launch

# Relative: logits, and the worst gradient. What several ranks share is summed in another order, and nothing else may
# differ. On GPUs float64 runs the torch ops and proves what is sent where; float32 runs the Triton kernels, TF32 off,
# but for the core of the attention, which has 16-bit kernels only.
LIMITS = {"float64": (1e-12, 1e-11), "float32": (2e-6, 1e-4)}


def write_reference(directory: Path, device: Device) -> Path:
    """Fills the directory with a checkpoint and the step of one rank, far enough from ties for a comparison."""
    worker = Path(__file__).with_name("worker.py")
    (result,) = launch(worker, 1, ["reference"], directory, device=device)["reference"]
    assert result["gap"] > 1e-5, "a top-k is so close to a tie that rounding could decide it"
    assert result["clamp"] > 1e-6, (
        "a value is so close to the bound of its clamp that rounding could decide it"
    )
    return directory


def check_close(results: Sequence[dict[str, Any]], case: str) -> None:
    """Logits and gradients of every rank, within the limits of the precision that ends the case's name."""
    logits, grads = LIMITS[case.rsplit("-", 1)[1]]
    for result in results:
        assert result["logits"] <= logits, result
        assert result["grads"] <= grads, result


def check_step(results: Sequence[dict[str, Any]], case: str) -> None:
    """A case of `worker.py`."""
    check_close(results, case)
    logits, _ = LIMITS[case.rsplit("-", 1)[1]]
    for result in results:
        assert result["losses"] <= 10 * logits, result
        assert result["compared"][1] > 200, "most parameters were left out"
        assert not result["unknown"], "gradients that one process does not have"
    assert any(result["compared"][0] for result in results), "no rank saw logits"


def check_context_parallel(results: Sequence[dict[str, Any]], case: str) -> None:
    """A case of `cp_worker.py`."""
    for result in results:
        assert result["gap"] > 1e-5, "a selection is so close to a tie that rounding could decide it"
        assert result["compared"] > 150, "most parameters were left out"
    check_close(results, case)


def check_replay(results: Sequence[dict[str, Any]], case: str) -> None:
    """A case of `replay_worker.py`: each replay of each indexer gave the recorded picks."""
    for result in results:
        assert result["gap"] > 1e-5, "a router is so close to a tie that rounding could decide it"
        assert result["clamp"] > 1e-6 or case.endswith("float64"), (
            "a value is so close to the bound of its clamp"
        )
        assert result["same picks"] == [True] * (4 if case.startswith("recompute") else 2)
    check_close(results, case)
