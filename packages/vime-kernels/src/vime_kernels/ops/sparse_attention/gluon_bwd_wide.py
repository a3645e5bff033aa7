# SPDX-License-Identifier: Apache-2.0
"""Backward of sparse attention for Hopper, 512 + 64 channels: the consumers, and the kernel around them.

The roles are those of `gluon_bwd_keys`; the tail changes what the consumers do. dQ of 576 channels leaves them fewer
registers (208 each, with less ptxas serialises their products), and none to the fourth warpgroup for holding P and dS.
So P is the first consumer's alone and dS the second's: the first forms S' = KV·Qᵀ of all heads and stores P, rounded
as dKV needs it, and what the rounding left, where dS will be; the second forms dP' = KV·dOᵀ and from both parts dS.
The fourth warpgroup multiplies from shared memory and is the slowest, so dKV of the tail is the first consumer's work,
which waits most. Leaves 512 channels to `gluon_bwd_keys`, and dQ alone to `gluon_bwd`.
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

from vime_kernels.ops.sparse_attention import gluon_bwd_keys
from vime_kernels.ops.sparse_attention.gluon_bwd_keys import ALL_HEADS, CHUNK, HALVES
from vime_kernels.ops.sparse_attention.gluon_bwd_roles import (
    HB,
    SCORES,
    STORE,
    D,
    add_keys,
    add_tail,
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
    sum_in_thread,
)
from vime_kernels.ops.sparse_attention.sources import Sources

DT = gl.constexpr(64)
# ALL_HEADS by thread, eight values at a time: what a thread lends its twin reads, without bank conflicts.
EIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[0, 32, 0], [0, 64, 0]],
        [],
        [4, 128, 8],
    )
)
LENT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0]))


@gluon.jit
def lend(x, smem):  # type: ignore[no-untyped-def]
    """Stores [slots, heads] by thread, whatever the layout of `smem`."""
    # [warp, h, g, b1, b0, t, e] to [b1, (warp, g, t), (b0, h, e)]: slots are (warp, h, g), heads (b1, b0, t, e).
    x = gl.permute(gl.reshape(x, [BK // 16, 2, 8, BH // 16, 2, 4, 2]), (3, 0, 2, 5, 4, 1, 6))
    x = gl.convert_layout(gl.reshape(x, [4, 128, 8]), EIGHTS, assert_trivial=True)
    smem._reinterpret(smem.dtype, [4, 128, 8], LENT).store(x)


@gluon.jit
def borrow(smem):  # type: ignore[no-untyped-def]
    """Loads what `lend` stored."""
    x = smem._reinterpret(smem.dtype, [4, 128, 8], LENT).load(EIGHTS)
    x = gl.permute(gl.reshape(x, [BH // 16, BK // 16, 8, 4, 2, 2, 2]), (1, 5, 2, 0, 4, 3, 6))
    return gl.convert_layout(gl.reshape(x, [BK, BH]), ALL_HEADS, assert_trivial=True)


@gluon.jit
def scores(q_s, do_s, qt_s, kv_s, kvt_s, full, t, z, ME: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start S' of a tile and all heads (ME 0), or dP' (ME 1)."""
    x = gl.zeros([BK, BH], gl.float32, ALL_HEADS)
    for k in gl.static_range(4):
        mbarrier.wait(full.index(chunk(k)), t & 1)
        fence_async_shared()
        if ME == 0:
            right = q_s.index(z + chunk(k)).permute((1, 0))
        else:
            right = do_s.index(z + chunk(k)).permute((1, 0))
        x = warpgroup_mma(kv_s.index(z + chunk(k)), right, x, is_async=True)
    mbarrier.wait(full.index(4), t & 1)
    fence_async_shared()
    if ME == 0:
        x = warpgroup_mma(kvt_s.index(z), qt_s.index(z).permute((1, 0)), x, is_async=True)
    return x


@gluon.jit
def hand_over(  # type: ignore[no-untyped-def]
    s, p_s, ds_s, head_s, rows_s, p_full, ds_empty, t, scale_log2, HEADS: gl.constexpr
):  # fmt: skip
    """The first consumer: P, rounded for dKV, and the rest of it for dS."""
    slots = rows_s.index(t & 1).load(gl.SliceLayout(1, ALL_HEADS))[:, None]
    p = gl.exp2(s * scale_log2 - head_s.index(0).load(gl.SliceLayout(0, ALL_HEADS))[None, :])
    if HEADS > 0:
        column = gl.arange(0, BH, layout=gl.SliceLayout(0, ALL_HEADS))[None, :]
        p = gl.where(seen_by(slots, column, HEADS), p, 0.0)
    else:
        p = gl.where(slots >= 0, p, 0.0)
    rounded = p.to(p_s.dtype)
    rest = (p - rounded.to(gl.float32)).to(p_s.dtype)
    mbarrier.wait(ds_empty.index(0), (t & 1) ^ 1)
    p_s.store(rounded)
    lend(rest, ds_s)
    fence_async_shared()
    mbarrier.arrive(p_full.index(0))


@gluon.jit
def take_over(  # type: ignore[no-untyped-def]
    dp, exact, p_s, ds_s, head_s, p_full, ds_full, t, scale, HAS_SINK: gl.constexpr
):  # fmt: skip
    """The second consumer: dS from both parts of P, and the float32 sums behind the gradient of the sink."""
    mbarrier.wait(p_full.index(0), t & 1)
    p = p_s.load(ALL_HEADS).to(gl.float32) + borrow(ds_s).to(gl.float32)
    if HAS_SINK:
        exact += sum_in_thread(p * dp)
    ds = p * (dp - head_s.index(1).load(gl.SliceLayout(0, ALL_HEADS))[None, :]) * scale
    # Everyone has read what was lent before the first overwrites it.
    gl.thread_barrier()
    ds_s.store(ds.to(ds_s.dtype))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(0))
    return exact


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    ranges, sink, out, lse, dlse, dq, dsink, dkv, H, scale, work, head_blocks, stride_os, stride_oh, bufs, bars,
    ME: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_DLSE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Consumer ME of 0, 1: P or dS, and its half of the channels of dQ."""
    q_s, do_s, qt_s, kv_s, kvt_s, p_s, ds_s, head_s, rows_s = bufs
    full, empty, rows_full, q_full, q_empty, heads_full, p_full, ds_full, ds_empty = bars
    COLS: gl.constexpr = gl.SliceLayout(0, ALL_HEADS)
    t = 0
    r = 0
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        row = (w // head_blocks).to(gl.int64)
        hb = w % head_blocks
        start_a, end_a, _, count_b = row_sources(row, *ranges, HAS_A, KIND_B, HAS_LENGTHS)
        _, tiles = count_tiles(start_a, end_a, count_b)
        if tiles > 0:
            total, delta = head_terms(
                row, hb, sink, out, lse, dlse, H, stride_os, stride_oh, do_s, q_full, r & 1, ME, HAS_SINK, HAS_DLSE
            )  # fmt: skip
            # Two numbers a head, read again for every tile: registers are what this kernel has least of.
            head_s.index(0).slice(ME * HB, HB).store(total)
            head_s.index(1).slice(ME * HB, HB).store(delta)
            mbarrier.arrive(heads_full.index(0))
            mbarrier.wait(heads_full.index(0), r & 1)
            r += 1
            dq0 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dq1 = gl.zeros([BH, DC], gl.float32, CHUNK)
            dqt = gl.zeros([BH, HB], gl.float32, SCORES)
            exact = sum_in_thread(gl.zeros([BK, BH], gl.float32, ALL_HEADS))
            for i in range(0, tiles):
                # Zero, but not to the compiler: it would hoist, and then spill, every matrix descriptor of the loop.
                z = t >> 30
                x = scores(q_s, do_s, qt_s, kv_s, kvt_s, full, t, z, ME)
                if ME == 0:
                    mbarrier.wait(rows_full.index(t & 1), (t >> 1) & 1)
                    x = warpgroup_mma_wait(0, deps=[x])
                    hand_over(x, p_s, ds_s, head_s, rows_s, p_full, ds_empty, t, scale * LOG2E, HEADS)
                else:
                    x = warpgroup_mma_wait(0, deps=[x])
                    exact = take_over(x, exact, p_s, ds_s, head_s, p_full, ds_full, t, scale, HAS_SINK)
                mbarrier.wait(ds_full.index(0), t & 1)
                ds_t = ds_s.permute((1, 0))
                dq0 = warpgroup_mma(ds_t, kv_s.index(2 * ME + z), dq0, is_async=True)
                dq1 = warpgroup_mma(ds_t, kv_s.index(2 * ME + 1 + z), dq1, is_async=True)
                dqt = warpgroup_mma(ds_t, kvt_s.index(z).slice(ME * HB, HB, dim=1), dqt, is_async=True)
                dq0, dq1, dqt = warpgroup_mma_wait(0, deps=[dq0, dq1, dqt])
                mbarrier.arrive(empty.index(4))
                mbarrier.arrive(empty.index(2 * ME), pred=i + 1 < tiles)
                mbarrier.arrive(empty.index(2 * ME + 1), pred=i + 1 < tiles)
                if ME == 0:
                    add_tail(dkv, qt_s, ds_s, rows_s, q_empty, ds_empty, t, z, i + 1 == tiles, DT, KIND_B)
                else:
                    mbarrier.arrive(ds_empty.index(0))
                t += 1

            # Zero again: addresses worked out here do not stay in registers from above the loop.
            last = hb + (t >> 30)
            # My chunks of the last tile are still mine: they turn dQ into whole lines.
            kv_s.index(2 * ME).store(dq0.to(p_s.dtype))
            kv_s.index(2 * ME + 1).store(dq1.to(p_s.dtype))
            d_heads = last * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, STORE))
            d = ME * 2 * DC + gl.arange(0, DC, layout=gl.SliceLayout(0, STORE))
            dq_ptr = dq + row * H * (D + DT) + d_heads[:, None] * (D + DT) + d[None, :]
            d_live = (d_heads < H)[:, None] & (d >= 0)[None, :]
            gl.store(dq_ptr, kv_s.index(2 * ME).load(STORE), mask=d_live)
            gl.store(dq_ptr + DC, kv_s.index(2 * ME + 1).load(STORE), mask=d_live)
            mbarrier.arrive(empty.index(2 * ME))
            mbarrier.arrive(empty.index(2 * ME + 1))
            t_heads = last * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, SCORES))
            td = D + ME * HB + gl.arange(0, HB, layout=gl.SliceLayout(0, SCORES))
            t_ptr = dq + row * H * (D + DT) + t_heads[:, None] * (D + DT) + td[None, :]
            gl.store(t_ptr, dqt.to(p_s.dtype), mask=(t_heads < H)[:, None] & (td >= 0)[None, :])
            if HAS_SINK and ME == 1:
                heads = last * BH + gl.arange(0, BH, layout=COLS)
                # From float32 products: delta itself comes from the rounded output, and dsink is a sum of such deltas.
                sink_log2 = gl.load(sink + heads, mask=heads < H, other=float("-inf")) * LOG2E
                p_sink = gl.where(
                    sink_log2 > float("-inf"), gl.exp2(sink_log2 - head_s.index(0).load(COLS)), 0.0
                )
                delta_exact = gl.convert_layout(gl.sum(gl.sum(exact, axis=1), axis=0), COLS)
                gl.store(dsink + row * H + heads, -delta_exact * p_sink, mask=heads < H)
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
                heads = hb * BH + gl.arange(0, BH, layout=COLS)
                gl.store(dsink + row * H + heads, gl.zeros([BH], gl.float32, COLS), mask=heads < H)


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
    qt_s = gl.allocate_shared_memory(dtype, [1, BH, DT], HALVES)
    kvt_s = gl.allocate_shared_memory(dtype, [1, BK, DT], HALVES)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    head_s = gl.allocate_shared_memory(gl.float32, [2, BH], flat)
    rows_s = gl.allocate_shared_memory(gl.int32, [2, BK], flat)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [5, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [5, 1], barrier)
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    heads_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    p_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    ds_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    for c in gl.static_range(4):
        mbarrier.init(full.index(c), count=128)
        mbarrier.init(empty.index(c), count=1)
        mbarrier.init(q_full.index(c), count=128)
        mbarrier.init(q_empty.index(c), count=2 if c == 3 else 1)
    mbarrier.init(full.index(4), count=128)
    mbarrier.init(empty.index(4), count=2)
    for i in gl.static_range(2):
        mbarrier.init(rows_full.index(i), count=1)
    mbarrier.init(heads_full.index(0), count=2)
    mbarrier.init(p_full.index(0), count=1)
    mbarrier.init(ds_full.index(0), count=1)
    mbarrier.init(ds_empty.index(0), count=3)
    fence_async_shared()
    gl.thread_barrier()
    ranges = (starts_a, ends_a, starts_b, ends_b, lengths, n_a, n_b, K)
    bufs = (q_s, do_s, qt_s, kv_s, kvt_s, p_s, ds_s, head_s, rows_s)
    bars = (full, empty, rows_full, q_full, q_empty, heads_full, p_full, ds_full, ds_empty)
    gl.warp_specialize(
        [
            (consume, (
                ranges, sink, out, lse, dlse, dq, dsink, dkv, H, scale, work, head_blocks, stride_os, stride_oh,
                bufs, bars, 0, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE, HEADS,
            )),
            (consume, (
                ranges, sink, out, lse, dlse, dq, dsink, dkv, H, scale, work, head_blocks, stride_os, stride_oh,
                bufs, bars, 1, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK, HAS_DLSE, HEADS,
            )),
            (add_keys, (
                ranges, dkv, work, head_blocks, q_s, do_s, p_s, ds_s, rows_s, q_empty, ds_full, ds_empty,
                DT, HAS_A, KIND_B, HAS_LENGTHS,
            )),
            (produce_rows, (
                q, do, kv_a, kv_b, ranges, indices, n_a, n_b, H, work, head_blocks,
                stride_qs, stride_qh, stride_gs, stride_gh, stride_a, stride_b, stride_is,
                q_s, do_s, qt_s, kv_s, kvt_s, rows_s, full, empty, rows_full, q_full, q_empty,
                DT, HAS_A, KIND_B, HAS_LENGTHS,
            )),
        ],
        [4, 4, 4], [208, 64, 32],
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
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """As `gluon_bwd_keys.backward`, for 512 + 64 channels."""
    return gluon_bwd_keys.backward(q, sources, sink, out, lse, do, dlse, scale, kernel=backward_kernel)
