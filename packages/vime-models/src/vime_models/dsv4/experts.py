# SPDX-License-Identifier: Apache-2.0
"""Experts whose activation is one operation: both halves clamped, multiplied, and weighted by the router in float32.

Megatron's own experts do the same in half a dozen passes over the widest tensor of the layer, rounding after each. Its
routed experts, one after the other, also take the host longer to launch than the device to compute, and their results
are copied to be one tensor. Here the rows of all experts stay one tensor: a product writes each expert's rows where
they belong, and the activation is launched once. Parameters, names and sharding stay Megatron's. Left out:
TransformerEngine's grouped experts, used as they are.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_kernels.moe import swiglu


class _HandsOut:
    """Mixin of Megatron's linears: a call returns the weight, and leaves the product to `Experts`.

    It is a call because distributed data parallelism gathers a weight when its module is called.
    """

    weight: torch.Tensor

    def forward(self) -> torch.Tensor:
        """[out, in], what the product is to see."""
        return self.weight


class ExpertColumn(_HandsOut, ColumnParallelLinear):
    """First linear of an expert."""


class ExpertRow(_HandsOut, RowParallelLinear):
    """Second linear of an expert."""


class Experts(SequentialMLP):
    """The routed experts of a rank; their linears are `ExpertColumn` and `ExpertRow`."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Rows sorted by expert to the pair (outputs of the counted rows times their weight, no bias).

        Args:
            permuted_local_hidden_states: [R, h].
            tokens_per_expert: [experts of this rank], integers that sum to at most R.
            permuted_probs: [R], the router's weights.
        """
        counts = tokens_per_expert.tolist()
        fused = self.config.gradient_accumulation_fusion
        weights = [expert.linear_fc1() for expert in self.local_experts]
        hidden = expert_products(permuted_local_hidden_states, counts, weights, fused=fused)
        hidden = _activate(self.config, hidden, permuted_probs[: len(hidden)])
        weights = [expert.linear_fc2() for expert in self.local_experts]
        return expert_products(hidden, counts, weights, fused=fused), None


class SharedExpert(SharedExpertMLP):
    """The expert of every token; it has no gate."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] to the same shape."""
        hidden = _activate(self.config, self.linear_fc1(hidden_states)[0])
        return cast(torch.Tensor, self.linear_fc2(hidden)[0])


def _activate(
    config: TransformerConfig, hidden: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., 2f] and a weight per row [...], or None, to [..., f]."""
    limit = config.activation_func_clamp_value
    return swiglu(
        hidden, weights, limit=float("inf") if limit is None else limit, backend=config.vime_dsv4.backend
    )


def expert_products(
    rows: torch.Tensor, counts: list[int], weights: Sequence[torch.Tensor], *, fused: bool = False
) -> torch.Tensor:
    """Each expert's rows times its weight: [Σ counts, out].

    Args:
        rows: [R, in], by expert; those behind the last expert's are ignored.
        counts: rows of each expert.
        weights: [out, in] of each expert.
        fused: whether products of the backward pass add to `main_grad` of weights that have one, as Megatron's do.
    """
    return cast(torch.Tensor, _ExpertProducts.apply(rows, counts, fused, *weights))


class _ExpertProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts: list[int], fused: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, *weights)
        # Not saved tensors: the optimizer's buffer changes between the passes.
        ctx.buffers = [getattr(weight, "main_grad", None) if fused else None for weight in weights]
        ctx.counts = counts
        out = rows.new_empty(sum(counts), len(weights[0]))
        for own, target, weight in zip(_parts(rows, counts), out.split(counts), weights, strict=True):
            torch.mm(own, weight.t(), out=target)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        counts, parts = ctx.counts, grad.contiguous().split(ctx.counts)
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.empty_like(rows)
            grad_rows[len(grad) :].zero_()
            for own, weight, target in zip(parts, weights, _parts(grad_rows, counts), strict=True):
                torch.mm(own, weight, out=target)
        grad_weights = (
            _weight_gradient(x, own, weight, buffer) if needed else None
            for x, own, weight, buffer, needed in zip(
                _parts(rows, counts), parts, weights, ctx.buffers, ctx.needs_input_grad[3:], strict=True
            )
        )
        return grad_rows, None, None, *grad_weights


def _parts(rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, ...]:
    return rows[: sum(counts)].split(counts)


def _weight_gradient(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor | None
) -> torch.Tensor | None:
    """gradᵀ x, or what Megatron's hooks want to see once it has been added to the buffer."""
    if buffer is None:
        return grad.t() @ x
    extension = layers.fused_weight_gradient_mlp_cuda
    wide = buffer.dtype is torch.float32
    (extension.wgrad_gemm_accum_fp32 if wide else extension.wgrad_gemm_accum_fp16)(x, grad, buffer)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # A gradient of None would run the hooks, and what they communicate, on another thread.
    return torch.empty_like(weight)
