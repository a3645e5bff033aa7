# SPDX-License-Identifier: Apache-2.0
"""The slice benchmark: its arithmetic, its file, and a dry run of a step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
KERNELS = Path(__file__).parents[2] / "vime-kernels" / "benchmarks" / "results" / "h200.json"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the folder by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import importlib

    return importlib.import_module


def test_overlapping_spans_count_once(modules: Any) -> None:
    length = modules("measure").length
    assert length([]) == 0
    assert length([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 5.0


def test_attention_is_core_indexer_and_selection(modules: Any) -> None:
    import vime_kernels.ops.hyper_connection.triton_sinkhorn
    import vime_kernels.ops.indexer.triton_fwd
    import vime_kernels.ops.sparse_attention.triton_fwd
    import vime_kernels.ops.topk.triton_fwd  # noqa: F401

    names = modules("measure").attention_kernels()
    assert {"forward_kernel", "_logits_kernel", "_select_kernel"} <= names
    assert not any("swiglu" in name or "mix" in name or "sinkhorn" in name for name in names)


def test_planned_attention_follows_the_rows(modules: Any) -> None:
    predict, slices, kernels = modules("predict"), modules("slices"), json.loads(KERNELS.read_text())
    names = ("64k-single", "cp2-64k-single", "cp2-64k-single-balanced")
    whole, halves, balanced = (
        predict.attention_ms(slices.CASES[name], slices.FLASH_SLICE, kernels) for name in names
    )
    assert len(whole) == 1
    assert sum(halves) == pytest.approx(whole[0]) == sum(balanced)
    assert halves[1] > 1.3 * halves[0], "the second half sees three quarters of the entries"
    assert max(balanced) < 1.01 * min(balanced)


def test_row_balance_takes_what_was_planned_from_the_slower_rank(modules: Any) -> None:
    """Of the filed records."""
    predict, slices, kernels = modules("predict"), modules("slices"), json.loads(KERNELS.read_text())
    names = ("cp2-64k-single", "cp2-64k-single-balanced")
    records = {r["name"]: r for r in json.loads((BENCHMARKS / "results" / "multi_gpu.json").read_text())}
    measured = [max(records[name]["attention_ms"]) for name in names]
    planned = [max(predict.attention_ms(slices.CASES[name], slices.FLASH_SLICE, kernels)) for name in names]
    assert 1 - measured[1] / measured[0] == pytest.approx(1 - planned[1] / planned[0], rel=0.1)


def test_records_replace_those_of_the_same_name(modules: Any, tmp_path: Path) -> None:
    merge, path = modules("train_slice").merge, tmp_path / "new" / "records.json"
    merge(path, [{"name": "a", "step_ms": 1}, {"name": "b", "step_ms": 2}])
    merge(path, [{"name": "a", "step_ms": 3}])
    assert json.loads(path.read_text()) == [{"name": "b", "step_ms": 2}, {"name": "a", "step_ms": 3}]


def test_a_case_is_compared_with_one_gpu(modules: Any) -> None:
    baseline = modules("table").baseline
    assert baseline("cp2-16k") == "16k"
    assert baseline("tp2-64k") == "64k"
    assert baseline("cp2-64k-single-balanced") == "64k-single"
    assert baseline("pp2-16k-4x") == "16k-4x"


def test_a_row_of_the_table(modules: Any) -> None:
    record = {
        "name": "cp2-16k",
        "case": "cp2-16k",
        "gpus": 2,
        "commit": "abc-dirty",
        "kernels": "auto",
        "step_ms": 300.2,
        "predicted_ms": 250.0,
        "tokens_per_s_per_gpu": 27000,
        "mfu": 0.221,
        "peak_gib": 60.04,
        "predicted_gib": 59.5,
        "exposed_ms": [10.2, 40.6],
        "attention_ms": [20.0, 21.5],
    }
    found = {"cp2-16k": record, "16k": record | {"tokens_per_s_per_gpu": 30000, "commit": "abc"}}
    kernels = json.loads(KERNELS.read_text())
    *cells, attention = modules("table").cells(record, found, kernels)
    assert cells == ["`cp2-16k`", "300, 250", "27 000", "90 %", "22 %", "60.0, 59.5", "41"]
    assert attention.startswith("20.0, 21.5; ")
    found["16k"]["commit"] = "another"
    assert modules("table").cells(record, found, kernels)[3] == "", "rates of two versions are not compared"


def test_the_documentation_shows_the_records(modules: Any, capsys: pytest.CaptureFixture[str]) -> None:
    records = [str(BENCHMARKS / "results" / f"{name}.json") for name in ("slice-h200", "multi_gpu")]
    doc = Path(__file__).parents[3] / "docs" / "scaling.md"
    assert modules("table").main([*records, "--doc", str(doc), "--check"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_dry_step() -> None:
    run = subprocess.run(
        [sys.executable, "train_slice.py", "--dry", "2k"],
        cwd=BENCHMARKS,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "2k: loss 5." in run.stdout
