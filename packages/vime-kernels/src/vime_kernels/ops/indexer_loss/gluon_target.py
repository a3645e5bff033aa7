# SPDX-License-Identifier: Apache-2.0
"""The teacher of the indexer for Hopper, given the denominator: a warpgroup gathers, two multiply and sum over heads.

Programs are persistent and walk query rows. Everything comes through one ring of tiles of 64 rows: first a row's
queries, one block of 64 heads a tile, then its picked keys. A consumer keeps its block of queries in registers, as
the left operand of its products, so that shared memory is read once for a tile of keys and holds nothing else. With up
to 64 heads the consumers take tiles in turn; with up to 128 each takes every tile for its half of the heads, and the
second one's sums reach the first one through shared memory. Results do not depend on the number of programs. Leaves
the denominator itself, and every other width, to `triton_target`.

Source: warp roles as in FlashAttention-3 (arXiv 2407.08608).
"""

import torch
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
    COPY_T,
    LOG2E,
    SHARED,
    copy_heads,
    copy_tile,
)

MAIN = gl.constexpr(512)  # channels without the tail
STAGES = gl.constexpr(3)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
QUERIES = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
# A thread has one slot, and what the four warps have summed of it.
SUMS = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0]))
SLOTS = gl.constexpr(gl.SliceLayout(0, SUMS))
PICKED = gl.constexpr(gl.SliceLayout(1, COPY))
LINE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
BLOCK = gl.constexpr(512)


@gluon.jit
def used_slots(picks_row, N, K):  # type: ignore[no-untyped-def]
    """One past the last of K slots that names one of N rows."""
    used = gl.zeros([BLOCK], gl.int32, LINE)
    for first in range(0, K, BLOCK):
        slot = first + gl.arange(0, BLOCK, layout=LINE)
        index = gl.load(picks_row + slot, mask=slot < K, other=-1)
        used = gl.maximum(used, gl.where((index >= 0) & (index < N), slot + 1, 0))
    return gl.max(used, axis=0)


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    lse, out, S, H, K, scale, ring, sums, ME: gl.constexpr, BLOCKS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Consumer ME of 0, 1: every other tile of keys, or every tile for half of the heads."""
    tile_s, tail_s, picks_s, count_s, full, empty = ring
    sums_s, sums_full, sums_empty, turn = sums
    HEADS: gl.constexpr = gl.SliceLayout(1, SCORES)
    scale_log2 = scale * LOG2E
    h = gl.arange(0, BH, layout=HEADS)
    if BLOCKS == 2:
        h += ME * BH
    u = 0  # place in the ring
    t = 0  # tiles of keys so far
    for w in range(gl.program_id(0), S, gl.num_programs(0)):
        row = gl.cast(w, gl.int64)
        # Heads that do not exist have no mass.
        lse_H = gl.load(lse + row * H + h, mask=h < H, other=float("inf")) * LOG2E
        at = u
        if BLOCKS == 2:
            at += ME
        stage = at % STAGES
        mbarrier.wait(full.index(stage), (at // STAGES) & 1)
        q = tile_s.index(stage).load(QUERIES)
        q_tail = q
        if TAIL > 0:
            q_tail = tail_s.index(stage).load(QUERIES)
        tiles = gl.max(count_s.index(stage).load(LINE), axis=0)
        mbarrier.arrive(empty.index(stage), count=BLOCKS)
        u += BLOCKS
        first = 0
        if BLOCKS == 1:
            first = (ME + t) % 2
        for i in range(first, tiles, 3 - BLOCKS):
            stage = (u + i) % STAGES
            n = t + i
            mbarrier.wait(full.index(stage), ((u + i) // STAGES) & 1)
            if BLOCKS == 2:
                mbarrier.wait(turn.index(ME), (n & 1) ^ (1 - ME))
            fence_async_shared()
            x = gl.zeros([BH, BK], gl.float32, SCORES)
            x = warpgroup_mma(q, tile_s.index(stage).permute((1, 0)), x, use_acc=False, is_async=True)
            if TAIL > 0:
                x = warpgroup_mma(q_tail, tail_s.index(stage).permute((1, 0)), x, is_async=True)
            if BLOCKS == 2:
                mbarrier.arrive(turn.index(1 - ME))
            picked = picks_s.index(stage).load(SLOTS) >= 0
            x = warpgroup_mma_wait(0, deps=[x])
            mbarrier.arrive(empty.index(stage), count=3 - BLOCKS)
            mass = gl.exp2(x * scale_log2 - lse_H[:, None])
            warps = gl.sum(gl.reshape(mass, [4, BH // 4, BK]), axis=1)
            if BLOCKS == 2 and ME == 0:
                mbarrier.wait(sums_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
                sums_s.index(n & 1).store(warps)
                mbarrier.arrive(sums_full.index(n & 1))
            else:
                total = gl.sum(gl.convert_layout(warps, SUMS), axis=0)
                if BLOCKS == 2:
                    mbarrier.wait(sums_full.index(n & 1), (n >> 1) & 1)
                    total += gl.sum(sums_s.index(n & 1).load(SUMS), axis=0)
                    mbarrier.arrive(sums_empty.index(n & 1))
                slot = i * BK + gl.arange(0, BK, layout=SLOTS)
                gl.store(out + row * K + slot, gl.where(picked, total, 0.0), mask=slot < K)
        u += tiles
        t += tiles


@gluon.jit
def produce(  # type: ignore[no-untyped-def]
    query, key, indices, out, S, N, H, K, query_row, query_head, key_row, ring,
    BLOCKS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Producer: the queries of a row and how many tiles of keys follow, these tiles, and zeros behind them."""
    tile_s, tail_s, picks_s, count_s, full, empty = ring
    u = 0
    for w in range(gl.program_id(0), S, gl.num_programs(0)):
        row = gl.cast(w, gl.int64)
        picks_row = indices + row * K
        tiles = (used_slots(picks_row, N, K) + BK - 1) // BK
        for block in gl.static_range(BLOCKS):
            stage = u % STAGES
            q_row = query + row * query_row
            mbarrier.wait(empty.index(stage), ((u // STAGES) & 1) ^ 1)
            # Plus zero, but not to the compiler: it would hoist, and then spill, the places of all heads.
            hb = block + (u >> 30)
            copy_heads(q_row, query_head, H, hb, tile_s.index(stage), 0, MAIN, COPY)
            if TAIL > 0:
                copy_heads(q_row, query_head, H, hb, tail_s.index(stage), MAIN, TAIL, COPY_T)
            count_s.index(stage).store(gl.full([1], tiles, gl.int32, LINE))
            mbarrier.arrive(full.index(stage))
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            u += 1
        slot = gl.arange(0, BK, layout=PICKED)
        index = gl.load(picks_row + slot, mask=slot < K, other=-1)
        for _ in range(tiles):
            stage = u % STAGES
            valid = (index >= 0) & (index < N)
            mbarrier.wait(empty.index(stage), ((u // STAGES) & 1) ^ 1)
            copy_tile(key, key_row, index, valid, tile_s.index(stage), 0, MAIN, COPY)
            if TAIL > 0:
                index_t = gl.convert_layout(index, gl.SliceLayout(1, COPY_T))
                valid_t = gl.convert_layout(valid, gl.SliceLayout(1, COPY_T))
                copy_tile(key, key_row, index_t, valid_t, tail_s.index(stage), MAIN, TAIL, COPY_T)
            picks_s.index(stage).store(gl.where(valid, index, -1))
            # One arrival says that the picks are there, 128 come with the copies.
            mbarrier.arrive(full.index(stage))
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            u += 1
            slot += BK
            index = gl.load(picks_row + slot, mask=slot < K, other=-1)
        for first in range(tiles * BK, K, BLOCK):
            at = first + gl.arange(0, BLOCK, layout=LINE)
            gl.store(out + row * K + at, gl.zeros([BLOCK], gl.float32, LINE), mask=at < K)


@gluon.jit(do_not_specialize=["S", "N"])
def target_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, lse, out, S, N, H, K, scale, query_row, query_head, key_row,
    BLOCKS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its three roles."""
    dtype: gl.constexpr = query.dtype.element_ty
    tile_s = gl.allocate_shared_memory(dtype, [STAGES, BK, MAIN], SHARED)
    tail_s = tile_s
    if TAIL > 0:
        tail_s = gl.allocate_shared_memory(dtype, [STAGES, BK, TAIL], SHARED)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    picks_s = gl.allocate_shared_memory(gl.int32, [STAGES, BK], flat)
    count_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    sums_s = gl.allocate_shared_memory(gl.float32, [2, 4, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    sums_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    sums_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(sums_full.index(i), count=1)
        mbarrier.init(sums_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    ring = (tile_s, tail_s, picks_s, count_s, full, empty)
    sums = (sums_s, sums_full, sums_empty, turn)
    gl.warp_specialize(
        [
            (consume, (lse, out, S, H, K, scale, ring, sums, 0, BLOCKS, TAIL)),
            (consume, (lse, out, S, H, K, scale, ring, sums, 1, BLOCKS, TAIL)),
            (produce, (
                query, key, indices, out, S, N, H, K, query_row, query_head, key_row, ring, BLOCKS, TAIL,
            )),
        ],
        [4, 4], [216, 80],
    )  # fmt: skip


def indexer_kl_target(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    """As `triton_target.indexer_kl_target`, into `out`, for what `sparse_attention.config.hopper` admits."""
    (S, H, D), N, K = query.shape, len(key), indices.shape[1]
    programs = min(S, torch.cuda.get_device_properties(query.device).multi_processor_count)
    target_kernel[(programs,)](
        query, key, indices, lse, out, S, N, H, K, sm_scale, query.stride(0), query.stride(1), key.stride(0),
        BLOCKS=1 if H <= 64 else 2, TAIL=D - 512, num_warps=4,
    )  # fmt: skip
