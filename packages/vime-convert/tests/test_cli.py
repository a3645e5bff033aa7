# SPDX-License-Identifier: Apache-2.0
"""The command: verbs, exit status, messages without tracebacks, and imports without the extras."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_convert import cli
from vime_convert.plugin import ModelPlugin, TinyCase
from vime_convert.registry import table_for

PLUGIN = "stub_model:PLUGIN"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, dsv4_config: dict[str, Any]) -> str:
    """A plugin that knows names and values but cannot build anything."""
    module = type(sys)("stub_model")

    def unused(*_args: object, **_kwargs: object) -> Any:
        raise AssertionError("not needed here")

    module.PLUGIN = ModelPlugin(  # type: ignore[attr-defined]
        model_type="deepseek_v4",
        setup=unused,
        build=unused,
        rules=table_for,
        forward=unused,
        layer_states=unused,
        tiny_cases=[TinyCase("small", dsv4_config, 8, "all layer kinds")],
        init_tiny=lambda name, shape, generator: (
            torch.rand(shape, generator=generator).add(0.5).round(decimals=2)
        ),
    )
    monkeypatch.setitem(sys.modules, "stub_model", module)
    return PLUGIN


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][:2] == [
        "deepseek_v3",
        "deepseek_v4",
    ]


def test_inspect(release_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(release_dir)]) == 0
    text = capsys.readouterr().out
    for part in (
        "deepseek_v4",
        "release (known: release, dpsk-hf",
        "quantised    no",
        "compress_ratios 0 4 128 4 0",
    ):
        assert part in text
    assert text.endswith("problems     none\n")
    assert cli.main(["inspect", str(release_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dialect"], found["problem"], found["extras"]) == ("release", "", 0)
    assert found["dtypes"].keys() == {"bfloat16", "float32", "int64"}


def test_inspect_reports_problems(
    release_dir: Path, edit: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(release_dir, lambda tensors: tensors.pop("norm.weight"))
    assert cli.main(["inspect", str(release_dir)]) == 1
    assert "norm.weight: missing" in capsys.readouterr().out


def test_make_tiny_and_hf2hf(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, other = str(tmp_path / "tiny"), str(tmp_path / "other")
    model = ["--model-type", "deepseek_v4", "--plugin", plugin]
    assert cli.main(["make-tiny", tiny, *model, "--case", "small", "--dtype", "float32"]) == 0
    assert cli.main(["hf2hf", tiny, other, "--dialect", "hf-module"]) == 0
    assert "wrote 122 tensors" in capsys.readouterr().out
    assert cli.main(["inspect", other]) == 0
    assert "dialect      hf-module" in capsys.readouterr().out
    config = tmp_path / "tiny" / "config.json"
    assert cli.main(["make-tiny", str(tmp_path / "third"), *model, "--config", str(config)]) == 0
    assert cli.main(["make-tiny", str(tmp_path / "fourth"), *model, "--case", "nope"]) == 2
    assert "--case: expected one of small, got 'nope'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        pytest.param(
            ["hf2hf", "{hf}", "{hf}", "--dialect", "dpsk-hf"], 2, "does not exist yet", id="output-exists"
        ),
        pytest.param(["hf2hf", "{hf}", "{out}", "--dialect", "x"], 2, "got 'x'", id="unknown-dialect"),
        pytest.param(["hf2hf", "{none}", "{out}", "--dialect", "dpsk-hf"], 1, "found none", id="no-source"),
        pytest.param(["inspect", "{none}"], 1, "expected a checkpoint directory", id="no-directory"),
        pytest.param(
            ["make-tiny", "{out}", "--model-type", "nope"], 2, "announces model type 'nope'", id="no-plugin"
        ),
        pytest.param(
            ["make-tiny", "{out}", "--model-type", "deepseek_v41"], 2, "a different architecture", id="v4.1"
        ),
        pytest.param(
            ["verify", "--model-type", "deepseek_v41"], 2, "a different architecture", id="verify-v4.1"
        ),
        pytest.param(
            ["make-tiny", "{out}", "--model-type", "x", "--plugin", "a"], 2, "MODULE:ATTR", id="bad-plugin"
        ),
        pytest.param(
            ["hf2dist", "{none}", "{out}"], 1, "config.json: expected this file", id="dist-no-source"
        ),
    ],
)
def test_errors_are_one_message(
    release_dir: Path,
    tmp_path: Path,
    words: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {"hf": release_dir, "out": tmp_path / "out", "none": tmp_path / "none"}
    assert cli.main([word.format(**paths) for word in words]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("vime-convert: ")
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"model_type": "llama"}, "model_type 'llama' is not one of deepseek_v3", id="model-type"
        ),
        pytest.param(
            {"model_type": "deepseek_v41"},
            "model_type 'deepseek_v41' is refused; DeepSeek-V4.1 is a different architecture",
            id="v4.1",
        ),
        pytest.param({"model_type": None}, "expected a string model_type, got None", id="no-model-type"),
        pytest.param({"compress_ratios": [0, 4]}, "compress_ratios", id="schedule"),
    ],
)
def test_bad_config(
    release_dir: Path,
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = release_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert cli.main(["inspect", str(release_dir)]) == 2
    assert cli.main(["hf2hf", str(release_dir), str(tmp_path / "out"), "--dialect", "dpsk-hf"]) == 2
    assert capsys.readouterr().err.count(message) == 2
    if "refused" in message:
        assert cli.main(["hf2dist", str(release_dir), str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, size", [("5GB", 5_000_000_000), ("1.5 MiB", 3 << 19), ("4096", 4096)], ids=["gb", "mib", "plain"]
)
def test_sizes_have_units(text: str, size: int) -> None:
    parsed = cli._parser().parse_args(["hf2hf", "a", "b", "--dialect", "release", "--shard-bytes", text])
    assert parsed.shard_bytes == size


@pytest.mark.parametrize("text", ["0", "-1", "5 parsecs", "GB", "0.1"])
def test_sizes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["hf2hf", "a", "b", "--dialect", "release", f"--shard-bytes={text}"])
    assert "expected a number of bytes" in capsys.readouterr().err


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="expected a checkpoint directory"):
        cli.main(["--debug", "inspect", str(tmp_path / "none")])


def test_unexpected_error(
    release_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_args: object) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr("vime_convert.cli.inspect", broken)
    assert cli.main(["inspect", str(release_dir)]) == 2
    assert capsys.readouterr().err == (
        "vime-convert: unexpected TypeError: no such thing; run again with --debug for the traceback\n"
    )
    with pytest.raises(TypeError):
        cli.main(["--debug", "inspect", str(release_dir)])


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [
        pytest.param(signal.SIGINT, 130, "vime-convert: interrupted\n", id="ctrl-c"),
        pytest.param(signal.SIGTERM, 143, "", id="sigterm"),
    ],
)
def test_signals_remove_unfinished_output(
    release_dir: Path, number: signal.Signals, status: int, text: str
) -> None:
    script = """
import sys, time
from vime_convert import cli, writer
def slow(shards, name, tensor):
    print("writing", flush=True)
    time.sleep(60)
writer._Shards.add = slow
sys.exit(cli.main(["hf2hf", sys.argv[1], sys.argv[2], "--dialect", "dpsk-hf", "--quiet"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(release_dir), str(release_dir.parent / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and Python keeps that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert (release_dir.parent / ".out.partial").is_dir()
    process.send_signal(number)
    assert process.communicate(timeout=30)[1] == text
    assert process.returncode == status
    assert [path.name for path in release_dir.parent.iterdir()] == [release_dir.name]


def test_imports_without_extras() -> None:
    """Every module but the verifier's oracle side imports with torch, safetensors, numpy and tqdm alone."""
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "megatron", "mbridge", "vime_models", "vime_kernels"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import vime_convert.cli, vime_convert.dist, vime_convert.tiny, vime_convert.megatron.exporter, vime_convert.__main__
from vime_convert.errors import MissingExtra
try:
    vime_convert.dist.hf2dist("a", "b", None)
except MissingExtra as error:
    assert "vime-convert[mbridge]" in str(error), error
    print("ok")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout == "ok\n", run.stderr
