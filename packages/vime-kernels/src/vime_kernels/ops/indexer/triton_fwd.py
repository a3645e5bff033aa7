# SPDX-License-Identifier: Apache-2.0
"""Indexer logits in Triton.

A program holds the heads of a few queries and walks over the keys. The product is key-major, [keys, queries · heads],
because the heads then lie inside one group of four lanes of the tensor core's result, and their weighted sum needs two
shuffles. That sum has one fixed order, so a row's scores do not depend on the rows it shares a tile with.

Equal to `reference.logits` up to the rounding of float32 sums.
"""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.indexer import config


@triton.jit
def _head_sum(x_NM, weights_M, RELU: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr):  # type: ignore[no-untyped-def]
    """[keys, queries] from [keys, queries · heads]."""
    if RELU:
        x_NM = tl.maximum(x_NM, 0.0, propagate_nan=tl.PropagateNan.ALL)
    x_NM *= weights_M[None, :]
    return tl.sum(tl.reshape(x_NM, [x_NM.shape[0], BLOCK_Q, BLOCK_H]), 2)


@triton.jit(do_not_specialize=["S"])  # a row's bits must not depend on how many there are
def _logits_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    weights,
    q_scale,
    k_scale,
    starts,
    ends,
    out,
    S,
    N,
    H,
    D,
    q_row,
    q_head,
    k_row,
    weights_row,
    q_scale_row,
    out_row,
    HAS_WEIGHTS: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    RELU: tl.constexpr,
    CLEAN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr,
):
    # The last rows of a causal batch see the most keys: they go first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK_Q
    span = tl.program_id(1) * SPAN
    span_end = tl.minimum(span + SPAN, N)
    row_Q = first_row + tl.arange(0, BLOCK_Q)
    start_Q = tl.maximum(tl.load(starts + row_Q, mask=row_Q < S, other=0), 0)
    end_Q = tl.minimum(tl.load(ends + row_Q, mask=row_Q < S, other=0), N)
    some_Q = end_Q > start_Q
    low = tl.min(tl.where(some_Q, start_Q, N))
    high = tl.max(tl.where(some_Q, end_Q, 0))
    first = tl.minimum(tl.maximum(low, span) // BLOCK_N * BLOCK_N, span_end)
    last = tl.maximum(tl.minimum(high, span_end), first)

    column = tl.arange(0, BLOCK_N)
    out_NQ = out + row_Q[None, :] * out_row + column[:, None]
    if first < last:
        flat = tl.arange(0, BLOCK_Q * BLOCK_H)
        row_M, head_M = first_row + flat // BLOCK_H, flat % BLOCK_H
        live_M = (row_M < S) & (head_M < H)
        d = tl.arange(0, BLOCK_D)
        q_MD = tl.load(
            q + row_M[:, None] * q_row + head_M[:, None].to(tl.int64) * q_head + d[None, :],
            mask=live_M[:, None] & (d < D)[None, :],
            other=0.0,
        )
        weights_M = live_M.to(tl.float32)
        if HAS_WEIGHTS:
            weights_M = tl.load(weights + row_M * weights_row + head_M, mask=live_M, other=0.0).to(tl.float32)
        if HAS_Q_SCALE:
            weights_M *= tl.load(q_scale + row_M * q_scale_row + head_M, mask=live_M, other=0.0).to(
                tl.float32
            )
        k_ND = k + column[:, None].to(tl.int64) * k_row + d[None, :]
        for n in range(first, last, BLOCK_N):
            n = tl.multiple_of(n, BLOCK_N)
            live_ND = (n + column < N)[:, None] & (d < D)[None, :]
            keys_ND = tl.load(k_ND + n.to(tl.int64) * k_row, mask=live_ND, other=0.0)
            x_NM = tl.dot(keys_ND, tl.trans(q_MD), input_precision="ieee")
            score_NQ = _head_sum(x_NM, weights_M, RELU, BLOCK_Q, BLOCK_H)
            if HAS_K_SCALE:
                score_NQ *= tl.load(k_scale + n + column, mask=n + column < N, other=0.0).to(tl.float32)[
                    :, None
                ]
            if CLEAN:
                inside_NQ = (n + column[:, None] >= start_Q[None, :]) & (n + column[:, None] < end_Q[None, :])
                score_NQ = tl.where(inside_NQ, score_NQ, float("-inf"))
            tl.store(out_NQ + n, score_NQ, mask=(row_Q < S)[None, :] & (n + column < N)[:, None])
    if CLEAN:
        nothing_NQ = tl.full([BLOCK_N, BLOCK_Q], float("-inf"), tl.float32)
        for n in range(span, first, BLOCK_N):
            tl.store(out_NQ + n, nothing_NQ, mask=(row_Q < S)[None, :] & (n + column < first)[:, None])
        for n in range(first + tl.cdiv(last - first, BLOCK_N) * BLOCK_N, span_end, BLOCK_N):
            tl.store(out_NQ + n, nothing_NQ, mask=(row_Q < S)[None, :] & (n + column < N)[:, None])


@torch.library.custom_op("vime_kernels::indexer_logits", mutates_args=("out",))
def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    use_relu: bool,
    clean_logits: bool,
) -> None:
    """Writes the scores [S, N] into `out`. Arguments as in `interface.indexer_logits`, already checked."""
    S, H, D = q.shape
    N = len(k)
    if not S or not N:
        return
    if config.hopper(q, k, out):
        from vime_kernels.ops.indexer import gluon_fwd

        gluon_fwd.indexer_logits(q, k, weights, q_scale, k_scale, starts, ends, out, use_relu, clean_logits)
        return
    tile = config.logits_tile(q.dtype)
    block_h = max(16, triton.next_power_of_2(H))
    block_q = max(1, tile.queries_x_heads // block_h)
    grid = (triton.cdiv(S, block_q), triton.cdiv(N, config.KEYS_PER_PROGRAM))
    _logits_kernel[grid](
        q,
        k,
        weights,
        q_scale,
        k_scale,
        starts,
        ends,
        out,
        S,
        N,
        H,
        D,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        0 if weights is None else weights.stride(0),
        0 if q_scale is None else q_scale.stride(0),
        out.stride(0),
        HAS_WEIGHTS=weights is not None,
        HAS_Q_SCALE=q_scale is not None,
        HAS_K_SCALE=k_scale is not None,
        RELU=use_relu,
        CLEAN=clean_logits,
        BLOCK_Q=block_q,
        BLOCK_H=block_h,
        BLOCK_N=tile.keys,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        SPAN=config.KEYS_PER_PROGRAM,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@indexer_logits.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    use_relu: bool,
    clean_logits: bool,
) -> None:
    return None
