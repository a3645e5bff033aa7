# SPDX-License-Identifier: Apache-2.0
"""Loader, exporter and shards on stand-in modules with Megatron's names; real models are the verifier's business."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_convert.checkpoint import Checkpoint
from vime_convert.errors import CheckpointError, ConfigError, NamesError, OutputError
from vime_convert.hf2hf import rewrite
from vime_convert.megatron.exporter import LossyCast, export_tensors, save_hf
from vime_convert.megatron.loader import load_checkpoint
from vime_convert.megatron.names import canonical
from vime_convert.megatron.shards import join, split, whole_shape
from vime_convert.reader import CheckpointReader
from vime_convert.registry import table_for
from vime_convert.rules import Rule, RuleTable

FakeModel = Callable[..., torch.nn.Module]


@pytest.mark.parametrize(
    ("name", "offsets", "expected"),
    [
        pytest.param("module.module.output_layer.weight", {}, "output_layer.weight", id="wrappers"),
        pytest.param(
            "language_model.decoder.layers.1.x", {"layer_offset": 3}, "decoder.layers.4.x", id="stage"
        ),
        pytest.param(
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
            {"layer_offset": 2, "expert_offset": 4},
            "decoder.layers.2.mlp.experts.linear_fc1.weight5",
            id="sequential-experts",
        ),
        pytest.param(
            "module.decoder.layers.0.mlp.experts.linear_fc2.weight1",
            {"expert_offset": 4},
            "decoder.layers.0.mlp.experts.linear_fc2.weight5",
            id="grouped-experts",
        ),
        pytest.param(
            "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
            {"expert_offset": 4},
            "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
            id="shared-experts",
        ),
    ],
)
def test_canonical(name: str, offsets: dict[str, int], expected: str) -> None:
    assert canonical(name, **offsets) == expected


@settings(deadline=None)
@given(
    st.sampled_from(["copy", "gate_up"]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
)
def test_shards_split_and_join(kind: str, dim: int | None, size: int, unit: int) -> None:
    shape = (4 * unit, 4)
    count = 2 if kind == "gate_up" else 1
    rule = Rule("m", ("a", "b")[:count], (shape,) * count, kind=kind, tp_dim=dim)  # type: ignore[arg-type]
    whole = torch.randn(rule.mcore_shape)
    local = list(rule.mcore_shape)
    if dim is not None:
        local[dim] //= size
    parts = [split(rule, whole, local, rank, size) for rank in range(size)]
    assert all(list(part.shape) == local for part in parts)
    assert whole_shape(rule, local, size, "m") == rule.mcore_shape
    if dim is None or size == 1:
        assert all(part.equal(whole) for part in parts)
        parts = parts[:1]
    assert join(rule, parts).equal(whole)


def test_gate_and_up_are_split_separately() -> None:
    rule = Rule("m", ("g", "u"), ((4,), (4,)), kind="gate_up", tp_dim=0)
    whole = torch.arange(8)
    assert [split(rule, whole, (4,), rank, 2).tolist() for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_vocabulary_is_padded_per_rank_and_cut_again() -> None:
    rule = Rule("m", ("e",), ((5, 2),), tp_dim=0, vocab=True)
    whole = torch.randn(5, 2)
    parts = [split(rule, whole, (4, 2), rank, 2) for rank in (0, 1)]
    assert parts[1][1:].eq(0).all()
    assert join(rule, parts).equal(whole)
    assert join(rule, [split(rule, whole, (8, 2), 0, 1)]).equal(whole)


def test_wrong_local_shape_is_refused() -> None:
    rule = Rule("m", ("e",), ((8, 2),), tp_dim=0)
    with pytest.raises(
        CheckpointError, match=r"m: expected the model to hold \[8, 2\] over 2 rank\(s\), got \[3, 2\]"
    ):
        whole_shape(rule, (3, 2), 2, "m")


@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
def test_load_and_export_are_inverse(
    config: dict[str, Any],
    tmp_path: Path,
    grouped: bool,
    make_checkpoint: Callable[..., Path],
    fake_megatron: FakeModel,
    load_tensors: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    table = table_for(config)
    source = make_checkpoint(tmp_path / "hf", config)
    model = fake_megatron(table, grouped=grouped)
    steps: list[int] = []
    report = load_checkpoint([model], CheckpointReader(source), table, progress=steps.append)
    assert report.tensors == len(list(table.bound())) == len(steps)
    assert (report.dialect, report.narrowed) == ("release", ())
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())
    assert_same(dict(export_tensors([model], table)), load_tensors(source))
    save_hf([model], table, tmp_path / "out", config_from=source)
    assert_same(load_tensors(tmp_path / "out"), load_tensors(source))


@pytest.mark.parametrize("dialect", ["release", "dpsk-hf", "hf-module", "hf-save-5.24"])
def test_every_dialect_round_trips_through_a_float32_model(
    dsv4: RuleTable,
    release_dir: Path,
    tmp_path: Path,
    dialect: str,
    edit: Callable[..., None],
    fake_megatron: FakeModel,
    load_tensors: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:
    edit(release_dir, lambda t: t.update({"mtp.0.norm.weight": torch.ones(32)}))
    edit(release_dir, lambda t: t.update({"layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"].int()}))
    rewrite(release_dir, tmp_path / "in", dsv4, dialect)
    model = fake_megatron(dsv4, dtype=torch.float32)
    reader = CheckpointReader(tmp_path / "in")
    load_checkpoint([model], reader, dsv4)
    save_hf([model], dsv4, tmp_path / "out", dialect=dialect, like=reader, config_from=tmp_path / "in")
    assert_same(load_tensors(tmp_path / "out"), load_tensors(tmp_path / "in"))


def test_pipeline_chunks_and_padded_vocabulary(
    dsv4: RuleTable, release_dir: Path, fake_megatron: FakeModel, load_tensors: Callable[..., Any],
    assert_same: Callable[..., None],
) -> None:  # fmt: skip
    first = fake_megatron(dsv4, layers=range(2), vocab_rows=64)
    second = fake_megatron(dsv4, layers=range(2, 4))
    for name in ("embedding", "output_layer"):
        delattr(second, name)
    del second.decoder.final_layernorm
    load_checkpoint([first, second], CheckpointReader(release_dir), dsv4)
    assert first.output_layer.weight[48:].eq(0).all()
    assert_same(dict(export_tensors([first, second], dsv4)), load_tensors(release_dir))


def test_float32_values_never_pass_through_bfloat16(
    dsv4: RuleTable, release_dir: Path, edit: Callable[..., None], fake_megatron: FakeModel
) -> None:
    fine = torch.tensor([1 + 2**-20] * 4)
    edit(
        release_dir,
        lambda t: t.update({"layers.0.attn.attn_sink": fine, "layers.0.attn_norm.weight": fine.repeat(8)}),
    )
    model = fake_megatron(dsv4)
    report = load_checkpoint([model], CheckpointReader(release_dir), dsv4)
    layer = model.get_submodule("decoder.layers.0")
    assert layer.self_attention.attn_sink.equal(fine)
    # The norm is a bfloat16 parameter here, and the report says that the file had more.
    assert report.narrowed == ("decoder.layers.0.input_layernorm.weight",)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    layer.self_attention.attn_sink.vime_dtype = torch.float32
    with pytest.raises(CheckpointError, match=r"attn_sink: marked to stay float32 but is torch.bfloat16"):
        load_checkpoint([model], CheckpointReader(release_dir), dsv4)


def break_extra(model: torch.nn.Module) -> None:
    model.decoder.register_parameter("bogus", torch.nn.Parameter(torch.zeros(1)))


def break_absent(model: torch.nn.Module) -> None:
    del model.get_submodule("decoder.layers.1.self_attention.indexer").compressor


def break_shape(model: torch.nn.Module) -> None:
    model.decoder.final_layernorm.weight = torch.nn.Parameter(torch.zeros(31))


def break_dtype(model: torch.nn.Module) -> None:
    router = model.get_submodule("decoder.layers.0.mlp.router")
    router.tid2eid = router.tid2eid.float()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        pytest.param(break_extra, NamesError, "no rule for the Megatron parameter decoder.bogus", id="extra"),
        pytest.param(
            break_absent, CheckpointError, "4 problems(.|\n)*compressor.ape: the model has no", id="absent"
        ),
        pytest.param(
            break_shape, CheckpointError, r"layernorm.weight: expected .*\[32\].* got \[31\]", id="shape"
        ),
        pytest.param(break_dtype, CheckpointError, "tid2eid: expected a torch.int64 parameter", id="dtype"),
    ],
)
def test_model_and_rules_disagree(
    dsv4: RuleTable,
    release_dir: Path,
    fake_megatron: FakeModel,
    damage: Any,
    error: type[Exception],
    message: str,
) -> None:
    model = fake_megatron(dsv4)
    damage(model)
    with pytest.raises(error, match=message):
        load_checkpoint([model], CheckpointReader(release_dir), dsv4)
    # Nothing was copied before the fault was found.
    assert model.embedding.word_embeddings.weight.isnan().all()


def test_one_parameter_in_two_chunks(dsv4: RuleTable, release_dir: Path, fake_megatron: FakeModel) -> None:
    model = fake_megatron(dsv4)
    with pytest.raises(NamesError, match="appears twice in the model chunks"):
        load_checkpoint([model, model], CheckpointReader(release_dir), dsv4)


def test_gradients_come_out_under_release_names(dsv4: RuleTable, fake_megatron: FakeModel) -> None:
    model = fake_megatron(dsv4, dtype=torch.float32)
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(index))
    fc1 = model.get_submodule("decoder.layers.0.mlp.shared_experts.linear_fc1").weight
    fc1.grad = torch.cat([torch.ones(20, 32), 2 * torch.ones(20, 32)])
    model.get_submodule("decoder.layers.1.self_attention.indexer.linear_wq_b").weight.grad = None
    grads = dict(export_tensors([model], dsv4, value=lambda p: p.grad))
    assert grads["layers.0.ffn.shared_experts.w1.weight"].eq(1).all()
    assert grads["layers.0.ffn.shared_experts.w3.weight"].eq(2).all()
    absent = {"layers.1.attn.indexer.wq_b.weight"} | {
        n for n in dsv4.expected_hf() if n.endswith(("tid2eid", "gate.bias"))
    }
    assert set(dsv4.expected_hf()) - set(grads) == absent


def test_dtype_policies(dsv4: RuleTable, release_dir: Path, fake_megatron: FakeModel, tmp_path: Path) -> None:
    model = fake_megatron(dsv4, dtype=torch.float32)
    reader = CheckpointReader(release_dir)
    load_checkpoint([model], reader, dsv4)
    kept, released = dict(export_tensors([model], dsv4)), dict(export_tensors([model], dsv4, dtype="release"))
    liked = dict(export_tensors([model], dsv4, dtype="like", like=reader))
    assert kept["norm.weight"].dtype == torch.float32
    for name, spec in dsv4.expected_hf().items():
        assert released[name].dtype == liked[name].dtype == spec.dtype
        assert released[name].equal(liked[name])
    # One training step later the values need more bits than the source has.
    model.decoder.final_layernorm.weight.data += 1e-5
    with pytest.raises(LossyCast, match=r"norm.weight: .* stores torch.bfloat16, which does not hold"):
        save_hf([model], dsv4, tmp_path / "out", like=reader, config_from=release_dir)
    assert not (tmp_path / "out").exists()
    save_hf([model], dsv4, tmp_path / "out", like=reader, dtype="keep", config_from=release_dir)
    saved = Checkpoint(CheckpointReader(tmp_path / "out"), dsv4)
    assert saved.get("norm.weight").equal(model.decoder.final_layernorm.weight)
    assert saved.reader.config()["dtype"] == "float32"


def test_incomplete_export(
    dsv4: RuleTable, release_dir: Path, tmp_path: Path, fake_megatron: FakeModel
) -> None:
    model = fake_megatron(dsv4)
    break_absent(model)
    with pytest.raises(
        NamesError, match=r"4 release tensors have no parameter in the model, first layers.1.attn.indexer"
    ):
        save_hf([model], dsv4, tmp_path / "out", config_from=release_dir)
    assert not (tmp_path / "out").exists()


def test_contradicting_arguments(
    dsv4: RuleTable, release_dir: Path, tmp_path: Path, fake_megatron: FakeModel
) -> None:
    model = fake_megatron(dsv4)
    with pytest.raises(ConfigError, match="expected like= exactly with dtype='like'"):
        next(export_tensors([model], dsv4, dtype="like"))
    with pytest.raises(ConfigError, match="expected config= or config_from="):
        save_hf([model], dsv4, tmp_path / "out")
    with pytest.raises(OutputError, match=r"hf-save-5.12 is only read"):
        save_hf([model], dsv4, tmp_path / "out", dialect="hf-save-5.12", config_from=release_dir)
