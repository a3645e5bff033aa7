# SPDX-License-Identifier: Apache-2.0
"""Quantisation-aware training: the trainer computes with the values that the rollout engine's caches hold.

Forward passes see the rounded values, gradients pass through the rounding unchanged. What is rounded how is in
`recipes`; the arithmetic, bit by bit, in `vime_kernels.quant`. Weights stay in full precision and are rounded on
every use, so an optimizer accumulates updates that are smaller than a quantisation step.
Source: DeepSeek-V4 technical report and inference code.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules

from vime_kernels.quant import fake_quant_fp4, fake_quant_fp8
from vime_models.dsv4.config import DSv4Options
from vime_models.dsv4.experts import ExpertColumn, ExpertRow, Experts
from vime_models.dsv4.recipes import RECIPES
from vime_models.host.backend import Backend


def quantise_latent(kv: torch.Tensor, options: DSv4Options) -> torch.Tensor:
    """Rotated keys [N, head_dim] as the key-value cache returns them: FP8 except for the channels that rotate."""
    recipe = RECIPES.get(options.qat)
    if recipe is None:
        return kv
    still = kv.shape[-1] - options.rope_dim
    return fake_quant_fp8(kv, recipe.latent_block, channels=still, backend=options.backend)


def quantise_indexer(x: torch.Tensor, options: DSv4Options) -> torch.Tensor:
    """Rotated indexer queries [T, heads, width] or keys [M, width] in the precision of the indexer's cache."""
    recipe = RECIPES.get(options.qat)
    if recipe is None:
        return x
    quantise = fake_quant_fp4 if recipe.indexer_format == "fp4" else fake_quant_fp8
    return quantise(x, recipe.indexer_block, rotate=recipe.hadamard, backend=options.backend)


class _Fp4Weight:
    """Mixin of the experts' linears: the product sees the weight after a round trip through FP4."""

    def forward(self) -> torch.Tensor:
        """[out, in]."""
        options: DSv4Options = self.config.vime_dsv4  # type: ignore[attr-defined]
        block = RECIPES[options.qat].expert_block
        return fake_quant_fp4(super().forward(), block, backend=options.backend)  # type: ignore[misc]


class Fp4Column(_Fp4Weight, ExpertColumn):
    """First linear of an expert, its weight rounded to FP4 on use."""


class Fp4Row(_Fp4Weight, ExpertRow):
    """Second linear of an expert, its weight rounded to FP4 on use."""


def experts_of(backend: Backend, options: DSv4Options) -> Any:
    """The class of the routed experts: the backend's, or local ones, whose weights may be rounded to FP4."""
    if backend.column_linear is not ColumnParallelLinear:
        return backend.experts
    linears: tuple[Any, Any] = (ExpertColumn, ExpertRow)
    recipe = RECIPES.get(options.qat)
    if recipe is not None and recipe.expert_block:
        linears = (Fp4Column, Fp4Row)
    return partial(Experts, submodules=MLPSubmodules(linear_fc1=linears[0], linear_fc2=linears[1]))
