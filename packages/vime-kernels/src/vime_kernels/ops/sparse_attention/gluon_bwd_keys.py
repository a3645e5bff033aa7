# SPDX-License-Identifier: Apache-2.0
"""Backward of sparse attention for Hopper, 512 channels: dKV in a warpgroup of its own.

Programs are persistent and have four roles. A producer gathers. Two consumers work key-major as in `gluon_bwd`: one
forms S' = KV·Qᵀ, the other dP' = KV·dOᵀ; each gives one half of the heads to the other, forms P and dS of the half it
has both of, and owns half of the channels of dQ. A fourth warpgroup takes P and dS into registers, forms
dKV = dS'·Q + P'·dO and adds it with float32 atomics while the consumers are at the next tile. Which rows a tile holds
reaches everyone through shared memory: a load from global memory would queue behind the atomics, and so would a
spilled register, of which the loops have next to none. The order of the atomics is not fixed. Leaves the 64 channels
of a tail to `gluon_bwd_wide`, and dQ alone to `gluon_bwd`.

What binds is the bandwidth of shared memory, from which the tensor cores read, and of the L2 cache, which adds.

Source: warp roles as in FlashAttention-3 (arXiv 2407.08608).
"""

from dataclasses import replace
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vime_kernels.ops.sparse_attention.gluon_bwd_roles import (
    HB,
    SCORES,
    STORE,
    D,
    add_keys,
    chunk,
    head_terms,
    produce_rows,
)
from vime_kernels.ops.sparse_attention.gluon_tiles import (
    BH,
    BK,
    DC,
    LOG2E,
    SHARED,
    count_tiles,
    row_sources,
    seen_by,
)
from vime_kernels.ops.sparse_attention.sources import Sources, host_or_dummy
from vime_kernels.ops.sparse_attention.triton_places import in_order, used_lengths

CHUNK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ALL_HEADS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
# SCORES by thread, four values at a time: what a thread lends its twin reads, without bank conflicts.
FOURS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[0, 32, 0], [0, 64, 0]],
        [],
        [4, 128, 4],
    )
)
LENT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# Swizzled in lines of 32 elements, so that half of the heads, or one piece, is a tile of its own.
HALVES = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))


@gluon.jit
def sum_in_thread(x):  # type: ignore[no-untyped-def]
    """Adds the two rows of a [slots, heads] product that a thread holds: half the registers, and no exchange."""
    return gl.sum(gl.reshape(x, [BK // 16, 2, 8, HB]), axis=1)


@gluon.jit
def halves(x):  # type: ignore[no-untyped-def]
    """The first and the last HB heads of [slots, heads]; they lie in different registers."""
    first, last = gl.split(gl.permute(gl.reshape(x, [BK, 2, HB]), (0, 2, 1)))
    return (
        gl.convert_layout(first, SCORES, assert_trivial=True),
        gl.convert_layout(last, SCORES, assert_trivial=True),
    )


@gluon.jit
def lend(x, smem):  # type: ignore[no-untyped-def]
    """Stores [slots, HB] by thread."""
    x = gl.permute(gl.reshape(x, [BK // 16, 2, 8, HB // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    smem.store(gl.convert_layout(gl.reshape(x, [4, 128, 4]), FOURS, assert_trivial=True))


@gluon.jit
def borrow(smem):  # type: ignore[no-untyped-def]
    """Loads what `lend` stored."""
    x = gl.permute(gl.reshape(smem.load(FOURS), [HB // 8, BK // 16, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(x, [BK, HB]), SCORES, assert_trivial=True)


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    ranges, sink, out, lse, dlse, dq, dsink, H, scale, work, head_blocks, stride_os, stride_oh, bufs, bars,
    ME: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_DLSE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Consumer ME of 0, 1: P and dS of its half of the heads, and its half of the channels of dQ."""
    q_s, do_s, kv_s, p_s, ds_s, lent_s, head_s, rows_s = bufs
    full, empty, rows_full, q_full, ds_full, ds_empty, lent_full = bars
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    scale_log2 = scale * LOG2E
    t = 0
    r = 0
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        row = (w // head_blocks).to(gl.int64)
        hb = w % head_blocks
        start_a, end_a, _, count_b = row_sources(row, *ranges, HAS_A, KIND_B, HAS_LENGTHS)
        _, tiles = count_tiles(start_a, end_a, count_b)
        if tiles > 0:
            total, delta = head_terms(
                row,
                hb,
                sink,
                out,
                lse,
                dlse,
                H,
                stride_os,
                stride_oh,
                do_s,
                q_full,
                r & 1,
                ME,
                HAS_SINK,
                HAS_DLSE,
            )
            r += 1
            # Two numbers a head, read again for every tile: registers are what this kernel has least of.
            head_s.index(2 * ME).store(total)
            head_s.index(2 * ME + 1).store(delta)
            dq0 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dq1 = gl.zeros([BH, DC], gl.float32, CHUNK)
            exact = sum_in_thread(gl.zeros([BK, HB], gl.float32, SCORES))
            for i in range(0, tiles):
                # Zero, but not to the compiler: it would hoist, and then spill, every matrix descriptor of the loop.
                z = t >> 30
                x = gl.zeros([BK, BH], gl.float32, ALL_HEADS)
                for k in gl.static_range(4):
                    mbarrier.wait(full.index(chunk(k)), t & 1)
                    fence_async_shared()
                    if ME == 0:
                        w_s = q_s.index(z + chunk(k)).permute((1, 0))
                    else:
                        w_s = do_s.index(z + chunk(k)).permute((1, 0))
                    x = warpgroup_mma(kv_s.index(z + chunk(k)), w_s, x, is_async=True)
                mbarrier.wait(rows_full.index(t & 1), (t >> 1) & 1)
                slots = rows_s.index(t & 1).load(gl.SliceLayout(1, SCORES))[:, None]
                x = warpgroup_mma_wait(0, deps=[x])
                # S of the last heads for dP of the first.
                first, last = halves(x)
                if ME == 0:
                    lend(last, lent_s.index(0))
                else:
                    lend(first, lent_s.index(1))
                mbarrier.arrive(lent_full.index(0))
                mbarrier.wait(lent_full.index(0), t & 1)
                if ME == 0:
                    s = first
                    dp = borrow(lent_s.index(1))
                else:
                    s = borrow(lent_s.index(0))
                    dp = last
                p = gl.exp2(s * scale_log2 - head_s.index(2 * ME).load(COLS)[None, :])
                if HEADS > 0:
                    column = ME * HB + gl.arange(0, HB, layout=COLS)[None, :]
                    p = gl.where(seen_by(slots, column, HEADS), p, 0.0)
                else:
                    p = gl.where(slots >= 0, p, 0.0)
                if HAS_SINK:
                    exact += sum_in_thread(p * dp)
                ds = (p * (dp - head_s.index(2 * ME + 1).load(COLS)[None, :]) * scale).to(p_s.dtype)
                mbarrier.wait(ds_empty.index(0), (t & 1) ^ 1)
                p_s.slice(ME * HB, HB, dim=1).store(p.to(p_s.dtype))
                ds_s.slice(ME * HB, HB, dim=1).store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(0))
                mbarrier.wait(ds_full.index(0), t & 1)
                ds_t = ds_s.permute((1, 0))
                dq0 = warpgroup_mma(ds_t, kv_s.index(2 * ME + z), dq0, is_async=True)
                dq1 = warpgroup_mma(ds_t, kv_s.index(2 * ME + 1 + z), dq1, is_async=True)
                dq0 = warpgroup_mma_wait(1, deps=[dq0])
                mbarrier.arrive(empty.index(2 * ME), pred=i + 1 < tiles)
                dq1 = warpgroup_mma_wait(0, deps=[dq1])
                mbarrier.arrive(ds_empty.index(0))
                mbarrier.arrive(empty.index(2 * ME + 1), pred=i + 1 < tiles)
                t += 1

            # Zero again: addresses worked out here do not stay in registers from above the loop.
            last = hb + (t >> 30)
            # My chunks of the last tile are still mine: they turn dQ into whole lines.
            kv_s.index(2 * ME).store(dq0.to(p_s.dtype))
            kv_s.index(2 * ME + 1).store(dq1.to(p_s.dtype))
            d_heads = last * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, STORE))
            d = ME * 2 * DC + gl.arange(0, DC, layout=gl.SliceLayout(0, STORE))
            dq_ptr = dq + row * H * D + d_heads[:, None] * D + d[None, :]
            d_live = (d_heads < H)[:, None] & (d >= 0)[None, :]
            gl.store(dq_ptr, kv_s.index(2 * ME).load(STORE), mask=d_live)
            gl.store(dq_ptr + DC, kv_s.index(2 * ME + 1).load(STORE), mask=d_live)
            mbarrier.arrive(empty.index(2 * ME))
            mbarrier.arrive(empty.index(2 * ME + 1))
            if HAS_SINK:
                heads = last * BH + ME * HB + gl.arange(0, HB, layout=COLS)
                live = heads < H
                # From float32 products: delta itself comes from the rounded output, and dsink is a sum of such deltas.
                sink_log2 = gl.load(sink + heads, mask=live, other=float("-inf")) * LOG2E
                p_sink = gl.where(
                    sink_log2 > float("-inf"), gl.exp2(sink_log2 - head_s.index(2 * ME).load(COLS)), 0.0
                )
                delta_exact = gl.convert_layout(gl.sum(gl.sum(exact, axis=1), axis=0), COLS)
                gl.store(dsink + row * H + heads, -delta_exact * p_sink, mask=live)
        else:
            d_heads = hb * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, STORE))
            d = ME * 2 * DC + gl.arange(0, DC, layout=gl.SliceLayout(0, STORE))
            dq_ptr = dq + row * H * D + d_heads[:, None] * D + d[None, :]
            d_live = (d_heads < H)[:, None] & (d >= 0)[None, :]
            nothing = gl.zeros([BH, DC], p_s.dtype, STORE)
            gl.store(dq_ptr, nothing, mask=d_live)
            gl.store(dq_ptr + DC, nothing, mask=d_live)
            if HAS_SINK:
                heads = hb * BH + ME * HB + gl.arange(0, HB, layout=COLS)
                gl.store(dsink + row * H + heads, gl.zeros([HB], gl.float32, COLS), mask=heads < H)


@gluon.jit(do_not_specialize=["n_a", "n_b", "work"])
def backward_kernel(  # type: ignore[no-untyped-def]
    q, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse, do, dlse, dq, dsink, dkv,
    n_a, n_b, H, K, scale, work, head_blocks,
    stride_qs, stride_qh, stride_a, stride_b, stride_is, stride_os, stride_oh, stride_gs, stride_gh,
    HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_SINK: gl.constexpr,
    HAS_DLSE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its four roles."""
    dtype: gl.constexpr = q.dtype.element_ty
    q_s = gl.allocate_shared_memory(dtype, [4, BH, DC], HALVES)
    do_s = gl.allocate_shared_memory(dtype, [4, BH, DC], HALVES)
    kv_s = gl.allocate_shared_memory(dtype, [4, BK, DC], SHARED)
    p_s = gl.allocate_shared_memory(dtype, [BK, BH], HALVES)
    ds_s = gl.allocate_shared_memory(dtype, [BK, BH], HALVES)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lent_s = gl.allocate_shared_memory(gl.float32, [2, 4, 128, 4], LENT)
    head_s = gl.allocate_shared_memory(gl.float32, [4, HB], flat)
    rows_s = gl.allocate_shared_memory(gl.int32, [2, BK], flat)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    ds_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    lent_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    for c in gl.static_range(4):
        mbarrier.init(full.index(c), count=128)
        mbarrier.init(empty.index(c), count=1)
        mbarrier.init(q_full.index(c), count=128)
        mbarrier.init(q_empty.index(c), count=1)
    for i in gl.static_range(2):
        mbarrier.init(rows_full.index(i), count=1)
    mbarrier.init(ds_full.index(0), count=2)
    mbarrier.init(ds_empty.index(0), count=3)
    mbarrier.init(lent_full.index(0), count=2)
    fence_async_shared()
    gl.thread_barrier()
    ranges = (starts_a, ends_a, starts_b, ends_b, lengths, n_a, n_b, K)
    bufs = (q_s, do_s, kv_s, p_s, ds_s, lent_s, head_s, rows_s)
    bars = (full, empty, rows_full, q_full, ds_full, ds_empty, lent_full)
    gl.warp_specialize(
        [
            (consume, (
                ranges, sink, out, lse, dlse, dq, dsink, H, scale, work, head_blocks, stride_os, stride_oh,
                bufs, bars, 0, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE, HEADS,
            )),
            (consume, (
                ranges, sink, out, lse, dlse, dq, dsink, H, scale, work, head_blocks, stride_os, stride_oh,
                bufs, bars, 1, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE, HEADS,
            )),
            (add_keys, (
                ranges, dkv, work, head_blocks, q_s, do_s, p_s, ds_s, rows_s, q_empty, ds_full, ds_empty,
                0, HAS_A, KIND_B, HAS_LENGTHS,
            )),
            (produce_rows, (
                q, do, kv_a, kv_b, ranges, indices, n_a, n_b, H, work, head_blocks,
                stride_qs, stride_qh, stride_gs, stride_gh, stride_a, stride_b, stride_is,
                q_s, do_s, q_s, kv_s, kv_s, rows_s, full, empty, rows_full, q_full, q_empty,
                0, HAS_A, KIND_B, HAS_LENGTHS,
            )),
        ],
        [4, 4, 4], [192, 96, 32],
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
    *,
    kernel: Any = backward_kernel,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """As `triton_bwd.backward`, with the gradients of kv in its dtype; `kernel` is the one for the width of q."""
    S, H, _ = q.shape
    n_a, n_b = (0 if kv is None else len(kv) for kv in (sources.kv_a, sources.kv_b))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dsink_SH = torch.empty((S, H), dtype=torch.float32, device=q.device) if sink is not None else None
    dkv = torch.zeros((n_a + n_b, q.shape[-1]), dtype=torch.float32, device=q.device)
    if S and H:
        if sources.indices is not None and not sources.heads:
            sources = replace(sources, lengths=used_lengths(sources.indices, sources.lengths, n_b))
        args = sources.kernel_arguments(q)
        dummy = host_or_dummy(q)
        head_blocks = -(-H // 64)
        work = S * head_blocks
        programs = min(work, torch.cuda.get_device_properties(q.device).multi_processor_count)
        kernel[(programs,)](
            q, *args.tensors, dummy(sink), out, lse, do, dummy(dlse), dq, dummy(dsink_SH), dkv,
            args.n_a, args.n_b, H, args.K, scale, work, head_blocks,
            q.stride(0), q.stride(1), args.stride_a, args.stride_b, args.stride_is,
            out.stride(0), out.stride(1), do.stride(0), do.stride(1),
            HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths,
            HAS_SINK=sink is not None, HAS_DLSE=dlse is not None, HEADS=sources.heads, num_warps=4,
        )  # fmt: skip
    return (
        dq,
        in_order(dkv[:n_a], sources.kv_a),
        in_order(dkv[n_a:], sources.kv_b),
        None if dsink_SH is None else dsink_SH.sum(0),
    )
