# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton indexer loss, and what it supports."""

from typing import NamedTuple

import torch

from vime_kernels._backend import interpreting

MAX_HEADS = 128
MAX_DIM = 576
# Slots of a row that the loss looks at together, and how many of them are a warp's.
LOSS_SLOTS = 2048
LOSS_SLOTS_PER_WARP = 512
# Rows whose losses are added together.
LOSS_ROWS = 4096


class TargetTile(NamedTuple):
    """One program's tile of the teacher: all heads of a row, and so many slots at a time."""

    slots: int
    num_warps: int
    num_stages: int


def target_tile(heads: int, dim: int) -> TargetTile:
    """The tile for so many heads, a power of two: queries and one tile of keys share 227 KiB."""
    # A wide tile without a pipeline is faster than a pipeline of narrow ones.
    return TargetTile(128 if heads * dim <= 64 * 512 and dim <= 512 else 64, 8, 1)


def unsupported_target(query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor | None) -> str | None:
    """What the kernel cannot do about this teacher, None when it can."""
    allowed = (torch.bfloat16, torch.float16) + ((torch.float32,) if interpreting() else ())
    if query.dtype not in allowed or key.dtype != query.dtype:
        return f"query in {query.dtype} with key in {key.dtype} (both bfloat16 or float16)"
    if lse is not None and lse.dtype != torch.float32:
        return f"lse in {lse.dtype}"
    if query.shape[1] > MAX_HEADS:
        return f"H={query.shape[1]} (at most {MAX_HEADS})"
    if query.shape[2] > MAX_DIM:
        return f"D={query.shape[2]} (at most {MAX_DIM})"
    return None


def unsupported_loss(scores: torch.Tensor, target: torch.Tensor) -> str | None:
    """What the kernel cannot do about these scores, None when it can."""
    return "float64" if torch.float64 in (scores.dtype, target.dtype) else None
