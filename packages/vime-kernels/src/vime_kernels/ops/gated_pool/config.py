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


class Tile(NamedTuple):
    """One program: the slots of a pool as a power of two, a block of channels, and so many pools in turn."""

    slots: int
    channels: int
    pools: int
    num_warps: int


def tile(ratio: int, overlap: bool, channels: int) -> Tile:
    """The forward tile."""
    return _tile(ratio, overlap, channels, 2 if _slots(ratio, overlap) > 32 else 4)


def tile_bwd(ratio: int, overlap: bool, channels: int) -> Tile:
    """The backward tile. More pools a program, because each leaves a partial sum for ape behind."""
    slots = _slots(ratio, overlap)
    return _tile(ratio, overlap, channels, 16 if 8 <= slots <= 32 else 8)


def _tile(ratio: int, overlap: bool, channels: int, pools: int) -> Tile:
    slots = _slots(ratio, overlap)
    widest = max(MIN_CHANNELS, VALUES // slots)
    block = min(widest, max(16, 1 << (channels - 1).bit_length()))
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
