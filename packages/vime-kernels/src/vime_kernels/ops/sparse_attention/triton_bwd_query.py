# SPDX-License-Identifier: Apache-2.0
"""Gradient of the queries of sparse attention in Triton: the first step of `triton_bwd`, row by row like the forward.

Recomputes the probabilities P, forms dS = sm_scale · P · (dP - delta) and accumulates dQ = dS · KV in registers. On
request it leaves P and dS, in the input dtype, in a workspace [rows, slots, H], from which `triton_bwd_keys` forms the
gradient of the keys. The workspace holds the band in slots [0, slots_a), then source b.

Source: FlashAttention-2 (arXiv 2307.08691) for delta and the recomputation.
"""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.sparse_attention import config
from vime_kernels.ops.sparse_attention.sources import Sources, host_or_dummy
from vime_kernels.ops.sparse_attention.triton_fwd import (
    LOG2E,
    load_count_b,
    load_range,
    tile_pointer,
    tile_rows,
)

# exp2 of it is finite: keeps 0 · inf out of the gradient of lse where a sink outweighs every key.
LARGE = tl.constexpr(100.0)


@triton.jit(do_not_specialize=["n_a", "n_b"])
def query_kernel(  # type: ignore[no-untyped-def]
    q, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse, do, dlse,
    dq, dsink, p_ws, ds_ws,
    n_a, n_b, H, K, scale, slots_a, slots,
    stride_qs, stride_qh, stride_a, stride_b, stride_is, stride_os, stride_oh, stride_gs, stride_gh,
    DV: tl.constexpr, DT: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    HAS_A: tl.constexpr, KIND_B: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_DLSE: tl.constexpr, NEEDS_KV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query row and one block of heads: dQ, the row's part of dsink, and P and dS into the workspace."""
    row = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    heads = (tl.program_id(0) % HEAD_BLOCKS) * BH + tl.arange(0, BH)
    live = heads < H
    dv = tl.arange(0, DV)
    dt = tl.arange(0, DT if DT > 0 else 16)
    offs = tl.arange(0, BK)

    start_a = 0
    end_a = 0
    if HAS_A:
        start_a, end_a = load_range(starts_a, ends_a, row, n_a)
    tiles_a = tl.cdiv(end_a - start_a, BK)
    start_b, count_b = load_count_b(starts_b, ends_b, lengths, row, n_b, K, KIND_B, HAS_LENGTHS)
    picks_row = indices + row * stride_is

    o_row = out + row * stride_os + heads.to(tl.int64)[:, None] * stride_oh
    g_row = do + row * stride_gs + heads.to(tl.int64)[:, None] * stride_gh
    do_v = tl.load(g_row + dv[None, :], mask=live[:, None], other=0.0)
    o_v = tl.load(o_row + dv[None, :], mask=live[:, None], other=0.0)
    delta = tl.sum(o_v.to(tl.float32) * do_v.to(tl.float32), 1)
    lse_keys = tl.load(lse + row * H + heads, mask=live, other=float("-inf")) * LOG2E
    total = lse_keys
    if HAS_SINK:
        sink_log2 = tl.load(sink + heads, mask=live, other=float("-inf")) * LOG2E
        peak = tl.maximum(tl.maximum(lse_keys, sink_log2), -3.0e38)
        total = peak + tl.log2(tl.exp2(lse_keys - peak) + tl.exp2(sink_log2 - peak))
    if HAS_DLSE:
        grad = tl.load(dlse + row * H + heads, mask=live, other=0.0)
        share = tl.exp2(tl.minimum(total - lse_keys, LARGE))
        delta -= grad * share
    # Of a row without keys the gradients may be anything.
    delta = tl.where(lse_keys > float("-inf"), delta, 0.0)

    q_row = q + row * stride_qs + heads.to(tl.int64)[:, None] * stride_qh
    q_v = tl.load(q_row + dv[None, :], mask=live[:, None], other=0.0)
    acc = tl.zeros([BH, DV], tl.float32)
    exact = tl.zeros([BH], tl.float32)
    if DT > 0:
        q_t = tl.load(q_row + DV + dt[None, :], mask=live[:, None], other=0.0)
        acc_t = tl.zeros([BH, DT], tl.float32)
    scale_log2 = scale * LOG2E
    for i in tl.range(0, tiles_a + tl.cdiv(count_b, BK), num_stages=STAGES):
        rows, valid = tile_rows(
            i, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, BK, HAS_A, KIND_B
        )
        base, stride = tile_pointer(i, tiles_a, kv_a, kv_b, stride_a, stride_b, HAS_A, KIND_B)
        kv_rows = base + rows.to(tl.int64)[:, None] * stride
        kv_v = tl.load(kv_rows + dv[None, :], mask=valid[:, None], other=0.0)
        s = tl.dot(q_v, tl.trans(kv_v), input_precision="ieee")
        dp = tl.dot(do_v, tl.trans(kv_v), input_precision="ieee")
        dp = tl.where(valid[None, :], dp, 0.0)
        if DT > 0:
            kv_t = tl.load(kv_rows + DV + dt[None, :], mask=valid[:, None], other=0.0)
            s = tl.dot(q_t, tl.trans(kv_t), s, input_precision="ieee")
        p = tl.where(valid[None, :], tl.exp2(s * scale_log2 - total[:, None]), 0.0)
        if HAS_SINK:
            exact += tl.sum(p * dp, 1)
        ds = (p * (dp - delta[:, None]) * scale).to(kv_v.dtype)
        acc = tl.dot(ds, kv_v, acc, input_precision="ieee")
        if DT > 0:
            acc_t = tl.dot(ds, kv_t, acc_t, input_precision="ieee")
        if NEEDS_KV:
            slot = tl.where(i < tiles_a, i * BK, slots_a + (i - tiles_a) * BK) + offs
            at = (row * slots + slot)[None, :] * H + heads[:, None]
            kept = live[:, None] & (slot < slots)[None, :]
            tl.store(ds_ws + at, ds, mask=kept)
            tl.store(p_ws + at, p.to(kv_v.dtype), mask=kept)

    if HAS_SINK:
        # From float32 products: delta itself comes from the rounded output, and dsink is a sum of such deltas.
        p_sink = tl.where(sink_log2 > float("-inf"), tl.exp2(sink_log2 - total), 0.0)
        tl.store(dsink + row * H + heads, -exact * p_sink, mask=live)
    dq_row = dq + row * H * (DV + DT) + heads[:, None] * (DV + DT)
    tl.store(dq_row + dv[None, :], acc.to(dq.dtype.element_ty), mask=live[:, None])
    if DT > 0:
        tl.store(dq_row + DV + dt[None, :], acc_t.to(dq.dtype.element_ty), mask=live[:, None])


def query_step(
    q: torch.Tensor,
    sources: Sources,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor,
    dsink: torch.Tensor | None,
    p_ws: torch.Tensor,
    ds_ws: torch.Tensor,
    slots_a: int,
    slots: int,
    scale: float,
    needs_kv: bool,
    tile: config.RowTile,
) -> None:
    """Writes dq and dsink [S, H] of the rows, and P and dS into the workspace if the keys need them."""
    S, H, d_qk = q.shape
    d_v = out.shape[-1]
    args = sources.kernel_arguments(q)
    dummy = host_or_dummy(q)
    head_blocks = triton.cdiv(H, tile.BH)
    query_kernel[(S * head_blocks,)](
        q, *args.tensors, dummy(sink), out, lse, do, dummy(dlse), dq, dummy(dsink), p_ws, ds_ws,
        args.n_a, args.n_b, H, args.K, scale, slots_a, slots,
        q.stride(0), q.stride(1), args.stride_a, args.stride_b, args.stride_is,
        out.stride(0), out.stride(1), do.stride(0), do.stride(1),
        DV=d_v, DT=d_qk - d_v, BH=tile.BH, BK=tile.BK, HEAD_BLOCKS=head_blocks,
        HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths, HAS_SINK=sink is not None,
        HAS_DLSE=dlse is not None, NEEDS_KV=needs_kv, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
