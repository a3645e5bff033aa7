# SPDX-License-Identifier: Apache-2.0
"""Rotary tables against transformers' own and against complex multiplication."""

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from vime_convert.dsv4.hf_config import Yarn, read_config
from vime_models.dsv4.config import DSv4Options
from vime_models.dsv4.rope import RotaryTable, _inv_freq, rotate, yarn_range

RELEASED = Yarn(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1)


def test_yarn_range_of_the_released_models_is_15_to_25():
    assert yarn_range(64, 160000.0, RELEASED) == (15, 25)


@pytest.mark.parametrize("name", ["flash", "pruned"])
@pytest.mark.parametrize("kind", ["main", "compress"])
def test_frequencies_have_the_bits_of_transformers(twin, name, kind):
    theirs = DeepseekV4RotaryEmbedding(twin(name).theirs.config)
    options = DSv4Options.from_hf(read_config(twin(name).case.config))
    table = RotaryTable(options.rope_dim, options.rope_theta)
    if kind == "compress":
        table = RotaryTable(options.rope_dim, options.compress_rope_theta, options.yarn)
    ours = _inv_freq(table, torch.float32, torch.device("cpu"))
    assert torch.equal(ours, getattr(theirs, f"{kind}_inv_freq"))


def test_rotation_is_complex_multiplication_of_trailing_pairs():
    torch.manual_seed(0)
    table, positions = RotaryTable(8, 1e4), torch.tensor([0, 3, 70])
    x = torch.randn(3, 2, 11, dtype=torch.float64)
    pairs = torch.view_as_complex(x[..., 3:].unflatten(-1, (4, 2)).contiguous())
    angles = positions[:, None] * 1e4 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turned = torch.view_as_real(pairs * torch.exp(1j * angles)[:, None]).flatten(-2)
    cos, sin = table.cos_sin(positions, x.dtype)
    rotated = rotate(x, cos, sin)
    torch.testing.assert_close(rotated, torch.cat((x[..., :3], turned), -1), rtol=0, atol=1e-13)
    torch.testing.assert_close(rotate(rotated, cos, sin, inverse=True), x, rtol=0, atol=1e-13)


def test_table_stays_float32_for_bfloat16_activations():
    cos, _ = RotaryTable(8, 1e4).cos_sin(torch.arange(3), torch.bfloat16)
    assert cos.dtype == torch.float32
    assert rotate(torch.ones(3, 8, dtype=torch.bfloat16), cos, cos).dtype == torch.bfloat16


def test_a_ramp_of_no_width_does_not_divide_by_zero():
    narrow = Yarn(factor=16, original_max_position_embeddings=64, beta_fast=1.0, beta_slow=1.0)
    low, high = yarn_range(8, 6.0, narrow)
    inv_freq = _inv_freq(RotaryTable(8, 6.0, narrow), torch.float64, torch.device("cpu"))
    assert high - low <= 1
    assert inv_freq.isfinite().all()
