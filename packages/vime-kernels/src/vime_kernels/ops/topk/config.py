# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the Triton top-k, and what it supports."""

import torch

# Rows up to this long are selected exactly at once; longer ones are thinned out first.
EXACT_WIDTH = 8192
# Columns that the threshold of a row is guessed from: one of so many, and no more than this.
SAMPLED_ONE_OF = 16
MAX_SAMPLE = 8192
# Candidates that thinning out may leave of a row, at least: the more, the seldomer a row is walked over twice, which
# costs the more the longer it is.
MIN_KEPT, MIN_KEPT_OF_LONG, LONG = 1024, 2048, 32768
MAX_K = 4096
# Warps that thin out one row, and the groups of 128 columns that one of them looks at together.
GATHER_WARPS = 4
GATHER_GROUPS = 2
# The exact selection: columns of a warp, and registers of a thread, with which sixteen warps share a multiprocessor.
SELECT_COLUMNS = 1024
SELECT_REGISTERS = 128
# Candidates between the two steps; rows are launched in groups that stay below it.
SCRATCH_BYTES = 2**28


def most_kept(k: int, columns: int) -> int:
    """Candidates that thinning out may leave of a row: at least twice k, so that the guess nearly always does."""
    return max(MIN_KEPT if columns <= LONG else MIN_KEPT_OF_LONG, 1 << (2 * k - 1).bit_length())


def unsupported(logits: torch.Tensor, k: int) -> str | None:
    """What the kernel cannot do about this call, None when it can."""
    if logits.dtype == torch.float64:
        return "float64 scores"
    if k > MAX_K:
        return f"k={k} (at most {MAX_K})"
    return None
