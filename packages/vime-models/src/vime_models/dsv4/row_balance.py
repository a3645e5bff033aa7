# SPDX-License-Identifier: Apache-2.0
"""Gives every context-parallel rank the same causal work: the queries move, the results move back.

Late queries see more compressed entries than early ones, so the last of C contiguous ranks scores up to twice the
average. Here the stream (or each row of a batch) is cut into 2·C equal chunks and rank r computes the queries of
chunks r and 2·C - 1 - r. Keys are addressed in the whole stream, so each query's result is the same bits wherever it
is computed; gradients of shared keys differ by the order of a sum. For one long sequence or equal ones the busiest rank
does at most 1.04 times the average; a stream of very unequal sequences stays uneven, because the cut ignores borders.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all

from vime_models.dsv4.thd import TokenLayout


def balanced(layout: TokenLayout, size: int, rank: int) -> TokenLayout:
    """The layout of the queries that a rank computes, from that of the rows it holds.

    Args:
        layout: contiguous slices of this rank, of an even length.
        size: context-parallel ranks.
        rank: this one.
    """
    half = layout.length // 2
    pair = torch.arange(2, dtype=torch.int32, device=layout.starts.device)
    chunk = rank + pair * (2 * size - 1 - 2 * rank)
    first = layout.starts[:, None] - rank * layout.length
    return replace(layout, starts=(first + chunk * half).flatten(), length=half)


def balance(rows: torch.Tensor, layout: TokenLayout, group: Any) -> torch.Tensor:
    """Rows [T, ...] of the contiguous slices to the rows [T, ...] of `balanced(layout)`; collective.

    Args:
        rows: any dtype and width.
        layout: contiguous slices of this rank.
        group: the context-parallel ranks.
    """
    halves = rows.unflatten(0, (len(layout.starts), 2, layout.length // 2))
    return _trade(halves.transpose(0, 1), group).transpose(0, 1).flatten(0, 2)


def balance_keys(keys: torch.Tensor, layout: TokenLayout, group: Any) -> torch.Tensor:
    """Keys [N, D] of the contiguous slices, halo included, to those of the slices of `balanced(layout)`; collective."""
    half = layout.length // 2
    slices = keys.unflatten(0, (len(layout.starts), layout.halo + layout.length))
    # Each half with the rows that precede it.
    halves = torch.stack([slices[:, : layout.halo + half], slices[:, half:]])
    return _trade(halves, group).transpose(0, 1).flatten(0, 2)


def restore(rows: torch.Tensor, layout: TokenLayout, group: Any) -> torch.Tensor:
    """The inverse of `balance`; collective."""
    halves = rows.unflatten(0, (len(layout.starts), 2, layout.length // 2))
    return _trade(halves.transpose(0, 1), group, back=True).transpose(0, 1).flatten(0, 2)


def _trade(halves: torch.Tensor, group: Any, *, back: bool = False) -> torch.Tensor:
    """[2, G, ...]: own chunks 2·r and 2·r + 1 to chunks r and 2·C - 1 - r, or back."""
    size, rank = group.size(), group.rank()
    takers = [min(chunk, 2 * size - 1 - chunk) for chunk in (2 * rank, 2 * rank + 1)]
    givers = [rank // 2, (2 * size - 1 - rank) // 2]
    rows = halves[0].shape[0] * halves.shape[2]

    def counts(peers: list[int]) -> list[int]:
        return [rows * peers.count(peer) for peer in range(size)]

    # Buffers are sorted by rank. Givers are in order already; of the takers, the first may have the higher rank.
    crossed = takers[0] > takers[1]
    if back:
        traded = all_to_all(group, halves.flatten(0, 2), counts(takers), counts(givers))
    else:
        traded = all_to_all(
            group, (halves.flip(0) if crossed else halves).flatten(0, 2), counts(givers), counts(takers)
        )
    traded = traded.view(halves.shape)
    return traded.flip(0) if back and crossed else traded
