# SPDX-License-Identifier: Apache-2.0
"""`vime-models args`: print, then check what was printed."""

import json
import shlex
from pathlib import Path

import pytest

from vime_models.cli import DIFFERENT, OK, UNUSABLE, main, same_values, split_flags
from vime_models.dsv4.tiny import TINY_CASES


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(dict(TINY_CASES[0].config)))
    return tmp_path


def _printed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["args", "--hf", str(checkpoint)]) == OK
    return capsys.readouterr().out.splitlines()


def test_prints_one_flag_per_line_quoted_for_a_shell(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _printed(checkpoint, capsys)
    assert all(line.startswith("--") for line in lines)
    assert "--dsv4-compress-ratios 0 0 4 128 4" in lines
    assert "--spec vime_models.dsv4 get_dsv4_spec" in lines
    assert len({line.split()[0] for line in lines}) == len(lines)


def test_check_accepts_what_was_printed_in_any_order_and_spelling(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _printed(checkpoint, capsys)[::-1]
    words = [word for line in lines for word in shlex.split(line)]
    words[words.index("--norm-epsilon") : words.index("--norm-epsilon") + 2] = ["--norm-epsilon=0.000001"]
    assert main(["args", "--hf", str(checkpoint), "--check", "--", *words, "--lr", "1e-6"]) == OK
    assert capsys.readouterr().out == ""


def test_check_reports_every_difference(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in _printed(checkpoint, capsys) if line != "--swiglu"]
    words = [word for line in lines for word in shlex.split(line)]
    words[words.index("--num-layers") + 1] = "4"
    words += ["--dsv4-window-sise", "16"]
    assert main(["args", "--hf", str(checkpoint), "--check", "--", *words]) == DIFFERENT
    report = capsys.readouterr().out.splitlines()
    assert "missing: --swiglu" in report
    assert "differs: expected --num-layers 5, got --num-layers 4" in report
    assert any("--dsv4-window-sise (did you mean --dsv4-window-size?)" in line for line in report)
    assert len(report) == 3


@pytest.mark.parametrize(
    "config, message",
    [
        (None, "found none; --hf takes the folder"),
        ("{", "is not JSON"),
        ('{"model_type": "llama"}', "expected model_type out of deepseek_v4, got 'llama'"),
        ('{"model_type": "deepseek_v41"}', "DeepSeek-V4.1 is a different architecture"),
        ('{"model_type": "deepseek_v4"}', "deepseek_v4"),
    ],
    ids=["absent", "broken", "other-model", "v4.1", "incomplete"],
)
def test_unusable_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["args", "--hf", str(tmp_path)]) == UNUSABLE
    assert message in capsys.readouterr().err


def test_unexpected_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_config: object) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr("vime_models.dsv4.arguments.launch_flags", broken)
    assert main(["args", "--hf", str(checkpoint)]) == UNUSABLE
    assert capsys.readouterr().err == (
        "vime-models: unexpected TypeError: no such thing; run again with --debug for the traceback\n"
    )
    with pytest.raises(TypeError):
        main(["--debug", "args", "--hf", str(checkpoint)])


def test_flags_without_check(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "--hf", str(checkpoint), "--", "--swiglu"]) == UNUSABLE
    assert "need --check" in capsys.readouterr().err


def test_splitting_and_comparing_words() -> None:
    assert split_flags(["--a", "1", "2", "--b", "--c=x", "--a", "3"]) == {
        "--a": ("3",),
        "--b": (),
        "--c": ("x",),
    }
    with pytest.raises(ValueError, match="starts with --, got 'x'"):
        split_flags(["x"])
    assert same_values(["1e-6"], ["0.000001"])
    assert not same_values(["1"], ["1", "1"])
    assert not same_values(["a"], ["b"])
    assert not same_values(["1"], ["a"])
