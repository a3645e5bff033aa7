# SPDX-License-Identifier: Apache-2.0
"""Partial interleaved rotary embedding in plain torch: the specification. Tensors are in the dtype to compute in."""

import torch


def rotate(x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> torch.Tensor:
    """The last 2P channels of each head, as adjacent pairs, turned by the token's angles; the others as they are."""
    pairs = cos_TP.shape[1]
    still, turning = x_THD.split([x_THD.shape[-1] - 2 * pairs, 2 * pairs], -1)
    even, odd = turning.unflatten(-1, (pairs, 2)).unbind(-1)
    cos, sin = cos_TP[:, None], sin_TP[:, None]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((still, turned), dim=-1)


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
