# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with a stated rounding, for every backend.

Megatron's torch norm refuses sequence parallelism, and which intermediate result is rounded decides whether
trainer and rollout agree to the last bit; so the rounding is an argument here and the implementation is one.
"""

from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

Rounding = Literal["once", "before_weight"]
_ROUNDINGS = ("once", "before_weight")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding = "once") -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in the dtype of x.

    Args:
        x: [..., D], any floating dtype; the statistic is float32, or float64 for float64 input.
        weight: [D].
        eps: added to the mean square.
        rounding: "once" multiplies by the weight before the single cast to the dtype of x (DeepSeek-V4);
            "before_weight" casts the normalised x first and multiplies in the dtype of x (Llama, Kimi-K3).

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    narrow = x.is_cuda and x.dtype is weight.dtype is torch.bfloat16
    if narrow and rounding == "once" and hasattr(torch.ops.aten, "_fused_rms_norm"):
        # One kernel in place of eight; it multiplies in float32 and rounds once as well.
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    accumulate = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(accumulate)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounding == "once":
        return (normed * weight.to(accumulate)).to(x.dtype)
    return normed.to(x.dtype) * weight.to(x.dtype)


class RMSNorm(torch.nn.Module):
    """RMSNorm module with the constructor that Megatron's specs expect.

    Args:
        config: gives the parameter dtype and, through `sequence_parallel`, whether the weight's gradient is a
            partial sum over tensor-parallel ranks.
        hidden_size: D, length of the last axis.
        eps: added to the mean square.
        rounding: see `rms_norm`.
        **ignored: options of other norm classes that Megatron passes along.

    Raises:
        ValueError: unknown rounding, or the config asks for a zero-centred weight.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        rounding: Rounding = "once",
        **ignored: Any,
    ) -> None:
        super().__init__()
        if rounding not in _ROUNDINGS:
            raise ValueError(
                f"vime_models.host.norm: expected rounding one of {_ROUNDINGS}, got {rounding!r}; "
                "choose the one that the rollout engine uses"
            )
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "vime_models.host.norm: expected layernorm_zero_centered_gamma=False, got True; "
                "drop --apply-layernorm-1p, the checkpoints store the weight itself"
            )
        self.eps = eps
        self.rounding: Rounding = rounding
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Read by Megatron's gradient finaliser, which then sums over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., D], same dtype."""
        return rms_norm(x, self.weight, self.eps, self.rounding)

    def extra_repr(self) -> str:
        """Size, eps and rounding."""
        return f"{self.weight.numel()}, eps={self.eps}, rounding={self.rounding!r}"
