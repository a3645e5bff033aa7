# SPDX-License-Identifier: Apache-2.0
"""RMSNorm against torch and against the norms of two transformers models, bit for bit where they round alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from vime_models.host.norm import RMSNorm, rms_norm


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, 48, generator=generator, dtype=torch.float64)
    return x.to(dtype), (1 + 0.1 * torch.randn(48, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("rounding", ["once", "before_weight"])
def test_float64_equals_torch(rounding: Any) -> None:
    x, weight = _inputs(torch.float64)
    expected = torch.nn.functional.rms_norm(x, (48,), weight, eps=1e-3)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3, rounding), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "rounding, peer",
    [("once", DeepseekV4RMSNorm), ("before_weight", Qwen3RMSNorm)],
    ids=["once-deepseek_v4", "before_weight-qwen3"],
)
def test_bitwise_equal_to_transformers(rounding: Any, peer: Any, dtype: torch.dtype) -> None:
    x, weight = _inputs(dtype)
    module = peer(48, eps=1e-6).to(dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    assert torch.equal(rms_norm(x, weight, 1e-6, rounding), module(x))


def test_the_two_roundings_differ_in_bf16() -> None:
    x, weight = _inputs(torch.bfloat16)
    assert not torch.equal(rms_norm(x, weight, 1e-6, "once"), rms_norm(x, weight, 1e-6, "before_weight"))


def test_gradients() -> None:
    x, weight = _inputs(torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: rms_norm(a, b, 1e-2), (x[:2, :2].requires_grad_(), weight.requires_grad_())
    )


def test_module_takes_dtype_and_sequence_parallel_from_config(make_config: Callable[..., Any]) -> None:
    config = make_config()
    norm = RMSNorm(config, hidden_size=48, eps=1e-3, normalization="RMSNorm")
    assert norm.weight.dtype is torch.float64
    assert norm.weight.sequence_parallel is False
    x, _ = _inputs(torch.float64)
    assert torch.equal(norm(x), rms_norm(x, torch.ones(48, dtype=torch.float64), 1e-3))
    config.sequence_parallel = True
    assert RMSNorm(config, 48).weight.sequence_parallel is True


def test_refusals(make_config: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="rounding one of"):
        RMSNorm(make_config(), 8, rounding="twice")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layernorm_zero_centered_gamma=False"):
        RMSNorm(make_config(layernorm_zero_centered_gamma=True), 8)
