# SPDX-License-Identifier: Apache-2.0
"""Seeded random checkpoints and the first layers of a larger one."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime_convert.checkpoint import Checkpoint
from vime_convert.errors import ConfigError, ConvertError, OutputError
from vime_convert.reader import CheckpointReader
from vime_convert.registry import table_for
from vime_convert.rules import RuleTable
from vime_convert.tiny import make_tiny, truncate

PLUGIN: Any = SimpleNamespace(rules=table_for)


def test_values_depend_on_seed_and_name_only(
    dsv4_config: dict[str, Any],
    tmp_path: Path,
    make_checkpoint: Callable[..., Path],
    load_tensors: Callable[..., Any],
) -> None:
    whole = load_tensors(make_checkpoint(tmp_path / "a", dsv4_config))
    shorter = load_tensors(
        make_checkpoint(tmp_path / "b", dsv4_config | {"num_hidden_layers": 1, "compress_ratios": [0]})
    )
    assert 0 < len(shorter) < len(whole)
    assert all(whole[name].equal(tensor) for name, tensor in shorter.items())
    assert not whole["layers.0.attn.wkv.weight"].equal(whole["layers.1.attn.wkv.weight"])


def test_stored_dtypes(
    config: dict[str, Any],
    tmp_path: Path,
    make_checkpoint: Callable[..., Path],
    load_tensors: Callable[..., Any],
) -> None:
    expected = table_for(config).expected_hf()
    assert {n: t.dtype for n, t in load_tensors(make_checkpoint(tmp_path / "a", config)).items()} == {
        n: spec.dtype for n, spec in expected.items()
    }
    wide = load_tensors(make_checkpoint(tmp_path / "b", config, dtype=torch.float32))
    assert {tensor.dtype for tensor in wide.values()} <= {torch.float32, torch.int64}


def test_other_dialects(
    dsv4: RuleTable, dsv4_config: dict[str, Any], tmp_path: Path, make_checkpoint: Any
) -> None:
    plain = Checkpoint(CheckpointReader(make_checkpoint(tmp_path / "a", dsv4_config)), dsv4)
    fused = Checkpoint(
        CheckpointReader(make_checkpoint(tmp_path / "b", dsv4_config, dialect="hf-module")), dsv4
    )
    assert all(plain.get(name).equal(fused.get(name)) for name in plain.names())
    with pytest.raises(OutputError, match="only read"):
        make_checkpoint(tmp_path / "c", dsv4_config, dialect="hf-save-5.12")


def test_bad_init(dsv4: RuleTable, dsv4_config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected plugin=, or both table= and init="):
        make_tiny(dsv4_config, tmp_path / "out", seed=0)
    with pytest.raises(ConfigError, match=r"init of embed.weight: expected shape \(48, 32\), got \(1,\)"):
        make_tiny(dsv4_config, tmp_path / "out", seed=0, table=dsv4, init=lambda *_: torch.ones(1))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dialect", ["release", "dpsk-hf", "hf-module", "hf-save-5.24"])
def test_truncate(
    dsv4_config: dict[str, Any],
    tmp_path: Path,
    dialect: str,
    make_checkpoint: Any,
    load_tensors: Any,
    edit: Any,
) -> None:
    source = make_checkpoint(tmp_path / "in", dsv4_config, dialect=dialect)
    draft = "model.layers.4.enorm.weight" if dialect == "dpsk-hf" else "mtp.0.enorm.weight"
    edit(source, lambda t: t.update({draft: torch.ones(32)}))
    truncate(source, tmp_path / "out", 2, PLUGIN)
    reader = CheckpointReader(tmp_path / "out")
    checkpoint = Checkpoint(reader, table_for(reader.config()))
    assert (checkpoint.dialect.name, checkpoint.extras, checkpoint.table.num_layers) == (dialect, [], 2)
    whole = load_tensors(source)
    assert all(tensor.equal(whole[name]) for name, tensor in load_tensors(tmp_path / "out").items())
    with pytest.raises(ConvertError, match="expected 1 to 4 layers to keep, got 5"):
        truncate(source, tmp_path / "more", 5, PLUGIN)


@pytest.mark.parametrize("num_experts", [3, 16], ids=["3-experts", "16-experts"])
def test_expert_ids(
    dsv4_config: dict[str, Any],
    tmp_path: Path,
    num_experts: int,
    make_checkpoint: Callable[..., Path],
    load_tensors: Callable[..., Any],
) -> None:
    tensors = load_tensors(make_checkpoint(tmp_path / "a", dsv4_config | {"n_routed_experts": num_experts}))
    ids = tensors["layers.1.ffn.gate.tid2eid"]
    assert ids.dtype == torch.int64
    assert sorted(ids.unique().tolist()) == list(range(num_experts))
    assert (ids[:, 0] != ids[:, 1]).all()
    assert not ids.equal(tensors["layers.0.ffn.gate.tid2eid"])
