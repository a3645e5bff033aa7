# SPDX-License-Identifier: Apache-2.0
"""Tile choices of the top-k kernels, and what they support. Measured on an H200."""

from dataclasses import dataclass
from math import isqrt

import torch

from vime_kernels._backend import has_gluon

# Candidates that thinning out may leave of a row, at least: the more, the seldomer a row is walked over twice, which
# costs the more the longer it is.
MIN_KEPT, MIN_KEPT_OF_LONG, LONG = 1024, 2048, 32768
MAX_K = 4096
# Candidates of a warp where they are searched in registers.
SELECT_COLUMNS = 1024

# Triton, in three launches. Rows up to this long are selected exactly at once; longer ones are thinned out first.
EXACT_WIDTH = 8192
# Columns that the threshold of a row is guessed from: one of so many, and no more than this.
SAMPLED_ONE_OF = 16
MAX_SAMPLE = 8192
# Warps that thin out one row, and the groups of 128 columns that one of them looks at together.
GATHER_WARPS = 4
GATHER_GROUPS = 2
# Registers of a thread with which sixteen warps of the exact selection share a multiprocessor.
SELECT_REGISTERS = 128
# Candidates between the two steps; rows are launched in groups that stay below it.
SCRATCH_BYTES = 2**28

# Gluon, in one launch. Rows up to this long keep fewer candidates, since a second walk over them costs little.
SHORT = 8192
# Warps with which an H200 is busy.
BUSY_WARPS = 132 * 16
MAX_ROW_WARPS = 16
# Scores of the sample that should reach the guess: their number is then off by a tenth.
SAMPLED_KEPT = 96
MAX_ROW_SAMPLE = 4096


@dataclass(frozen=True)
class RowTile:
    """Of one row: candidates at most, columns of the sample, warps, and registers of a thread."""

    most: int
    sample: int
    warps: int
    registers: int


def most_kept(k: int, columns: int) -> int:
    """Candidates that thinning out may leave of a row: at least twice k, so that the guess nearly always does."""
    return max(MIN_KEPT if columns <= LONG else MIN_KEPT_OF_LONG, 1 << (2 * k - 1).bit_length())


def row_tile(rows: int, columns: int, k: int) -> RowTile:
    """As few warps as can hold the candidates, since they wait for each other; more where rows are long or few."""
    most = max(MIN_KEPT if columns <= SHORT else MIN_KEPT_OF_LONG, most_kept(k, columns))
    warps = 4 if columns > LONG else max(1, most // (2 * SELECT_COLUMNS))
    while rows * warps < BUSY_WARPS and warps < min(MAX_ROW_WARPS, columns // SELECT_COLUMNS):
        warps *= 2
    sample = 1 << (SAMPLED_KEPT * columns // isqrt(k * most)).bit_length() >> 1
    sample = min(max(sample, 128, 32 * warps), MAX_ROW_SAMPLE)
    return RowTile(most, sample, warps, 64 if warps * SELECT_COLUMNS >= most else 128)


def hopper(logits: torch.Tensor) -> bool:
    """Whether the kernel written for Hopper can run this call."""
    return logits.is_cuda and torch.cuda.get_device_capability(logits.device) == (9, 0) and has_gluon()


def unsupported(logits: torch.Tensor, k: int) -> str | None:
    """What the kernels cannot do about this call, None when they can."""
    if logits.dtype == torch.float64:
        return "float64 scores"
    if k > MAX_K:
        return f"k={k} (at most {MAX_K})"
    return None
