# SPDX-License-Identifier: Apache-2.0
"""What `gluon_bwd_keys` is made of beside its consumers: the fourth warpgroup, the producer, and terms of a head.

The tiles' shapes and layouts are those of its module docstring.
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
    COPY,
    DC,
    LARGE,
    LOG2E,
    copy_heads,
    copy_tile,
    count_tiles,
    row_sources,
    tile_rows,
)

D = gl.constexpr(512)
HB = gl.constexpr(32)  # heads whose scores one consumer forms
PIECE = gl.constexpr(32)  # channels of dKV at a time

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
# The rows of a warp stay in the warp; a thread has four neighbouring channels of four of them.
LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0], [8, 0]],
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


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
def piece(q_s, do_s, p_s, ds_s, z, j: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start channels [PIECE j, PIECE (j + 1)) of dKV."""
    PER_CHUNK: gl.constexpr = DC // PIECE
    at: gl.constexpr = (j % PER_CHUNK) * PIECE
    acc = gl.zeros([BK, PIECE], gl.float32, SCORES)
    acc = warpgroup_mma(ds_s, q_s.index(z + j // PER_CHUNK).slice(at, PIECE, dim=1), acc, is_async=True)
    return warpgroup_mma(p_s, do_s.index(z + j // PER_CHUNK).slice(at, PIECE, dim=1), acc, is_async=True)


@gluon.jit
def add_keys(  # type: ignore[no-untyped-def]
    ranges, dkv, work, head_blocks, q_s, do_s, p_s, ds_s, rows_s, q_empty, ds_full, ds_empty,
    HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
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
            # The queries were copied by ordinary stores, and this warpgroup has not waited for them itself.
            fence_async_shared()
            acc = piece(q_s, do_s, p_s, ds_s, z, 0)
            rows = rows_s.index(t & 1).load(gl.SliceLayout(1, LINES))
            d = gl.arange(0, PIECE, layout=gl.SliceLayout(0, LINES))
            ptrs = dkv + (rows.to(gl.int64) * D)[:, None] + d[None, :]
            ok = (rows >= 0)[:, None] & (d >= 0)[None, :]
            for j in gl.static_range(PIECES):
                if j + 1 < PIECES:
                    coming = piece(q_s, do_s, p_s, ds_s, z, j + 1)
                    acc = warpgroup_mma_wait(2, deps=[acc])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(ds_empty.index(0))
                # The next row's queries arrive chunk by chunk, as soon as the last tile has no use for a chunk.
                if j % PER_CHUNK == PER_CHUNK - 1:
                    mbarrier.arrive(q_empty.index(j // PER_CHUNK), pred=i + 1 == tiles)
                gl.atomic_add(ptrs + j * PIECE, gl.convert_layout(acc, LINES), mask=ok, sem="relaxed")
                if j + 1 < PIECES:
                    acc = coming
            t += 1


@gluon.jit
def produce_rows(  # type: ignore[no-untyped-def]
    q, do, kv_a, kv_b, ranges, indices, n_a, n_b, H, work, head_blocks,
    stride_qs, stride_qh, stride_gs, stride_gh, stride_a, stride_b, stride_is,
    q_s, do_s, kv_s, rows_s, full, empty, rows_full, q_full, q_empty,
    HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """Producer: tiles of keys and which rows they are, and the queries and output gradients of a row."""
    PICKED: gl.constexpr = gl.SliceLayout(1, COPY)
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
            if KIND_B == "none":
                base = kv_a
                stride = stride_a
                shift = 0
            elif HAS_A:
                base = gl.where(i < tiles_a, kv_a, kv_b)
                stride = gl.where(i < tiles_a, stride_a, stride_b)
                shift = gl.where(i < tiles_a, 0, n_a)
            mbarrier.wait(empty.index(0), (t & 1) ^ 1)
            # Two tiles deep, and so free: consumers let go of tile t - 1, after the fourth warpgroup had read t - 2.
            rows_s.index(t & 1).store(gl.where(valid, rows + shift, -1))
            mbarrier.arrive(rows_full.index(t & 1))
            for c in gl.static_range(4):
                if c == 2:
                    mbarrier.wait(empty.index(1), (t & 1) ^ 1)
                copy_tile(base, stride, rows, valid, kv_s.index(c), c * DC, DC, COPY)
                async_copy.mbarrier_arrive(full.index(c), increment_count=False)
            t += 1
            # Asked for now, so that the next gather does not begin with a wait behind the atomics.
            rows, valid = tile_rows(
                i + 1, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, HAS_A, KIND_B, PICKED
            )
            if i == 0:
                for c in gl.static_range(4):
                    mbarrier.wait(q_empty.index(c), (r & 1) ^ 1)
                    copy_heads(q + row * stride_qs, stride_qh, H, hb, q_s.index(c), c * DC, DC, COPY)
                    copy_heads(do + row * stride_gs, stride_gh, H, hb, do_s.index(c), c * DC, DC, COPY)
                    async_copy.mbarrier_arrive(q_full.index(c), increment_count=False)
                r += 1
