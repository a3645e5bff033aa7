# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton rotation, and what it supports."""

import torch
import triton

# Values of one program, and warps that hold them: 32 values a thread.
TILE = 8192
NUM_WARPS = 8


def tile(D: int) -> dict[str, int]:
    """Heads and channels of one program."""
    width = triton.next_power_of_2(D)
    return {"BLOCK_R": max(1, TILE // width), "BLOCK_D": width, "num_warps": NUM_WARPS}


def unsupported(x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> str | None:
    """What the kernels cannot do about these tensors, None when they can."""
    if torch.float64 in (x_THD.dtype, cos_TP.dtype, sin_TP.dtype):
        return "float64"
    if x_THD.shape[2] % 2:
        return f"an odd D ({x_THD.shape[2]})"
    if x_THD.shape[2] > TILE:
        return f"D={x_THD.shape[2]} (at most {TILE})"
    return None
