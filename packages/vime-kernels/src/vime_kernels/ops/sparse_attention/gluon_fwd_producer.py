# SPDX-License-Identifier: Apache-2.0
"""The producer warpgroup of the Hopper forward: queries, tiles of keys, and what the consumers must know about them.

Only this warpgroup reads ranges and picks. A row's number of pairs of tiles, and for every slot 0 or -inf to add to its
score, or the word of a united list (`triton_unite`), reach the consumers through shared memory. Empty slots behind a
row's last key cost nothing: the row ends there. A load takes long behind a gather, so none is waited for when it is
made: picks are asked for one pair ahead, in front of a pair's gathers, one slot a thread; ranges and the picks among
which the last key is looked for one row ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from vime_kernels.ops.sparse_attention.gluon_tiles import (
    BH,
    BK,
    COPY,
    COPY_T,
    HALF,
    buffer_of,
    copy_tile,
    count_tiles,
    row_of,
)

SCAN = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
SCANNED = gl.constexpr(1024)  # picks among which the last key is looked for in one go
SLOTS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a slot of the pair of tiles a thread


@gluon.jit
def load_bounds(  # type: ignore[no-untyped-def]
    w, work, head_blocks, starts_a, ends_a, starts_b, ends_b, lengths, K, indices, stride_is,
    HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """What `clamp_bounds` needs of the w-th piece of work, or of the last one, as it is in memory."""
    row = (gl.minimum(w, work - 1) // head_blocks).to(gl.int64)
    picks_row = indices + row * stride_is
    low_a = 0
    high_a = 0
    low_b = 0
    high_b = K
    picks = gl.full([SCANNED], -1, gl.int32, SCAN)
    if HAS_A:
        low_a = gl.load(starts_a + row)
        high_a = gl.load(ends_a + row)
    if KIND_B == "range":
        low_b = gl.load(starts_b + row)
        high_b = gl.load(ends_b + row)
    elif HAS_LENGTHS:
        high_b = gl.load(lengths + row)
    if KIND_B == "picks":
        slot = gl.arange(0, SCANNED, layout=SCAN)
        picks = gl.load(picks_row + slot, mask=slot < K, other=-1)
    return low_a, high_a, low_b, high_b, picks_row, picks


@gluon.jit
def clamp_bounds(low_a, high_a, low_b, high_b, picks_row, picks, n_a, n_b, K, KIND_B: gl.constexpr):  # type: ignore[no-untyped-def]
    """(start_a, end_a, start_b, count_b, picks_row) of a row; count_b ends at its last key."""
    start_a = gl.minimum(gl.maximum(low_a, 0), n_a)
    end_a = gl.maximum(gl.minimum(high_a, n_a), start_a)
    start_b = gl.minimum(gl.maximum(low_b, 0), n_b)
    if KIND_B == "range":
        high_b = gl.minimum(high_b, n_b)
    elif KIND_B == "picks":
        slot = gl.arange(0, SCANNED, layout=SCAN)
        used = gl.where((picks >= 0) & (picks < n_b), slot + 1, 0)
        for first in range(SCANNED, K, SCANNED):
            more = gl.load(picks_row + first + slot, mask=first + slot < K, other=-1)
            used = gl.maximum(used, gl.where((more >= 0) & (more < n_b), first + slot + 1, 0))
        high_b = gl.minimum(high_b, gl.max(used, axis=0))
    return start_a, end_a, start_b, gl.maximum(high_b - start_b, 0), picks_row


@gluon.jit
def load_slots(i, tiles_a, count_b, picks_row, KIND_B: gl.constexpr):  # type: ignore[no-untyped-def]
    """The picks, or words, of tiles i and i + 1 as they are in memory."""
    slot = (i - tiles_a) * BK + gl.arange(0, 2 * BK, layout=SLOTS)
    if KIND_B == "picks" or KIND_B == "united":
        picks = gl.load(picks_row + slot, mask=(slot >= 0) & (slot < count_b), other=-1)
    else:
        picks = slot
    return picks


@gluon.jit
def slot_keys(  # type: ignore[no-untyped-def]
    picks, i, tiles_a, start_a, end_a, start_b, count_b, n_b, HAS_A: gl.constexpr, KIND_B: gl.constexpr
):
    """Key rows of tiles i and i + 1, or words of a united list, -1 for a slot without a key."""
    at = i * BK + gl.arange(0, 2 * BK, layout=SLOTS)
    rows = picks
    if KIND_B == "picks":
        rows = gl.where((picks >= 0) & (picks < n_b), picks, -1)
    elif KIND_B == "range":
        rows = gl.where((picks >= 0) & (picks < count_b), start_b + picks, -1)
    if HAS_A:
        rows_a = gl.where(start_a + at < end_a, start_a + at, -1)
        rows = rows_a if KIND_B == "none" else gl.where(at < tiles_a * BK, rows_a, rows)
    return rows


@gluon.jit
def fill_half(  # type: ignore[no-untyped-def]
    from_a, rows, n_a, kv_a, kv_b, stride_a, stride_b, kv_s, full, empty, free,
    BUFFER: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr,
):  # fmt: skip
    """Gather half `BUFFER % 2` of tile `BUFFER // 2` once its buffer is free."""
    base = kv_b
    stride = stride_b
    if KIND_B == "none":
        base = kv_a
        stride = stride_a
    elif HAS_A:
        base = gl.where(from_a, kv_a, kv_b)
        stride = gl.where(from_a, stride_a, stride_b)
    valid = rows >= 0
    if KIND_B == "united":
        base, stride, rows = buffer_of(rows, kv_a, kv_b, stride_a, stride_b, n_a)
    mbarrier.wait(empty.index(BUFFER), free)
    copy_tile(base, stride, rows, valid, kv_s.index(BUFFER), (BUFFER % 2) * HALF, HALF, COPY)
    async_copy.mbarrier_arrive(full.index(BUFFER), increment_count=False)


@gluon.jit
def fill_tail(  # type: ignore[no-untyped-def]
    kv, stride, rows, kvt_s, full, TILE: gl.constexpr, DT: gl.constexpr, KIND_B: gl.constexpr
):
    """Gather the channels beyond 512 of one tile, once both of its halves are free, and with them its weights."""
    rows_t = gl.convert_layout(rows, gl.SliceLayout(1, COPY_T))
    valid = rows_t >= 0
    if KIND_B == "united":
        rows_t = row_of(rows_t)
    copy_tile(kv, stride, rows_t, valid, kvt_s.index(TILE), 2 * HALF, DT, COPY_T)
    async_copy.mbarrier_arrive(full.index(4 + TILE), increment_count=False)


@gluon.jit
def fetch_heads(q_desc, qt_desc, row, head, q_s, qt_s, q_full, DT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Queries of a row from `head` on, by the bulk copy engine; zeros for heads behind the last."""
    nbytes: gl.constexpr = 2 * q_desc.block_type.nbytes + (qt_desc.block_type.nbytes if DT > 0 else 0)
    mbarrier.expect(q_full.index(0), nbytes)
    for h in gl.static_range(2):
        to = q_s.index(h)._reinterpret(q_s.dtype, [1, BH, HALF], q_desc.layout)
        tma.async_copy_global_to_shared(q_desc, [row, head, h * HALF], q_full.index(0), to)
    if DT > 0:
        to_t = qt_s._reinterpret(q_s.dtype, [1, BH, DT], qt_desc.layout)
        tma.async_copy_global_to_shared(qt_desc, [row, head, 2 * HALF], q_full.index(0), to_t)


@gluon.jit
def produce(  # type: ignore[no-untyped-def]
    q_desc, qt_desc, kv_a, kv_b, ranges, n_a, n_b, H, K, work, head_blocks, stride_a, stride_b,
    q_s, qt_s, kv_s, kvt_s, rows_s, slots_s, pairs_s, full, empty, q_full, q_empty, row_full, slots_full,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """Producer: queries of a row, then its tiles, half by half, in the order in which the consumers let go of them."""
    t = 0
    r = 0
    read = load_bounds(gl.program_id(0), work, head_blocks, *ranges, HAS_A, KIND_B, HAS_LENGTHS)
    start_a, end_a, start_b, count_b, picks_row = clamp_bounds(*read, n_a, n_b, K, KIND_B)
    tiles_a, tiles = count_tiles(start_a, end_a, count_b)
    picks = load_slots(0, tiles_a, count_b, picks_row, KIND_B)
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        pairs = gl.maximum((tiles + 1) // 2, 1)
        # A row without a key is a pair of empty tiles. Its queries count as zero, whatever they are.
        head = gl.where(tiles > 0, w % head_blocks, head_blocks) * BH
        read = load_bounds(w + gl.num_programs(0), work, head_blocks, *ranges, HAS_A, KIND_B, HAS_LENGTHS)
        mbarrier.wait(q_empty.index(0), r ^ 1)
        pairs_s.index(r).store(gl.full([1], 0, gl.int32, SLOTS) + pairs)
        mbarrier.arrive(row_full.index(0))
        fetch_heads(q_desc, qt_desc, w // head_blocks, head, q_s, qt_s, q_full, DT)
        r ^= 1
        for i in range(0, 2 * pairs, 2):
            free = (t & 1) ^ 1
            rows = slot_keys(picks, i, tiles_a, start_a, end_a, start_b, count_b, n_b, HAS_A, KIND_B)
            # Two pairs deep, and so free: the consumers have let go of the pair before the last one.
            rows_s.index(t & 1).store(rows)
            if KIND_B != "united":
                slots_s.index(t & 1).store(gl.where(rows >= 0, 0.0, float("-inf")))
            mbarrier.arrive(slots_full.index(t & 1))
            band = tiles_a
            coming = i + 2
            if coming == 2 * pairs:
                coming = 0
                start_a, end_a, start_b, count_b, picks_row = clamp_bounds(*read, n_a, n_b, K, KIND_B)
                tiles_a, tiles = count_tiles(start_a, end_a, count_b)
            picks = load_slots(coming, tiles_a, count_b, picks_row, KIND_B)
            for tile in gl.static_range(2):
                tile_rows = rows_s.index(t & 1).slice(tile * BK, BK).load(gl.SliceLayout(1, COPY))
                for h in gl.static_range(2):
                    fill_half(
                        i + tile < band, tile_rows, n_a, kv_a, kv_b, stride_a, stride_b, kv_s, full, empty, free,
                        2 * tile + h, HAS_A, KIND_B,
                    )  # fmt: skip
                if DT > 0:
                    fill_tail(kv_b, stride_b, tile_rows, kvt_s, full, tile, DT, KIND_B)
            t += 1
