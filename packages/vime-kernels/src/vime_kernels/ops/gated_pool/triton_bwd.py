# SPDX-License-Identifier: Apache-2.0
"""Gated pooling in Triton, backward.

    dx = π g,   dscore = π (x - pooled) g,   dape[m] = Σ_p dscore[p, m]

Every token's channel belongs to at most one pool, so nothing is added atomically; a small second kernel writes the
zeros of the channels that belong to none. The gradient of ape is a sum of per-program partial sums, in fixed order.
"""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.gated_pool import config
from vime_kernels.ops.gated_pool.triton_fwd import address, gate, locate, pool, read_slot


@triton.jit(do_not_specialize=["B"])
def _pool_bwd_kernel(  # type: ignore[no-untyped-def]
    grad,
    x,
    score,
    ape,
    halo_x,
    halo_score,
    cu_seqlens,
    cu_pools,
    dx,
    dscore,
    dape_partial,
    dhalo_x,
    dhalo_score,
    B,
    C,
    D,
    x_row,
    score_row,
    ratio: tl.constexpr,
    OVERLAP: tl.constexpr,
    HALO: tl.constexpr,
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
    live = live_P[:, None] & (d_D < D)[None, :]
    g = tl.load(grad + pool_P.to(tl.int64)[:, None] * D + d_D[None, :], mask=live, other=0.0).to(tl.float32)
    partial = dape_partial + tl.program_id(0).to(tl.int64) * (ratio * C)
    # The second walk finds the slots in the cache.
    for m in tl.range(SLOTS, loop_unroll_factor=UNROLL):
        a = gate(score, halo_score, score_row, ape, place, m, D, ratio, OVERLAP, HALO)
        value = read_slot(x, halo_x, x_row, place, m, D, ratio, OVERLAP, HALO, 0.0).to(tl.float32)
        weighted = tl.exp2(a - top) / total * g
        dz = tl.where(live, weighted * (value - pooled), 0.0)
        packed, here, halo, in_halo = address(place, m, C, D, ratio, OVERLAP, HALO)
        tl.store(dx + packed, weighted.to(dx.dtype.element_ty), mask=here)
        tl.store(dscore + packed, dz.to(dscore.dtype.element_ty), mask=here)
        if HALO:
            tl.store(dhalo_x + halo, weighted.to(dx.dtype.element_ty), mask=in_halo)
            tl.store(dhalo_score + halo, dz.to(dscore.dtype.element_ty), mask=in_halo)
        if OVERLAP:
            column_D = (m % ratio) * C + tl.where(m < ratio, d_D, d_D + D)
        else:
            column_D = m * C + d_D
        tl.store(partial + column_D, tl.sum(dz, 0), mask=d_D < D)


@triton.jit
def _zero_rows(dx, dscore, first, last, width, C, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    for start in range(first, last, BLOCK_T):
        row = start + tl.arange(0, BLOCK_T)
        offset = row.to(tl.int64)[:, None] * C + column[None, :]
        mask = (row < last)[:, None] & (column < width)[None, :]
        zero = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        tl.store(dx + offset, zero.to(dx.dtype.element_ty), mask=mask)
        tl.store(dscore + offset, zero.to(dscore.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "B"])
def _unpooled_kernel(  # type: ignore[no-untyped-def]
    dx,
    dscore,
    cu_seqlens,
    T,
    B,
    C,
    D,
    ratio,
    OVERLAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Zeros for leftover tokens, for the halves that no later group reads, and for rows of no sequence."""
    b = tl.program_id(0)
    first = tl.load(cu_seqlens + b)
    if b == B:
        _zero_rows(dx, dscore, first, T, C, C, BLOCK_T, BLOCK_C)
    else:
        end = tl.load(cu_seqlens + b + 1)
        leftover = first + (end - first) // ratio * ratio
        _zero_rows(dx, dscore, leftover, end, C, C, BLOCK_T, BLOCK_C)
        if OVERLAP:
            _zero_rows(dx, dscore, tl.maximum(leftover - ratio, first), leftover, D, C, BLOCK_T, BLOCK_C)


@torch.library.custom_op("vime_kernels::gated_pool_bwd", mutates_args=())
def gated_pool_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    halo_x: torch.Tensor | None,
    halo_score: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    cu_pools: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, score, ape and the two halo tensors (empty without a halo)."""
    T, C = x.shape
    P, D, B = T // ratio, C // 2 if overlap else C, len(cu_seqlens) - 1
    dx, dscore = torch.empty_strided(x.shape, (C, 1), dtype=x.dtype, device=x.device), score.new_empty(T, C)
    dhalo = [
        x.new_zeros(0) if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format)
        for t in (halo_x, halo_score)
    ]
    if not P or not B or not D:
        return dx.zero_(), dscore.zero_(), torch.zeros_like(ape), dhalo[0], dhalo[1]
    block_p, block_d, warps = config.tile_bwd(ratio)
    programs = triton.cdiv(P, block_p)
    dape_partial = torch.empty(programs, ratio, C, dtype=torch.float32, device=x.device)
    _pool_bwd_kernel[(programs, triton.cdiv(D, block_d))](
        grad,
        x,
        score,
        ape,
        halo_x,
        halo_score,
        cu_seqlens,
        cu_pools,
        dx,
        dscore,
        dape_partial,
        *dhalo,
        B,
        C,
        D,
        x.stride(0),
        score.stride(0),
        ratio=ratio,
        OVERLAP=overlap,
        HALO=halo_x is not None,
        UNROLL=min(ratio, 4),
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        num_warps=warps,
    )
    _unpooled_kernel[(B + 1, triton.cdiv(C, 256))](
        dx, dscore, cu_seqlens, T, B, C, D, ratio, OVERLAP=overlap, BLOCK_T=8, BLOCK_C=256, num_warps=4
    )
    return dx, dscore, dape_partial.sum(0), dhalo[0], dhalo[1]


@gated_pool_bwd.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    halo_x: torch.Tensor | None,
    halo_score: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    cu_pools: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    halo = [x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (halo_x, halo_score)]
    return x.new_empty(x.shape), score.new_empty(score.shape), ape.new_empty(ape.shape), halo[0], halo[1]
