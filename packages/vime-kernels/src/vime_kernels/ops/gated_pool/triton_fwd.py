# SPDX-License-Identifier: Apache-2.0
"""Gated pooling in Triton, forward, with the registration of its gradient.

A program makes a few pools of a block of channels in one walk over their slots, with a running maximum as in online
softmax. Nothing is saved for the backward pass but the inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.gated_pool import config

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["B"])
def _offsets_kernel(cu_seqlens, cu_pools, B, ratio, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """cu_pools [B + 1]: cumulative number of complete groups."""
    total = 0
    tl.store(cu_pools, total)
    for first in range(0, B, BLOCK):
        b = first + tl.arange(0, BLOCK)
        start = tl.load(cu_seqlens + b, mask=b < B, other=0)
        groups = (tl.load(cu_seqlens + b + 1, mask=b < B, other=0) - start) // ratio
        tl.store(cu_pools + 1 + b, total + tl.cumsum(groups, 0), mask=b < B)
        total += tl.sum(groups)


@triton.jit
def locate(cu_seqlens, cu_pools, start, B, D, ratio, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where pools `start` and on are: number, first token, exists, opens its sequence; and this program's channels."""
    pool_P = start + tl.arange(0, BLOCK_P)
    low = tl.zeros_like(pool_P)
    high = low + B  # the sequence is in [low, high): the last one whose pools start at or before this pool
    while tl.max(high - low) > 1:
        middle = (low + high) // 2
        before = tl.load(cu_pools + middle) <= pool_P
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    within_P = pool_P - tl.load(cu_pools + low)
    first_P = tl.load(cu_seqlens + low) + within_P * ratio
    d_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    return pool_P, first_P, pool_P < tl.load(cu_pools + B), within_P == 0, d_D


@triton.jit
def address(place, m, row, D, ratio, OVERLAP: tl.constexpr, HALO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Slot m of every pool: (offset, mask) in the packed rows, (offset, mask) in the halo.

    With overlap the slots below `ratio` are the first halves of the channels of the group before.
    """
    pool_P, first_P, live_P, opens_P, d_D = place
    live = live_P[:, None] & (d_D < D)[None, :]
    if OVERLAP:
        own = m >= ratio
        here = live & (own | (opens_P == 0)[:, None])
        if HALO:
            here = here & (own | (pool_P != 0)[:, None])
        token_P = first_P + m - ratio
        column_D = d_D + tl.where(own, D, 0)
        in_halo = live & (m < ratio) & (pool_P == 0)[:, None]
    else:
        here = live
        token_P = first_P + m
        column_D = d_D
        in_halo = live & (m < 0)
    packed = token_P.to(tl.int64)[:, None] * row + column_D[None, :]
    halo = m * (2 * D) + d_D[None, :] + tl.zeros_like(pool_P)[:, None]
    return packed, here, halo, in_halo


@triton.jit
def read_slot(  # type: ignore[no-untyped-def]
    tensor, halo_tensor, row, place, m, D, ratio, OVERLAP: tl.constexpr, HALO: tl.constexpr, missing
):
    """Slot m of every pool, [pools, channels]; `missing` where there is none."""
    packed, here, halo, in_halo = address(place, m, row, D, ratio, OVERLAP, HALO)
    value = tl.load(tensor + packed, mask=here, other=missing)
    if HALO:
        value = tl.where(in_halo, tl.load(halo_tensor + halo, mask=in_halo, other=missing), value)
    return value


@triton.jit
def gate(score, halo_score, score_row, ape, place, m, D, ratio, OVERLAP: tl.constexpr, HALO: tl.constexpr):  # type: ignore[no-untyped-def]
    """The softmax argument of slot m in base 2; -inf where the slot is missing."""
    d_D = place[4]
    z = read_slot(score, halo_score, score_row, place, m, D, ratio, OVERLAP, HALO, float("-inf"))
    if OVERLAP:
        bias = ape + (m % ratio) * (2 * D) + tl.where(m < ratio, d_D, d_D + D)
    else:
        bias = ape + m * D + d_D
    return (z.to(tl.float32) + tl.load(bias, mask=d_D < D, other=0.0)[None, :]) * LOG2E


@triton.jit
def pool(  # type: ignore[no-untyped-def]
    x,
    score,
    ape,
    halo_x,
    halo_score,
    x_row,
    score_row,
    place,
    D,
    ratio,
    OVERLAP: tl.constexpr,
    HALO: tl.constexpr,
    SLOTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """(maximum of the gates, sum of the weights before division, pooled values), [pools, channels] in float32."""
    top = tl.full([place[0].shape[0], place[4].shape[0]], -1e30, tl.float32)
    total = tl.zeros_like(top)
    pooled = tl.zeros_like(top)
    for m in tl.range(SLOTS, loop_unroll_factor=UNROLL):
        a = gate(score, halo_score, score_row, ape, place, m, D, ratio, OVERLAP, HALO)
        value = read_slot(x, halo_x, x_row, place, m, D, ratio, OVERLAP, HALO, 0.0).to(tl.float32)
        higher = tl.maximum(top, a, propagate_nan=tl.PropagateNan.ALL)
        shrink, weight = tl.exp2(top - higher), tl.exp2(a - higher)
        total = total * shrink + weight
        pooled = pooled * shrink + weight * value
        top = higher
    total = tl.where(place[2][:, None] & (place[4] < D)[None, :], total, 1.0)
    return top, total, pooled / total


@triton.jit(do_not_specialize=["P", "B"])
def _pool_kernel(  # type: ignore[no-untyped-def]
    x,
    score,
    ape,
    halo_x,
    halo_score,
    cu_seqlens,
    cu_pools,
    out,
    P,
    B,
    D,
    x_row,
    score_row,
    ratio: tl.constexpr,
    OVERLAP: tl.constexpr,
    HALO: tl.constexpr,
    ROUND_WEIGHTS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    SLOTS: tl.constexpr = 2 * ratio if OVERLAP else ratio
    place = locate(cu_seqlens, cu_pools, tl.program_id(0) * BLOCK_P, B, D, ratio, BLOCK_P, BLOCK_D)
    pool_P, _, live_P, _, d_D = place
    top, total, pooled = pool(
        x, score, ape, halo_x, halo_score, x_row, score_row, place, D, ratio, OVERLAP, HALO, SLOTS, UNROLL
    )
    if ROUND_WEIGHTS:
        # Weights and products in the dtype of x, which needs the finished softmax: a second walk.
        pooled = tl.zeros_like(pooled)
        for m in tl.range(SLOTS, loop_unroll_factor=UNROLL):
            a = gate(score, halo_score, score_row, ape, place, m, D, ratio, OVERLAP, HALO)
            value = read_slot(x, halo_x, x_row, place, m, D, ratio, OVERLAP, HALO, 0.0)
            weight = (tl.exp2(a - top) / total).to(value.dtype)
            pooled += (weight.to(tl.float32) * value.to(tl.float32)).to(value.dtype).to(tl.float32)
    pooled = tl.where(live_P[:, None], pooled, 0.0)
    target = out + pool_P.to(tl.int64)[:, None] * D + d_D[None, :]
    tl.store(target, pooled.to(out.dtype.element_ty), mask=(pool_P < P)[:, None] & (d_D < D)[None, :])


@torch.library.custom_op("vime_kernels::gated_pool", mutates_args=())
def gated_pool(
    x: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    halo_x: torch.Tensor | None,
    halo_score: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    ratio: int,
    overlap: bool,
    round_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pooled rows [T // ratio, D] and cumulative counts int32 [B + 1].

    Arguments as in `interface.gated_pool`, already checked; ape and the halo contiguous.
    """
    T, C = x.shape
    P, D, B = T // ratio, C // 2 if overlap else C, len(cu_seqlens) - 1
    cu_pools = torch.empty_like(cu_seqlens)
    _offsets_kernel[(1,)](cu_seqlens, cu_pools, B, ratio, BLOCK=128, num_warps=1)
    pooled = x.new_empty(P, D)
    if not P or not B or not D:
        return pooled.zero_(), cu_pools
    block_p, block_d, warps = config.tile(ratio)
    _pool_kernel[(triton.cdiv(P, block_p), triton.cdiv(D, block_d))](
        x,
        score,
        ape,
        halo_x,
        halo_score,
        cu_seqlens,
        cu_pools,
        pooled,
        P,
        B,
        D,
        x.stride(0),
        score.stride(0),
        ratio=ratio,
        OVERLAP=overlap,
        HALO=halo_x is not None,
        ROUND_WEIGHTS=round_weights,
        UNROLL=min(ratio, 4),
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        num_warps=warps,
    )
    return pooled, cu_pools


@gated_pool.register_fake
def _(
    x: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    halo_x: torch.Tensor | None,
    halo_score: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    ratio: int,
    overlap: bool,
    round_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    T, C = x.shape
    return x.new_empty(T // ratio, C // 2 if overlap else C), torch.empty_like(cu_seqlens)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, score, ape, halo_x, halo_score, cu_seqlens, ctx.ratio, ctx.overlap, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, score, ape, halo_x, halo_score, cu_seqlens, output[1])


def _backward(ctx: Any, grad_pooled: torch.Tensor, _: None) -> tuple[Any, ...]:
    from vime_kernels.ops.gated_pool.triton_bwd import gated_pool_bwd

    *inputs, cu_pools = ctx.saved_tensors
    dx, dscore, dape, *dhalo = gated_pool_bwd(
        grad_pooled.contiguous(), *inputs, cu_pools, ctx.ratio, ctx.overlap
    )
    if inputs[3] is None:
        dhalo = [None, None]
    return dx, dscore, dape, *dhalo, None, None, None, None


gated_pool.register_autograd(_backward, setup_context=_save)
