# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton gated pooling, and what it supports."""

from typing import NamedTuple

import torch

MAX_SLOTS = 512
# Values of x in a tile, the fewest channels of it, and values that a thread holds. Short pools fit in one warp, whose
# reductions need no barrier.
VALUES, MIN_CHANNELS, PER_THREAD = 1024, 32, 32
# Pools that one program makes, where they are short. The backward pass leaves a partial sum for ape per program.
FORWARD_POOLS, BACKWARD_POOLS = 4, 8


class Tile(NamedTuple):
    """One program: the slots of a pool as a power of two, a block of channels, and so many pools in turn."""

    slots: int
    channels: int
    pools: int
    num_warps: int


def tile(ratio: int, overlap: bool, channels: int) -> Tile:
    """The forward tile."""
    slots, block = _slots(ratio, overlap), _channels(ratio, overlap, channels)
    # Twice as many values a thread as in the backward pass, which has more to hold.
    warps = 1 if slots * block <= VALUES else slots * block // (64 * PER_THREAD)
    return Tile(slots, block, FORWARD_POOLS if slots <= 32 else 2, max(1, min(16, warps)))


def tile_bwd(ratio: int, overlap: bool, channels: int) -> Tile:
    """The backward tile."""
    slots, block = _slots(ratio, overlap), _channels(ratio, overlap, channels)
    return Tile(slots, block, BACKWARD_POOLS, max(1, min(16, slots * block // (32 * PER_THREAD))))


def _channels(ratio: int, overlap: bool, channels: int) -> int:
    widest = max(MIN_CHANNELS, VALUES // _slots(ratio, overlap))
    return min(widest, max(16, 1 << (channels - 1).bit_length()))


def _slots(ratio: int, overlap: bool) -> int:
    return 1 << ((2 * ratio if overlap else ratio) - 1).bit_length()


def unsupported(
    x: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, ratio: int, overlap: bool
) -> str | None:
    """What the kernels cannot do about this call, None when they can."""
    if torch.float64 in (x.dtype, score.dtype, ape.dtype):
        return "float64"
    if _slots(ratio, overlap) > MAX_SLOTS:
        return f"ratio={ratio} (at most {MAX_SLOTS} slots in a pool)"
    return None
