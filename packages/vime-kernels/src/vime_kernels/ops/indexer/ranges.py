# SPDX-License-Identifier: Apache-2.0
"""Which key rows a query may see, as one half-open range per row."""

import torch

from vime_kernels import _checks
from vime_kernels.ops.gated_pool.reference import pool_offsets


def causal_ranges(
    cu_seqlens: torch.Tensor, *, ratio: int = 1, q_positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The causal range of every query row: (starts, ends), both int32 [S], half-open, in rows of the keys.

    With ratio 1 the keys are the packed tokens. Otherwise they are the pools that `gated_pool` makes of them: a pool is
    visible once its last token is.

        starts = cu_pools[b],   ends = cu_pools[b] + (t - cu_seqlens[b] + 1) // ratio      (row t of sequence b)

    Args:
        cu_seqlens: int32 [B + 1], cumulative lengths of the packed sequences.
        ratio: tokens per key row.
        q_positions: int32 [S], packed row of each query, for queries that are a part or a permutation of the rows
            (context parallelism). A row outside [0, cu_seqlens[-1]) sees nothing. None: every row in order, which
            reads cu_seqlens[-1] on the host.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "causal_ranges"
    _checks.cu_seqlens(op, cu_seqlens)
    _checks.positive(op, ratio=ratio)
    if q_positions is None:
        if not torch.compiler.is_compiling() and not _checks.has_values(cu_seqlens):
            kind = f"{type(cu_seqlens).__name__} on {cu_seqlens.device}"
            _checks.fail(op, "q_positions with cu_seqlens that has no values to read", kind)
        q_positions = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device, dtype=torch.int32)
    _checks.sizes(op, q_positions=(q_positions, "S"), cu_seqlens=(cu_seqlens, "B+1"))
    _checks.int32(op, q_positions=q_positions)
    first_S, seq_S, inside_S = sequence_of(cu_seqlens, q_positions)
    starts = pool_offsets(cu_seqlens, ratio)[seq_S]
    visible = torch.where(inside_S, (q_positions - first_S + 1) // ratio, 0)
    return starts, (starts + visible).to(torch.int32)


def sequence_of(
    cu_seqlens: torch.Tensor, positions_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every packed row: the first row of its sequence, the sequence's number, whether there is one at all."""
    seq_S = torch.searchsorted(cu_seqlens, positions_S, right=True) - 1
    inside_S = (positions_S >= 0) & (positions_S < cu_seqlens[-1])
    seq_S = torch.where(inside_S, seq_S, 0)
    return cu_seqlens[seq_S], seq_S, inside_S
