# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton sum of rows, and what it supports."""

import torch
import triton

# Channels of one program, at most.
WIDEST = 4096
# Picks of a token, at most: the loop over them is unrolled, so that all loads are on their way at once.
MOST = 32


def tile(C: int) -> dict[str, int]:
    """Channels and warps of a program, 16 channels a thread."""
    width = max(32, min(WIDEST, triton.next_power_of_2(C)))
    return {"BLOCK_C": width, "num_warps": min(8, max(1, width // 512))}


def unsupported(x: torch.Tensor, rows: torch.Tensor) -> str | None:
    """What the kernel cannot do about these tensors, None when it can."""
    if x.dtype == torch.float64:
        return "float64"
    return f"{rows.shape[1]} rows a sum (at most {MOST})" if rows.shape[1] > MOST else None
