# SPDX-License-Identifier: Apache-2.0
"""Zero gradients of gated pooling, where no pool reads: for the first B + 1 programs of a backward kernel."""

import triton
import triton.language as tl


@triton.jit
def _zero_rows(dx, dscore, first, last, column, width, C, BLOCK_T: tl.constexpr = 8):  # type: ignore[no-untyped-def]
    for start in range(first, last, BLOCK_T):
        row = start + tl.arange(0, BLOCK_T)[:, None]
        offset = row.to(tl.int64) * C + column
        mask = (row < last) & (column < width)
        tl.store(dx + offset, tl.zeros(offset.shape, dx.dtype.element_ty), mask=mask)
        tl.store(dscore + offset, tl.zeros(offset.shape, dscore.dtype.element_ty), mask=mask)


@triton.jit
def zero_unpooled(  # type: ignore[no-untyped-def]
    dx, dscore, cu_seqlens, T, B, C, D, ratio, OVERLAP: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Program b: zeros for leftover tokens of sequence b, and for the halves that no later group reads.

    Program B: for rows of no sequence.
    """
    b = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    first = tl.load(cu_seqlens + b)
    end = T
    leftover = first
    if b < B:
        end = tl.load(cu_seqlens + b + 1)
        leftover = first + (end - first) // ratio * ratio
    _zero_rows(dx, dscore, leftover, end, column, D, C)
    if OVERLAP:
        _zero_rows(dx, dscore, leftover, end, column + D, C, C)
        _zero_rows(dx, dscore, tl.maximum(leftover - ratio, first), leftover, column, D, C)
