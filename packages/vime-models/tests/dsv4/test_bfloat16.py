# SPDX-License-Identifier: Apache-2.0
"""In bfloat16 every layer reproduces the float32 reference up to rounding, on rows whose selections are no ties."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from vime_convert.verify import pinned
from vime_convert.verify.precision import PRECISIONS
from vime_convert.verify.runs import Candidate, Reference, draw_ids
from vime_models.dsv4.plugin import PLUGIN

CASE = PLUGIN.tiny_cases[0]
BF16 = PRECISIONS["bfloat16"]


@pytest.fixture(scope="module")
def sides(checkpoint: Callable[[str], Path]) -> tuple[Reference, Candidate, torch.Tensor]:
    directory = checkpoint(CASE.name)
    reference = Reference(directory, PRECISIONS["float32"], "cpu", PLUGIN.rules(CASE.config))
    ids = draw_ids(reference, CASE.config["vocab_size"], CASE.seq_len, seed=1)
    return reference, Candidate(PLUGIN, CASE.config, directory, BF16, "cpu"), ids


def failing(sides: Any) -> list[str]:
    checks, errors = pinned.compare_pinned(*sides, BF16)
    assert len(errors) == len(CASE.config["compress_ratios"]) - 1
    return [check.name for check in checks if not check.ok]


def test_layers_reproduce_the_reference(sides: Any) -> None:
    assert failing(sides) == []


def test_rows_close_to_ties_would_not(sides: Any) -> None:
    with mock.patch.object(pinned, "ROW_MARGIN", 0.0):
        assert failing(sides) == ["streams[bfloat16]"]


def test_too_few_rows_prove_nothing(sides: Any) -> None:
    with mock.patch.object(pinned, "ROW_MARGIN", 0.5):
        assert failing(sides) == ["streams[bfloat16]"]


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_an_attention_without_its_sink_shows(sides: Any, layer: int) -> None:
    attention = sides[1].chunks[0].decoder.layers[layer].self_attention
    kept = attention.attn_sink.detach().clone()
    try:
        attention.attn_sink.data.fill_(float("-inf"))
        assert failing(sides) == ["streams[bfloat16]"]
    finally:
        attention.attn_sink.data.copy_(kept)


def test_a_head_without_its_norm_shows(sides: Any) -> None:
    weight = sides[1].chunks[0].decoder.final_layernorm.weight
    kept = weight.detach().clone()
    try:
        weight.data.fill_(1.0)
        assert failing(sides) == ["logits[bfloat16]"]
    finally:
        weight.data.copy_(kept)
