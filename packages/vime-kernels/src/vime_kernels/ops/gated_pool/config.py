# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton gated pooling, and what it supports."""

from typing import NamedTuple

import torch

MAX_SLOTS = 512
# Sequences whose pools a program counts at a time.
SEQUENCES = 128
# Values of x in a tile, the fewest channels of it, and values that a thread holds. Short pools fit in one warp, whose
# sums need no barrier.
VALUES, MIN_CHANNELS, PER_THREAD = 1024, 32, 64
# Pools from so many slots on are long.
LONG = 32
# Forward, a warp looks at so many of their slots together, and at so many channels.
LONG_STEPS, LONG_CHANNELS = 8, 128
# Backward, a warp has so many slots and channels, of so many pools at most.
LONG_BWD_SLOTS, LONG_BWD_CHANNELS, LONG_BWD_POOLS = 2, 256, 32
# The backward pass of short pools, so that 16 of its warps share a multiprocessor.
BACKWARD_REGISTERS = 128


class Tile(NamedTuple):
    """One program: the slots of a pool as a power of two, a block of channels, and so many pools in turn."""

    slots: int
    channels: int
    pools: int
    num_warps: int


def tile(ratio: int, overlap: bool, channels: int) -> Tile:
    """The forward tile. One pool, so that all that a program reads is under way at once."""
    return _tile(ratio, overlap, channels, 1)


def tile_bwd(ratio: int, overlap: bool, channels: int) -> Tile:
    """The backward tile. More pools a program, because each leaves a partial sum for ape behind."""
    slots = _slots(ratio, overlap)
    return _tile(ratio, overlap, channels, 16 if 8 <= slots <= 32 else 8)


def is_long(ratio: int, overlap: bool) -> bool:
    """Whether a pool is walked over, and not held in registers."""
    return not overlap and _slots(ratio, overlap) >= LONG


def long_bwd_pools(pools: int) -> int:
    """Pools that a backward program takes in turn: a sixteenth of them or less, a power of two from 4 on."""
    return min(LONG_BWD_POOLS, max(4, 1 << (pools // 16).bit_length() >> 1))


def channel_block(channels: int, widest: int) -> int:
    """Channels of a program, a power of two."""
    return min(widest, max(16, 1 << (channels - 1).bit_length()))


def _tile(ratio: int, overlap: bool, channels: int, pools: int) -> Tile:
    slots = _slots(ratio, overlap)
    block = channel_block(channels, max(MIN_CHANNELS, VALUES // slots))
    return Tile(slots, block, pools, min(16, max(1, slots * block // (32 * PER_THREAD))))


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
