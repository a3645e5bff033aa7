# SPDX-License-Identifier: Apache-2.0
"""Number formats and tile choices of the Triton quantisation, and what it supports."""

from typing import NamedTuple

import torch


class Format(NamedTuple):
    """A small floating-point format, as far as rounding to it needs."""

    largest: float
    floor: float  # least amax of a block
    mantissa: int  # stored bits
    normal: float  # smallest normal number; below it the steps stay as wide


FP8 = Format(448.0, 1e-4, 3, 2.0**-6)  # E4M3
FP4 = Format(6.0, 6.0 * 2.0**-126, 1, 1.0)  # E2M1

# Values of one program, and of each of its warps where a block or a rotated row is longer. Within a warp the steps of
# the rotation exchange values without a barrier.
TILE = 1024
MAX_BLOCK = 4096
# A row has to fit in a program when it is rotated.
MAX_ROTATED = 4096


def num_warps(values: int) -> int:
    """Warps of a program that holds so many values."""
    return max(1, values // TILE)


def unsupported(x: torch.Tensor, block: int, rotate: bool) -> str | None:
    """What the quantisation kernel cannot do about this call, None when it can."""
    if block & (block - 1) or block > MAX_BLOCK:
        return f"block={block} (a power of two, at most {MAX_BLOCK})"
    if x.numel() // block >= 2**31:
        return f"{x.numel() // block} blocks (less than 2**31)"
    return unsupported_rotation(x) if rotate else None


def unsupported_rotation(x: torch.Tensor) -> str | None:
    """What the kernels cannot do about rotating these rows, None when they can."""
    if x.dtype == torch.float64:
        return "float64"
    if x.shape[-1] > MAX_ROTATED:
        return f"rows of {x.shape[-1]} (at most {MAX_ROTATED})"
    return None
