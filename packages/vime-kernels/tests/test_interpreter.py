# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on the CPU: `tests/kernels` in its own process, because the interpreter is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_kernels_in_the_interpreter():
    folder = Path(__file__).parent / "kernels"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
        str(folder),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "VIME_KERNELS_BACKEND": "triton"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
