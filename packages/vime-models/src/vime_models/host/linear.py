# SPDX-License-Identifier: Apache-2.0
"""Linears that megatron-core has only with TransformerEngine: unsharded weights, and results that are not rounded.

Ours serve both backends, and keep float64.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicatedLinear(torch.nn.Module):
    """y = x Wᵀ (+ b) with an unsharded weight; returns the pair that Megatron's linears return.

    Args:
        input_size: length of the last axis of x.
        output_size: length of the last axis of y.
        config: parameter dtype, initialisation device, sequence parallelism.
        init_method: fills the weight in place. The default random state is equal on all tensor-parallel
            ranks, so the copies start equal.
        bias: add a bias, initialised to zero.
        skip_bias_add: return the bias instead of adding it.
        sequence_parallel: whether x is this rank's shard of the sequence, so that weight gradients are
            partial sums that Megatron's finaliser adds over tensor-parallel ranks. None: as the config says.
        **ignored: options of sharded linears (`tp_group`, `name`, ...) that Megatron passes along.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        )
        self.bias: torch.nn.Parameter | None = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            with torch.no_grad():
                init_method(self.weight)
        partial_gradient = config.sequence_parallel if sequence_parallel is None else sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = partial_gradient  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[..., input_size] to ([..., output_size], bias if it was not added)."""
        if self.skip_bias_add:
            return torch.nn.functional.linear(x, self.weight), self.bias
        return torch.nn.functional.linear(x, self.weight, self.bias), None

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"


def wide_linear(x: torch.Tensor, weight: torch.Tensor, *, wide_gradient: bool = False) -> torch.Tensor:
    """x Wᵀ [T, R] in float32 (float64 for float64 input), of operands as they are stored.

    Products of bfloat16 numbers are exact in float32, so on GPUs the tensor cores compute it without wide copies.

    Args:
        x: [T, C].
        weight: [R, C].
        wide_gradient: whether the gradient of the result keeps 16 bits on its way back, as two bfloat16 terms; else
            it is rounded to bfloat16 once, like every other gradient that enters a product. For few rows R.
    """
    if x.is_cuda and x.dtype is weight.dtype is torch.bfloat16 and "dtype" in torch.ops.aten.mm.overloads():
        return cast(torch.Tensor, _WideLinear.apply(x, weight, wide_gradient))
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide))


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, wide_gradient: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wide_gradient = wide_gradient
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        high = grad.to(x.dtype)
        if not ctx.wide_gradient:
            return high @ weight if needs_x else None, high.t() @ x if needs_weight else None, None
        terms = torch.cat([high, (grad - high).to(x.dtype)], 1)
        grad_x = terms @ torch.cat([weight, weight]) if needs_x else None
        grad_weight = None
        if needs_weight:
            wide = torch.mm(terms.t(), x, out_dtype=torch.float32)
            grad_weight = wide.unflatten(0, (2, -1)).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None
