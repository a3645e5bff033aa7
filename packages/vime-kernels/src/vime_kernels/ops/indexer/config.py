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
# Lists of two rows each that the gradient for Hopper holds at a time.
PAIRS_BYTES = 2**26
# Keys that one program walks through; long rows are shared by several programs.
KEYS_PER_PROGRAM = 4096


def logits_tile(dtype: torch.dtype) -> LogitsTile:
    """The forward tile for operands of this dtype."""
    return LOGITS_8BIT if dtype in FP8 else LOGITS_16BIT


def hopper(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the logits kernel written for Hopper's warpgroup instructions can run this call, and is the faster."""
    S, H, D = q.shape
    if not q.is_cuda or q.element_size() > 2 or D != 128 or H not in (32, 64, 128) or not q.is_contiguous():
        return False
    if not _aligned(q, k, 16 // q.element_size()) or min(len(k), out.stride(0)) < 2:
        return False
    # Blocks of 256 rows of q have to fill the device.
    return _is_hopper(q, blocks=S * H // 256)


def logits_workers(q: torch.Tensor) -> int:
    """Warpgroups that multiply in that kernel: four where a product takes longer than its sums over heads."""
    return 4 if q.dtype not in FP8 and q.shape[1] >= 64 else 2


def hopper_scores(q: torch.Tensor, k: torch.Tensor) -> bool:
    """The same for the gradient of the scores of a selection."""
    S, H, D = q.shape
    if not q.is_cuda or q.element_size() > 2 or D != 128 or H not in (32, 64):
        return False
    # Triton takes a stride for a multiple of 16 bytes only if 16 divides it, counted in elements.
    if not _aligned(q, k, 16):
        return False
    return _is_hopper(q, blocks=S // 2)


def _aligned(q: torch.Tensor, k: torch.Tensor, apart: int) -> bool:
    """Whether rows of both can be copied in pieces of 16 bytes, and are not one row under many names (expanded).

    Rows lie a multiple of `apart` elements from each other.
    """
    whole = all(stride and stride % apart == 0 for stride in (*q.stride()[:2], k.stride(0)))
    return whole and q.stride(2) == k.stride(1) == 1 and not any(t.data_ptr() % 16 for t in (q, k))


def _is_hopper(q: torch.Tensor, blocks: int) -> bool:
    """Whether this is a Hopper device with the right Triton, and so many programs fill it."""
    filled = blocks >= torch.cuda.get_device_properties(q.device).multi_processor_count
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
