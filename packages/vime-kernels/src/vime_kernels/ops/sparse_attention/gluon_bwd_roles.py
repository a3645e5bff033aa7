# SPDX-License-Identifier: Apache-2.0
"""What `gluon_bwd_keys` and `gluon_bwd_wide` share: the fourth warpgroup and the producer.

The tiles' shapes and layouts are those of its module docstring. Layout of the float32 sum of dKV: of every 16 channels,
place 4q + 2h + e holds channel 8h + 2q + e. That is how the threads of a warpgroup hold a product: four neighbouring
places are in one thread, and one exchange between two lanes gives whole lines of 128 bytes. The idea is cuDNN's. Of
rows that are stored (a dkv of 16 bits, in deterministic mode), of every 32 channels place 8q + 2h + e holds the same:
16 bytes a thread without an exchange.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vime_kernels.ops.sparse_attention.gluon_bwd_queue import announce, claim, row_behind
from vime_kernels.ops.sparse_attention.gluon_tiles import (
    BH,
    BK,
    COPY_T,
    DC,
    buffer_of,
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
# SCORES with 32 channels in the places of rows that are stored: a thread has eight neighbouring places of two rows.
RUNS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
RANKS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def chunk(k):  # type: ignore[no-untyped-def]
    """The chunk that is gathered k-th: the first of either consumer, then the second of either."""
    return (k % 2) * 2 + k // 2


@gluon.constexpr_function
def first_channel(j, tail):  # type: ignore[no-untyped-def]
    """Of the j-th piece of dKV: `tail` pieces of the channels from 512 on, then the others in order."""
    return D.value + j * PIECE.value if j < tail else (j - tail) * PIECE.value


@gluon.jit
def of_queries(q_s, qt_s, ds, z, j: gl.constexpr, TAIL: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the products of one piece of dKV with the queries."""
    first: gl.constexpr = first_channel(j, TAIL)
    if first >= D:
        x = qt_s.index(z).slice(first - D, PIECE, dim=1)
    else:
        x = q_s.index(z + first // DC).slice(first % DC, PIECE, dim=1)
    return warpgroup_mma(ds, x, gl.zeros([BK, PIECE], gl.float32, SCORES), is_async=True)


@gluon.jit
def of_outputs(acc, do_s, p, z, j: gl.constexpr, TAIL: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start those with the gradients of the output; values have no part in the tail."""
    first: gl.constexpr = first_channel(j, TAIL)
    if first < D:
        acc = warpgroup_mma(
            p, do_s.index(z + first // DC).slice(first % DC, PIECE, dim=1), acc, is_async=True
        )
    return acc


@gluon.jit
def lines(acc):  # type: ignore[no-untyped-def]
    """A product with its channels in their places, in whole lines."""
    x = gl.permute(gl.reshape(acc, [BK, PIECE // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    x = gl.convert_layout(gl.reshape(x, [BK, PIECE]), PLACES, assert_trivial=True)
    return gl.convert_layout(x, LINES)


@gluon.jit
def runs(acc):  # type: ignore[no-untyped-def]
    """A product with its channels in the places of rows that are stored."""
    x = gl.permute(gl.reshape(acc, [BK, PIECE // 8, 4, 2]), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(x, [BK, PIECE]), RUNS, assert_trivial=True)


@gluon.jit
def targets(  # type: ignore[no-untyped-def]
    dkv, rows, block, blocks, slots, DT: gl.constexpr, KIND_B: gl.constexpr, ORDERED: gl.constexpr
):  # fmt: skip
    """Where a piece of dKV of a tile goes, and which of its slots are keys.

    Atomics with a condition would be branches. So slots without a key add their zeros behind the last of `rows`, and
    each to a row of its own, as programs would wait for each other at one.
    """
    layout: gl.constexpr = RUNS if ORDERED else LINES
    valid = slots >= 0
    if ORDERED:
        target = slots * blocks + block
    else:
        target = slots
        if KIND_B == "united":
            target = row_of(slots)
        target = gl.where(valid, target, rows + gl.arange(0, BK, layout=gl.SliceLayout(1, layout)))
    d = gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))
    return dkv + (target.to(gl.int64) * (D + DT))[:, None] + d[None, :], valid[:, None] & (d >= 0)[None, :]


@gluon.jit
def turned(acc, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    """A piece of dKV as `put` needs it."""
    if ORDERED:
        return runs(acc)
    else:
        return lines(acc)


@gluon.jit
def put(ptrs, x, ok, t, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Adds a piece of dKV, turned, to its rows, or stores it where every slot has a row of its own."""
    if ORDERED:
        gl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=ok)
    else:
        gl.atomic_add(ptrs, x, sem="relaxed")
    # ptxas would put it off until the products of later pieces have no registers; a barrier of the warp stops it.
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [t], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tiles_of(  # type: ignore[no-untyped-def]
    w, work, head_blocks, ranges, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr
):  # fmt: skip
    """Tiles of a row; behind the last row, of the last."""
    row = (gl.minimum(w, work - 1) // head_blocks).to(gl.int64)
    start_a, end_a, _, count_b = row_sources(row, *ranges, HAS_A, KIND_B, HAS_LENGTHS)
    _, tiles = count_tiles(start_a, end_a, count_b)
    return tiles


@gluon.jit
def add_keys(  # type: ignore[no-untyped-def]
    ranges, dkv, work, head_blocks, queue, q_s, do_s, qt_s, p_s, ds_s, rows_s, q_empty, ds_full, ds_empty,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """The fourth warpgroup: dKV of every tile, piece by piece.

    A warp cannot do anything else while its products wait for the tensor cores. So lanes exchange a piece between the
    two groups of products of the next, and the last piece of a tile waits for the first products of the next tile.
    """
    TAIL: gl.constexpr = DT // PIECE
    PIECES: gl.constexpr = TAIL + D // PIECE
    PER_CHUNK: gl.constexpr = DC // PIECE
    LAST: gl.constexpr = first_channel(PIECES - 1, TAIL)
    ORDERED: gl.constexpr = dkv.dtype.element_ty != gl.float32
    rows = ranges[5] + ranges[6]
    slots_of: gl.constexpr = gl.SliceLayout(1, RUNS if ORDERED else LINES)
    # Before the first tile: zeros, and no slot is a key.
    ptrs, ok = targets(dkv, rows, 0, head_blocks, gl.full([BK], -1, gl.int32, slots_of), DT, KIND_B, ORDERED)
    held = gl.zeros([BK, PIECE], gl.float32, SCORES)
    t = 0
    n = 0
    w = gl.program_id(0)
    tiles = tiles_of(w, work, head_blocks, ranges, HAS_A, KIND_B, HAS_LENGTHS)
    while w < work:
        coming_w = row_behind(queue, n)
        n += 1
        # A load that waited here would wait for the atomics of the last tile.
        coming_tiles = tiles_of(coming_w, work, head_blocks, ranges, HAS_A, KIND_B, HAS_LENGTHS)
        for i in range(0, tiles):
            z = t >> 30
            mbarrier.wait(ds_full.index(0), t & 1)
            # In registers: all products read them, and the consumers may write the next ones at once.
            ds = ds_s.load(LEFT)
            p = p_s.load(LEFT)
            acc = of_queries(q_s, qt_s, ds, z, 0, TAIL)
            x = turned(held, ORDERED)
            acc = of_outputs(acc, do_s, p, z, 0, TAIL)
            put(ptrs + LAST, x, ok, t, ORDERED)
            slots = rows_s.index(t & 1).load(slots_of)
            mbarrier.arrive(ds_empty.index(0))
            ptrs, ok = targets(dkv, rows, w % head_blocks, head_blocks, slots, DT, KIND_B, ORDERED)
            for j in gl.static_range(PIECES):
                if j + 1 < PIECES:
                    coming = of_queries(q_s, qt_s, ds, z, j + 1, TAIL)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    # No warp says that the queries are free before all have read them.
                    gl.thread_barrier()
                # The next row's queries arrive chunk by chunk, as soon as the last tile has no use for a chunk.
                if j >= TAIL and (j - TAIL) % PER_CHUNK == PER_CHUNK - 1:
                    mbarrier.arrive(q_empty.index((j - TAIL) // PER_CHUNK), pred=i + 1 == tiles)
                if j + 1 < PIECES:
                    x = turned(acc, ORDERED)
                    acc = of_outputs(coming, do_s, p, z, j + 1, TAIL)
                    put(ptrs + first_channel(j, TAIL), x, ok, t, ORDERED)
            held = acc
            t += 1
        w = coming_w
        tiles = coming_tiles
    put(ptrs + LAST, turned(held, ORDERED), ok, t, ORDERED)


@gluon.jit
def produce_rows(  # type: ignore[no-untyped-def]
    q_desc, do_desc, qt_desc, kv_a, kv_b, ranges, indices, rank, n_a, n_b, work, head_blocks, counter, queue,
    stride_a, stride_b, stride_is, stride_rank,
    q_s, do_s, qt_s, kv_s, kvt_s, rows_s, full, empty, rows_full, q_full, q_empty,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Producer: tiles of keys and which rows they are, and the queries and output gradients of a row."""
    PICKED: gl.constexpr = gl.SliceLayout(1, COPY_T)
    nbytes: gl.constexpr = q_desc.block_type.nbytes + do_desc.block_type.nbytes
    t = 0
    r = 0
    n = 0
    w = gl.program_id(0)
    ticket = claim(counter)
    while w < work:
        row = (w // head_blocks).to(gl.int64)
        hb = w % head_blocks
        start_a, end_a, start_b, count_b = row_sources(row, *ranges, HAS_A, KIND_B, HAS_LENGTHS)
        coming_w = announce(queue, n, ticket)
        n += 1
        ticket = claim(counter)
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
                    if ORDERED:
                        ranks = rank + row * stride_rank + i * BK + gl.arange(0, BK, layout=RANKS)
                        async_copy.async_copy_global_to_shared(rows_s.index(t & 1), ranks)
                        async_copy.mbarrier_arrive(rows_full.index(t & 1), increment_count=False)
                    else:
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
                    at = [row.to(gl.int32), hb * BH, c * DC]
                    if DT > 0 and c == 3:
                        mbarrier.expect(q_full.index(c), nbytes + qt_desc.block_type.nbytes)
                        at_t = [row.to(gl.int32), hb * BH, D]
                        qt_to = qt_s.index(0)._reinterpret(qt_s.dtype, [1, BH, DT], qt_desc.layout)
                        tma.async_copy_global_to_shared(qt_desc, at_t, q_full.index(c), qt_to)
                    else:
                        mbarrier.expect(q_full.index(c), nbytes)
                    q_to = q_s.index(c)._reinterpret(q_s.dtype, [1, BH, DC], q_desc.layout)
                    do_to = do_s.index(c)._reinterpret(q_s.dtype, [1, BH, DC], do_desc.layout)
                    tma.async_copy_global_to_shared(q_desc, at, q_full.index(c), q_to)
                    tma.async_copy_global_to_shared(do_desc, at, q_full.index(c), do_to)
                r += 1
        w = coming_w
