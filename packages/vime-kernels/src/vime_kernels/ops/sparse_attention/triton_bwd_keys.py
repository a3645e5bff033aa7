# SPDX-License-Identifier: Apache-2.0
"""Gradient of the keys of sparse attention in Triton: the second step of `triton_bwd`.

dKV = dSᵀ Q + Pᵀ dO from the workspace of the first step, summed over all heads before anything is scattered.
Ranges (the window, heavily compressed rows) have an owner: `range_kernel` walks the rows that see a tile of keys.
Picks: `scatter_kernel` adds one row per slot with float32 atomics; in deterministic mode it writes them, each rounded
to the input dtype, in the order of a stable sort by key, and `add_segments` sums each key's rows in that order.
"""

import torch
import triton
import triton.language as tl

from vime_kernels._ordered_sum import add_segments, order
from vime_kernels.ops.sparse_attention import config
from vime_kernels.ops.sparse_attention.sources import Sources
from vime_kernels.ops.sparse_attention.triton_fwd import load_range


@triton.jit(do_not_specialize=["n_b"])
def scatter_kernel(  # type: ignore[no-untyped-def]
    q, do, indices, lengths, p_ws, ds_ws, dkv, rank,
    n_b, H, K, slots_a, slots, d_first,
    stride_qs, stride_qh, stride_gs, stride_gh, stride_is, stride_dkv,
    BK: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, D_BLOCKS: tl.constexpr, HAS_V: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, ORDERED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query row and one run of channels: one row of dKV per slot, added to its key or put in sorted order."""
    row = (tl.program_id(0) // D_BLOCKS).to(tl.int64)
    d = d_first + (tl.program_id(0) % D_BLOCKS) * BD + tl.arange(0, BD)
    offs = tl.arange(0, BK)
    heads = tl.arange(0, BH)
    live = heads < H
    count = K
    if HAS_LENGTHS:
        count = tl.minimum(tl.maximum(tl.load(lengths + row), 0), K)
    q_at = q + row * stride_qs + heads.to(tl.int64)[:, None] * stride_qh + d[None, :]
    q_tile = tl.load(q_at, mask=live[:, None], other=0.0)
    if HAS_V:
        do_at = do + row * stride_gs + heads.to(tl.int64)[:, None] * stride_gh + d[None, :]
        do_tile = tl.load(do_at, mask=live[:, None], other=0.0)
    workspace = (row * slots + slots_a) * H + heads[None, :]
    for i in tl.range(0, tl.cdiv(count, BK), num_stages=STAGES):
        slot = i * BK + offs
        keys = tl.load(indices + row * stride_is + slot, mask=slot < count, other=-1)
        valid = (keys >= 0) & (keys < n_b)
        used = valid[:, None] & live[None, :]
        ds = tl.load(ds_ws + workspace + slot[:, None] * H, mask=used, other=0.0)
        acc = tl.dot(ds, q_tile, input_precision="ieee")
        if HAS_V:
            p = tl.load(p_ws + workspace + slot[:, None] * H, mask=used, other=0.0)
            acc = tl.dot(p, do_tile, acc, input_precision="ieee")
        if ORDERED:
            place = tl.load(rank + row * K + slot, mask=valid, other=0).to(tl.int64)
            at = dkv + place[:, None] * stride_dkv + d[None, :]
            tl.store(at, acc.to(dkv.dtype.element_ty), mask=valid[:, None])
        else:
            target = dkv + keys.to(tl.int64)[:, None] * stride_dkv + d[None, :]
            tl.atomic_add(target, acc, mask=valid[:, None], sem="relaxed")


@triton.jit(do_not_specialize=["S", "n"])
def bounds_kernel(starts, ends, lo, hi, S, n, BN: tl.constexpr, BS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Smallest run [lo, hi) of query rows that holds every row which sees a key of this tile."""
    key = tl.program_id(0) * BN
    rows = tl.arange(0, BS)
    low = tl.full([BS], 2147483647, tl.int32)
    high = tl.zeros([BS], tl.int32)
    for s0 in range(0, S, BS):
        s = s0 + rows
        start = tl.maximum(tl.load(starts + s, mask=s < S, other=0), 0)
        end = tl.minimum(tl.load(ends + s, mask=s < S, other=0), n)
        seen = (start < end) & (start < key + BN) & (end > key)
        low = tl.minimum(low, tl.where(seen, s, 2147483647))
        high = tl.maximum(high, tl.where(seen, s + 1, 0))
    tl.store(lo + tl.program_id(0), tl.min(low, 0))
    tl.store(hi + tl.program_id(0), tl.max(high, 0))


@triton.jit(do_not_specialize=["n"])
def range_kernel(  # type: ignore[no-untyped-def]
    q, do, starts, ends, lo, hi, p_ws, ds_ws, parts,
    n, H, slot_first, slots,
    stride_qs, stride_qh, stride_gs, stride_gh,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """parts[split, key] += Σ over this split's rows that see the key."""
    tile = tl.program_id(0)
    split = tl.program_id(2)
    low = tl.load(lo + tile)
    high = tl.load(hi + tile)
    share = tl.cdiv(high - low, SPLITS)
    begin = low + split * share
    end_row = tl.minimum(begin + share, high)
    if begin < end_row:
        keys = tile * BN + tl.arange(0, BN)
        d = tl.program_id(1) * BD + tl.arange(0, BD)
        heads = tl.arange(0, BH)
        live = heads < H
        at = parts + (split * n + keys.to(tl.int64))[:, None] * D + d[None, :]
        acc = tl.load(at, mask=(keys < n)[:, None], other=0.0)
        for step in tl.range(0, end_row - begin, num_stages=STAGES):
            row = begin.to(tl.int64) + step
            start, end = load_range(starts, ends, row, n)
            used = ((keys >= start) & (keys < end))[:, None] & live[None, :]
            slot = slot_first + keys - start
            ws = (row * slots + slot)[:, None] * H + heads[None, :]
            ds = tl.load(ds_ws + ws, mask=used, other=0.0)
            q_at = q + row * stride_qs + heads.to(tl.int64)[:, None] * stride_qh + d[None, :]
            acc = tl.dot(ds, tl.load(q_at, mask=live[:, None], other=0.0), acc, input_precision="ieee")
            p = tl.load(p_ws + ws, mask=used, other=0.0)
            do_at = do + row * stride_gs + heads.to(tl.int64)[:, None] * stride_gh + d[None, :]
            acc = tl.dot(p, tl.load(do_at, mask=live[:, None], other=0.0), acc, input_precision="ieee")
        tl.store(at, acc, mask=(keys < n)[:, None])


def range_step(
    q: torch.Tensor,
    do: torch.Tensor,
    band: tuple[torch.Tensor, torch.Tensor],
    p_ws: torch.Tensor,
    ds_ws: torch.Tensor,
    dkv: torch.Tensor,
    slot_first: int,
    slots: int,
    tile: config.BandTile,
) -> None:
    """Adds the rows' part of the gradient of a buffer that is read by ranges."""
    (S, H, _), (n, D) = q.shape, dkv.shape
    if n == 0:
        return
    starts, ends = band
    n_tiles, d_blocks = triton.cdiv(n, tile.BN), triton.cdiv(D, tile.BD)
    bounds = torch.empty((2, n_tiles), dtype=torch.int32, device=q.device)
    bounds_kernel[(n_tiles,)](starts, ends, bounds[0], bounds[1], S, n, BN=tile.BN, BS=1024, num_warps=4)
    # Few keys and many rows leave the device idle: split the rows, and sum the parts in a fixed order.
    splits = max(1, min(triton.cdiv(config.PROGRAMS, n_tiles * d_blocks), triton.cdiv(S, 32)))
    splits = 1 << (splits.bit_length() - 1)
    parts = dkv if splits == 1 else torch.zeros((splits, n, D), dtype=torch.float32, device=q.device)
    range_kernel[(n_tiles, d_blocks, splits)](
        q, do, starts, ends, bounds[0], bounds[1], p_ws, ds_ws, parts,
        n, H, slot_first, slots, q.stride(0), q.stride(1), do.stride(0), do.stride(1),
        D=D, BN=tile.BN, BD=tile.BD, BH=tile.BH, SPLITS=splits, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if splits > 1:
        dkv += parts.sum(0)


def picks_step(
    q: torch.Tensor,
    do: torch.Tensor,
    sources: Sources,
    p_ws: torch.Tensor,
    ds_ws: torch.Tensor,
    dkv: torch.Tensor,
    slots_a: int,
    slots: int,
    d_v: int,
    deterministic: bool,
    tiles: config.BackwardTiles,
) -> None:
    """Adds the rows' part of the gradient of a buffer that is read by picks."""
    if sources.indices is None or 0 in (*dkv.shape, *sources.indices.shape):
        return
    (S, H, d_qk), (n, D), K = q.shape, dkv.shape, sources.indices.shape[1]
    target, rank, offsets = dkv, dkv, None
    if deterministic:
        valid = (sources.indices >= 0) & (sources.indices < n)
        if sources.lengths is not None:
            slot = torch.arange(K, device=q.device, dtype=torch.int32)
            valid &= slot < sources.lengths[:, None]
        rank, offsets = order(valid, sources.indices, n)
        target = torch.empty((S * K, D), dtype=q.dtype, device=q.device)
    has_lengths = sources.lengths is not None
    runs = [(0, d_v, True)] + ([(d_v, d_qk - d_v, False)] if d_qk > d_v else [])
    for first, channels, has_v in runs:
        tile = tiles.scatter if has_v else tiles.tail
        d_blocks = triton.cdiv(channels, tile.BD)
        scatter_kernel[(S * d_blocks,)](
            q, do, sources.indices, sources.lengths if has_lengths else q, p_ws, ds_ws, target, rank,
            n, H, K, slots_a, slots, first,
            q.stride(0), q.stride(1), do.stride(0), do.stride(1), sources.indices.stride(0), D,
            BK=tile.BK, BD=tile.BD, BH=tile.BH, D_BLOCKS=d_blocks, HAS_V=has_v,
            HAS_LENGTHS=has_lengths, ORDERED=deterministic, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    if offsets is not None:
        add_segments(target, offsets, dkv)
