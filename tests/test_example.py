# SPDX-License-Identifier: Apache-2.0
"""The training example passes its own checks: loss, exact resume, export equal in transformers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_tiny_training_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_dsv4_tiny.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok    ") == 3
    assert (tmp_path / "out" / "hf" / "model.safetensors").exists()
