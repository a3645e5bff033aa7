# SPDX-License-Identifier: Apache-2.0
"""Real Megatron arguments to a trained, saved and resumed model, on the CPU and in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("training") / "checkpoints"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "train_script.py"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result | {"files": sorted(path.name for path in directory.iterdir())}


def test_resume_repeats_the_remaining_losses_exactly(run: dict[str, Any]) -> None:
    assert run["iteration"] == 2
    assert run["resumed"] == run["rest"]
    assert run["same_weights"]
    assert len(set(run["first"] + run["rest"])) == 4, "the premise: every step has another loss"


def test_the_files_are_an_ordinary_megatron_checkpoint(run: dict[str, Any]) -> None:
    assert run["files"] == ["iter_0000002", "latest_checkpointed_iteration.txt"]


def test_parsed_arguments_are_ready_to_build_with(run: dict[str, Any]) -> None:
    assert run["vocab"] == 56
    assert run["variable"] is False


@pytest.mark.parametrize(
    "key, message",
    [
        ("misspelt", "--dsv4-imp (did you mean --dsv4-impl?)"),
        ("no_checkpoint", "found no latest_checkpointed_iteration.txt"),
        ("no_gradient", "1 parameters never received a gradient, e.g. extra"),
        ("options", "was written with dsv4_impl='vime', got 'megatron'"),
    ],
)
def test_mistakes_are_named(run: dict[str, Any], key: str, message: str) -> None:
    assert message in run[key]
