# SPDX-License-Identifier: Apache-2.0
"""torch_dist checkpoints of real Megatron models, there and back through the command line."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_convert.dist import _drafts, weights_directory
from vime_convert.errors import CheckpointError
from vime_convert.rules import RuleTable


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        pytest.param("qwen3", "vime_models.controls.qwen3", id="qwen3"),
        pytest.param(
            "deepseek_v3", "vime_models.controls.deepseek_v3", id="deepseek_v3", marks=pytest.mark.slow
        ),
    ],
)
def test_round_trip(model_type: str, module: str, tmp_path: Path) -> None:
    for needed in ("megatron", "vime_models"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}, to build a model")
    worker = Path(__file__).with_name("dist_worker.py")
    run = subprocess.run(
        [sys.executable, str(worker), f"{module}:PLUGIN", model_type, str(tmp_path)],
        capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, run.stderr[-3000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["status"] == {
        "make-tiny": 0,
        "hf2dist": 0,
        "dist2hf": 0,
        "dist2hf of training": 0,
        "dist2hf again": 2,
        "dist2hf of another model": 1,
        "make-tiny float32": 0,
        "hf2dist to bfloat16": 1,
        "hf2dist float32": 0,
        "dist2hf float32": 0,
        "dist2hf of damaged metadata": 1,
    }, run.stderr[-3000:]
    assert "expected a path that does not exist yet" in run.stderr
    # Megatron stacks equal layers into one tensor, and names them singly where layers differ.
    assert {"qwen3": "expected [4, ", "deepseek_v3": "not in the checkpoint"}[model_type] in run.stderr
    assert (
        "parameters do not fit into bfloat16 without rounding, first embedding.word_embeddings.weight"
        in run.stderr
    )
    assert "dist32/release: its metadata cannot be read" in run.stderr
    assert result["bitwise"] == [True, True]
    assert result["bitwise float32"]
    assert result["tracker"] == "release"
    assert result["left"] == [*("back", "back32", "dist", "dist32", "hf", "hf32", "iter", "other", "trained")]


@pytest.mark.parametrize(
    "word", [pytest.param("latest", id="nonsense"), pytest.param("7", id="absent-iteration")]
)
def test_bad_directory(tmp_path: Path, word: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"expected a torch_dist checkpoint \(metadata.json\), found none"
    ):
        weights_directory(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(word)
    with pytest.raises(CheckpointError, match=r"got 'latest'|iter_0000007: expected a torch_dist checkpoint"):
        weights_directory(tmp_path)


def test_draft_layers_are_carried_over_or_missed_aloud(
    dsv4: RuleTable,
    dsv4_config: dict[str, Any],
    release_dir: Path,
    tmp_path: Path,
    edit: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    missing = "the output has no draft layers, although config.json says num_nextn_predict_layers = 1"
    for directory in (tmp_path, release_dir):  # no tensors at all; no draft layers among them
        assert _drafts(directory, dsv4_config, dsv4) is None
        assert [missing in record.getMessage() for record in caplog.records] == [True]
        caplog.clear()
    edit(release_dir, lambda t: t.update({"mtp.0.enorm.weight": torch.ones(32)}))
    carried = _drafts(release_dir, dsv4_config, dsv4)
    assert carried is not None
    assert carried.extras == ["mtp.0.enorm.weight"]
    assert _drafts(tmp_path, dsv4_config | {"num_nextn_predict_layers": 0}, dsv4) is None
    assert not caplog.records
