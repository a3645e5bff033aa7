# SPDX-License-Identifier: Apache-2.0
"""Gated pooling in Triton, backward.

    dx = π g,   dscore = π (x - pooled) g,   dape[m] = Σ_p dscore[p, m]

Every token's channel belongs to at most one pool, so nothing is added atomically; programs of their own write the zeros
of the channels that belong to none. The gradient of ape is a sum of per-program partial sums, in fixed order.
"""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.gated_pool import config
from vime_kernels.ops.gated_pool.triton_fwd import average, bias_offset, find, follow, place, read
from vime_kernels.ops.gated_pool.triton_zero import zero_unpooled


@triton.jit(do_not_specialize=["P", "T", "B"])
def _pool_bwd_kernel(  # type: ignore[no-untyped-def]
    grad, x, score, ape, halo_x, halo_score, cu_seqlens, dx, dscore, dape_partial, dhalo_x, dhalo_score,
    P, T, B, C, D, x_row, score_row,
    ratio: tl.constexpr, OVERLAP: tl.constexpr, HALO: tl.constexpr,
    SLOTS: tl.constexpr, POOLS: tl.constexpr, BLOCK_D: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) - (B + 1)
    if group < 0:
        zero_unpooled(dx, dscore, cu_seqlens, T, B, C, D, ratio, OVERLAP, BLOCK_D)
        return
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    m = tl.arange(0, SLOTS)[:, None]
    offset, used = bias_offset(D, C, ratio, OVERLAP, SLOTS, BLOCK_D)
    dape = tl.zeros([SLOTS, BLOCK_D], tl.float32)
    begin = group * POOLS
    sequence, before = find(begin, cu_seqlens, B, ratio, None, False, SEQUENCES)
    for pool in range(begin, tl.minimum(begin + POOLS, P)):
        sequence, before, first, live, opens = follow(pool, sequence, before, cu_seqlens, B, ratio)
        token, column, here, in_halo, alive = place(
            pool, first, live, opens, D, ratio, OVERLAP, HALO, SLOTS, BLOCK_D
        )
        z = read(score, halo_score, score_row, token, column, here, in_halo, C, HALO, float("-inf"), "")
        value = read(x, halo_x, x_row, token, column, here, in_halo, C, HALO, 0.0, "").to(tl.float32)
        g = tl.load(grad + tl.cast(pool, tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
        bias = tl.load(ape + offset, mask=used, other=0.0)
        weights, pooled = average(z, value, bias, alive)
        dvalue = weights * g
        dz = tl.where(here | in_halo, dvalue * (value - pooled), 0.0)
        dape += dz
        packed = token.to(tl.int64) * C + column
        tl.store(dx + packed, dvalue.to(dx.dtype.element_ty), mask=here)
        tl.store(dscore + packed, dz.to(dscore.dtype.element_ty), mask=here)
        if HALO:
            tl.store(dhalo_x + m * C + column, dvalue.to(dx.dtype.element_ty), mask=in_halo)
            tl.store(dhalo_score + m * C + column, dz.to(dscore.dtype.element_ty), mask=in_halo)
    partial = dape_partial + group.to(tl.int64) * (ratio * C)
    tl.store(partial + offset, dape, mask=used)


@torch.library.custom_op("vime_kernels::gated_pool_bwd", mutates_args=())
def gated_pool_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    halo_x: torch.Tensor | None,
    halo_score: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    stats: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, score, ape and the two halo tensors (empty without a halo); `stats` only of long pools."""
    T, C = x.shape
    P, D, B = T // ratio, C // 2 if overlap else C, len(cu_seqlens) - 1
    dx, dscore = torch.empty_strided(x.shape, (C, 1), dtype=x.dtype, device=x.device), score.new_empty(T, C)
    dhalo = [
        x.new_zeros(0) if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format)
        for t in (halo_x, halo_score)
    ]
    if not P or not B or not D:
        return dx.zero_(), dscore.zero_(), torch.zeros_like(ape), dhalo[0], dhalo[1]
    if stats.numel():
        from vime_kernels.ops.gated_pool import triton_long

        dape = triton_long.backward(grad, x, score, ape, cu_seqlens, stats, dx, dscore, ratio)
        return dx, dscore, dape, dhalo[0], dhalo[1]
    tile = config.tile_bwd(ratio, overlap, D)
    programs = triton.cdiv(P, tile.pools)
    dape_partial = torch.empty(programs, ratio, C, dtype=torch.float32, device=x.device)
    _pool_bwd_kernel[(B + 1 + programs, triton.cdiv(D, tile.channels))](
        grad, x, score, ape, halo_x, halo_score, cu_seqlens, dx, dscore, dape_partial, *dhalo,
        P, T, B, C, D, x.stride(0), score.stride(0), ratio=ratio, OVERLAP=overlap, HALO=halo_x is not None,
        SLOTS=tile.slots, POOLS=tile.pools, BLOCK_D=tile.channels, SEQUENCES=config.SEQUENCES,
        num_warps=tile.num_warps, maxnreg=config.BACKWARD_REGISTERS if tile.num_warps == 1 else None,
    )  # fmt: skip
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
    stats: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    halo = [x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (halo_x, halo_score)]
    return x.new_empty(x.shape), score.new_empty(score.shape), ape.new_empty(ape.shape), halo[0], halo[1]
