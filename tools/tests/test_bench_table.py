# SPDX-License-Identifier: Apache-2.0
"""The table holds what the records say, and `--check` notices when it does not."""

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

SPEC = importlib.util.spec_from_file_location(
    "bench_table", Path(__file__).resolve().parents[1] / "bench_table.py"
)
bench_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench_table)

RECORD = {
    "op": "topk", "shape": "V3.2", "dtype": "bfloat16", "direction": "fwd", "ours_ms": 0.3, "peer": None,
    "peer_ms": None, "ratio": None, "rel_error": 0.0, "peak_mib": 160.0, "failure": None, "commit": "abc",
    "device": "H200", "versions": {"torch": "2.11"}, "command": "run.py",
}  # fmt: skip
PEER = RECORD | {"peer": "torch", "peer_ms": 7.5, "ratio": 25.0}


def test_a_case_is_one_line():
    text = bench_table.table([RECORD, PEER])
    assert "| `topk` | V3.2 | fwd | 0.300 | torch 25× | exact | 160 |" in text
    assert text.count("| `topk`") == 1


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


def test_the_plot_is_well_formed_and_has_a_bar_for_every_peer():
    root = ElementTree.fromstring(bench_table.plot([RECORD, PEER, PEER | {"peer": "a & b", "ratio": 0.5}]))
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 3
