# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton indexer, and what it supports."""

from typing import NamedTuple

import torch

from vime_kernels._backend import interpreting

FP8 = (torch.float8_e4m3fn,)
MAX_HEADS = 128
MAX_DIM = 256


class LogitsTile(NamedTuple):
    """One program's tile of the forward kernel."""

    queries_x_heads: int  # columns of the product: BLOCK_Q · BLOCK_H
    keys: int
    num_warps: int
    num_stages: int


# Two programs per multiprocessor in both cases: one multiplies while the other sums over its heads.
LOGITS_16BIT = LogitsTile(256, 64, 4, 3)
LOGITS_8BIT = LogitsTile(256, 64, 4, 4)
# Picks of one tile of the kernels that score a selection.
PICKS = 64
SCORES_BWD_STAGES = 2
# Rows of slots that the deterministic gradient of k holds at a time.
ORDERED_BYTES = 2**31
# Keys that one program walks through; long rows are shared by several programs.
KEYS_PER_PROGRAM = 4096


def logits_tile(dtype: torch.dtype) -> LogitsTile:
    """The forward tile for operands of this dtype."""
    return LOGITS_8BIT if dtype in FP8 else LOGITS_16BIT


def unsupported(q: torch.Tensor, k: torch.Tensor) -> str | None:
    """What the kernels cannot do about these operands, None when they can."""
    allowed = (torch.bfloat16, torch.float16, *FP8) + ((torch.float32,) if interpreting() else ())
    if q.dtype not in allowed or k.dtype != q.dtype:
        return f"q in {q.dtype} with k in {k.dtype} (both bfloat16, float16 or float8_e4m3fn)"
    if q.shape[1] > MAX_HEADS:
        return f"H={q.shape[1]} (at most {MAX_HEADS})"
    if q.shape[2] > MAX_DIM:
        return f"D={q.shape[2]} (at most {MAX_DIM})"
    return None


def unsupported_out(out: torch.Tensor) -> str | None:
    """What the forward kernel cannot do about this result tensor."""
    if out.dtype != torch.float32:
        return f"results in {out.dtype}"
    if out.numel() and out.stride(-1) != 1:
        return f"out.stride(-1) == {out.stride(-1)}"
    return None
