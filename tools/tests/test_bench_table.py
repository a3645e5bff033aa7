# SPDX-License-Identifier: Apache-2.0
"""The table and the plots hold what the records say, and `--check` notices when they do not."""

import importlib.util
import json
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "bench_table", Path(__file__).resolve().parents[1] / "bench_table.py"
)
bench_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench_table)

RECORD = {
    "op": "topk", "shape": "2048 of 16k", "dtype": "float32", "direction": "fwd", "ours_ms": 0.3, "peer": None,
    "variant": "", "peer_ms": None, "ratio": None, "rel_error": 0.0, "peer_error": None, "peak_mib": 160.0,
    "peer_peak_mib": None, "rate": 812.4, "unit": "GB/s", "failure": None, "commit": "abc", "device": "H200",
    "versions": {"torch": "2.11"}, "command": "run.py",
}  # fmt: skip
TORCH = RECORD | {"peer": "torch", "peer_ms": 7.5, "ratio": 25.0, "peer_error": 0.0, "peer_peak_mib": 900.0}
CUDNN = RECORD | {
    "peer": "cuDNN fast",
    "peer_ms": 0.2,
    "ratio": 0.8,
    "peer_error": 0.25,
    "peer_peak_mib": 33.0,
}


def test_a_cell_is_one_line_with_both_errors():
    text = bench_table.table([RECORD, TORCH, CUDNN])
    line = (
        "| `topk` | 2048 of 16k | fwd | 0.300 | 812 GB/s | cuDNN fast 0.80×, torch 25× | exact, cuDNN fast 2.5e-01 "
        "| 160, cuDNN fast 33 |"
    )
    assert line in text
    assert text.count("| `topk`") == 1


def test_a_failure_is_shown():
    assert "| `topk` | 2048 of 16k | fwd | failed |" in bench_table.table([RECORD | {"failure": "wrong"}])


def test_check_notices_an_old_table(tmp_path):
    records, document = tmp_path / "r.json", tmp_path / "d.md"
    records.write_text(json.dumps([RECORD]))
    document.write_text(f"before\n{bench_table.BEGIN}\n{bench_table.END}\nafter\n")
    arguments = [str(records), "--doc", str(document)]
    assert bench_table.main([*arguments, "--check"]) == 1
    assert bench_table.main(arguments) == 0
    assert bench_table.main([*arguments, "--check"]) == 0
    assert document.read_text().endswith("\nafter\n")


def test_a_document_without_markers_is_refused():
    with pytest.raises(ValueError, match="expected the marker"):
        bench_table.replaced("no table here", "text")


def test_plots_have_a_row_for_every_cell_with_a_peer_of_its_own():
    other = RECORD | {"op": "mhc_pre"}
    rows = bench_table.bars([RECORD, TORCH, CUDNN, other], bench_table.PLOTS["kernels-indexer"])
    assert rows == [("topk  2048 of 16k  fwd", [("cuDNN fast", 0.8)])]
    assert (
        bench_table.bars(
            [other, other | {"peer": "torch", "ratio": 9.0}], bench_table.PLOTS["kernels-memory-bound"]
        )
        == []
    )


def test_every_operation_has_a_plot():
    from vime_kernels._backend import IMPLEMENTED

    prefixes = tuple(prefix for ops in bench_table.PLOTS.values() for prefix in ops)
    assert all(op.startswith(prefixes) for op in IMPLEMENTED)
