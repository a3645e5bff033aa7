# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton SwiGLU, and what it supports."""

import torch
import triton

# Channels of one program, at most; 8 a thread.
WIDEST = 8192
CHANNELS_PER_THREAD = 8


def tile(F: int) -> dict[str, int]:
    """Channels and warps of a program, which holds a row."""
    width = max(32, triton.next_power_of_2(F))
    return {"BLOCK_F": width, "num_warps": min(16, max(1, width // (32 * CHANNELS_PER_THREAD)))}


def unsupported(x: torch.Tensor, weight: torch.Tensor | None) -> str | None:
    """What the kernels cannot do about these tensors, None when they can."""
    if x.dtype == torch.float64 or (weight is not None and weight.dtype == torch.float64):
        return "float64"
    return f"rows of {x.shape[-1]} (at most {2 * WIDEST})" if x.shape[-1] > 2 * WIDEST else None
