# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton gated pooling, and what it supports."""

from typing import NamedTuple

import torch

MAX_SLOTS = 1024
# Values of x in one tile, and those that a thread holds of it.
FORWARD, BACKWARD = (1024, 16), (1024, 32)
# Pools that one program makes, where there are many.
FORWARD_POOLS, BACKWARD_POOLS = 4, 32


class Tile(NamedTuple):
    """One program: the slots of a pool as a power of two, a block of channels, and so many pools in turn."""

    slots: int
    channels: int
    pools: int
    num_warps: int


def tile(ratio: int, overlap: bool, channels: int) -> Tile:
    """The forward tile."""
    return _tile(ratio, overlap, channels, *FORWARD, FORWARD_POOLS)


def tile_bwd(ratio: int, overlap: bool, channels: int) -> Tile:
    """The backward tile; it makes more pools, because each program leaves a partial sum for ape behind."""
    return _tile(ratio, overlap, channels, *BACKWARD, BACKWARD_POOLS)


def _tile(ratio: int, overlap: bool, channels: int, values: int, per_thread: int, pools: int) -> Tile:
    slots = _slots(ratio, overlap)
    block = min(max(32, values // slots), max(16, 1 << (channels - 1).bit_length()))
    warps = min(16, max(1, slots * block // (32 * per_thread)))
    return Tile(slots, block, max(1, min(pools, 512 // slots)), warps)


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
