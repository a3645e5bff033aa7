# SPDX-License-Identifier: Apache-2.0
"""A linear whose gradient is added to the buffer by its own product, against the one that returns its gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, layers

from vime_models.host import gradient_fusion


@pytest.fixture
def without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)


def linear(config: Any, *, fused: bool) -> ColumnParallelLinear:
    config.gradient_accumulation_fusion = fused
    return ColumnParallelLinear(6, 4, config=config, init_method=torch.nn.init.normal_, bias=False)


@pytest.mark.usefixtures("without_apex")
def test_the_buffer_gets_what_the_gradient_would_have_been(make_config: Callable[..., Any]) -> None:
    config = make_config(params_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        linear(config, fused=True)
    gradient_fusion.install()
    plain, fused = linear(config, fused=False), linear(config, fused=True)
    with torch.no_grad():
        fused.weight.copy_(plain.weight)
    x, grad = torch.randn(5, 1, 6), torch.randn(5, 1, 4)
    fused.weight.main_grad = torch.ones(4, 6)
    for _ in range(2):
        plain(x)[0].backward(grad)
        fused(x)[0].backward(grad)
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad + 1)
    assert fused.weight.grad is None


@pytest.mark.usefixtures("without_apex")
def test_a_gradient_put_off_needs_apex() -> None:
    with pytest.raises(ValueError, match="--defer-embedding-wgrad-compute needs Apex"):
        gradient_fusion.install(deferred=True)
    gradient_fusion.install()
    with pytest.raises(ValueError, match="--defer-embedding-wgrad-compute needs Apex"):
        gradient_fusion.install(deferred=True)
