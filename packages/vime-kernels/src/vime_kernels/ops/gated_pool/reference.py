# SPDX-License-Identifier: Apache-2.0
"""Gated pooling in plain torch: the specification.

The compressor of DeepSeek-V4 (with overlap at ratio 4, without at ratio 128) and the key pooling of the GLM-5.3-Flash
indexer are the same sum: every `ratio` consecutive tokens of a sequence become one row, each channel averaged with
softmax weights of its own. Leaves out the norm, the rotation and the quantisation that follow.
"""

import torch

Halo = tuple[torch.Tensor, torch.Tensor]


def gated_pool(
    x_TC: torch.Tensor,
    score_TC: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ratio: int,
    *,
    overlap: bool,
    rounding: str,
    halo: Halo | None,
    acc: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pooled rows [T // ratio, D] in the dtype of x, and their cumulative counts."""
    cu_pools = pool_offsets(cu_seqlens, ratio)
    first_P, live_P, opens_P = _groups(x_TC.shape[0], cu_seqlens, cu_pools, ratio)
    steps = torch.arange(ratio, device=x_TC.device)
    own_Pr = torch.where(live_P[:, None], first_P[:, None] + steps, 0)
    x_PrC = _take(x_TC, own_Pr).masked_fill(~live_P[:, None, None], 0.0)
    a_PrC = (_take(score_TC, own_Pr).to(acc) + ape.to(acc)).masked_fill(~live_P[:, None, None], 0.0)
    if overlap:
        x_PrC, a_PrC = _with_previous(x_PrC, a_PrC, opens_P, live_P, halo, ape.to(acc))
    weights = a_PrC.softmax(1)
    if rounding == "hf":
        pooled = (weights.to(x_TC.dtype) * x_PrC).sum(1)
    else:
        pooled = (weights * x_PrC.to(acc)).sum(1).to(x_TC.dtype)
    return pooled, cu_pools


def pool_offsets(cu_seqlens: torch.Tensor, ratio: int) -> torch.Tensor:
    """int32 [B + 1]: cumulative number of complete groups of `ratio` tokens; leftovers form no group."""
    counts = torch.diff(cu_seqlens) // ratio
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def _groups(
    tokens: int, cu_seqlens: torch.Tensor, cu_pools: torch.Tensor, ratio: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every pool of the capacity: its first token, whether it exists, whether no group of its sequence precedes."""
    pool_P = torch.arange(tokens // ratio, device=cu_seqlens.device, dtype=torch.int32)
    # The last sequence that starts at or before the pool: sequences without a pool are skipped by right=True.
    seq_P = (torch.searchsorted(cu_pools, pool_P, right=True) - 1).clamp(max=max(len(cu_pools) - 2, 0))
    within_P = pool_P - cu_pools[seq_P]
    live_P = pool_P < cu_pools[-1]
    return cu_seqlens[seq_P] + within_P * ratio, live_P, (within_P == 0) | ~live_P


def _take(rows_TC: torch.Tensor, index_Pr: torch.Tensor) -> torch.Tensor:
    return rows_TC.index_select(0, index_Pr.flatten()).unflatten(0, index_Pr.shape)


def _with_previous(
    x_PrC: torch.Tensor,
    a_PrC: torch.Tensor,
    opens_P: torch.Tensor,
    live_P: torch.Tensor,
    halo: Halo | None,
    ape: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """2r slots per pool: the first half of the channels of the group before, then the second half of the own group.

    A pool that opens its sequence has no group before it: value 0, weight 0. Across a cut of the sequence (context
    parallelism) the group before the first pool comes in as `halo`.
    """
    D = x_PrC.shape[-1] // 2
    x_prev, a_prev = x_PrC[..., :D].roll(1, 0), a_PrC[..., :D].roll(1, 0)
    x_prev = x_prev.masked_fill(opens_P[:, None, None], 0.0)
    a_prev = a_prev.masked_fill(opens_P[:, None, None], float("-inf"))
    if halo is not None and len(x_PrC):
        x_halo, a_halo = halo[0][None, :, :D], halo[1][None, :, :D].to(ape.dtype) + ape[:, :D]
        x_prev = torch.cat([x_halo.masked_fill(~live_P[0], 0.0), x_prev[1:]])
        a_prev = torch.cat([a_halo.masked_fill(~live_P[0], 0.0), a_prev[1:]])
    return torch.cat([x_prev, x_PrC[..., D:]], 1), torch.cat([a_prev, a_PrC[..., D:]], 1)
