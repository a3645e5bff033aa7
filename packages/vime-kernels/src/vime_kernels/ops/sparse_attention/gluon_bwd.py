# SPDX-License-Identifier: Apache-2.0
"""Gradient of the queries alone of sparse attention for Hopper, with dQ in registers.

Programs are persistent and specialised as in `gluon_fwd`. Everything is key-major: S' = KV·Qᵀ and dP' = KV·dOᵀ give
[slots, heads], and dS', transposed, is the left operand of dQ = dS·KV. A tile of keys is let go as soon as dQ has it.
Leaves a backward with gradients of the keys to `fused_bwd`.

Source: the producer and consumer roles of FlashAttention-3 (arXiv 2407.08608).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vime_kernels.ops.sparse_attention.gluon_bwd_producer import produce_backward
from vime_kernels.ops.sparse_attention.gluon_tiles import (
    BH,
    BK,
    CHUNK,
    CHUNKS,
    DC,
    LARGE,
    LOG2E,
    SCORES,
    SHARED,
    STORE,
    count_tiles,
    head_lines,
    row_sources,
    sum_in_thread,
    tile_rows,
)
from vime_kernels.ops.sparse_attention.sources import Sources, host_or_dummy

# The 64 channels of a tail: a warpgroup takes 32.
TAIL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse, dlse, dq, dsink,
    n_a, n_b, H, K, scale, work, head_blocks, stride_is, stride_os, stride_oh,
    q_s, do_s, qt_s, kv_s, kvt_s, ds_s, head_s, full, empty, q_full, q_empty,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_DLSE: gl.constexpr,
):  # fmt: skip
    """Consumers: both warpgroups run this together."""
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    D: gl.constexpr = CHUNKS * DC + DT
    scale_log2 = scale * LOG2E
    t = 0
    r = 0
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        row = (w // head_blocks).to(gl.int64)
        hb = w % head_blocks
        start_a, end_a, start_b, count_b = row_sources(
            row, starts_a, ends_a, starts_b, ends_b, lengths, n_a, n_b, K, HAS_A, KIND_B, HAS_LENGTHS
        )
        tiles_a, tiles = count_tiles(start_a, end_a, count_b)
        picks_row = indices + row * stride_is
        heads = hb * BH + gl.arange(0, BH, layout=COLS)
        live = heads < H

        if tiles > 0:
            lse_keys = gl.load(lse + row * H + heads, mask=live, other=float("inf")) * LOG2E
            total = lse_keys
            if HAS_SINK:
                sink_log2 = gl.load(sink + heads, mask=live, other=float("-inf")) * LOG2E
                peak = gl.maximum(gl.maximum(lse_keys, sink_log2), -3.0e38)
                joint = peak + gl.log2(gl.exp2(lse_keys - peak) + gl.exp2(sink_log2 - peak))
                total = gl.where(live, joint, float("inf"))
            o_ptr, o_live = head_lines(out + row * stride_os, stride_oh, hb, H)
            prod = gl.zeros([BH, DC], gl.float32, STORE)
            mbarrier.wait(q_full.index(0), r & 1)
            r += 1
            for c in gl.static_range(CHUNKS):
                o_tile = gl.load(o_ptr + c * DC, mask=o_live, other=0.0).to(gl.float32)
                prod += o_tile * do_s.index(c).load(STORE).to(gl.float32)
            delta = gl.convert_layout(gl.sum(prod, axis=1), COLS)
            if HAS_DLSE:
                grad = gl.load(dlse + row * H + heads, mask=live, other=0.0)
                share = gl.where(lse_keys > float("-inf"), gl.exp2(gl.minimum(total - lse_keys, LARGE)), 0.0)
                delta -= gl.where(live, grad * share, 0.0)

            # Two numbers a head, read again for every tile: registers are what this kernel has least of.
            head_s.index(0).store(total)
            head_s.index(1).store(delta)
            dq0 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dq1 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dq2 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dq3 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dqt = gl.zeros([BH, 64], gl.float32, TAIL)
            exact = sum_in_thread(gl.zeros([BK, BH], gl.float32, SCORES))
            for i in range(0, tiles):
                # Zero, but not to the compiler: it would hoist, and then spill, every matrix descriptor of the loop.
                z = t >> 30
                _, valid = tile_rows(
                    i, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, HAS_A, KIND_B,
                    gl.SliceLayout(1, SCORES),
                )  # fmt: skip
                s = gl.zeros([BK, BH], gl.float32, SCORES)
                dp = gl.zeros([BK, BH], gl.float32, SCORES)
                for c in gl.static_range(CHUNKS):
                    mbarrier.wait(full.index(c), t & 1)
                    fence_async_shared()
                    s = warpgroup_mma(kv_s.index(z + c), q_s.index(z + c).permute((1, 0)), s, is_async=True)
                    dp = warpgroup_mma(
                        kv_s.index(z + c), do_s.index(z + c).permute((1, 0)), dp, is_async=True
                    )
                if DT > 0:
                    mbarrier.wait(full.index(CHUNKS), t & 1)
                    fence_async_shared()
                    s = warpgroup_mma(kvt_s.index(0), qt_s.permute((1, 0)), s, is_async=True)
                s, dp = warpgroup_mma_wait(0, deps=[s, dp])
                p = gl.exp2(s * scale_log2 - head_s.index(0).load(COLS)[None, :])
                p = gl.where(valid[:, None], p, 0.0)
                if HAS_SINK:
                    exact += sum_in_thread(p * dp)
                ds = p * (dp - head_s.index(1).load(COLS)[None, :]) * scale
                ds_s.store(ds.to(ds_s.dtype))
                fence_async_shared()
                gl.thread_barrier()
                ds_t = ds_s.permute((1, 0))
                dq0 = warpgroup_mma(ds_t, kv_s.index(z + 0), dq0, is_async=True)
                dq1 = warpgroup_mma(ds_t, kv_s.index(z + 1), dq1, is_async=True)
                dq2 = warpgroup_mma(ds_t, kv_s.index(z + 2), dq2, is_async=True)
                dq3 = warpgroup_mma(ds_t, kv_s.index(z + 3), dq3, is_async=True)
                if DT > 0:
                    dqt = warpgroup_mma(ds_t, kvt_s.index(0), dqt, is_async=True)
                    dq0, dq1, dq2, dq3, dqt = warpgroup_mma_wait(0, deps=[dq0, dq1, dq2, dq3, dqt])
                else:
                    dq0, dq1, dq2, dq3 = warpgroup_mma_wait(0, deps=[dq0, dq1, dq2, dq3])
                mbarrier.arrive(empty.index(0))
                t += 1

            # Zero again: addresses worked out here do not stay in registers from above the loop.
            last = hb + (t >> 30)
            if HAS_SINK:
                heads = last * BH + gl.arange(0, BH, layout=COLS)
                live = heads < H
                # From float32 products: delta itself comes from the rounded output, and dsink is a sum of such deltas.
                sink_log2 = gl.load(sink + heads, mask=live, other=float("-inf")) * LOG2E
                p_sink = gl.where(
                    sink_log2 > float("-inf"), gl.exp2(sink_log2 - head_s.index(0).load(COLS)), 0.0
                )
                delta_exact = gl.convert_layout(gl.sum(gl.sum(exact, axis=1), axis=0), COLS)
                gl.store(dsink + row * H + heads, -delta_exact * p_sink, mask=live)
            # Nobody reads the queries any more: their buffers turn dQ into whole lines.
            q_s.index(0).store(dq0.to(ds_s.dtype))
            q_s.index(1).store(dq1.to(ds_s.dtype))
            q_s.index(2).store(dq2.to(ds_s.dtype))
            q_s.index(3).store(dq3.to(ds_s.dtype))
            dq_ptr, o_live = head_lines(dq + row * H * D, D, last, H)
            for c in gl.static_range(CHUNKS):
                gl.store(dq_ptr + c * DC, q_s.index(c).load(STORE), mask=o_live)
            if DT > 0:
                t_heads = last * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, TAIL))
                td = gl.arange(0, 64, layout=gl.SliceLayout(0, TAIL))
                t_live = (t_heads < H)[:, None] & (td >= 0)[None, :]
                t_ptr = dq + row * H * D + t_heads[:, None] * D + CHUNKS * DC + td[None, :]
                gl.store(t_ptr, dqt.to(ds_s.dtype), mask=t_live)
            mbarrier.arrive(q_empty.index(0))
        else:
            nothing = gl.zeros([BH, DC], ds_s.dtype, STORE)
            dq_ptr, o_live = head_lines(dq + row * H * D, D, hb, H)
            for c in gl.static_range(CHUNKS):
                gl.store(dq_ptr + c * DC, nothing, mask=o_live)
            if DT > 0:
                d = gl.arange(0, DC, layout=gl.SliceLayout(0, STORE))
                gl.store(dq_ptr + CHUNKS * DC, nothing, mask=o_live & (d < DT)[None, :])
            if HAS_SINK:
                gl.store(dsink + row * H + heads, gl.zeros([BH], gl.float32, COLS), mask=live)


@gluon.jit(do_not_specialize=["n_a", "n_b", "K", "work"])  # the compiler fails on a K of 1 that it knows
def backward_kernel(  # type: ignore[no-untyped-def]
    q, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse, do, dlse, dq, dsink,
    n_a, n_b, H, K, scale, work, head_blocks,
    stride_qs, stride_qh, stride_a, stride_b, stride_is, stride_os, stride_oh, stride_gs, stride_gh,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_DLSE: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its two roles."""
    PER_TILE: gl.constexpr = CHUNKS + (1 if DT > 0 else 0)
    WIDTH_T: gl.constexpr = DT if DT > 0 else 16
    dtype: gl.constexpr = q.dtype.element_ty
    q_s = gl.allocate_shared_memory(dtype, [CHUNKS, BH, DC], SHARED)
    do_s = gl.allocate_shared_memory(dtype, [CHUNKS, BH, DC], SHARED)
    kv_s = gl.allocate_shared_memory(dtype, [CHUNKS, BK, DC], SHARED)
    ds_s = gl.allocate_shared_memory(dtype, [BK, BH], SHARED)
    head_s = gl.allocate_shared_memory(gl.float32, [2, BH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tail_layout: gl.constexpr = gl.NVMMASharedLayout(128 if DT > 0 else 32, 16, 2)
    qt_s = gl.allocate_shared_memory(dtype, [BH, WIDTH_T], tail_layout)
    kvt_s = gl.allocate_shared_memory(dtype, [1, BK, WIDTH_T], tail_layout)
    full = gl.allocate_shared_memory(gl.int64, [PER_TILE, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PER_TILE):
        mbarrier.init(full.index(i), count=128)
    mbarrier.init(empty.index(0), count=1)
    mbarrier.init(q_full.index(0), count=128)
    mbarrier.init(q_empty.index(0), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (consume, (
                starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse, dlse, dq, dsink,
                n_a, n_b, H, K, scale, work, head_blocks, stride_is, stride_os, stride_oh,
                q_s, do_s, qt_s, kv_s, kvt_s, ds_s, head_s, full, empty, q_full, q_empty,
                DT, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE,
            )),
            (produce_backward, (
                q, do, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths,
                n_a, n_b, H, K, work, head_blocks,
                stride_qs, stride_qh, stride_gs, stride_gh, stride_a, stride_b, stride_is,
                q_s, do_s, qt_s, kv_s, kvt_s, full, empty, q_full, q_empty,
                DT, HAS_A, KIND_B, HAS_LENGTHS,
            )),
        ],
        [4], [64],
    )  # fmt: skip


def backward(
    q: torch.Tensor,
    sources: Sources,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, None, None, torch.Tensor | None]:
    """As `triton_bwd.backward` without gradients of the keys, for widths 512 and 512 + 64."""
    S, H, D = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dsink_SH = torch.empty((S, H), dtype=torch.float32, device=q.device) if sink is not None else None
    args = sources.kernel_arguments(q)
    dummy = host_or_dummy(q)
    head_blocks = -(-H // 64)
    work = S * head_blocks
    programs = min(work, torch.cuda.get_device_properties(q.device).multi_processor_count)
    if programs:
        backward_kernel[(programs,)](
            q, *args.tensors, dummy(sink), out, lse, do, dummy(dlse), dq, dummy(dsink_SH),
            args.n_a, args.n_b, H, args.K, scale, work, head_blocks,
            q.stride(0), q.stride(1), args.stride_a, args.stride_b, args.stride_is,
            out.stride(0), out.stride(1), do.stride(0), do.stride(1),
            DT=D - out.shape[-1], HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths,
            HAS_SINK=sink is not None, HAS_DLSE=dlse is not None, num_warps=8,
        )  # fmt: skip
    return dq, None, None, None if dsink_SH is None else dsink_SH.sum(0)
