# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's dialects against the names and values that transformers itself has, reads and writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_convert.checkpoint import Checkpoint
from vime_convert.dialects import split_indices
from vime_convert.errors import CheckpointError, NamesError, OutputError
from vime_convert.hf2hf import rewrite
from vime_convert.reader import CheckpointReader
from vime_convert.registry import table_for

WRITABLE = ("release", "dpsk-hf", "hf-module", "hf-save-5.24")
MTP = {
    "mtp.0.attn.wq_a.weight": torch.randn(24, 32),
    "mtp.0.ffn.experts.1.w2.weight": torch.randn(32, 20),
    "mtp.0.e_proj.weight": torch.randn(32, 32),
    "mtp.0.norm.weight": torch.ones(32),
    "mtp.0.emb.tok_emb.weight": torch.randn(48, 32),
    "mtp.0.hc_head_fn": torch.randn(2, 64),
}


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="compares with transformers")


def load_with(transformers: Any, directory: Path) -> torch.nn.Module:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return model


def test_split_indices() -> None:
    assert split_indices("layers.3.ffn.experts.12.w1.weight") == (
        "layers.{}.ffn.experts.{}.w1.weight",
        (3, 12),
    )
    assert split_indices("decoder.layers.3.mlp.experts.linear_fc1.weight7")[1] == (3, 7)
    assert split_indices("hc_head_fn") == ("hc_head_fn", ())


@pytest.mark.parametrize("name", [*WRITABLE, "hf-save-5.12"])
def test_bijection(dsv4, name: str) -> None:
    dialect = dsv4.dialect(name)
    slots = {release: dialect.slot(release) for release in [*dsv4.expected_hf(), *MTP]}
    assert len(set(slots.values())) == len(slots)
    for release, slot in slots.items():
        assert dialect.knows(slot.stored)
        assert slot.expert is not None or dialect.release_name(slot.stored) == release
    with pytest.raises(NamesError, match="no such tensor in the release dialect"):
        dialect.slot("layers.0.attn.bogus.weight")


def test_dpsk_hf_spellings(dsv4) -> None:
    dialect = dsv4.dialect("dpsk-hf")
    spelt = {
        "layers.2.attn.wq_a.weight": "model.layers.2.self_attn.wq_a.weight",
        "layers.2.attn.compressor.norm.weight": "model.layers.2.self_attn.compressor.norm.weight",
        "layers.2.ffn_norm.weight": "model.layers.2.post_attention_layernorm.weight",
        "layers.2.ffn.experts.3.w2.weight": "model.layers.2.mlp.experts.3.down_proj.weight",
        "layers.2.ffn.shared_experts.w1.weight": "model.layers.2.mlp.shared_experts.gate_proj.weight",
        "layers.2.ffn.gate.bias": "model.layers.2.mlp.gate.e_score_correction_bias",
        "layers.0.ffn.gate.tid2eid": "model.layers.0.mlp.topk.tid2eid",
        "layers.2.hc_ffn_scale": "model.layers.2.hc_ffn_scale",
        "hc_head_fn": "model.hc_head_fn",
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "mtp.0.norm.weight": "model.layers.4.shared_head.norm.weight",
        "mtp.0.attn.kv_norm.weight": "model.layers.4.self_attn.kv_norm.weight",
    }
    assert {name: dialect.slot(name).stored for name in spelt} == spelt
    assert (
        dialect.scale_of(spelt["layers.2.attn.wq_a.weight"])
        == "model.layers.2.self_attn.wq_a.weight_scale_inv"
    )


def test_module_names_are_the_state_dict_of_transformers(
    transformers: Any,
    dsv4,
    dsv4_config: dict[str, Any],
) -> None:
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**dsv4_config))
    state = dict(model.state_dict())
    release = dsv4.module_dialect.to_release(state)
    assert {name: tuple(t.shape) for name, t in release.items()} == {
        name: spec.shape for name, spec in dsv4.expected_hf().items()
    }
    stored = dict(dsv4.module_dialect.from_release(release.items(), dsv4.num_experts))
    assert stored.keys() == state.keys()
    assert all(stored[name].equal(state[name]) for name in state)


def test_saved_names_are_what_save_pretrained_writes(
    transformers: Any,
    dsv4,
    dsv4_config: dict[str, Any],
    tmp_path: Path,
    assert_same: Callable[..., None],
) -> None:
    torch.manual_seed(3)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**dsv4_config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # zeros, which name one expert twice
            table.copy_(torch.arange(table.shape[1]).expand_as(table))
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = Checkpoint(CheckpointReader(tmp_path / "theirs"), dsv4)
    assert checkpoint.dialect.name == "hf-save-5.24"
    read = {name: checkpoint.get(name) for name in checkpoint.names()}
    assert_same(read, dsv4.module_dialect.to_release(dict(model.state_dict())))


@pytest.mark.parametrize("name", ["release", "hf-save-5.24"])
def test_transformers_reads_what_we_write(
    transformers: Any,
    dsv4,
    release_dir: Path,
    tmp_path: Path,
    name: str,
) -> None:
    rewrite(release_dir, tmp_path / "out", dsv4, name)
    model = load_with(transformers, tmp_path / "out")
    checkpoint = Checkpoint(CheckpointReader(release_dir), dsv4)
    theirs = dsv4.module_dialect.to_release(dict(model.state_dict()))
    assert theirs.keys() == set(checkpoint.names())
    for release, tensor in theirs.items():
        assert tensor.equal(checkpoint.get(release).to(tensor.dtype)), release


@pytest.mark.parametrize("config", ["qwen3", "deepseek_v3"], indirect=True)
def test_transformers_reads_the_controls(
    transformers: Any,
    tmp_path: Path,
    config: dict[str, Any],
    make_checkpoint: Callable[..., Path],
) -> None:
    table = table_for(config)
    make_checkpoint(tmp_path / "hf", config)
    model = load_with(transformers, tmp_path / "hf")
    theirs = table.module_dialect.to_release(dict(model.state_dict()))
    checkpoint = Checkpoint(CheckpointReader(tmp_path / "hf"), table)
    assert theirs.keys() == set(checkpoint.names())
    for release, tensor in theirs.items():
        assert tensor.equal(checkpoint.get(release).to(tensor.dtype)), release
    # What transformers saves is one of the dialects, too.
    model.save_pretrained(tmp_path / "saved")
    saved = Checkpoint(CheckpointReader(tmp_path / "saved"), table)
    assert all(saved.get(name).equal(checkpoint.get(name).float()) for name in saved.names())


@pytest.mark.parametrize("via", WRITABLE)
def test_rewriting_there_and_back_is_bitwise(
    dsv4, release_dir: Path, tmp_path: Path, via: str, edit: Callable[..., None],
    load_tensors: Callable[..., Any], assert_same: Callable[..., None],
) -> None:  # fmt: skip
    edit(release_dir, lambda tensors: tensors.update(MTP))
    (release_dir / "tokenizer.json").write_text("{}")
    rewrite(release_dir, tmp_path / "there", dsv4, via, shard_bytes=20_000)
    assert len(list((tmp_path / "there").glob("*.safetensors"))) > 1
    there = Checkpoint(CheckpointReader(tmp_path / "there"), dsv4)
    assert there.dialect.name == via
    assert there.extras == sorted(MTP)
    table_for(json.loads((tmp_path / "there" / "config.json").read_text()))
    rewrite(tmp_path / "there", tmp_path / "back", dsv4, "release")
    assert_same(load_tensors(tmp_path / "back"), load_tensors(release_dir))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


def test_old_save_names_are_read_only(
    dsv4,
    release_dir: Path,
    tmp_path: Path,
    edit: Callable[..., None],
    load_tensors: Callable[..., Any],
) -> None:
    with pytest.raises(OutputError, match=r"hf-save-5.12 is only read; choose one of release, dpsk-hf"):
        rewrite(release_dir, tmp_path / "out", dsv4, "hf-save-5.12")
    before = load_tensors(release_dir)
    old = dsv4.dialect("hf-save-5.12")

    def respell(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[old.slot(name).stored] = tensors.pop(name)

    edit(release_dir, respell)
    checkpoint = Checkpoint(CheckpointReader(release_dir), dsv4)
    assert checkpoint.dialect is old
    assert all(checkpoint.get(name).equal(before[name]) for name in before)


def test_two_dialects_in_one_checkpoint_are_refused(
    dsv4, release_dir: Path, edit: Callable[..., None]
) -> None:
    def mix(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.q_a_proj.weight"] = tensors.pop("layers.1.attn.wq_a.weight")

    edit(release_dir, mix)
    with pytest.raises(
        CheckpointError,
        match=r"two dialects are mixed: '.*' is release and 'model.layers.1.self_attn.q_a_proj",
    ):
        Checkpoint(CheckpointReader(release_dir), dsv4)
