# SPDX-License-Identifier: Apache-2.0
"""Backward of sparse attention for Hopper, 512 + 64 channels: the consumers, and the kernel around them.

The roles are those of `gluon_bwd_keys`; the tail changes what the consumers do. dQ of 576 channels leaves them so few
registers that they form scores of one half of the heads after the other. P is the first consumer's alone and dS the
second's: the first forms S' = KV·Qᵀ and stores P, rounded as dKV needs it, and what the rounding left, where dS will
be; the second forms dP' = KV·dOᵀ and from both parts dS, while the first is at the other half. dKV of the tail is the
fourth warpgroup's, like the rest. Registers suffice without a sink; with one, which no model of this width has, ptxas
serialises products. Leaves 512 channels to `gluon_bwd_keys`, and dQ alone to `gluon_bwd`.
"""

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vime_kernels.ops.sparse_attention import gluon_bwd_keys
from vime_kernels.ops.sparse_attention.gluon_bwd_heads import head_terms, of_row
from vime_kernels.ops.sparse_attention.gluon_bwd_keys import CHUNK, HALVES, LENT, borrow, lend, sum_in_thread
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

DT = gl.constexpr(64)


@gluon.jit
def scores(x_s, xt_s, kv_s, kvt_s, full, t, h: gl.constexpr, ME: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start S' of a tile and half of the heads (ME 0), or dP' (ME 1)."""
    # Zero, but not to the compiler, nor the same as for the other products of a tile: it would keep, and spill, every
    # matrix descriptor.
    z = (t + h) >> 30
    x = gl.zeros([BK, HB], gl.float32, SCORES)
    for k in gl.static_range(4):
        # Two chunks at a time: products of one take less time than the fence.
        if h == 0 and k % 2 == 0:
            mbarrier.wait(full.index(chunk(k)), t & 1)
            mbarrier.wait(full.index(chunk(k + 1)), t & 1)
            fence_async_shared()
        heads = x_s.index(z + chunk(k)).slice(h * HB, HB, dim=0)
        x = warpgroup_mma(kv_s.index(z + chunk(k)), heads.permute((1, 0)), x, is_async=True)
    if h == 0:
        mbarrier.wait(full.index(4), t & 1)
        fence_async_shared()
    if ME == 0:
        heads = xt_s.index(z).slice(h * HB, HB, dim=0)
        x = warpgroup_mma(kvt_s.index(z), heads.permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def hand_over(  # type: ignore[no-untyped-def]
    s, slots, total, p_s, lent_s, p_full, ds_empty, t, scale_log2, h: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """The first consumer: P of half of the heads, rounded for dKV, and the rest of it for dS."""
    p = gl.exp2(s * scale_log2 - total[None, :])
    if HEADS > 0:
        column = h * HB + gl.arange(0, HB, layout=gl.SliceLayout(0, SCORES))[None, :]
        p = gl.where(seen_by(slots[:, None], column, HEADS), p, 0.0)
    else:
        p = gl.where(slots[:, None] >= 0, p, 0.0)
    rounded = p.to(p_s.dtype)
    rest = (p - rounded.to(gl.float32)).to(p_s.dtype)
    if h == 0:
        mbarrier.wait(ds_empty.index(0), (t & 1) ^ 1)
    p_s.slice(h * HB, HB, dim=1).store(rounded)
    lend(rest, lent_s.index(h))
    fence_async_shared()
    mbarrier.arrive(p_full.index(h))


@gluon.jit
def take_over(  # type: ignore[no-untyped-def]
    dp, delta, exact, p_s, ds_s, lent_s, p_full, ds_full, t, scale, h: gl.constexpr,
    HAS_SINK: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """The second consumer: dS from both parts of P, and the float32 sums behind the gradient of the sink."""
    mbarrier.wait(p_full.index(h), t & 1)
    p = p_s.slice(h * HB, HB, dim=1).load(SCORES).to(gl.float32) + borrow(lent_s.index(h)).to(gl.float32)
    if HEADS > 0:
        # Of a row without keys it may be NaN.
        dp = gl.where(p > 0, dp, 0.0)
    if HAS_SINK:
        exact += sum_in_thread(p * dp)
    ds = p * (dp - delta[None, :]) * scale
    # Everyone has read what was lent before the first overwrites it.
    gl.thread_barrier()
    ds_s.slice(h * HB, HB, dim=1).store(ds.to(ds_s.dtype))
    fence_async_shared()
    if h == 1:
        mbarrier.arrive(ds_full.index(0))
    return exact


@gluon.jit
def store_sink(dsink, exact, p_sink_s, hb, H, h: gl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of half of the sinks, of one row."""
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    heads = hb * BH + h * HB + gl.arange(0, HB, layout=COLS)
    delta = gl.convert_layout(gl.sum(gl.sum(exact, axis=1), axis=0), COLS)
    gl.store(dsink + heads, -delta * p_sink_s.slice(h * HB, HB).load(COLS), mask=heads < H)


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    ranges, sink, out, lse, dlse, dq, dq_desc, dsink, H, scale, work, head_blocks, stride_os, stride_oh,
    bufs, bars,
    ME: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_DLSE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Consumer ME of 0, 1: P or dS, and its half of the channels of dQ."""
    q_s, do_s, qt_s, kv_s, kvt_s, p_s, ds_s, head_s, rows_s = bufs
    full, empty, rows_full, q_full, heads_full, p_full, ds_full, ds_empty, queue = bars
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
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
                row, hb, o0, o1, o2, o3, lse_keys, sinks, dlse, H, q_s, do_s, qt_s, q_full, r & 1,
                DT, ME, HAS_SINK, HAS_DLSE, HEADS,
            )  # fmt: skip
            # Three numbers a head, read again for every tile: registers are what this kernel has least of.
            head_s.index(0).slice(ME * HB, HB).store(total)
            head_s.index(1).slice(ME * HB, HB).store(delta)
            # Two deep: consumer 1 may still read the last row's.
            head_s.index(2 + (r & 1)).slice(ME * HB, HB).store(p_sink)
            mbarrier.arrive(heads_full.index(0))
            mbarrier.wait(heads_full.index(0), r & 1)
            r += 1
            dq0 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dq1 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dqt = gl.zeros([BH, HB], gl.float32, SCORES)
            # The consumers lend each other the rest of P where dS will be.
            lent_s = ds_s._reinterpret(ds_s.dtype, [2, 4, 128, 4], LENT)
            exact0 = sum_in_thread(gl.zeros([BK, HB], gl.float32, SCORES))
            exact1 = exact0
            for i in range(0, tiles):
                for h in gl.static_range(2):
                    if ME == 0:
                        x = scores(q_s, qt_s, kv_s, kvt_s, full, t, h, ME)
                        if h == 0:
                            mbarrier.wait(rows_full.index(t & 1), (t >> 1) & 1)
                        slots = rows_s.index(t & 1).load(gl.SliceLayout(1, SCORES))
                        total = head_s.index(0).slice(h * HB, HB).load(COLS)
                        x = warpgroup_mma_wait(0, deps=[x])
                        hand_over(x, slots, total, p_s, lent_s, p_full, ds_empty, t, scale * LOG2E, h, HEADS)
                    else:
                        x = scores(do_s, qt_s, kv_s, kvt_s, full, t, h, ME)
                        delta = head_s.index(1).slice(h * HB, HB).load(COLS)
                        x = warpgroup_mma_wait(0, deps=[x])
                        if h == 0:
                            exact0 = take_over(
                                x, delta, exact0, p_s, ds_s, lent_s, p_full, ds_full, t, scale, h, HAS_SINK, HEADS
                            )  # fmt: skip
                        else:
                            exact1 = take_over(
                                x, delta, exact1, p_s, ds_s, lent_s, p_full, ds_full, t, scale, h, HAS_SINK, HEADS
                            )  # fmt: skip
                mbarrier.wait(ds_full.index(0), t & 1)
                z = (t + 2) >> 30
                ds_t = ds_s.permute((1, 0))
                dq0 = warpgroup_mma(ds_t, kv_s.index(2 * ME + z), dq0, is_async=True)
                dqt = warpgroup_mma(ds_t, kvt_s.index(z).slice(ME * HB, HB, dim=1), dqt, is_async=True)
                dq1 = warpgroup_mma(ds_t, kv_s.index(2 * ME + 1 + z), dq1, is_async=True)
                dq0 = warpgroup_mma_wait(2, deps=[dq0])
                mbarrier.arrive(empty.index(2 * ME), pred=i + 1 < tiles)
                dqt, dq1 = warpgroup_mma_wait(0, deps=[dqt, dq1])
                mbarrier.arrive(empty.index(4))
                mbarrier.arrive(empty.index(2 * ME + 1), pred=i + 1 < tiles)
                mbarrier.arrive(ds_empty.index(0))
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
            t_heads = last * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, SCORES))
            td = D + ME * HB + gl.arange(0, HB, layout=gl.SliceLayout(0, SCORES))
            t_ptr = dq + row * H * (D + DT) + t_heads[:, None] * (D + DT) + td[None, :]
            gl.store(t_ptr, dqt.to(p_s.dtype), mask=(t_heads < H)[:, None] & (td >= 0)[None, :])
            if HAS_SINK and ME == 1:
                # From float32 products: delta itself comes from the rounded output, and dsink is a sum of such deltas.
                store_sink(dsink + row * H, exact0, head_s.index(2 + ((r - 1) & 1)), last, H, 0)
                store_sink(dsink + row * H, exact1, head_s.index(2 + ((r - 1) & 1)), last, H, 1)
        else:
            d_heads = hb * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, STORE))
            d = ME * 2 * DC + gl.arange(0, DC, layout=gl.SliceLayout(0, STORE))
            dq_ptr = dq + row * H * (D + DT) + d_heads[:, None] * (D + DT) + d[None, :]
            d_live = (d_heads < H)[:, None] & (d >= 0)[None, :]
            nothing = gl.zeros([BH, DC], p_s.dtype, STORE)
            gl.store(dq_ptr, nothing, mask=d_live)
            gl.store(dq_ptr + DC, nothing, mask=d_live)
            if ME == 1:
                gl.store(dq_ptr + 2 * DC, nothing, mask=d_live & (d < 2 * DC + DT)[None, :])
            if HAS_SINK and ME == 1:
                heads = hb * BH + gl.arange(0, BH, layout=gl.SliceLayout(0, STORE))
                gl.store(dsink + row * H + heads, gl.zeros_like(heads).to(gl.float32), mask=heads < H)
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
    qt_s = gl.allocate_shared_memory(dtype, [1, BH, DT], HALVES)
    kvt_s = gl.allocate_shared_memory(dtype, [1, BK, DT], HALVES)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    head_s = gl.allocate_shared_memory(gl.float32, [4, BH], flat)
    rows_s = gl.allocate_shared_memory(gl.int32, [2, BK], flat)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [5, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [5, 1], barrier)
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    heads_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    ds_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    queue = make_queue()
    for c in gl.static_range(4):
        mbarrier.init(full.index(c), count=128)
        mbarrier.init(empty.index(c), count=1)
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    mbarrier.init(full.index(4), count=128)
    mbarrier.init(empty.index(4), count=2)
    for i in gl.static_range(2):
        mbarrier.init(rows_full.index(i), count=128 if ORDERED else 1)
        mbarrier.init(p_full.index(i), count=1)
    mbarrier.init(heads_full.index(0), count=2)
    mbarrier.init(ds_full.index(0), count=1)
    mbarrier.init(ds_empty.index(0), count=3)
    fence_async_shared()
    gl.thread_barrier()
    ranges = (starts_a, ends_a, starts_b, ends_b, lengths, n_a, n_b, K)
    bufs = (q_s, do_s, qt_s, kv_s, kvt_s, p_s, ds_s, head_s, rows_s)
    bars = (full, empty, rows_full, q_full, heads_full, p_full, ds_full, ds_empty, queue)
    gl.warp_specialize(
        [
            (consume, (
                ranges, sink, out, lse, dlse, dq, dq_desc, dsink, H, scale, work, head_blocks,
                stride_os, stride_oh, bufs, bars, 0, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE, HEADS,
            )),
            (consume, (
                ranges, sink, out, lse, dlse, dq, dq_desc, dsink, H, scale, work, head_blocks,
                stride_os, stride_oh, bufs, bars, 1, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE, HEADS,
            )),
            (add_keys, (
                ranges, dkv, work, head_blocks, queue, q_s, do_s, qt_s, p_s, ds_s, rows_s, q_empty, ds_full, ds_empty,
                DT, HAS_A, KIND_B, HAS_LENGTHS,
            )),
            (produce_rows, (
                q_desc, do_desc, qt_desc, kv_a, kv_b, ranges, indices, rank, n_a, n_b, work, head_blocks,
                counter, queue, stride_a, stride_b, stride_is, stride_rank,
                q_s, do_s, qt_s, kv_s, kvt_s, rows_s, full, empty, rows_full, q_full, q_empty,
                DT, HAS_A, KIND_B, HAS_LENGTHS, ORDERED,
            )),
        ],
        [4, 4, 4], [192, 104, 24],
    )  # fmt: skip


# As `gluon_bwd_keys.launch`, for 512 + 64 channels.
launch = partial(gluon_bwd_keys.launch, kernel=backward_kernel)
