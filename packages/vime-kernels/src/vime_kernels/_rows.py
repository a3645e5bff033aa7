# SPDX-License-Identifier: Apache-2.0
"""Row by row work: gathering rows by index, and chunks that bound memory in the forward and the backward pass."""

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import embedding, pad
from torch.utils.checkpoint import checkpoint

# What the intermediates of one chunk may take. Small models fit in one chunk and pay no recomputation.
CHUNK_BYTES = 2**28


def gather(x_ND: torch.Tensor, indices_SK: torch.Tensor, valid_SK: torch.Tensor) -> torch.Tensor:
    """[S, K, D]: row indices[s, k] of x, and zeros without a gradient where the slot is not valid.

    An invalid slot reads an appended row of zeros, never x: multiplying a stray inf or NaN by zero would give NaN.
    """
    nothing = len(x_ND)
    return embedding(torch.where(valid_SK, indices_SK, nothing), pad(x_ND, (0, 0, 0, 1)), padding_idx=nothing)


def chunks(rows: int, bytes_per_row: int, budget: int | None = None) -> Iterator[slice]:
    """Slices that cover `rows`, of as many rows as fit in `budget` (CHUNK_BYTES), and of one row at least."""
    step = max(1, (CHUNK_BYTES if budget is None else budget) // max(1, bytes_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def map_rows(
    function: Callable[[slice], tuple[torch.Tensor, ...]], rows: int, bytes_per_row: int
) -> tuple[torch.Tensor, ...]:
    """The results of `function` over all rows, concatenated along dimension 0.

    With several chunks each is recomputed in the backward pass instead of being stored.

    Args:
        function: maps a slice of rows to tensors whose first dimension is those rows; must be deterministic.
        rows: how many rows there are; 0 is legal.
        bytes_per_row: size of the intermediates of one row.
    """
    pieces = list(chunks(rows, bytes_per_row))
    if len(pieces) <= 1:
        return function(slice(0, rows))
    results = [checkpoint(function, piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
