# SPDX-License-Identifier: Apache-2.0
"""What `gluon_bwd_keys` and `gluon_bwd_wide` share: the fourth warpgroup, the producer, and terms of a head.

The tiles' shapes and layouts are those of its module docstring. Layout of the float32 sum of dKV: of every 16 channels,
place 4q + 2h + e holds channel 8h + 2q + e. That is how the threads of a warpgroup hold a product: four neighbouring
places are in one thread, and one exchange between two lanes gives whole lines of 128 bytes. The idea is cuDNN's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vime_kernels.ops.sparse_attention.gluon_tiles import (
    BH,
    BK,
    COPY_T,
    DC,
    LARGE,
    LOG2E,
    buffer_of,
    copy_heads,
    copy_tile,
    count_tiles,
    row_of,
    row_sources,
    tile_rows,
)

D = gl.constexpr(512)  # channels of a value; a tail of DT may follow
HB = gl.constexpr(32)  # heads whose scores one consumer forms
PIECE = gl.constexpr(32)  # channels of dKV at a time


SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
# SCORES with the channels in their places: a thread has two rows, and four neighbouring places of each 16.
PLACES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
# The same with one bit exchanged: an instruction of a warp covers 32 places of four rows.
LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [4, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [0, 16]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.constexpr_function
def chunk(k):  # type: ignore[no-untyped-def]
    """The chunk that is gathered k-th: the first of either consumer, then the second of either."""
    return (k % 2) * 2 + k // 2


@gluon.jit
def head_terms(  # type: ignore[no-untyped-def]
    row, hb, sink, out, lse, dlse, H, stride_os, stride_oh, do_s, q_full, phase,
    ME: gl.constexpr, HAS_SINK: gl.constexpr, HAS_DLSE: gl.constexpr,
):  # fmt: skip
    """Of a consumer's heads: log2 of the whole softmax's sum, and delta = <o, do> less the gradient of lse."""
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    heads = hb * BH + ME * HB + gl.arange(0, HB, layout=COLS)
    live = heads < H
    o_heads = hb * BH + ME * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, STORE))
    d = gl.arange(0, DC, layout=gl.SliceLayout(0, STORE))
    o_ptr = out + row * stride_os + o_heads[:, None] * stride_oh + d[None, :]
    o_live = (o_heads < H)[:, None] & (d >= 0)[None, :]
    # All loads before the first wait.
    o0 = gl.load(o_ptr, mask=o_live, other=0.0)
    o1 = gl.load(o_ptr + DC, mask=o_live, other=0.0)
    o2 = gl.load(o_ptr + 2 * DC, mask=o_live, other=0.0)
    o3 = gl.load(o_ptr + 3 * DC, mask=o_live, other=0.0)
    lse_keys = gl.load(lse + row * H + heads, mask=live, other=float("inf")) * LOG2E
    total = lse_keys
    if HAS_SINK:
        sink_log2 = gl.load(sink + heads, mask=live, other=float("-inf")) * LOG2E
        peak = gl.maximum(gl.maximum(lse_keys, sink_log2), -3.0e38)
        joint = peak + gl.log2(gl.exp2(lse_keys - peak) + gl.exp2(sink_log2 - peak))
        total = gl.where(live, joint, float("inf"))
    prod = times_do(o0, do_s, q_full, phase, ME, 0)
    prod += times_do(o1, do_s, q_full, phase, ME, 1)
    prod += times_do(o2, do_s, q_full, phase, ME, 2)
    prod += times_do(o3, do_s, q_full, phase, ME, 3)
    delta = gl.convert_layout(gl.sum(prod, axis=1), COLS)
    if HAS_DLSE:
        grad = gl.load(dlse + row * H + heads, mask=live, other=0.0)
        share = gl.where(lse_keys > float("-inf"), gl.exp2(gl.minimum(total - lse_keys, LARGE)), 0.0)
        delta -= gl.where(live, grad * share, 0.0)
    return total, delta


@gluon.jit
def times_do(o, do_s, q_full, phase, ME: gl.constexpr, c: gl.constexpr):  # type: ignore[no-untyped-def]
    """One chunk of o · do."""
    mbarrier.wait(q_full.index(c), phase)
    return o.to(gl.float32) * do_s.index(c).slice(ME * HB, HB, dim=0).load(STORE).to(gl.float32)


@gluon.jit
def piece(q_s, do_s, p, ds, z, j: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start channels [PIECE j, PIECE (j + 1)) of dKV."""
    PER_CHUNK: gl.constexpr = DC // PIECE
    at: gl.constexpr = (j % PER_CHUNK) * PIECE
    acc = gl.zeros([BK, PIECE], gl.float32, SCORES)
    acc = warpgroup_mma(ds, q_s.index(z + j // PER_CHUNK).slice(at, PIECE, dim=1), acc, is_async=True)
    return warpgroup_mma(p, do_s.index(z + j // PER_CHUNK).slice(at, PIECE, dim=1), acc, is_async=True)


@gluon.jit
def lines(acc):  # type: ignore[no-untyped-def]
    """A product with its channels in their places, in whole lines."""
    x = gl.permute(gl.reshape(acc, [BK, PIECE // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    x = gl.convert_layout(gl.reshape(x, [BK, PIECE]), PLACES, assert_trivial=True)
    return gl.convert_layout(x, LINES)


@gluon.jit
def targets(dkv, rows_s, t, DT: gl.constexpr, KIND_B: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where a piece of dKV of tile t is added, and which of its slots are keys."""
    rows = rows_s.index(t & 1).load(gl.SliceLayout(1, LINES))
    target = rows
    if KIND_B == "united":
        target = row_of(rows)
    d = gl.arange(0, PIECE, layout=gl.SliceLayout(0, LINES))
    ok = (rows >= 0)[:, None] & (d >= 0)[None, :]
    return dkv + (target.to(gl.int64) * (D + DT))[:, None] + d[None, :], ok


@gluon.jit
def add_keys(  # type: ignore[no-untyped-def]
    ranges, dkv, work, head_blocks, q_s, do_s, p_s, ds_s, rows_s, q_empty, ds_full, ds_empty,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """The fourth warpgroup: dKV of every tile, piece by piece, the next piece's products under this one's atomics."""
    PIECES: gl.constexpr = D // PIECE
    PER_CHUNK: gl.constexpr = DC // PIECE
    t = 0
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        row = (w // head_blocks).to(gl.int64)
        start_a, end_a, _, count_b = row_sources(row, *ranges, HAS_A, KIND_B, HAS_LENGTHS)
        _, tiles = count_tiles(start_a, end_a, count_b)
        for i in range(0, tiles):
            z = t >> 30
            mbarrier.wait(ds_full.index(0), t & 1)
            ptrs, ok = targets(dkv, rows_s, t, DT, KIND_B)
            if DT == 0:
                # In registers: 16 products read them, and the consumers may write the next ones at once.
                ds = ds_s.load(LEFT)
                p = p_s.load(LEFT)
                mbarrier.arrive(ds_empty.index(0))
            else:
                # The consumers of a tail leave no registers for that.
                ds = ds_s
                p = p_s
                fence_async_shared()
            acc = piece(q_s, do_s, p, ds, z, 0)
            for j in gl.static_range(PIECES):
                if j + 1 < PIECES:
                    coming = piece(q_s, do_s, p, ds, z, j + 1)
                    acc = warpgroup_mma_wait(2, deps=[acc])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    if DT > 0:
                        mbarrier.arrive(ds_empty.index(0))
                # The next row's queries arrive chunk by chunk, as soon as the last tile has no use for a chunk.
                if j % PER_CHUNK == PER_CHUNK - 1:
                    mbarrier.arrive(q_empty.index(j // PER_CHUNK), pred=i + 1 == tiles)
                gl.atomic_add(ptrs + j * PIECE, lines(acc), mask=ok, sem="relaxed")
                if j + 1 < PIECES:
                    acc = coming
            t += 1


@gluon.jit
def add_tail(  # type: ignore[no-untyped-def]
    dkv, qt_s, ds_s, rows_s, q_empty, ds_empty, t, z, is_last, DT: gl.constexpr, KIND_B: gl.constexpr
):  # fmt: skip
    """The channels from 512 on of dKV, which values have no part in: dS'·Q."""
    ptrs, ok = targets(dkv + D, rows_s, t, DT, KIND_B)
    for j in gl.static_range(DT // PIECE):
        acc = gl.zeros([BK, PIECE], gl.float32, SCORES)
        acc = warpgroup_mma(ds_s, qt_s.index(z).slice(j * PIECE, PIECE, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if j + 1 == DT // PIECE:
            mbarrier.arrive(ds_empty.index(0))
            mbarrier.arrive(q_empty.index(3), pred=is_last)
        gl.atomic_add(ptrs + j * PIECE, lines(acc), mask=ok, sem="relaxed")


@gluon.jit
def produce_rows(  # type: ignore[no-untyped-def]
    q, do, kv_a, kv_b, ranges, indices, n_a, n_b, H, work, head_blocks,
    stride_qs, stride_qh, stride_gs, stride_gh, stride_a, stride_b, stride_is,
    q_s, do_s, qt_s, kv_s, kvt_s, rows_s, full, empty, rows_full, q_full, q_empty,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """Producer: tiles of keys and which rows they are, and the queries and output gradients of a row."""
    PICKED: gl.constexpr = gl.SliceLayout(1, COPY_T)
    t = 0
    r = 0
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        row = (w // head_blocks).to(gl.int64)
        hb = w % head_blocks
        start_a, end_a, start_b, count_b = row_sources(row, *ranges, HAS_A, KIND_B, HAS_LENGTHS)
        tiles_a, tiles = count_tiles(start_a, end_a, count_b)
        picks_row = indices + row * stride_is
        rows, valid = tile_rows(
            0, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, HAS_A, KIND_B, PICKED
        )
        for i in range(0, tiles):
            base = kv_b
            stride = stride_b
            shift = n_a
            key = rows
            if KIND_B == "united":
                base, stride, key = buffer_of(rows, kv_a, kv_b, stride_a, stride_b, n_a)
                shift = 0
            elif KIND_B == "none":
                base = kv_a
                stride = stride_a
                shift = 0
            elif HAS_A:
                base = gl.where(i < tiles_a, kv_a, kv_b)
                stride = gl.where(i < tiles_a, stride_a, stride_b)
                shift = gl.where(i < tiles_a, 0, n_a)
            for k in gl.static_range(4):
                mbarrier.wait(empty.index(chunk(k)), (t & 1) ^ 1)
                if k == 0:
                    # Two deep, and so free: consumers are past tile t - 1, and the fourth warpgroup past t - 2.
                    rows_s.index(t & 1).store(gl.where(valid, rows + shift, -1))
                    mbarrier.arrive(rows_full.index(t & 1))
                copy_tile(base, stride, key, valid, kv_s.index(chunk(k)), chunk(k) * DC, DC, COPY_T)
                async_copy.mbarrier_arrive(full.index(chunk(k)), increment_count=False)
            if DT > 0:
                mbarrier.wait(empty.index(4), (t & 1) ^ 1)
                copy_tile(base, stride, key, valid, kvt_s.index(0), D, DT, COPY_T)
                async_copy.mbarrier_arrive(full.index(4), increment_count=False)
            t += 1
            # Asked for now, so that the next gather does not begin with a wait behind the atomics.
            rows, valid = tile_rows(
                i + 1, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, HAS_A, KIND_B, PICKED
            )
            if i == 0:
                for c in gl.static_range(4):
                    mbarrier.wait(q_empty.index(c), (r & 1) ^ 1)
                    copy_heads(q + row * stride_qs, stride_qh, H, hb, q_s.index(c), c * DC, DC, COPY_T)
                    copy_heads(do + row * stride_gs, stride_gh, H, hb, do_s.index(c), c * DC, DC, COPY_T)
                    if DT > 0 and c == 3:
                        copy_heads(q + row * stride_qs, stride_qh, H, hb, qt_s.index(0), D, DT, COPY_T)
                    async_copy.mbarrier_arrive(q_full.index(c), increment_count=False)
                r += 1
