# SPDX-License-Identifier: Apache-2.0
"""The command's words and exit status."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from vime_vllm_patch.cli import main
from vime_vllm_patch.tree import Tree


def test_a_round_through_all_verbs(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--vllm", str(tree.root)]
    said = []
    for verb in (
        "status",
        "check",
        "apply",
        "status",
        "verify",
        "check",
        "apply",
        "revert",
        "status",
        "revert",
    ):
        assert main([verb, *place]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == f"{tree.root}: vLLM 0.32.0+cpu: clean\n"
    assert "vllm/outputs.py: 1 hunk(s)\n" in said[1]
    assert said[1].endswith("the patch fits vLLM 0.32.0+cpu\n")
    ends = ["patched", "patched", "is patched and complete", "already patched", "was patched already"]
    ends += ["is as it was before", "clean", "was not patched"]
    assert [text.strip().endswith(end) for text, end in zip(said[2:], ends, strict=True)] == [True] * 8


def test_what_is_wrong_goes_to_stderr_with_its_status(
    tree: Tree, fake: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree.root / "vllm/outputs.py").write_text("x = 1\n")
    for verb in ("check", "apply", "revert"):
        assert main([verb, "--vllm", str(tree.root)]) == 2
    assert "vllm/outputs.py: sha256" in capsys.readouterr().err
    assert main(["status", "--vllm", str(tree.root)]) == 2
    assert main(["verify", "--vllm", str(tree.root)]) == 2
    assert "drifted" in capsys.readouterr().out
    assert main(["apply", "--vllm", str(tmp_path)]) == 2
    assert "expected a folder with vllm/__init__.py" in capsys.readouterr().err
    fake.write_wheel(tmp_path / "new", fake.pristine, "vllm", "0.34.0")
    assert main(["apply", "--vllm", str(tmp_path / "new")]) == 3
    assert main(["apply", "--vllm", str(tree.root), "--after", str(tmp_path / "absent.patch")]) == 1
    with pytest.raises(SystemExit) as caught:
        main(["unpatch"])
    assert caught.value.code == 2


def test_a_vllm_with_the_channel_of_its_own_is_left_alone(
    data: Path, fake: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.write_wheel(tmp_path / "new", fake.patched, "vllm", "0.35.0")
    before = fake.snapshot(tmp_path / "new")
    for verb in ("status", "check", "apply", "verify", "revert"):
        assert main([verb, "--vllm", str(tmp_path / "new")]) == 0
        assert "native" in capsys.readouterr().out
    assert fake.snapshot(tmp_path / "new") == before


def test_without_vllm_it_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 2
    assert "--vllm DIR" in capsys.readouterr().err
