# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton indexer, and what it supports."""

from typing import NamedTuple

import torch

from vime_kernels._backend import has_gluon, interpreting

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


def hopper(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the kernel written for Hopper's warpgroup instructions can run this call, and is the faster one."""
    S, H, D = q.shape
    # In float8 its sums weigh more than its products below 64 heads. Blocks of 256 rows of q have to fill the device.
    if not q.is_cuda or D != 128 or H not in ((64, 128) if q.dtype in FP8 else (32, 64, 128)):
        return False
    aligned = q.is_contiguous() and k.stride(1) == 1 and k.stride(0) * k.element_size() % 16 == 0
    if not aligned or any(t.data_ptr() % 16 for t in (q, k)) or min(len(k), out.stride(0)) < 2:
        return False
    filled = 256 * torch.cuda.get_device_properties(q.device).multi_processor_count <= S * H
    return filled and torch.cuda.get_device_capability(q.device) == (9, 0) and has_gluon()


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
