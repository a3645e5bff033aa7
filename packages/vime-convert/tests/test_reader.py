# SPDX-License-Identifier: Apache-2.0
"""Every kind of damaged or foreign checkpoint is refused with the name of what is wrong, and nothing is written."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime_convert.checkpoint import Checkpoint
from vime_convert.errors import CheckpointError
from vime_convert.hf2hf import rewrite
from vime_convert.reader import INDEX, CheckpointReader, read_json
from vime_convert.rules import RuleTable


def refused(directory: Path, table: RuleTable, message: str) -> str:
    """The error of opening; the same error stops a rewrite before anything is written."""
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(CheckpointReader(directory), table)
    target = directory.parent / "target"
    with pytest.raises(CheckpointError):
        rewrite(directory, target, table, "dpsk-hf")
    assert {path.name for path in directory.parent.iterdir()} == {directory.name}
    return str(caught.value)


def spoil(name: str, value: float | torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda t: t.pop("norm.weight"), "norm.weight: missing", id="missing"),
        pytest.param(
            lambda t: t.update({"layers.0.attn.bogus.weight": torch.ones(2)}),
            "layers.0.attn.bogus.weight: no tensor of this model",
            id="extra",
        ),
        pytest.param(
            lambda t: t.update({"layers.9.attn_norm.weight": torch.ones(32)}),
            "layers.9.attn_norm.weight: no tensor of this model",
            id="extra-layer",
        ),
        pytest.param(
            lambda t: t.update({"layers.1.attn.wkv.weight": torch.zeros(31, 32)}),
            r"layers.1.attn.wkv.weight: expected shape \[32, 32\], got \[31, 32\]",
            id="misshaped",
        ),
        pytest.param(
            lambda t: t.update({"layers.1.attn.wkv.weight": torch.zeros(32, 32, dtype=torch.float64)}),
            r"wkv.weight: expected one of float32, bfloat16, float16, got torch.float64",
            id="float64",
        ),
        pytest.param(
            lambda t: t.update({"layers.0.ffn.gate.tid2eid": torch.zeros(48, 2)}),
            "tid2eid: expected one of int64, int32, got torch.float32",
            id="float-for-integer-table",
        ),
        pytest.param(
            lambda t: t.update({"layers.1.hc_attn_fn": torch.zeros(8, 64, dtype=torch.int8)}),
            "hc_attn_fn: expected one of .* got torch.int8 .*need their scales",
            id="int8-without-scale",
        ),
        pytest.param(
            spoil("layers.2.attn.kv_norm.weight", float("nan")),
            "layers.2.attn.kv_norm.weight: holds NaN or infinity",
            id="nan-in-norm",
        ),
        pytest.param(
            spoil("norm.weight", float("inf")),
            "norm.weight: holds NaN or infinity",
            id="infinity-in-norm",
        ),
        pytest.param(
            spoil("layers.1.ffn.gate.tid2eid", torch.tensor([0, 4])),
            "layers.1.ffn.gate.tid2eid: row 3 names expert 4, expected 0 to 3",
            id="expert-id-too-large",
        ),
        pytest.param(
            spoil("layers.0.ffn.gate.tid2eid", torch.tensor([-1, 2])),
            "layers.0.ffn.gate.tid2eid: row 3 names expert -1, expected 0 to 3",
            id="expert-id-negative",
        ),
        pytest.param(
            spoil("layers.0.ffn.gate.tid2eid", torch.tensor([2, 2])),
            "layers.0.ffn.gate.tid2eid: row 3 names expert 2 twice",
            id="expert-twice",
        ),
    ],
)  # fmt: skip
def test_wrong_tensors(
    dsv4: RuleTable, release_dir: Path, edit: Callable[..., None], change: Any, message: str
) -> None:
    edit(release_dir, change)
    refused(release_dir, dsv4, message)


def test_many_problems_are_counted(dsv4: RuleTable, release_dir: Path, edit: Callable[..., None]) -> None:
    edit(release_dir, lambda t: [t.pop(name) for name in list(t) if "hc_" in name])
    text = refused(release_dir, dsv4, "27 problems")
    assert text.count("missing") == 10
    assert "and 17 more" in text


def test_wrong_number_of_stacked_experts(
    dsv4: RuleTable, release_dir: Path, tmp_path: Path, edit: Callable[..., None]
) -> None:
    directory = tmp_path / "inner" / "module"
    rewrite(release_dir, directory, dsv4, "hf-module")
    name = "model.layers.1.mlp.experts.down_proj"
    edit(directory, lambda t: t.update({name: torch.cat([t[name], t[name][:1]])}))
    refused(directory, dsv4, r"expected shape \[4, 32, 20\] of all experts, got \[5, 32, 20\]")


@pytest.mark.parametrize("keep", [0, 4, 300, -1], ids=["empty", "header-cut", "json-cut", "data-cut"])
def test_truncated_file(dsv4: RuleTable, release_dir: Path, keep: int) -> None:
    path = release_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(release_dir, dsv4, "model.safetensors: not a complete safetensors file")


def test_corrupt_header(dsv4: RuleTable, release_dir: Path) -> None:
    path = release_dir / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[9:20] = b"\x00" * 11
    path.write_bytes(data)
    refused(release_dir, dsv4, "not a complete safetensors file")


def test_unknown_stored_dtype(dsv4: RuleTable, release_dir: Path) -> None:
    path = release_dir / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["norm.weight"]["dtype"] = "U16"
    text = json.dumps(header).encode().ljust(size)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    refused(release_dir, dsv4, "norm.weight: model.safetensors stores it as U16")


@pytest.fixture
def sharded_dir(release_dir: Path) -> Path:
    """The same checkpoint in three files with an index."""
    tensors = load_file(release_dir / "model.safetensors")
    (release_dir / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for shard in range(3):
        file = f"model-{shard + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[shard::3]}
        save_file(part, release_dir / file)
        weight_map |= dict.fromkeys(part, file)
    (release_dir / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return release_dir


def test_shards_with_and_without_index(dsv4: RuleTable, sharded_dir: Path) -> None:
    assert Checkpoint(CheckpointReader(sharded_dir), dsv4).dialect.name == "release"
    (sharded_dir / INDEX).unlink()
    assert len(Checkpoint(CheckpointReader(sharded_dir), dsv4).names()) == len(dsv4.expected_hf())


def test_missing_shard(dsv4: RuleTable, sharded_dir: Path) -> None:
    (sharded_dir / "model-00002-of-00003.safetensors").unlink()
    refused(sharded_dir, dsv4, "model-00002-of-00003.safetensors: named in .* but not in the directory")


@pytest.mark.parametrize("fault", ["not-in-shard", "other-shard", "not-in-index"])
def test_index_and_shards_disagree(dsv4: RuleTable, sharded_dir: Path, fault: str) -> None:
    index = read_json(sharded_dir / INDEX)
    file = index["weight_map"].pop("norm.weight")
    if fault == "not-in-shard":
        index["weight_map"] |= {"norm.weight": file, "norm.bias": file}
    elif fault == "other-shard":
        other = next(f for f in sorted(set(index["weight_map"].values())) if f != file)
        index["weight_map"]["norm.weight"] = other
    (sharded_dir / INDEX).write_text(json.dumps(index))
    message = {
        "not-in-shard": f"norm.bias: {INDEX} places it in {file}, which does not contain it",
        "other-shard": f"norm.weight: .* but it is in {file}",
        "not-in-index": f"norm.weight: in {file} but not in {INDEX}",
    }
    refused(sharded_dir, dsv4, message[fault])


def test_duplicate_tensor(dsv4: RuleTable, release_dir: Path) -> None:
    save_file({"norm.weight": torch.ones(32)}, release_dir / "other.safetensors")
    refused(release_dir, dsv4, "norm.weight: stored in both model.safetensors and other.safetensors")


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint directory, found none"):
        CheckpointReader(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"expected \*.safetensors files, found none"):
        CheckpointReader(tmp_path)


def test_foreign_names(dsv4: RuleTable, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor name fits a known dialect .*first name: 'weight'"):
        Checkpoint(CheckpointReader(tmp_path), dsv4)


@pytest.mark.parametrize("text", ["{", "[]"], ids=["cut", "list"])
def test_bad_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match="expected this file, found none"):
        read_json(path)
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"not valid JSON|expected a JSON object, got list"):
        read_json(path)


def test_index_with_something_else_than_file_names(release_dir: Path) -> None:
    (release_dir / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": 3}}))
    with pytest.raises(CheckpointError, match=r"weight_map\['norm.weight'\] to be a file name, got 3"):
        CheckpointReader(release_dir)
