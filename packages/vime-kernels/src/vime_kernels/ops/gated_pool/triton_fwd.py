# SPDX-License-Identifier: Apache-2.0
"""Gated pooling in Triton, forward, with the registration of its gradient.

A program makes a block of channels of one pool, with all its slots in registers. Nothing is saved for the backward pass
but the inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.gated_pool import config, reference

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find(pool, cu_seqlens, B, ratio, cu_pools, WRITE: tl.constexpr, SEQUENCES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sequence of a pool, B if there is none; number of pools before that sequence), by counting the groups.

    With WRITE the whole of cu_pools is written on the way.
    """
    sequence = pool * 0
    before, seen, b = sequence, sequence, sequence
    while (b < B) & ((seen <= pool) | WRITE):
        step = b + tl.arange(0, SEQUENCES)
        start = tl.load(cu_seqlens + step, mask=step < B, other=0)
        groups = (tl.load(cu_seqlens + step + 1, mask=step < B, other=0) - start) // ratio
        upto = seen + tl.cumsum(groups, 0)
        if WRITE:
            tl.store(cu_pools + 1 + step, upto, mask=step < B)
        passed = (step < B) & (upto <= pool)
        sequence += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, upto, 0)))
        seen += tl.sum(groups)
        b += SEQUENCES
    return sequence, before


@triton.jit
def cumulate(pool, cu_seqlens, cu_pools, B, ratio, SEQUENCES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same, and one program writes cu_pools on the way."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(cu_pools, 0)
        sequence, before = find(pool, cu_seqlens, B, ratio, cu_pools, True, SEQUENCES)
    else:
        sequence, before = find(pool, cu_seqlens, B, ratio, None, False, SEQUENCES)
    return sequence, before


@triton.jit
def follow(pool, sequence, before, cu_seqlens, B, ratio):  # type: ignore[no-untyped-def]
    """The same for a later pool; and its first token, whether it exists, whether it opens its sequence."""
    start = tl.load(cu_seqlens + tl.minimum(sequence, B - 1))
    groups = (tl.load(cu_seqlens + tl.minimum(sequence, B - 1) + 1) - start) // ratio
    while (sequence < B) & (pool - before >= groups):
        before += groups
        sequence += 1
        start = tl.load(cu_seqlens + tl.minimum(sequence, B - 1))
        groups = (tl.load(cu_seqlens + tl.minimum(sequence, B - 1) + 1) - start) // ratio
    return sequence, before, start + (pool - before) * ratio, sequence < B, pool == before


@triton.jit
def place(  # type: ignore[no-untyped-def]
    pool, first, live, opens, D, ratio, OVERLAP: tl.constexpr, HALO: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Where the slots of a pool are, [SLOTS, BLOCK_D]: token, column, in the packed rows or not, in the halo or not.

    And which channels the pool has, [1, BLOCK_D]. With overlap the slots below `ratio` are the first halves of the
    channels of the group before.
    """
    m = tl.arange(0, SLOTS)[:, None]
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    alive = live & (column < D)
    if OVERLAP:
        exists = alive & (m < 2 * ratio)
        own = m >= ratio
        in_halo = exists & (m < ratio) & HALO & (pool == 0)
        here = exists & (own | (opens == 0)) & (in_halo == 0)
        return first + m - ratio, column + tl.where(own, D, 0), here, in_halo, alive
    exists = alive & (m < ratio)
    return first + m, column + tl.zeros_like(m), exists, exists & False, alive


@triton.jit
def read(  # type: ignore[no-untyped-def]
    tensor, halo, row, token, column, here, in_halo, C, HALO: tl.constexpr, missing, KEEP: tl.constexpr
):  # fmt: skip
    """The slots of a pool; `missing` where there is none. KEEP says what the caches do with them."""
    value = tl.load(
        tensor + token.to(tl.int64) * row + column, mask=here, other=missing, eviction_policy=KEEP
    )
    if HALO:
        m = tl.arange(0, value.shape[0])[:, None]
        value = tl.where(in_halo, tl.load(halo + m * C + column, mask=in_halo, other=missing), value)
    return value


@triton.jit
def bias_offset(D, C, ratio, OVERLAP: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the slots' position bias is, in ape and in its gradient, and whether it is there; [SLOTS, BLOCK_D]."""
    m = tl.arange(0, SLOTS)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    if OVERLAP:
        return m % ratio * C + d + tl.where(m >= ratio, D, 0), (m < 2 * ratio) & (d < D)
    return m * C + d, (m < ratio) & (d < D)


@triton.jit
def average(z, value, bias, alive):  # type: ignore[no-untyped-def]
    """Softmax weights of the slots of a pool, 0 where there is no slot, and the average of the values; in float32."""
    a = (z.to(tl.float32) + bias) * LOG2E
    e = tl.exp2(a - tl.maximum(tl.max(a, 0, keep_dims=True), -1e30))
    weights = e / tl.where(alive, tl.sum(e, 0, keep_dims=True), 1.0)
    return weights, tl.sum(weights * value, 0, keep_dims=True)


@triton.jit(do_not_specialize=["B"])
def _pool_kernel(  # type: ignore[no-untyped-def]
    x, score, ape, halo_x, halo_score, cu_seqlens, cu_pools, out, B, C, D, x_row, score_row,
    ratio: tl.constexpr, OVERLAP: tl.constexpr, HALO: tl.constexpr, ROUND_WEIGHTS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    pool = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    offset, used = bias_offset(D, C, ratio, OVERLAP, SLOTS, BLOCK_D)
    bias = tl.load(ape + offset, mask=used, other=0.0)
    sequence, before = cumulate(pool, cu_seqlens, cu_pools, B, ratio, SEQUENCES)
    first = tl.load(cu_seqlens + tl.minimum(sequence, B - 1)) + (pool - before) * ratio
    token, column, here, in_halo, alive = place(
        pool, first, sequence < B, pool == before, D, ratio, OVERLAP, HALO, SLOTS, BLOCK_D
    )
    # With overlap the other half of a row is another pool's, at another time: nothing is read twice.
    z = read(
        score, halo_score, score_row, token, column, here, in_halo, C, HALO, float("-inf"), "evict_first"
    )
    given = read(x, halo_x, x_row, token, column, here, in_halo, C, HALO, 0.0, "evict_first")
    value = given.to(tl.float32)
    weights, pooled = average(z, value, bias, alive)
    if ROUND_WEIGHTS:
        product = (weights.to(given.dtype).to(tl.float32) * value).to(given.dtype)
        pooled = tl.sum(product.to(tl.float32), 0, keep_dims=True)
    tl.store(out + tl.cast(pool, tl.int64) * D + d, pooled.to(out.dtype.element_ty), mask=d < D)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pooled rows [T // ratio, D], cumulative counts int32 [B + 1], and what long pools leave for backward.

    Arguments as in `interface.gated_pool`, already checked; ape and the halo contiguous.
    """
    T, C = x.shape
    P, D, B = T // ratio, C // 2 if overlap else C, len(cu_seqlens) - 1
    nothing = x.new_empty(0, dtype=torch.float32)
    if not P or not B or not D:
        return x.new_zeros(P, D), reference.pool_offsets(cu_seqlens, ratio), nothing
    if config.is_long(ratio, overlap) and not round_weights:
        from vime_kernels.ops.gated_pool import triton_long

        return triton_long.forward(x, score, ape, cu_seqlens, ratio)
    pooled, cu_pools = x.new_empty(P, D), torch.empty_like(cu_seqlens)
    tile = config.tile(ratio, overlap, D)
    _pool_kernel[(P, triton.cdiv(D, tile.channels))](
        x, score, ape, halo_x, halo_score, cu_seqlens, cu_pools, pooled, B, C, D, x.stride(0), score.stride(0),
        ratio=ratio, OVERLAP=overlap, HALO=halo_x is not None, ROUND_WEIGHTS=round_weights,
        SLOTS=tile.slots, BLOCK_D=tile.channels, SEQUENCES=config.SEQUENCES,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return pooled, cu_pools, nothing


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T, C = x.shape
    P, D = T // ratio, C // 2 if overlap else C
    long = P and D and len(cu_seqlens) > 1 and config.is_long(ratio, overlap) and not round_weights
    stats = x.new_empty((2, P, D) if long else 0, dtype=torch.float32)
    return x.new_empty(P, D), torch.empty_like(cu_seqlens), stats


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, score, ape, halo_x, halo_score, cu_seqlens, ctx.ratio, ctx.overlap, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, score, ape, halo_x, halo_score, cu_seqlens, output[2])


def _backward(ctx: Any, grad_pooled: torch.Tensor, *_: None) -> tuple[Any, ...]:
    from vime_kernels.ops.gated_pool.triton_bwd import gated_pool_bwd

    inputs = ctx.saved_tensors
    dx, dscore, dape, *dhalo = gated_pool_bwd(grad_pooled.contiguous(), *inputs, ctx.ratio, ctx.overlap)
    if inputs[3] is None:
        dhalo = [None, None]
    return dx, dscore, dape, *dhalo, None, None, None, None


gated_pool.register_autograd(_backward, setup_context=_save)
