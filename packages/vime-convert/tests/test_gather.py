# SPDX-License-Identifier: Apache-2.0
"""Loading and exporting with several ranks: every rank gets the whole checkpoint back, bit for bit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="uses Megatron's parallel groups")

WORLDS = {
    2: [{"tp": 2}, {"pp": 2}, {"ep": 2}, {"tp": 2, "etp": 2}],
    4: [{"tp": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"pp": 2, "ep": 2}],
}


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gather(
    world: int, tmp_path: Path, dsv4_config: dict[str, Any], make_checkpoint: Callable[..., Path]
) -> None:
    source = make_checkpoint(tmp_path / "in", dsv4_config)
    worker = Path(__file__).with_name("gather_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    run = subprocess.run(
        [*launch, str(worker), json.dumps(WORLDS[world]), str(source), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == WORLDS[world], run.stderr[-3000:]
    for line in lines:
        assert line["results"] == [""] * world, line
