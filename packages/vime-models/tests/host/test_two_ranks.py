# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.dist
def test_context_parallel_attention_and_torchrun_bringup() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("worker.py"))],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert out["unpacked"] < 1e-13
    assert out["packed"] < 1e-13
    assert (out["replaced"], out["cp"]) == (2, 1)
