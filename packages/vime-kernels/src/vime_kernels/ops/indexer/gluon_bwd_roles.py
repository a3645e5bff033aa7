# SPDX-License-Identifier: Apache-2.0
"""The roles of `gluon_bwd`: the producer, the consumers, and the warpgroup that adds to the gradient of k.

What they compute, and how they work together, is in its module docstring.
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

DIM = gl.constexpr(128)
STAGES = gl.constexpr(3)  # tiles of keys in shared memory
UNIT = gl.constexpr(64)  # heads of one consumer: the rows of one wgmma
TILE = gl.constexpr(64)  # keys per step
RING = gl.constexpr(8)  # lists of tiles in shared memory
AHEAD = gl.constexpr(4)  # of which so many are asked for before the tile's keys are
LIST = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
QUERIES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, QUERIES, 2))
# A thread stores 16 bytes of a query, half a warp the whole of it; rows stay in their warp.
QUERY_LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]], [[16, 0], [32, 0]], [], [64, 128],
    )
)  # fmt: skip
# Half a warp has 64 channels of a key, four to a thread; a key stays in its warp.
LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [4, 0], [2, 0]],
        [[0, 4], [0, 8], [1, 0], [0, 16], [0, 32]], [[16, 0], [32, 0]], [], [64, 64],
    )
)  # fmt: skip


@gluon.jit
def tiles_of(count):  # type: ignore[no-untyped-def]
    """Tiles of a list."""
    return (count + TILE - 1) // TILE


@gluon.jit
def bring_list(lists, first, count, K, u, rings, empty, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copy of tile u's list: keys, the gradients of both rows' scores at them, places. Zeros behind it."""
    keys, grads, place = lists
    key_s, g_s, place_s = rings
    m = u % RING
    mbarrier.wait(empty.index(m), ((u // RING) & 1) ^ 1)
    slot = first + gl.arange(0, TILE, layout=LIST)
    live = slot < count
    async_copy.async_copy_global_to_shared(key_s.index(m), keys + slot, mask=live)
    async_copy.async_copy_global_to_shared(g_s.index(2 * m), grads + slot, mask=live)
    async_copy.async_copy_global_to_shared(g_s.index(2 * m + 1), grads + 2 * K + slot, mask=live)
    if ORDERED:
        async_copy.async_copy_global_to_shared(place_s.index(m), place + slot, mask=live)


@gluon.jit
def list_keys(key_s, u, first, count, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of tile u's slots, and which slots there are."""
    key = key_s.index(u % RING).load(layout)
    return key, (key >= 0) & (first + gl.arange(0, TILE, layout=layout) < count)


@gluon.jit
def produce(  # type: ignore[no-untyped-def]
    q, k, weights, keys, grads, place, counts, S, K, pairs, q_row, q_head, k_row, weights_row, bufs, bars,
    HAS_WEIGHTS: gl.constexpr, ORDERED: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Producer: the queries and head weights of a pair of rows, then its tiles and, before them, their lists."""
    q_s, k_s, _, w_s, count_s, rings = bufs
    q_full, q_empty, full, empty, _, _, list_empty = bars
    PICKED: gl.constexpr = gl.SliceLayout(1, COPY)
    COLS: gl.constexpr = 2 * HEADS
    t = 0
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        count = gl.load(counts + pair)
        tiles = tiles_of(count)
        at = gl.cast(pair, gl.int64) * 2 * K
        lists = (keys + at, grads + 2 * at, place + at)
        for j in gl.static_range(AHEAD):
            if j < tiles:
                bring_list(lists, j * TILE, count, K, t + j, rings, list_empty, ORDERED)
            async_copy.commit_group()
        column = gl.arange(0, COLS, layout=PICKED)
        row = 2 * pair + column // HEADS
        w = (row < S).to(gl.float32)
        if HAS_WEIGHTS:
            w_at = weights + row.to(gl.int64) * weights_row + column % HEADS
            w = gl.load(w_at, mask=row < S, other=0.0).to(gl.float32)
        r = pair // gl.num_programs(0)
        qb = r & 1
        mbarrier.wait(q_empty.index(qb), ((r >> 1) & 1) ^ 1)
        head = q + row.to(gl.int64) * q_row + (column % HEADS).to(gl.int64) * q_head
        live = (row < S)[:, None] & (d >= 0)[None, :]
        async_copy.async_copy_global_to_shared(q_s.index(qb), head[:, None] + d[None, :], mask=live)
        async_copy.mbarrier_arrive(q_full.index(qb), increment_count=False)
        w_s.index(qb).store(w)
        count_s.index(qb).store(gl.full([COLS], 0, gl.int32, PICKED) + count)
        mbarrier.arrive(q_full.index(qb))
        for i in range(0, tiles):
            u = t + i
            s = u % STAGES
            async_copy.wait_group(AHEAD - 1)
            gl.thread_barrier()
            key, live_key = list_keys(rings[0], u, i * TILE, count, PICKED)
            mbarrier.wait(empty.index(s), ((u // STAGES) & 1) ^ 1)
            ptrs = k + key.to(gl.int64)[:, None] * k_row + d[None, :]
            async_copy.async_copy_global_to_shared(
                k_s.index(s), ptrs, mask=live_key[:, None] & (d >= 0)[None, :]
            )
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            if i + AHEAD < tiles:
                bring_list(lists, (i + AHEAD) * TILE, count, K, u + AHEAD, rings, list_empty, ORDERED)
            async_copy.commit_group()
        t += tiles


@gluon.jit
def score_grads(g_s, u, ME: gl.constexpr, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """g of tile u for this consumer's heads."""
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    m = u % RING
    if HEADS == UNIT:
        g = g_s.index(2 * m + ME).load(KEY)[None, :]
    else:
        first = gl.arange(0, UNIT, layout=gl.SliceLayout(1, SCORES)) < HEADS
        g = gl.where(
            first[:, None], g_s.index(2 * m).load(KEY)[None, :], g_s.index(2 * m + 1).load(KEY)[None, :]
        )
    return g


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    dq, dweights, S, pairs, bufs, bars,
    ME: gl.constexpr, RELU: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """x, A, dq and dw of 64 heads: of one row, or 32 of each."""
    q_s, k_s, a_s, w_s, count_s, rings = bufs
    q_full, q_empty, full, empty, a_full, a_empty, _ = bars
    COLS: gl.constexpr = 2 * HEADS
    HEAD: gl.constexpr = gl.SliceLayout(1, SCORES)
    g_s = rings[1]
    t = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        r = pair // gl.num_programs(0)
        qb = r & 1
        mbarrier.wait(q_full.index(qb), (r >> 1) & 1)
        tiles = tiles_of(gl.max(count_s.index(qb).slice(0, UNIT, dim=0).load(HEAD), axis=0))
        w = w_s.index(qb).slice(ME * UNIT, UNIT, dim=0).load(HEAD)
        mine = q_s.index(qb).slice(ME * UNIT, UNIT, dim=0)
        dq_acc = gl.zeros([UNIT, DIM], gl.float32, QUERIES)
        dw = gl.zeros([UNIT], gl.float32, HEAD)
        for i in range(0, tiles):
            u = t + i
            s = u % STAGES
            mbarrier.wait(full.index(s), (u // STAGES) & 1)
            fence_async_shared()
            x = gl.zeros([UNIT, TILE], gl.float32, SCORES)
            x = warpgroup_mma(mine, k_s.index(s).permute((1, 0)), x, use_acc=False, is_async=True)
            g = score_grads(g_s, u, ME, HEADS)
            x = warpgroup_mma_wait(0, deps=[x])
            if RELU:
                g = gl.where(x > 0, g, 0.0)
            dw += gl.sum(x * g, axis=1)
            a = (w[:, None] * g).to(a_s.dtype)
            mbarrier.wait(a_empty.index(u & 1), ((u >> 1) & 1) ^ 1)
            a_s.index(u & 1).slice(ME * UNIT, UNIT, dim=0).store(a)
            fence_async_shared()
            mbarrier.arrive(a_full.index(u & 1))
            dq_acc = warpgroup_mma(gl.convert_layout(a, OPERAND), k_s.index(s), dq_acc, is_async=True)
            dq_acc = warpgroup_mma_wait(0, deps=[dq_acc])
            mbarrier.arrive(empty.index(s))
        t += tiles
        mbarrier.arrive(q_empty.index(qb))
        out = gl.convert_layout(dq_acc.to(dq.dtype.element_ty), QUERY_LINES)
        c = ME * UNIT + gl.arange(0, UNIT, layout=gl.SliceLayout(1, QUERY_LINES))
        d = gl.arange(0, DIM, layout=gl.SliceLayout(0, QUERY_LINES))
        first = gl.cast(pair, gl.int64) * COLS
        at = dq + first * DIM + c[:, None] * DIM + d[None, :]
        gl.store(at, out, mask=(2 * pair + c // HEADS < S)[:, None] & (d >= 0)[None, :])
        head = ME * UNIT + gl.arange(0, UNIT, layout=HEAD)
        gl.store(dweights + first + head, dw, mask=2 * pair + head // HEADS < S)


@gluon.jit
def key_part(a_s, q_s, c: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start 64 channels of Aᵀ q."""
    acc = gl.zeros([TILE, 64], gl.float32, SCORES)
    return warpgroup_mma(a_s.permute((1, 0)), q_s.slice(c * 64, 64, dim=1), acc, use_acc=False, is_async=True)


@gluon.jit
def put_rows(dk, row, acc, c: gl.constexpr, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Adds 64 channels of rows to dk, or stores them."""
    d = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    ptrs = dk + row.to(gl.int64)[:, None] * DIM + d[None, :]
    live = (row >= 0)[:, None] & (d >= 0)[None, :]
    part = gl.convert_layout(acc, LINES)
    if ORDERED:
        gl.store(ptrs, part.to(ptrs.dtype.element_ty), mask=live)
    else:
        gl.atomic_add(ptrs, part, mask=live, sem="relaxed")


@gluon.jit
def target_rows(rings, u, first, count, empty, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of dk that tile u adds to, or places; -1 for none. Lets go of the tile's list."""
    key_s, _, place_s = rings
    ROW: gl.constexpr = gl.SliceLayout(1, LINES)
    row, live = list_keys(key_s, u, first, count, ROW)
    if ORDERED:
        row = place_s.index(u % RING).load(ROW)
    mbarrier.arrive(empty.index(u % RING))
    return gl.where(live, row, -1)


@gluon.jit
def add_keys(dk, pairs, bufs, bars, ORDERED: gl.constexpr):  # type: ignore[no-untyped-def]
    """The last warpgroup: Aᵀ q, 64 channels at a time."""
    q_s, _, a_s, _, count_s, rings = bufs
    q_full, q_empty, _, _, a_full, a_empty, list_empty = bars
    ROW: gl.constexpr = gl.SliceLayout(1, LINES)
    t = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        r = pair // gl.num_programs(0)
        qb = r & 1
        mbarrier.wait(q_full.index(qb), (r >> 1) & 1)
        count = gl.max(count_s.index(qb).slice(0, UNIT, dim=0).load(ROW), axis=0)
        # The queries were copied by ordinary stores.
        fence_async_shared()
        for i in range(0, tiles_of(count)):
            u = t + i
            ab = u & 1
            # Plus zero, but not to the compiler: it would hoist, and then spill, every matrix descriptor of the loop.
            q_b = q_s.index(qb + (u >> 30))
            mbarrier.wait(a_full.index(ab), (u >> 1) & 1)
            x0 = key_part(a_s.index(ab), q_b, 0)
            x1 = key_part(a_s.index(ab), q_b, 1)
            # The consumers, who have waited for the list, arrived at a_full after that.
            row = target_rows(rings, u, i * TILE, count, list_empty, ORDERED)
            x0 = warpgroup_mma_wait(1, deps=[x0])
            put_rows(dk, row, x0, 0, ORDERED)
            x1 = warpgroup_mma_wait(0, deps=[x1])
            mbarrier.arrive(a_empty.index(ab))
            put_rows(dk, row, x1, 1, ORDERED)
        t += tiles_of(count)
        mbarrier.arrive(q_empty.index(qb))
