# SPDX-License-Identifier: Apache-2.0
"""The operations under the names, argument order and shapes of Miles' DSA kernels, for code written against those.

Thin adapters without numerics of their own; new code uses `vime_kernels.dsa`.

Source: the public signatures of `miles.kernels.attention.dsa`.
"""

from collections.abc import Callable

import torch

from vime_kernels import dsa


def lighting_indexer(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
    topk_fn: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lightning_indexer` with `topk_fn(logits, topk)`, which sees all rows at once, -inf outside the ranges."""
    indices = None
    if topk_fn is not None:
        indices = topk_fn(dsa.indexer_logits(q, k, weights, cu_seqlen_ks, cu_seqlen_ke), topk).to(torch.int32)
    return dsa.lightning_indexer(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, topk, indices=indices)


def indexer_logits_sbhd(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
) -> torch.Tensor:
    """`indexer_logits` for q [S, B, H, D], k [N, B, D], weights [S, B, H] with shared ranges: [B, S, N]."""
    return torch.stack(
        [
            dsa.indexer_logits(q[:, b], k[:, b], weights[:, b], cu_seqlen_ks, cu_seqlen_ke)
            for b in range(q.shape[1])
        ]
    )


def causal_ranges_compressed(
    seq_len_q: int, compress_ratio: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_ranges` of one sequence over its pools."""
    cu_seqlens = torch.tensor([0, seq_len_q], dtype=torch.int32, device=device)
    positions = torch.arange(seq_len_q, dtype=torch.int32, device=device)
    return dsa.causal_ranges(cu_seqlens, ratio=compress_ratio, q_positions=positions)


def build_pooled_keys(
    index_k: torch.Tensor, gate_score: torch.Tensor, ape: torch.Tensor, cu_seqlens: torch.Tensor, kpool: int
) -> torch.Tensor:
    """`gated_pool` cut to the pools that exist, which reads their number on the host."""
    pooled, cu_pools = dsa.gated_pool(index_k, gate_score, ape, cu_seqlens, kpool)
    return pooled[: int(cu_pools[-1])]


def kpool_select_topk(
    index_q: torch.Tensor,
    pooled_k: torch.Tensor,
    head_weights: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool_cu_seqlens: torch.Tensor,
    index_topk: int,
    kpool: int,
) -> torch.Tensor:
    """`kpool_select` as [S, 1, W]; `pool_cu_seqlens` follows from the other arguments and is not read."""
    return dsa.kpool_select(index_q, pooled_k, head_weights, cu_seqlens, index_topk, kpool).unsqueeze(1)
