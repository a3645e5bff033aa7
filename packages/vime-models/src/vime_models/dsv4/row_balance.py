# SPDX-License-Identifier: Apache-2.0
"""Gives every context-parallel rank the same causal work: low-rank queries move, outputs move back.

Late queries see more compressed entries than early ones, so the last of C contiguous ranks scores up to twice the
average. Here the stream (or each row of a batch) is cut into parts (`vime_replay.layout.balance_folds`), each part into
2·C equal chunks, and rank r computes the queries of chunks r and 2·C - 1 - r of each. Keys are addressed in the whole
stream, so each query's result is the same bits wherever it is computed, as long as the projections around the move give
a row the same bits at every place: cuBLAS did, in every shape tried; a CPU's library in float64 does not for the last
rows of an odd count. Gradients of shared keys differ by the order of a sum. With at most 32 heads in 16 bits the Hopper
attention sums neighbouring rows together, whose last bits then depend on where a chunk begins, unless deterministic
algorithms are asked for. The cut ignores where samples begin; many parts make up for that: of 64k tokens the busiest of
2 to 16 ranks does at most 1.05 times the average for the packs in the tests.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all

from vime_models.dsv4.thd import TokenLayout
from vime_replay.layout import balance_folds


@dataclass(frozen=True)
class _Trade:
    """Which chunks a rank gives and takes; what it takes is in ascending order.

    Attributes:
        order: its own chunks, sorted by the rank that takes them.
        gives, takes: chunks per rank.
    """

    order: tuple[int, ...]
    gives: tuple[int, ...]
    takes: tuple[int, ...]


@lru_cache(maxsize=64)
def _trade(length: int, size: int, rank: int) -> _Trade:
    """Args: length: rows of a contiguous slice; size, rank: of the context-parallel group."""
    per_rank = 2 * balance_folds(length * size, size)

    def taker(chunk: int) -> int:
        place = chunk % (2 * size)
        return min(place, 2 * size - 1 - place)

    own = range(rank * per_rank, (rank + 1) * per_rank)
    chunks = [chunk for chunk in range(size * per_rank) if taker(chunk) == rank]
    return _Trade(
        tuple(sorted(range(per_rank), key=lambda i: taker(own[i]))),
        tuple(sum(taker(chunk) == peer for chunk in own) for peer in range(size)),
        tuple(sum(chunk // per_rank == peer for chunk in chunks) for peer in range(size)),
    )


def balanced(layout: TokenLayout, size: int, rank: int) -> TokenLayout:
    """The layout of the queries that a rank computes, from that of the rows it holds.

    Args:
        layout: contiguous slices of this rank, of an even length.
        size: context-parallel ranks.
        rank: this one.
    """
    folds = balance_folds(layout.length * size, size)
    width = layout.length // (2 * folds)
    pair, part = (torch.arange(n, dtype=torch.int32, device=layout.starts.device) for n in (2, folds))
    chunks = part[:, None] * 2 * size + rank + pair * (2 * size - 1 - 2 * rank)
    first = layout.starts[:, None] - rank * layout.length
    return replace(layout, starts=(first + chunks.flatten() * width).flatten(), length=width)


def balance(rows: torch.Tensor, layout: TokenLayout, group: Any) -> torch.Tensor:
    """Rows [T, ...] of the contiguous slices to the rows [T, ...] of `balanced(layout)`; collective.

    Args:
        rows: any dtype and width.
        layout: contiguous slices of this rank.
        group: the context-parallel ranks.
    """
    return _send(_pieces(rows, layout, group), _trade(layout.length, group.size(), group.rank()), group)


def balance_keys(keys: torch.Tensor, layout: TokenLayout, group: Any) -> torch.Tensor:
    """Keys [N, D] of the contiguous slices, halo included, to those of the slices of `balanced(layout)`; collective."""
    trade = _trade(layout.length, group.size(), group.rank())
    width = layout.length // len(trade.order)
    slices = keys.unflatten(0, (len(layout.starts), layout.halo + layout.length))
    # Each chunk with the rows that precede it.
    pieces = slices.unfold(1, layout.halo + width, width).movedim(-1, 2)
    return _send(pieces.transpose(0, 1), trade, group)


def restore(rows: torch.Tensor, layout: TokenLayout, group: Any) -> torch.Tensor:
    """The inverse of `balance`; collective."""
    trade = _trade(layout.length, group.size(), group.rank())
    pieces = _pieces(rows, layout, group)
    share = pieces.shape[1] * pieces.shape[2]
    gives, takes = ([share * count for count in counts] for counts in (trade.gives, trade.takes))
    returned = all_to_all(group, pieces.flatten(0, 2), gives, takes).view(pieces.shape)
    back = sorted(range(len(trade.order)), key=trade.order.__getitem__)
    parts = returned.unbind()
    return torch.stack([parts[place] for place in back], 1).flatten(0, 2)


def _pieces(rows: torch.Tensor, layout: TokenLayout, group: Any) -> torch.Tensor:
    """[T, ...] to [chunks, G, rows of a chunk, ...]."""
    count = 2 * balance_folds(layout.length * group.size(), group.size())
    slices = rows.unflatten(0, (len(layout.starts), count, layout.length // count))
    return slices.transpose(0, 1)


def _send(pieces: torch.Tensor, trade: _Trade, group: Any) -> torch.Tensor:
    """[chunks, G, rows, ...] of this rank to the rows that it computes, slice by slice."""
    share = pieces.shape[1] * pieces.shape[2]
    gives, takes = ([share * count for count in counts] for counts in (trade.gives, trade.takes))
    # Unbound and not indexed: the gradient of an index is a tensor of zeros of the whole size, and there are many.
    parts = pieces.unbind()
    sent = torch.cat([parts[chunk].flatten(0, 1) for chunk in trade.order])
    return all_to_all(group, sent, takes, gives).view(pieces.shape).transpose(0, 1).flatten(0, 2)
