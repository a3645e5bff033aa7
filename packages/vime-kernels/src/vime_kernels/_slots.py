# SPDX-License-Identifier: Apache-2.0
"""Lists of picks in Triton: where the last one is, and the end of a row of results that no pick reaches."""

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)


@triton.jit
def used_slots(indices_row, N, K):  # type: ignore[no-untyped-def]
    """One past the last of K slots that names one of N rows."""
    used = 0
    for first in range(0, K, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        index = tl.load(indices_row + slot, mask=slot < K, other=-1)
        used = tl.maximum(used, tl.max(tl.where((index >= 0) & (index < N), slot + 1, 0)))
    return used


@triton.jit
def fill_slots(row, first, K, value):  # type: ignore[no-untyped-def]
    """Writes `value` to the slots from `first` on."""
    for start in range(first // BLOCK * BLOCK, K, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(row + slot, value, mask=(slot >= first) & (slot < K))
