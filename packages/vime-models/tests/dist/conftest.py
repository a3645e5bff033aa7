# SPDX-License-Identifier: Apache-2.0
"""What one process computes on a tiny checkpoint, once per session; tests start ranks that compare with it."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Test modules and workers import the modules beside them by name.
sys.path.insert(0, str(HERE))

from harness import launch  # noqa: E402
from one_rank import write_reference  # noqa: E402

Ranks = Callable[[int, Sequence[str]], dict[str, list[Any]]]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the checkpoint and the step of one process."""
    return write_reference(tmp_path_factory.mktemp("one-process"), "cpu")


@pytest.fixture(scope="session")
def ranks(one_process: Path) -> Ranks:
    """`ranks(world, cases)`: what each rank returned, for each case of `worker.py`."""

    def run(world: int, cases: Sequence[str]) -> dict[str, list[Any]]:
        return launch(HERE / "worker.py", world, cases, one_process, timeout=120 * world)

    return run
