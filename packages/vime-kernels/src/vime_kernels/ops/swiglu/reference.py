# SPDX-License-Identifier: Apache-2.0
"""Clamped SwiGLU in plain torch: the specification. Tensors are in the dtype to compute in."""

import torch


def swiglu(x_RF: torch.Tensor, limit: float, weight_R: torch.Tensor | None) -> torch.Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit), times the row's weight; gate is the first half of the channels."""
    gate, up = x_RF.chunk(2, dim=-1)
    out = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return out if weight_R is None else out * weight_R[:, None]
