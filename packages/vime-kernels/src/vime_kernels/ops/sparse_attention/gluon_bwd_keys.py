# SPDX-License-Identifier: Apache-2.0
"""Backward of sparse attention for Hopper, 512 channels: dKV in a warpgroup of its own.

Programs are persistent and have four roles. A producer gathers. Two consumers work key-major as in `gluon_bwd`: one
forms S' = KV·Qᵀ, the other dP' = KV·dOᵀ; each gives one half of the heads to the other, forms P and dS of the half it
has both of, and owns half of the channels of dQ. A fourth warpgroup takes P and dS into registers, forms
dKV = dS'·Q + P'·dO and adds it with float32 atomics while the consumers are at the next tile. Which rows a tile holds
reaches everyone through shared memory: a load from global memory would queue behind the atomics, and so would a
spilled register, of which the loops have none; queries and dQ go through the bulk copy engine. The order of the
atomics is not fixed; with a dkv of 16 bits rows are stored by rank instead (`fused_bwd`). Leaves the 64 channels of a
tail to `gluon_bwd_wide`, and dQ alone to `gluon_bwd`.

What binds is the bandwidth of shared memory, from which the tensor cores read, and of the L2 cache, which adds.

Source: warp roles as in FlashAttention-3 (arXiv 2407.08608).
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vime_kernels.ops.sparse_attention.gluon_bwd_heads import head_terms, of_row
from vime_kernels.ops.sparse_attention.gluon_bwd_queue import make_queue, row_behind
from vime_kernels.ops.sparse_attention.gluon_bwd_roles import (
    HB,
    SCORES,
    STORE,
    D,
    add_keys,
    chunk,
    produce_rows,
)
from vime_kernels.ops.sparse_attention.gluon_tiles import BH, BK, DC, LOG2E, SHARED, seen_by
from vime_kernels.ops.sparse_attention.sources import Sources, host_or_dummy

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
# The same bytes, as a block of heads of one query row.
HALVES_3 = gl.NVMMASharedLayout(64, 16, 3)
SHARED_3 = gl.NVMMASharedLayout(128, 16, 3)


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
    x = gl.permute(
        gl.reshape(smem.load(FOURS), [HB // 8, BK // 16, 8, 4, 2, 2]),
        (1, 4, 2, 0, 3, 5),
    )
    return gl.convert_layout(gl.reshape(x, [BK, HB]), SCORES, assert_trivial=True)


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    ranges, sink, out, lse, dlse, dq, dq_desc, dsink, H, scale, work, head_blocks, stride_os, stride_oh, bufs, bars,
    ME: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_DLSE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Consumer ME of 0, 1: P and dS of its half of the heads, and its half of the channels of dQ."""
    q_s, do_s, kv_s, p_s, ds_s, lent_s, head_s, rows_s = bufs
    full, empty, rows_full, q_full, ds_full, ds_empty, lent_full, queue = bars
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    scale_log2 = scale * LOG2E
    t = 0
    r = 0
    tiles, o0, o1, o2, o3, lse_keys, sinks = of_row(
        gl.program_id(0), work, head_blocks, ranges, sink, out, lse, H, stride_os, stride_oh,
        ME, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK,
    )  # fmt: skip
    n = 0
    w = gl.program_id(0)
    while w < work:
        row = (w // head_blocks).to(gl.int64)
        hb = w % head_blocks
        busy = tiles > 0
        if tiles > 0:
            total, delta, p_sink = head_terms(
                row, hb, o0, o1, o2, o3, lse_keys, sinks, dlse, H, q_s, do_s, q_s, q_full, r & 1,
                0, ME, HAS_SINK, HAS_DLSE, HEADS,
            )  # fmt: skip
            r += 1
            # Three numbers a head, read again for every tile: registers are what this kernel has least of.
            head_s.index(3 * ME).store(total)
            head_s.index(3 * ME + 1).store(delta)
            head_s.index(3 * ME + 2).store(p_sink)
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
                p = gl.exp2(s * scale_log2 - head_s.index(3 * ME).load(COLS)[None, :])
                if HEADS > 0:
                    column = ME * HB + gl.arange(0, HB, layout=COLS)[None, :]
                    seen = seen_by(slots, column, HEADS)
                    p = gl.where(seen, p, 0.0)
                    # Of a row without keys it may be NaN.
                    dp = gl.where(seen, dp, 0.0)
                else:
                    p = gl.where(slots >= 0, p, 0.0)
                if HAS_SINK:
                    exact += sum_in_thread(p * dp)
                ds = (p * (dp - head_s.index(3 * ME + 1).load(COLS)[None, :]) * scale).to(p_s.dtype)
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
            fence_async_shared()
            at = row.to(gl.int32)
            tma.async_copy_shared_to_global(
                dq_desc, [at, last * BH, 2 * ME * DC],
                kv_s.index(2 * ME)._reinterpret(p_s.dtype, [1, BH, DC], dq_desc.layout),
            )  # fmt: skip
            tma.async_copy_shared_to_global(
                dq_desc, [at, last * BH, (2 * ME + 1) * DC],
                kv_s.index(2 * ME + 1)._reinterpret(p_s.dtype, [1, BH, DC], dq_desc.layout),
            )  # fmt: skip
            if HAS_SINK:
                heads = last * BH + ME * HB + gl.arange(0, HB, layout=COLS)
                # From float32 products: delta itself comes from the rounded output, and dsink is a sum of such deltas.
                delta_exact = gl.convert_layout(gl.sum(gl.sum(exact, axis=1), axis=0), COLS)
                p_sink = head_s.index(3 * ME + 2).load(COLS)
                gl.store(dsink + row * H + heads, -delta_exact * p_sink, mask=heads < H)
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
        w = row_behind(queue, n)
        n += 1
        # The next row's, under what is still being stored of this one.
        tiles, o0, o1, o2, o3, lse_keys, sinks = of_row(
            w, work, head_blocks, ranges, sink, out, lse, H, stride_os, stride_oh,
            ME, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK,
        )  # fmt: skip
        tma.store_wait(0)
        mbarrier.arrive(empty.index(2 * ME), pred=busy)
        mbarrier.arrive(empty.index(2 * ME + 1), pred=busy)


@gluon.jit(do_not_specialize=["n_a", "n_b", "work"])
def backward_kernel(  # type: ignore[no-untyped-def]
    q_desc, qt_desc, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths, rank,
    sink, out, lse, do_desc, dlse, dq, dq_desc, dsink, dkv, counter,
    n_a, n_b, H, K, scale, work, head_blocks,
    stride_a, stride_b, stride_is, stride_rank, stride_os, stride_oh,
    HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_SINK: gl.constexpr,
    HAS_DLSE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its four roles."""
    dtype: gl.constexpr = q_desc.dtype
    ORDERED: gl.constexpr = dkv.dtype.element_ty != gl.float32
    q_s = gl.allocate_shared_memory(dtype, [4, BH, DC], HALVES)
    do_s = gl.allocate_shared_memory(dtype, [4, BH, DC], HALVES)
    kv_s = gl.allocate_shared_memory(dtype, [4, BK, DC], SHARED)
    p_s = gl.allocate_shared_memory(dtype, [BK, BH], HALVES)
    ds_s = gl.allocate_shared_memory(dtype, [BK, BH], HALVES)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lent_s = gl.allocate_shared_memory(gl.float32, [2, 4, 128, 4], LENT)
    head_s = gl.allocate_shared_memory(gl.float32, [6, HB], flat)
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
    queue = make_queue()
    for c in gl.static_range(4):
        mbarrier.init(full.index(c), count=128)
        mbarrier.init(empty.index(c), count=1)
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for i in gl.static_range(2):
        mbarrier.init(rows_full.index(i), count=128 if ORDERED else 1)
    mbarrier.init(ds_full.index(0), count=2)
    mbarrier.init(ds_empty.index(0), count=3)
    mbarrier.init(lent_full.index(0), count=2)
    fence_async_shared()
    gl.thread_barrier()
    ranges = (starts_a, ends_a, starts_b, ends_b, lengths, n_a, n_b, K)
    bufs = (q_s, do_s, kv_s, p_s, ds_s, lent_s, head_s, rows_s)
    bars = (full, empty, rows_full, q_full, ds_full, ds_empty, lent_full, queue)
    gl.warp_specialize(
        [
            (consume, (
                ranges, sink, out, lse, dlse, dq, dq_desc, dsink, H, scale, work, head_blocks, stride_os, stride_oh,
                bufs, bars, 0, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE, HEADS,
            )),
            (consume, (
                ranges, sink, out, lse, dlse, dq, dq_desc, dsink, H, scale, work, head_blocks, stride_os, stride_oh,
                bufs, bars, 1, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE, HEADS,
            )),
            (add_keys, (
                ranges, dkv, work, head_blocks, queue, q_s, do_s, q_s, p_s, ds_s, rows_s, q_empty, ds_full, ds_empty,
                0, HAS_A, KIND_B, HAS_LENGTHS,
            )),
            (produce_rows, (
                q_desc, do_desc, q_desc, kv_a, kv_b, ranges, indices, rank, n_a, n_b, work, head_blocks,
                counter, queue, stride_a, stride_b, stride_is, stride_rank,
                q_s, do_s, q_s, kv_s, kv_s, rows_s, full, empty, rows_full, q_full, q_empty,
                0, HAS_A, KIND_B, HAS_LENGTHS, ORDERED,
            )),
        ],
        [4, 4, 4], [192, 96, 32],
    )  # fmt: skip


def launch(
    q: torch.Tensor,
    sources: Sources,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor,
    dsink_SH: torch.Tensor | None,
    dkv: torch.Tensor,
    rank: torch.Tensor | None,
    counter: torch.Tensor,
    scale: float,
    *,
    kernel: Any = backward_kernel,
) -> None:
    """Writes dq and dsink_SH. Adds to the rows of a float32 dkv; else stores the rows of slots there, by rank.

    `counter` is an int32 that is 0, and `kernel` the one for the width of q.
    """
    (S, H, _), args, dummy = q.shape, sources.kernel_arguments(q), host_or_dummy(q)
    head_blocks = -(-H // 64)
    work = S * head_blocks
    q_desc = _heads(q, HALVES_3)
    qt_desc = _heads(q, HALVES_3, 64) if q.shape[-1] > D.value else q_desc
    programs = min(work, torch.cuda.get_device_properties(q.device).multi_processor_count)
    kernel[(programs,)](
        q_desc, qt_desc, *args.tensors, dummy(rank),
        dummy(sink), out, lse, _heads(do, HALVES_3), dummy(dlse), dq, _heads(dq, SHARED_3), dummy(dsink_SH), dkv,
        counter, args.n_a, args.n_b, H, args.K, scale, work, head_blocks,
        args.stride_a, args.stride_b, args.stride_is, 0 if rank is None else rank.stride(0),
        out.stride(0), out.stride(1),
        HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths, HAS_SINK=sink is not None,
        HAS_DLSE=dlse is not None, HEADS=sources.heads, num_warps=4,
    )  # fmt: skip


def _heads(x_SHD: torch.Tensor, layout: gl.NVMMASharedLayout, channels: int = 128) -> TensorDescriptor:
    """64 heads and so many channels of one query row at a time; behind the last head there is nothing."""
    x_SHD = x_SHD.contiguous() if 0 in x_SHD.stride() else x_SHD
    return TensorDescriptor.from_tensor(x_SHD, [1, 64, channels], layout)
