# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose weight every tensor-parallel rank holds in full.

megatron-core has such a layer only with TransformerEngine. Ours serves both backends, and keeps float64.
"""

from collections.abc import Callable
from typing import Any

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
