# SPDX-License-Identifier: Apache-2.0
"""Gated pooling of many tokens in Triton, without overlap, forward and backward.

The slots of a long pool do not fit in the registers of a warp, and sums that leave a warp cost more than the slots.
Forward, a warp walks over the slots of a pool with a running maximum. It leaves behind the log of the softmax
denominators and the unrounded pooled rows, 2 / ratio of what it read, so that backward has no sums over slots: its
programs take a few slots of many pools.
"""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.gated_pool import config
from vime_kernels.ops.gated_pool.triton_fwd import LOG2E, cumulate, find, follow
from vime_kernels.ops.gated_pool.triton_zero import zero_unpooled


@triton.jit(do_not_specialize=["P", "B"])
def _long_kernel(  # type: ignore[no-untyped-def]
    x, score, ape, cu_seqlens, cu_pools, out, stats, P, B, D, x_row, score_row,
    ratio: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    pool = tl.program_id(0)
    sequence, before = cumulate(pool, cu_seqlens, cu_pools, B, ratio, SEQUENCES)
    _, _, first, live, _ = follow(pool, sequence, before, cu_seqlens, B, ratio)
    x += first.to(tl.int64) * x_row
    score += first.to(tl.int64) * score_row
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    alive = live & (d < D)
    top = tl.full([1, BLOCK_D], -1e30, tl.float32)
    total = tl.zeros([1, BLOCK_D], tl.float32)
    weighted = tl.zeros([1, BLOCK_D], tl.float32)
    # A step ahead: the loads of the next slots are under way while these are summed. What is read once leaves the
    # first cache to the position bias, which all pools of a multiprocessor share.
    m = tl.arange(0, STEPS)[:, None]
    here = alive & (m < ratio)
    z_next = tl.load(score + m * score_row + d, mask=here, other=float("-inf"), eviction_policy="evict_first")
    value_next = tl.load(x + m * x_row + d, mask=here, other=0.0, eviction_policy="evict_first")
    for _ in range(0, ratio, STEPS):
        bias = tl.load(ape + m * D + d, mask=here, other=0.0, eviction_policy="evict_last")
        a, value = (z_next.to(tl.float32) + bias) * LOG2E, value_next.to(tl.float32)
        m += STEPS
        here = alive & (m < ratio)
        z_next = tl.load(
            score + m * score_row + d, mask=here, other=float("-inf"), eviction_policy="evict_first"
        )
        value_next = tl.load(x + m * x_row + d, mask=here, other=0.0, eviction_policy="evict_first")
        higher = tl.maximum(top, tl.max(a, 0, keep_dims=True))
        e, shrink = tl.exp2(a - higher), tl.exp2(top - higher)
        total = total * shrink + tl.sum(e, 0, keep_dims=True)
        weighted = weighted * shrink + tl.sum(e * value, 0, keep_dims=True)
        top = higher
    total = tl.where(alive, total, 1.0)
    pooled = weighted / total
    row = tl.cast(pool, tl.int64) * D + d
    tl.store(out + row, pooled.to(out.dtype.element_ty), mask=d < D)
    tl.store(stats + row, tl.where(alive, top + tl.log2(total), 0.0), mask=d < D)
    tl.store(stats + tl.cast(P, tl.int64) * D + row, pooled, mask=d < D)


@triton.jit(do_not_specialize=["P", "T", "B"])
def _long_bwd_kernel(  # type: ignore[no-untyped-def]
    grad, x, score, ape, cu_seqlens, stats, dx, dscore, dape_partial, P, T, B, D, x_row, score_row,
    ratio: tl.constexpr, SLOTS: tl.constexpr, POOLS: tl.constexpr, BLOCK_D: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) - (B + 1)
    if group < 0:
        if tl.program_id(2) == 0:
            zero_unpooled(dx, dscore, cu_seqlens, T, B, D, D, ratio, False, BLOCK_D)
        return
    m = tl.program_id(2) * SLOTS + tl.arange(0, SLOTS)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    used = (m < ratio) & (d < D)
    bias = tl.load(ape + m * D + d, mask=used, other=0.0)
    dape = tl.zeros([SLOTS, BLOCK_D], tl.float32)
    begin = group * POOLS
    sequence, before = find(begin, cu_seqlens, B, ratio, None, False, SEQUENCES)
    for pool in range(begin, tl.minimum(begin + POOLS, P)):
        sequence, before, first, live, _ = follow(pool, sequence, before, cu_seqlens, B, ratio)
        here, token = used & live, (first + m).to(tl.int64)
        z = tl.load(score + token * score_row + d, mask=here, other=float("-inf")).to(tl.float32)
        value = tl.load(x + token * x_row + d, mask=here, other=0.0).to(tl.float32)
        row = tl.cast(pool, tl.int64) * D + d
        g = tl.load(grad + row, mask=d < D, other=0.0).to(tl.float32)
        normaliser = tl.load(stats + row, mask=d < D, other=0.0)
        pooled = tl.load(stats + tl.cast(P, tl.int64) * D + row, mask=d < D, other=0.0)
        dvalue = tl.exp2((z + bias) * LOG2E - normaliser) * g
        dz = tl.where(here, dvalue * (value - pooled), 0.0)
        dape += dz
        tl.store(dx + token * D + d, dvalue.to(dx.dtype.element_ty), mask=here)
        tl.store(dscore + token * D + d, dz.to(dscore.dtype.element_ty), mask=here)
    tl.store(dape_partial + (group.to(tl.int64) * ratio + m) * D + d, dape, mask=used)


def forward(
    x: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, cu_seqlens: torch.Tensor, ratio: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pooled rows [P, D], cumulative counts int32 [B + 1], and for backward float32 [2, P, D]."""
    T, D = x.shape
    P, B, block = T // ratio, len(cu_seqlens) - 1, config.channel_block(D, config.LONG_CHANNELS)
    pooled, cu_pools = x.new_empty(P, D), torch.empty_like(cu_seqlens)
    stats = x.new_empty(2, P, D, dtype=torch.float32)
    _long_kernel[(P, triton.cdiv(D, block))](
        x, score, ape, cu_seqlens, cu_pools, pooled, stats, P, B, D, x.stride(0), score.stride(0), ratio=ratio,
        STEPS=config.LONG_STEPS, BLOCK_D=block, SEQUENCES=config.SEQUENCES, num_warps=1,
    )  # fmt: skip
    return pooled, cu_pools, stats


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    stats: torch.Tensor,
    dx: torch.Tensor,
    dscore: torch.Tensor,
    ratio: int,
) -> torch.Tensor:
    """Writes the gradients of x and score, and returns that of ape."""
    T, D = x.shape
    P, B, block = T // ratio, len(cu_seqlens) - 1, config.channel_block(D, config.LONG_BWD_CHANNELS)
    slots, pools = config.LONG_BWD_SLOTS, config.long_bwd_pools(P)
    programs = triton.cdiv(P, pools)
    dape_partial = torch.empty(programs, ratio, D, dtype=torch.float32, device=x.device)
    _long_bwd_kernel[(B + 1 + programs, triton.cdiv(D, block), triton.cdiv(ratio, slots))](
        grad, x, score, ape, cu_seqlens, stats, dx, dscore, dape_partial, P, T, B, D, x.stride(0), score.stride(0),
        ratio=ratio, SLOTS=slots, POOLS=pools, BLOCK_D=block, SEQUENCES=config.SEQUENCES, num_warps=1,
    )  # fmt: skip
    return dape_partial.sum(0)
