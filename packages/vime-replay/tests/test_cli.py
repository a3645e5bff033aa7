# SPDX-License-Identifier: Apache-2.0
"""`vime-replay inspect` names what is in a payload and what is odd; `report` writes a page that needs nothing else."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import packing
import pytest

from vime_replay import store
from vime_replay.cli import main
from vime_replay.metrics import ReplayMetrics
from vime_replay.sinks import JsonLinesSink
from vime_replay.spec import indexer_spec
from vime_vllm_patch import wire

CONFIG = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "index_topk": 6,
    "compress_ratios": [0, 4, 128, 4, 4],
}
SPEC = indexer_spec(CONFIG)
ROWS = packing.random_rows(np.random.default_rng(0), 81, SPEC, full=True)


@pytest.fixture
def hf(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "hf"


def write(form, path):
    text = wire.encode(ROWS)
    if form == "base64":
        path.write_text(text + "\n")
    elif form == "response":
        choice = {"index": 0, wire.FIELD: text, wire.LAYER_IDS_FIELD: [1, 3, 4]}
        path.write_text(json.dumps({"choices": [choice]}))
    elif form == "npy":
        with path.open("wb") as file:
            np.save(file, ROWS)
    else:
        store.write_rows(path, ROWS, SPEC, encoding=form)


@pytest.mark.parametrize("form", ["base64", "response", "npy", "int32", "u16", "set-delta-z"])
def test_inspect_explains_every_form(form, tmp_path, hf, capsys):
    blob = tmp_path / "blob"
    write(form, blob)
    assert main(["inspect", str(blob), "--hf", str(hf)]) == 0
    out = capsys.readouterr().out
    assert "80 rows x 3 streams x 6 picks" in out
    assert "keys of 4 tokens" in out
    assert "queries at positions 0..79; tokens 81 in all" in out
    assert "80 of 80 rows pick min(K, keys they see); 27 see at most K" in out
    assert "as the model has; layers [1, 3, 4]" in out
    assert re.search(r"out of range +none", out)
    assert re.search(r"no capture +none", out)
    assert ("ascending" in out) == (form == "set-delta-z")


def test_inspect_guesses_the_ratio_and_finds_what_is_odd(tmp_path, capsys):
    rows = ROWS.copy()
    rows[40:43] = 0
    rows[50, 1] = -1
    (tmp_path / "blob").write_text(wire.encode(rows))
    assert main(["inspect", str(tmp_path / "blob")]) == 0
    out = capsys.readouterr().out
    assert "keys of 4 tokens, a guess" in out
    assert "4 rows (zero or empty although keys are visible), first [40, 41, 42, 50]" in out
    rows = ROWS[40:].copy()
    rows[13, 0, 0] = 50
    (tmp_path / "late").write_text(wire.encode(rows))
    assert main(["inspect", str(tmp_path / "late"), "--ratio", "4", "--start", "40"]) == 0
    assert "entries their query cannot see), first [53]" in capsys.readouterr().out
    # Read as groups of 8 tokens, the entries are ahead of their queries.
    assert main(["inspect", str(tmp_path / "blob"), "--ratio", "8"]) == 0
    assert "entries their query cannot see" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "expected a file with a payload"),
        (b"!!!!", "wire.base64"),
        (b'{"choices": [{"indexer_topk": null}]}', "is null: the server's flag is off"),
        (b'{"error": 1}', "JSON without choices"),
        (b'{"choices": [1]}', "JSON without choices"),
        (b'{"choices": [{"indexer', "not JSON"),
        (b"\xff\xfe\xfd", "blob: expected base64 text, JSON"),
        (b"\x93VIMERP\x01rest", "read with a model's configuration; pass --hf DIR"),
    ],
    ids=["missing", "base64", "null", "no-choices", "no-choice", "cut", "bytes", "encoded"],
)
def test_inspect_says_what_is_wrong(content, message, tmp_path, capsys):
    blob = tmp_path / "blob"
    if content is not None:
        blob.write_bytes(content)
    assert main(["inspect", str(blob)]) == 2
    assert message in capsys.readouterr().err


class Page(HTMLParser):
    """Cells of the heat map; fails on anything that loads."""

    def __init__(self, text):
        super().__init__()
        self.cells = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attrs} & {"src", "href"}


def test_report_is_one_page_with_a_heat_map(tmp_path, capsys):
    rng = np.random.default_rng(0)
    sink = JsonLinesSink(tmp_path / "run.jsonl")
    for step in range(3):
        metrics = ReplayMetrics([1, 3])
        for layer in (1, 3):
            replayed = np.argsort(rng.random((50, 40)), axis=1)[:, :10].astype(np.int32)
            fresh = replayed.copy()
            if layer == 3:
                fresh[25:, 0] = 41
            where = np.arange(50)
            metrics.add(
                layer,
                fresh,
                replayed,
                available=np.full(50, 42),
                positions=where,
                lengths=np.full(50, 50),
                lags=where % 2,
            )
        metrics.count(bytes=1e6)
        sink(metrics.values(detail=True), step)
    assert main(["report", str(tmp_path / "run.jsonl"), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    Page(text)
    assert "3 steps, 0 to 2" in text
    layer_3 = re.search(r"<tr><td>3</td>(.*?)</tr>", text, re.DOTALL)[1]
    assert re.findall(r">([01]\.\d{3})<", layer_3) == ["1.000"] * 5 + ["0.900"] * 5
    light = {
        value: int(share) for share, value in re.findall(r"(\d+)%\);color:[^>]*>([01]\.\d{3})<", layer_3)
    }
    assert light["0.900"] < light["1.000"] == 97
    assert "<polyline" in text
    assert re.search(r"<td>0</td><td>0\.97", text)


@pytest.mark.parametrize(
    "content", [None, b"", b"nonsense\n", b'{"a": 1}\n', b'{"step": "x"}\n', b"[1]\n", b"\xff\n"], ids=repr
)
def test_report_refuses_other_files(content, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert "expected" in said
    assert str(path) in said
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("words", [("--ratio", "0"), ("--start", "-9")], ids=["ratio", "start"])
def test_inspect_refuses_numbers_that_no_payload_has(words, tmp_path, capsys):
    write("base64", tmp_path / "blob")
    assert main(["inspect", str(tmp_path / "blob"), *words]) == 2
    assert "expected --start >= 0 and --ratio >= 1" in capsys.readouterr().err


def test_inspect_reads_the_text_part_of_a_configuration(tmp_path, hf, capsys):
    write("base64", tmp_path / "blob")
    (hf / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    assert main(["inspect", str(tmp_path / "blob"), "--hf", str(hf)]) == 0
    assert "as the model has" in capsys.readouterr().out
    (hf / "config.json").write_text("{")
    assert main(["inspect", str(tmp_path / "blob"), "--hf", str(hf)]) == 2
    assert "config.json: not JSON" in capsys.readouterr().err


def test_report_never_writes_over_its_input_and_leaves_out_what_is_no_number(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    text = '{"step": "1"}\n{"step": 2, "indexer_replay/layer_1/decile_3/overlap_mean": NaN}\n'
    path.write_text(text)
    assert main(["report", str(path), "--out", str(path)]) == 2
    assert path.read_text() == text
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    assert "nan" not in (tmp_path / "page.html").read_text()
