# SPDX-License-Identifier: Apache-2.0
"""Which classes a model is built from: TransformerEngine's or the local ones.

The layers of this package name their parameters alike with both; only the experts differ (grouped or one by
one). The norm and the replicated linear are ours in both cases, so their rounding does not depend on the backend.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_models.host.attention import EagerCoreAttention
from vime_models.host.linear import ReplicatedLinear
from vime_models.host.norm import RMSNorm


@dataclass(frozen=True)
class Backend:
    """Classes or partials, each usable as a field of Megatron's submodule dataclasses.

    Attributes:
        column_linear: output features sharded over tensor parallelism.
        row_linear: input features sharded.
        replicated_linear: not sharded.
        norm: RMSNorm.
        core_attention: causal softmax attention.
        experts: routed experts.
    """

    column_linear: Any
    row_linear: Any
    replicated_linear: Any
    norm: Any
    core_attention: Any
    experts: Any

    @classmethod
    def from_config(cls, config: TransformerConfig) -> "Backend":
        """The backend that `config.transformer_impl` names.

        Raises:
            ModuleNotFoundError: TransformerEngine is asked for and not installed (no silent fallback).
            ValueError: an implementation that trains no model.
        """
        if config.transformer_impl == "local":
            return cls(
                column_linear=ColumnParallelLinear,
                row_linear=RowParallelLinear,
                replicated_linear=ReplicatedLinear,
                norm=RMSNorm,
                core_attention=EagerCoreAttention,
                experts=partial(
                    SequentialMLP,
                    submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
                ),
            )
        if config.transformer_impl != "transformer_engine":
            raise ValueError(
                "vime_models.host.backend: expected transformer_impl local or transformer_engine, "
                f"got {config.transformer_impl!r}"
            )
        from megatron.core.extensions import transformer_engine as te

        if not te.HAVE_TE:
            raise ModuleNotFoundError(
                "vime_models.host.backend: --transformer-impl transformer_engine needs TransformerEngine, "
                "which is not installed; run `pip install transformer-engine[core_cu13,pytorch]` or pass "
                "--transformer-impl local",
                name="transformer_engine",
            )
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return cls(
            column_linear=te.TEColumnParallelLinear,
            row_linear=te.TERowParallelLinear,
            replicated_linear=ReplicatedLinear,
            norm=RMSNorm,
            core_attention=te.TEDotProductAttention,
            experts=TESpecProvider().grouped_mlp_modules(config.moe_grouped_gemm),
        )
