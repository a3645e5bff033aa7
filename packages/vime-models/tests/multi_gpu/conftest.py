# SPDX-License-Identifier: Apache-2.0
"""The ranks of tests/dist on GPUs: the same scripts and cases, over nccl, with the kernels that train."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

DIST = Path(__file__).parents[1] / "dist"
# Test modules and workers import the modules beside them and those of tests/dist by name.
sys.path[:0] = [str(DIST), str(Path(__file__).parent)]

from harness import Results, launch  # noqa: E402
from one_rank import write_reference  # noqa: E402
from worlds import NOT_HERE, WORLDS  # noqa: E402

Ranks = Callable[..., Results]


@pytest.fixture(scope="session")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the checkpoint and the step of one GPU."""
    return write_reference(tmp_path_factory.mktemp("one-gpu"), "cuda")


@pytest.fixture(scope="session")
def ranks(one_gpu: Path) -> Ranks:
    """`ranks(world, cases, script)`: what each rank returned, for each case of a script."""

    def run(world: int, cases: Sequence[str], script: Path = DIST / "worker.py") -> Results:
        return launch(script, world, cases, one_gpu, device="cuda")

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the measured differences, and which world sizes this machine is too small for."""
    terminalreporter.section("several GPUs")
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    for report in reports:
        if values := dict(getattr(report, "user_properties", ())):
            found = ", ".join(f"{name} {value:.2g}" for name, value in values.items())
            terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]}: {found}")
    terminalreporter.write_line(
        f"world sizes run: {WORLDS or 'none'}, not on this machine: {NOT_HERE or 'none'}"
    )
