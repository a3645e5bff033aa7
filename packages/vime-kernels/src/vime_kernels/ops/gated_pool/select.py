# SPDX-License-Identifier: Apache-2.0
"""Selection of whole pools by the indexer, given back as tokens (kpool of the GLM-5.3-Flash indexer).

Composed of `causal_ranges`, `indexer_topk` and integer arithmetic, which Triton does in one kernel; it has no
numerics of its own.
"""

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels.ops.indexer.interface import indexer_topk
from vime_kernels.ops.indexer.ranges import causal_ranges, sequence_of
from vime_kernels.ops.topk.interface import TopKFn


def kpool_select(
    q: torch.Tensor,
    pooled_k: torch.Tensor,
    weights: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    index_topk: int,
    kpool: int,
    *,
    always_tail: bool = True,
    topk_fn: TopKFn | None = None,
    pad_to: int = 64,
    q_positions: torch.Tensor | None = None,
    max_logits_bytes: int = 2**30,
    backend: str | None = None,
) -> torch.Tensor:
    """The tokens that every query attends to: int32 [S, W], packed rows, ascending, -1 last.

    The best index_topk // kpool visible pools are expanded to their tokens, and the visible tokens of the unfinished
    pool (the tail, at most kpool - 1) are added. A query that sees no more than index_topk tokens takes them all,
    whatever their scores.

    Args:
        q: index queries [S, H, D].
        pooled_k: pooled index keys [P, D] in the layout of `gated_pool`.
        weights: head weights [S, H], or None for weights of one.
        cu_seqlens: int32 [B + 1] over tokens.
        index_topk: token budget, a multiple of kpool.
        kpool: tokens per pool.
        always_tail: add the tail.
        topk_fn: what selects pools, see `indexer_topk`; it sees pool columns and k = index_topk // kpool.
        pad_to: W is index_topk (+ kpool - 1 with the tail) rounded up to a multiple of this.
        q_positions: int32 [S], packed row of each query; None for all rows in order. A row outside every sequence gets
            -1 throughout.
        max_logits_bytes: see `indexer_topk`.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: GLM-5.3-Flash as in transformers (`glm5_next`); the whole-prefix rule as in SGLang and Miles.
    """
    op = "kpool_select"
    _checks.positive(op, index_topk=index_topk, kpool=kpool, pad_to=pad_to)
    if index_topk % kpool:
        _checks.fail(op, f"index_topk to be a multiple of kpool ({kpool})", index_topk)
    S = _checks.sizes(
        op,
        q=(q, "S H D"),
        pooled_k=(pooled_k, "P D"),
        weights=(weights, "? S H"),
        q_positions=(q_positions, "? S"),
        cu_seqlens=(cu_seqlens, "B+1"),
    )["S"]
    _checks.cu_seqlens(op, cu_seqlens, S if q_positions is None else None, (kpool, len(pooled_k)))
    _checks.int32(op, q_positions=q_positions)
    if q_positions is None:
        q_positions = torch.arange(S, dtype=torch.int32, device=q.device)
    q_positions, cu_seqlens = q_positions.contiguous(), cu_seqlens.contiguous()
    width = -(-(index_topk + (kpool - 1 if always_tail else 0)) // pad_to) * pad_to

    def choose(starts_S: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        return indexer_topk(
            q,
            pooled_k,
            weights,
            starts_S,
            ends_S,
            index_topk // kpool,
            topk_fn=topk_fn,
            max_logits_bytes=max_logits_bytes,
            backend=backend,
        )

    if resolve(op, backend, (q, pooled_k, weights, cu_seqlens, q_positions)) == "triton":
        from vime_kernels.ops.gated_pool import triton_select

        starts_S, ends_S = triton_select.kpool_ranges(cu_seqlens, q_positions, kpool)
        pools_SP = choose(starts_S, ends_S)
        if topk_fn is not None:
            pools_SP = _ascending(pools_SP)
        return triton_select.kpool_expand(
            pools_SP, starts_S, cu_seqlens, q_positions, kpool, always_tail, width
        )

    starts_S, ends_S = causal_ranges(cu_seqlens, ratio=kpool, q_positions=q_positions)
    pools_SP = choose(starts_S, ends_S)
    first_S, _, inside_S = sequence_of(cu_seqlens, q_positions)
    seen_S = torch.where(inside_S, q_positions - first_S + 1, 0)
    step_r = torch.arange(kpool, dtype=torch.int32, device=q.device)
    pool_first_SP = first_S[:, None] + (pools_SP - starts_S[:, None]) * kpool
    chosen = (pool_first_SP[..., None] + step_r).masked_fill(pools_SP[..., None] < 0, -1).flatten(1)
    prefix_S = torch.arange(index_topk, dtype=torch.int32, device=q.device)
    everything = (first_S[:, None] + prefix_S).masked_fill(prefix_S >= seen_S[:, None], -1)
    short_S1 = (seen_S <= index_topk)[:, None]
    tokens = torch.where(short_S1, everything, chosen)
    if always_tail:
        tail = (first_S + seen_S // kpool * kpool)[:, None] + step_r[:-1]
        tokens = torch.cat([tokens, tail.masked_fill(short_S1 | (tail > q_positions[:, None]), -1)], 1)
    return _ascending(torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1))


def _ascending(rows: torch.Tensor) -> torch.Tensor:
    """int32 rows sorted, -1 last."""
    beyond = torch.iinfo(torch.int32).max
    rows = rows.masked_fill(rows < 0, beyond).sort(1).values
    return rows.masked_fill(rows == beyond, -1).to(torch.int32)
