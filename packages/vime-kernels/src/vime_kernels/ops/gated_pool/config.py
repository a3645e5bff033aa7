# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton gated pooling, and what it supports."""

import torch


def tile(ratio: int) -> tuple[int, int, int]:
    """(pools, channels, warps) of one forward program: eight channels a thread, 16 bytes of bfloat16.

    Long pools take smaller tiles, because there are few of them.
    """
    return (8, 128, 4) if ratio <= 16 else (2, 64, 1)


def tile_bwd(ratio: int) -> tuple[int, int, int]:
    """The same of one backward program. One warp holds all its pools, so that their sum for dape needs no barrier."""
    return (8, 128, 1) if ratio <= 16 else (4, 64, 1)


def unsupported(x: torch.Tensor, score: torch.Tensor, ape: torch.Tensor) -> str | None:
    """What the kernels cannot do about this call, None when they can."""
    if torch.float64 in (x.dtype, score.dtype, ape.dtype):
        return "float64"
    return None
