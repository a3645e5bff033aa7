# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton kernels, as data. Measured on an H200; shared memory and registers are what bind."""

from dataclasses import dataclass

import torch

from vime_kernels._backend import has_gluon

# Rows of keys that a word of a united list can name.
NAMED = 1 << 23
# Programs that keep an H200 busy where the grid can be chosen.
PROGRAMS = 264


@dataclass(frozen=True)
class RowTile:
    """Forward and dQ: BH heads of one query row, BK slots per step."""

    BH: int
    BK: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ScatterTile:
    """dKV of picked rows: BK slots by BD channels, summed over all heads (BH, padded)."""

    BK: int
    BD: int
    BH: int
    warps: int
    stages: int


@dataclass(frozen=True)
class BandTile:
    """dKV of ranges: BN keys by BD channels, summed over all heads of the rows that see them."""

    BN: int
    BD: int
    BH: int
    warps: int
    stages: int


@dataclass(frozen=True)
class BackwardTiles:
    """One tile per backward kernel; `tail` is `scatter` for the channels beyond d_v."""

    query: RowTile
    scatter: ScatterTile
    tail: ScatterTile
    band: BandTile


def all_heads(H: int) -> int:
    """The smallest power of two that holds all heads, 16 (the tensor cores' least) at least."""
    return max(16, 1 << (H - 1).bit_length())


def head_block(H: int) -> int:
    """Heads per program where a program keeps a whole query row of them: at most 64."""
    return min(64, all_heads(H))


def forward_tile(H: int, d_v: int) -> RowTile:
    """Tile of the forward kernel."""
    return RowTile(head_block(H), 64, 4 if d_v < 512 else 8, 2)


def backward_tiles(H: int, d_v: int, d_tail: int) -> BackwardTiles:
    """Tiles of the backward kernels."""
    query = RowTile(head_block(H), 32, 4, 2) if d_v < 512 else RowTile(head_block(H), 64, 8, 1)
    BH = all_heads(H)
    BD = min(64 if BH > 64 else 128, d_v)
    return BackwardTiles(
        query=query,
        scatter=ScatterTile(64, BD, BH, 4, 2),
        tail=ScatterTile(64, max(16, d_tail), BH, 4, 2),
        band=BandTile(64, min(128, d_v), BH, 4, 2),
    )


def group_rows(H: int, N: int) -> int:
    """Query rows of H heads that share the 64 columns of a Hopper kernel: a power of two, 8 at most.

    A word of their united list has to name one of N rows of keys.
    """
    return min(8, 1 << (max(1, 64 // H).bit_length() - 1)) if N <= NAMED else 1


def unsupported(
    H: int, d_qk: int, d_v: int, q: torch.dtype, kv: torch.dtype, interpreting: bool
) -> str | None:
    """Why the Triton kernels cannot do this call, in words; None when they can."""
    tail = d_qk - d_v
    allowed = (torch.bfloat16, torch.float16) + ((torch.float32,) if interpreting else ())
    if q not in allowed or kv != q:
        return f"q in {q} with kv in {kv} (supported: both bfloat16 or both float16)"
    if not 1 <= H <= 128:
        return f"H={H} (supported: 1 to 128)"
    if d_v not in (16, 32, 64, 128, 256, 512):
        return f"d_v={d_v} (supported: a power of two from 16 to 512)"
    if tail not in (0, 16, 32, 64):
        return f"q.shape[-1] - d_v = {tail} (supported: 0, 16, 32, 64)"
    return None


def hopper(q: torch.Tensor, *others: torch.Tensor | None, d_v: int) -> bool:
    """Whether the kernels written for Hopper's warpgroup instructions can run this call."""
    if (
        not q.is_cuda
        or q.dtype not in (torch.bfloat16, torch.float16)
        or d_v != 512
        or q.shape[-1] - d_v not in (0, 64)
    ):
        return False
    # Copies of 16 bytes. Triton takes a stride for a multiple of them only if 16 divides it, counted in elements.
    tensors = [t for t in (q, *others) if t is not None and t.numel()]
    aligned = all(t.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in t.stride()[:-1]) for t in tensors)
    return aligned and torch.cuda.get_device_capability(q.device) == (9, 0) and has_gluon()
