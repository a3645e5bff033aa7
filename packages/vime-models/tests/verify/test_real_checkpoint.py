# SPDX-License-Identifier: Apache-2.0
"""`vime-convert verify --hf DIR`: a stored checkpoint, block-scaled and in another dialect, cut to its first layers."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime_convert.cli import main
from vime_convert.hf2hf import rewrite
from vime_convert.tiny import make_tiny
from vime_models.dsv4.plugin import PLUGIN

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the hosts are not the subject

BLOCK = 128
CASE = next(case for case in PLUGIN.tiny_cases if case.name == "pruned")


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes and one power-of-two scale per 128 x 128 block, as in the release."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns, dtype=torch.float8_e8m0fnu)
    for r in range(rows):
        for c in range(columns):
            block = (slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK))
            values = weight[block].float()
            scale = 2.0 ** (values.abs().max() / 448).log2().ceil()
            codes[block] = (values / scale).to(torch.float8_e4m3fn)
            scales[r, c] = scale
    return codes, scales


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-layer checkpoint under dpsk-hf names whose experts and query projections are FP8."""
    root = tmp_path_factory.mktemp("stored")
    make_tiny(CASE.config, root / "plain", seed=1, plugin=PLUGIN)
    file = root / "plain" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name or name.endswith("wq_b.weight")]:
        tensors[name], tensors[name.replace(".weight", ".scale")] = quantise(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    rewrite(root / "plain", root / "checkpoint", PLUGIN.rules(CASE.config), "dpsk-hf")
    return root / "checkpoint"


def verify(*words: str) -> int:
    return main(["verify", "--model-type", "deepseek_v4", "--quiet", *words])


def test_first_layers_of_a_quantised_checkpoint(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    report = tmp_path / "out" / "report"
    words = ("--hf", str(stored), "--num-layers", "3", "--seq-len", "300", "--dtype", "float64")
    assert verify(*words, "--report", str(report)) == 0, capsys.readouterr()
    assert "PASS: 1 case(s)" in capsys.readouterr().out
    assert {path.suffix for path in report.parent.iterdir()} == {".json", ".html", ".svg"}


def test_a_difference_exits_1_and_names_the_layer(
    stored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from vime_models.dsv4 import attention

    original = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda *a, **k: original(*a, **k | {"norm_eps": None}))
    words = ("--hf", str(stored), "--num-layers", "1", "--dtype", "float64", "--checks", "logits")
    assert verify(*words) == 1
    assert "first layer that differs: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (("--hf", "{stored}", "--num-layers", "9"), "expected 1 to 4 layers"),
        (("--tiny", "--case", "none"), "no case named none; known: flash"),
        (("--tiny", "--checks", "all"), "expected a comma-separated subset of logits, grad, roundtrip"),
        (("--tiny", "--dtype", "int8"), "expected a comma-separated subset of float64, float32"),
        (("--tiny", "--plugin", "nothing:X"), "needs the module 'nothing'"),
        (("--tiny", "--plugin", "math:pi"), "expected a ModelPlugin"),
        (("--tiny", "--plugin", "math"), "expects MODULE:ATTRIBUTE"),
    ],
    ids=[
        "too-many-layers",
        "case",
        "checks",
        "dtype",
        "plugin",
        "not-a-plugin",
        "plugin-form",
    ],
)
def test_what_cannot_run_exits_2(
    stored: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert verify(*(word.format(stored=stored) for word in words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut-off", "no-directory"])
def test_a_damaged_checkpoint_exits_1_as_with_every_verb(
    stored: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture
) -> None:
    broken = tmp_path / "broken"
    if damage == "cut-off":
        shutil.copytree(stored, broken)
        for file in broken.glob("*.safetensors"):
            os.truncate(file, file.stat().st_size // 2)
    assert verify("--hf", str(broken), "--num-layers", "1") == 1
    assert str(broken) in capsys.readouterr().err
    assert main(["inspect", str(broken)]) == 1


def test_unknown_model_type_names_what_is_installed(capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--model-type", "gpt9", "--tiny"]) == 2
    assert (
        "no installed package announces model type 'gpt9' (installed: deepseek_v3" in capsys.readouterr().err
    )
