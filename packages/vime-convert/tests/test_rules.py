# SPDX-License-Identifier: Apache-2.0
"""The rule table: mutual inverses, unique names, and the layout that Megatron's attention expects."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_convert.errors import NamesError
from vime_convert.registry import table_for
from vime_convert.rules import Rule, to_hf, to_mcore

KINDS = st.sampled_from(["copy", "gate_up", "qkv_grouped"])


def rule_of(kind: str, rows: int, groups: int, width: int, vector: bool) -> Rule:
    tail = () if vector else (width,)
    if kind == "copy":
        return Rule("m", ("a",), ((rows, *tail),))
    if kind == "gate_up":
        return Rule("m", ("a", "b"), ((rows, *tail), (rows, *tail)), kind="gate_up")
    q, kv = 3 * groups * rows, groups * rows
    shapes = ((q, *tail), (kv, *tail), (kv, *tail))
    return Rule("m", ("q", "k", "v"), shapes, kind="qkv_grouped", head_groups=groups)


@settings(deadline=None)
@given(KINDS, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 2**31))
def test_both_directions_are_inverse(
    kind: str, rows: int, groups: int, width: int, vector: bool, seed: int
) -> None:
    rule = rule_of(kind, rows, groups, width, vector)
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=generator) for shape in rule.shapes]
    whole = to_mcore(rule, parts)
    assert whole.shape == rule.mcore_shape
    assert all(a.equal(b) for a, b in zip(to_hf(rule, whole), parts, strict=True))
    other = torch.randn(rule.mcore_shape, generator=generator)
    assert to_mcore(rule, to_hf(rule, other)).equal(other)


def test_grouped_qkv_interleaves_by_key_value_head() -> None:
    rule = rule_of("qkv_grouped", rows=1, groups=2, width=1, vector=True)
    q, k, v = torch.arange(6), torch.tensor([10, 11]), torch.tensor([20, 21])
    assert to_mcore(rule, [q, k, v]).tolist() == [0, 1, 2, 10, 20, 3, 4, 5, 11, 21]


def test_gate_comes_first() -> None:
    rule = rule_of("gate_up", rows=2, groups=1, width=1, vector=True)
    assert to_mcore(rule, [torch.tensor([1, 2]), torch.tensor([3, 4])]).tolist() == [1, 2, 3, 4]


def test_names_are_unique_and_found(config: dict) -> None:
    table = table_for(config)
    bound = list(table.bound())
    assert len({b.mcore for b in bound}) == len(bound)
    assert len(table.expected_hf()) == sum(len(b.hf) for b in bound)
    assert all(table.find(b.mcore) == b for b in bound)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "decoder.layers.0.self_attention.indexer.linear_wq_b.weight", id="no-indexer-in-sliding-layer"
        ),
        pytest.param("decoder.layers.0.mlp.router.expert_bias", id="no-bias-in-hash-layer"),
        pytest.param("decoder.layers.3.mlp.router.tid2eid", id="no-table-in-scored-layer"),
        pytest.param("decoder.layers.4.input_layernorm.weight", id="layer-out-of-range"),
        pytest.param("decoder.layers.0.mlp.experts.linear_fc1.weight4", id="expert-out-of-range"),
        pytest.param("decoder.layers.0.self_attention.linear_qkv.weight", id="other-model"),
    ],
)
def test_unknown_parameters_are_refused(dsv4, name: str) -> None:
    with pytest.raises(NamesError, match="no rule for the Megatron parameter " + name.replace(".", r"\.")):
        dsv4.find(name)


def test_unknown_dialect_names_the_known(dsv4) -> None:
    with pytest.raises(NamesError, match=r"release, dpsk-hf, hf-module, hf-save-5.24, hf-save-5.12, got 'x'"):
        dsv4.dialect("x")
