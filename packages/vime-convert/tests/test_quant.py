# SPDX-License-Identifier: Apache-2.0
"""Dequantisation against transformers' own code and against one plain loop over single values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_convert.checkpoint import Checkpoint
from vime_convert.errors import CheckpointError
from vime_convert.hf2hf import rewrite
from vime_convert.quant import FP4_BLOCK, FP8_BLOCK, dequantise
from vime_convert.reader import CheckpointReader
from vime_convert.rules import RuleTable

E2M1 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def fp8(rows: int, columns: int, scale: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(rows, columns, generator=generator).mul(30).to(torch.float8_e4m3fn)
    shape = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if scale == "float32":
        return weight, torch.rand(shape, generator=generator) + 0.01
    exponents = torch.randint(110, 140, shape, generator=generator, dtype=torch.uint8)
    return weight, exponents if scale == "uint8" else exponents.view(torch.float8_e8m0fnu)


def fp4(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(110, 140, (rows, columns // FP4_BLOCK), generator=generator, dtype=torch.uint8)
    return packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu)


def by_hand(weight: torch.Tensor, scale: torch.Tensor, row_step: int = 1) -> torch.Tensor:
    """Every `row_step`-th row, one value at a time."""
    packed = weight.dtype == torch.int8
    rows, columns = weight.shape[0], weight.shape[1] * (2 if packed else 1)
    block = (1, FP4_BLOCK) if packed else (FP8_BLOCK, FP8_BLOCK)
    out = torch.empty(rows, columns)
    for i in range(0, rows, row_step):
        for j in range(columns):
            if packed:
                byte = int(weight[i, j // 2]) & 0xFF
                code = byte >> 4 if j % 2 else byte & 0xF
                value = -E2M1[code & 7] if code & 8 else E2M1[code]
            else:
                value = float(weight[i, j])
            factor = scale[i // block[0], j // block[1]]
            out[i, j] = value * (2.0 ** (int(factor) - 127) if scale.dtype == torch.uint8 else float(factor))
    return out[::row_step]


@pytest.mark.parametrize("scale", ["float8_e8m0fnu", "uint8", "float32"])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (5, 7)], ids=str)
def test_fp8(shape: tuple[int, int], scale: str, seeded: Callable[[str], torch.Generator]) -> None:
    weight, scales = fp8(*shape, scale, seeded(f"{shape}{scale}"))
    ours = dequantise(weight, scales)
    assert ours.dtype == torch.float32
    step = max(1, shape[0] // 5)
    assert ours[::step].equal(by_hand(weight, scales, step))
    if scale != "float32":
        assert ours.bfloat16().float().equal(ours)


@pytest.mark.parametrize("shape", [(1, 32), (6, 96)], ids=str)
def test_fp4(shape: tuple[int, int], seeded: Callable[[str], torch.Generator]) -> None:
    weight, scales = fp4(*shape, seeded(str(shape)))
    ours = dequantise(weight, scales)
    assert ours.view(torch.int32).equal(by_hand(weight, scales).view(torch.int32))  # code 8 is -0.0
    assert ours.bfloat16().float().equal(ours)


@pytest.mark.parametrize("kind", ["fp8-e8m0", "fp8-float32", "fp4"])
def test_equals_transformers(kind: str, seeded: Callable[[str], torch.Generator]) -> None:
    module = pytest.importorskip(
        "transformers.integrations.finegrained_fp8", reason="compares with transformers"
    )
    generator = seeded(kind)
    if kind == "fp4":
        weight, scales = fp4(8, 128, generator)
    else:
        weight, scales = fp8(256, 384, "float32" if kind == "fp8-float32" else "e8m0", generator)
    theirs = module.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    assert dequantise(weight, scales).equal(theirs)


def test_small_blocks_follow_the_shapes(seeded: Callable[[str], torch.Generator]) -> None:
    weight = torch.randn(64, 64, generator=seeded("w")).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, generator=seeded("s"))
    assert dequantise(weight, scales)[40, 10] == weight[40, 10].float() * scales[1, 0]


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        pytest.param((130, 128), (3, 1), r"expected FP8 scales \[2, 1\].*got \[3, 1\]", id="fp8-rows"),
        pytest.param((128, 128), (1,), "expected two dimensions", id="fp8-flat"),
    ],
)
def test_misfitting_scales(weight: tuple[int, ...], scale: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantise(torch.zeros(weight).to(torch.float8_e4m3fn), torch.ones(scale))
    with pytest.raises(ValueError, match=r"expected FP4 scales \[4, 2\]"):
        dequantise(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1))


@pytest.fixture
def quantised_dir(
    release_dir: Path, edit: Callable[..., None], seeded: Callable[[str], torch.Generator]
) -> Path:
    """The release checkpoint with one FP8 projection and one FP4 expert, and a draft layer in FP8."""

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        pairs = {
            "layers.1.attn.wq_b": fp8(128, 24, "e8m0", seeded("a")),
            "layers.1.ffn.experts.2.w1": fp4(20, 32, seeded("b")),
            "mtp.0.attn.wq_a": fp8(24, 32, "e8m0", seeded("c")),
        }
        for name, (weight, scale) in pairs.items():
            tensors[name + ".weight"], tensors[name + ".scale"] = weight, scale

    edit(release_dir, quantise)
    return release_dir


def test_checkpoint_reads_quantised_tensors(
    dsv4: RuleTable, quantised_dir: Path, load_tensors: Callable[..., Any]
) -> None:
    checkpoint, raw = Checkpoint(CheckpointReader(quantised_dir), dsv4), load_tensors(quantised_dir)
    assert checkpoint.quantised
    for name in ("layers.1.attn.wq_b", "layers.1.ffn.experts.2.w1", "mtp.0.attn.wq_a"):
        expected = dequantise(raw[name + ".weight"], raw[name + ".scale"])
        assert checkpoint.get(name + ".weight").equal(expected)
        assert checkpoint.get_plain(name + ".weight").equal(expected.bfloat16())
    assert checkpoint.extras == ["mtp.0.attn.wq_a.weight"]


def test_rewriting_keeps_the_stored_codes(
    dsv4: RuleTable,
    quantised_dir: Path,
    tmp_path: Path,
    load_tensors: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    rewrite(quantised_dir, tmp_path / "there", dsv4, "dpsk-hf")
    assert "model.layers.1.self_attn.wq_b.weight_scale_inv" in load_tensors(tmp_path / "there")
    rewrite(tmp_path / "there", tmp_path / "back", dsv4, "release")
    assert_same(load_tensors(tmp_path / "back"), load_tensors(quantised_dir))


def test_dialects_without_scales_need_dequantise(
    dsv4: RuleTable, quantised_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="dialect hf-module cannot; pass --dequantise"):
        rewrite(quantised_dir, tmp_path / "out", dsv4, "hf-module")
    assert not (tmp_path / "out").exists()
    rewrite(quantised_dir, tmp_path / "out", dsv4, "hf-module", dequantise=True)
    plain = Checkpoint(CheckpointReader(tmp_path / "out"), dsv4)
    source = Checkpoint(CheckpointReader(quantised_dir), dsv4)
    assert not plain.quantised
    assert all(plain.get(name).equal(source.get_plain(name)) for name in source.names())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda t: t.pop("layers.1.attn.wq_b.scale"),
            "quantised weights need their scales",
            id="fp8-no-scale",
        ),
        pytest.param(
            lambda t: t.pop("layers.1.ffn.experts.2.w1.scale"),
            r"expected shape \[20, 32\]",
            id="fp4-no-scale",
        ),
        pytest.param(
            lambda t: t.update({"layers.1.attn.wq_b.scale": torch.ones(3, 1)}),
            r"expected FP8 scales \[1, 1\]",
            id="scale-shape",
        ),
        pytest.param(
            lambda t: t.update({"layers.1.attn.wkv.scale": torch.ones(1, 1)}),
            "layers.1.attn.wkv.scale: no tensor of this model",
            id="scale-of-plain-weight",
        ),
        pytest.param(
            lambda t: t.pop("mtp.0.attn.wq_a.scale"),
            "mtp.0.attn.wq_a.weight: stored as torch.float8_e4m3fn, but its block scales are missing",
            id="draft-no-scale",
        ),
        pytest.param(
            lambda t: t.update({"mtp.0.attn.wq_a.scale": torch.ones(5, 1)}),
            r"mtp.0.attn.wq_a.weight: expected FP8 scales \[1, 1\]",
            id="draft-scale-shape",
        ),
    ],
)
def test_bad_scales_are_refused(
    dsv4: RuleTable, quantised_dir: Path, edit: Callable[..., None], change: Any, message: str
) -> None:
    edit(quantised_dir, change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(CheckpointReader(quantised_dir), dsv4)


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu), id="e8m0"),
        pytest.param(torch.tensor([[255]], dtype=torch.uint8), id="e8m0-as-bytes"),
        pytest.param(torch.tensor([[float("nan")]]), id="float32"),
    ],
)
@pytest.mark.parametrize("dequantise", [False, True], ids=["kept", "dequantised"])
@pytest.mark.parametrize(
    "name", ["layers.1.attn.wq_b.scale", "mtp.0.attn.wq_a.scale"], ids=["layer", "draft"]
)
def test_nan_scales_are_refused(
    dsv4: RuleTable,
    quantised_dir: Path,
    tmp_path: Path,
    edit: Callable[..., None],
    scale: torch.Tensor,
    dequantise: bool,
    name: str,
) -> None:
    edit(quantised_dir, lambda t: t.update({name: scale.clone()}))
    with pytest.raises(CheckpointError, match=f"{name}: holds NaN or infinity"):
        rewrite(quantised_dir, tmp_path / "out", dsv4, "dpsk-hf", dequantise=dequantise)
    assert not (tmp_path / "out").exists()
