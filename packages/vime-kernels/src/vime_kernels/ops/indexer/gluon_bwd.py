# SPDX-License-Identifier: Apache-2.0
"""Gradients of the indexer's scores for Hopper: two query rows at a time, and dk in a warpgroup of its own.

    A[c, j] = g[j] w[c] 1[x[c, j] > 0],   dq = A k,   dw[c] = Σ_j g[j] relu(x[c, j]),   dk[index j] += Aᵀ q

with c over the heads of both rows, and j over the keys that either of them picked (`triton_pairs`). Neighbouring rows
pick many keys in common; such a key is gathered once and, what counts more, its gradient is added once. Programs are
persistent and have three roles. A producer gathers tiles of keys. Consumers form x, A, dq and dw of 64 heads each: one
of the two rows, or both where they have 32 heads. The last warpgroup forms Aᵀ q and adds it with float32 atomics while
the consumers are at the next tile; each instruction covers whole lines of 128 bytes. Loads queue behind atomics, so
only the producer loads from global memory in the loop. The order of the atomics is not fixed. A NaN in one row's
operands reaches the row paired with it. Takes what `config.hopper_scores` admits.

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

from vime_kernels.ops.indexer import config
from vime_kernels.ops.indexer.triton_pairs import pair_lists

DIM = gl.constexpr(128)
UNIT = gl.constexpr(64)  # heads of one consumer: the rows of one wgmma
TILE = gl.constexpr(64)  # keys per step
STAGES = gl.constexpr(3)
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
def list_tile(keys, grads, first, count, K, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of a tile, -1 for none, and the gradients of both rows' scores at them."""
    slot = first + gl.arange(0, TILE, layout=layout)
    key = gl.load(keys + slot, mask=slot < count, other=-1)
    a = gl.load(grads + slot, mask=slot < count, other=0.0)
    b = gl.load(grads + 2 * K + slot, mask=slot < count, other=0.0)
    return key, a, b


@gluon.jit
def produce(  # type: ignore[no-untyped-def]
    q, k, weights, keys, grads, counts, S, K, pairs, q_row, q_head, k_row, weights_row, bufs, bars,
    HAS_WEIGHTS: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Producer: the queries and head weights of a pair of rows, then its tiles."""
    q_s, k_s, _, g_s, key_s, w_s, count_s = bufs
    q_full, q_empty, full, empty, _, _, key_empty = bars
    PICKED: gl.constexpr = gl.SliceLayout(1, COPY)
    COLS: gl.constexpr = 2 * HEADS
    t = 0
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        count = gl.load(counts + pair)
        pair_keys = keys + gl.cast(pair, gl.int64) * 2 * K
        pair_grads = grads + gl.cast(pair, gl.int64) * 4 * K
        key, a, b = list_tile(pair_keys, pair_grads, 0, count, K, PICKED)
        column = gl.arange(0, COLS, layout=PICKED)
        row = 2 * pair + column // HEADS
        w = (row < S).to(gl.float32)
        if HAS_WEIGHTS:
            w = gl.load(
                weights + row.to(gl.int64) * weights_row + column % HEADS, mask=row < S, other=0.0
            ).to(gl.float32)
        r = pair // gl.num_programs(0)
        slot = r & 1
        mbarrier.wait(q_empty.index(slot), ((r >> 1) & 1) ^ 1)
        at = q + row.to(gl.int64) * q_row + (column % HEADS) * q_head
        async_copy.async_copy_global_to_shared(
            q_s.index(slot), at[:, None] + d[None, :], mask=(row < S)[:, None] & (d >= 0)[None, :]
        )
        async_copy.mbarrier_arrive(q_full.index(slot), increment_count=False)
        w_s.index(slot).store(w)
        count_s.index(slot).store(gl.full([COLS], 0, gl.int32, PICKED) + count)
        mbarrier.arrive(q_full.index(slot))
        for i in range(0, tiles_of(count)):
            s = t % STAGES
            mbarrier.wait(empty.index(s), ((t // STAGES) & 1) ^ 1)
            mbarrier.wait(key_empty.index(s), ((t // STAGES) & 1) ^ 1)
            ptrs = k + key.to(gl.int64)[:, None] * k_row + d[None, :]
            async_copy.async_copy_global_to_shared(
                k_s.index(s), ptrs, mask=(key >= 0)[:, None] & (d >= 0)[None, :]
            )
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            key_s.index(s).store(key)
            g_s.index(2 * s).store(a)
            g_s.index(2 * s + 1).store(b)
            mbarrier.arrive(full.index(s))
            t += 1
            # Asked for now, so that the next gather does not begin with a wait behind the atomics.
            key, a, b = list_tile(pair_keys, pair_grads, (i + 1) * TILE, count, K, PICKED)


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    dq, dweights, S, pairs, bufs, bars,
    ME: gl.constexpr, RELU: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """x, A, dq and dw of 64 heads: of one row, or 32 of each."""
    q_s, k_s, a_s, g_s, _, w_s, count_s = bufs
    q_full, q_empty, full, empty, a_full, a_empty, _ = bars
    COLS: gl.constexpr = 2 * HEADS
    HEAD: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    head = ME * UNIT + gl.arange(0, UNIT, layout=HEAD)
    t = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        r = pair // gl.num_programs(0)
        qb = r & 1
        mbarrier.wait(q_full.index(qb), (r >> 1) & 1)
        count = gl.max(count_s.index(qb).slice(0, UNIT, dim=0).load(HEAD), axis=0)
        w = w_s.index(qb).slice(ME * UNIT, UNIT, dim=0).load(HEAD)
        dq_acc = gl.zeros([UNIT, DIM], gl.float32, QUERIES)
        dw = gl.zeros([UNIT], gl.float32, HEAD)
        for i in range(0, tiles_of(count)):
            u = t + i
            s = u % STAGES
            mbarrier.wait(full.index(s), (u // STAGES) & 1)
            fence_async_shared()
            x = gl.zeros([UNIT, TILE], gl.float32, SCORES)
            mine = q_s.index(qb).slice(ME * UNIT, UNIT, dim=0)
            x = warpgroup_mma(mine, k_s.index(s).permute((1, 0)), x, use_acc=False, is_async=True)
            if HEADS == UNIT:
                g = g_s.index(2 * s + ME).load(KEY)[None, :]
            else:
                g0 = g_s.index(2 * s).load(KEY)
                g1 = g_s.index(2 * s + 1).load(KEY)
                g = gl.where((head < HEADS)[:, None], g0[None, :], g1[None, :])
            x = warpgroup_mma_wait(0, deps=[x])
            a = w[:, None] * g
            if RELU:
                a = gl.where(x > 0, a, 0.0)
                x = gl.maximum(x, 0.0)
            dw += gl.sum(x * g, axis=1)
            a = a.to(a_s.dtype)
            ab = u & 1
            mbarrier.wait(a_empty.index(ab), ((u >> 1) & 1) ^ 1)
            a_s.index(ab).slice(ME * UNIT, UNIT, dim=0).store(a)
            fence_async_shared()
            mbarrier.arrive(a_full.index(ab))
            dq_acc = warpgroup_mma(gl.convert_layout(a, OPERAND), k_s.index(s), dq_acc, is_async=True)
            dq_acc = warpgroup_mma_wait(0, deps=[dq_acc])
            mbarrier.arrive(empty.index(s))
        t += tiles_of(count)
        mbarrier.arrive(q_empty.index(qb))
        out = gl.convert_layout(dq_acc.to(dq.dtype.element_ty), QUERY_LINES)
        c = ME * UNIT + gl.arange(0, UNIT, layout=gl.SliceLayout(1, QUERY_LINES))
        d = gl.arange(0, DIM, layout=gl.SliceLayout(0, QUERY_LINES))
        live = 2 * pair + c // HEADS < S
        at = dq + gl.cast(pair, gl.int64) * COLS * DIM + c[:, None] * DIM + d[None, :]
        gl.store(at, out, mask=live[:, None] & (d >= 0)[None, :])
        gl.store(dweights + gl.cast(pair, gl.int64) * COLS + head, dw, mask=2 * pair + head // HEADS < S)


@gluon.jit
def key_part(a_s, q_s, c: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start 64 channels of Aᵀ q."""
    acc = gl.zeros([TILE, 64], gl.float32, SCORES)
    return warpgroup_mma(a_s.permute((1, 0)), q_s.slice(c * 64, 64, dim=1), acc, use_acc=False, is_async=True)


@gluon.jit
def add_keys(dk, pairs, bufs, bars):  # type: ignore[no-untyped-def]
    """The last warpgroup: Aᵀ q, 64 channels at a time, the next part's product under this one's atomics."""
    q_s, _, a_s, _, key_s, _, count_s = bufs
    q_full, q_empty, full, _, a_full, a_empty, key_empty = bars
    ROW: gl.constexpr = gl.SliceLayout(1, LINES)
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
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
            s = u % STAGES
            ab = u & 1
            mbarrier.wait(a_full.index(ab), (u >> 1) & 1)
            x0 = key_part(a_s.index(ab), q_s.index(qb), 0)
            x1 = key_part(a_s.index(ab), q_s.index(qb), 1)
            mbarrier.wait(full.index(s), (u // STAGES) & 1)
            key = key_s.index(s).load(ROW)
            mbarrier.arrive(key_empty.index(s))
            ptrs = dk + key.to(gl.int64)[:, None] * DIM + d[None, :]
            live = (key >= 0)[:, None] & (d >= 0)[None, :]
            x0 = warpgroup_mma_wait(1, deps=[x0])
            gl.atomic_add(ptrs, gl.convert_layout(x0, LINES), mask=live, sem="relaxed")
            x1 = warpgroup_mma_wait(0, deps=[x1])
            mbarrier.arrive(a_empty.index(ab))
            gl.atomic_add(ptrs + 64, gl.convert_layout(x1, LINES), mask=live, sem="relaxed")
        t += tiles_of(count)
        mbarrier.arrive(q_empty.index(qb))


@gluon.jit(do_not_specialize=["S", "pairs"])
def scores_bwd_kernel(  # type: ignore[no-untyped-def]
    q, k, weights, keys, grads, counts, dq, dk, dweights, S, K, pairs, q_row, q_head, k_row, weights_row,
    HAS_WEIGHTS: gl.constexpr, RELU: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its roles."""
    dtype: gl.constexpr = q.dtype.element_ty
    COLS: gl.constexpr = 2 * HEADS
    CONSUMERS: gl.constexpr = COLS // UNIT
    q_s = gl.allocate_shared_memory(dtype, [2, COLS, DIM], SHARED)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], SHARED)
    a_s = gl.allocate_shared_memory(dtype, [2, COLS, TILE], SHARED)
    g_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, TILE], FLAT)
    key_s = gl.allocate_shared_memory(gl.int32, [STAGES, TILE], FLAT)
    w_s = gl.allocate_shared_memory(gl.float32, [2, COLS], FLAT)
    count_s = gl.allocate_shared_memory(gl.int32, [2, COLS], FLAT)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    a_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    a_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=129)  # one of each thread's copies, one of its stores
        mbarrier.init(q_empty.index(i), count=CONSUMERS + 1)
        mbarrier.init(a_full.index(i), count=CONSUMERS)
        mbarrier.init(a_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=CONSUMERS)
        mbarrier.init(key_empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    bufs = (q_s, k_s, a_s, g_s, key_s, w_s, count_s)
    bars = (q_full, q_empty, full, empty, a_full, a_empty, key_empty)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (dq, dweights, S, pairs, bufs, bars, 0, RELU, HEADS)),
                (consume, (dq, dweights, S, pairs, bufs, bars, 1, RELU, HEADS)),
                (add_keys, (dk, pairs, bufs, bars)),
                (produce, (
                    q, k, weights, keys, grads, counts, S, K, pairs, q_row, q_head, k_row, weights_row, bufs, bars,
                    HAS_WEIGHTS, HEADS,
                )),
            ],
            [4, 4, 4], [160, 112, 72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (dq, dweights, S, pairs, bufs, bars, 0, RELU, HEADS)),
                (add_keys, (dk, pairs, bufs, bars)),
                (produce, (
                    q, k, weights, keys, grads, counts, S, K, pairs, q_row, q_head, k_row, weights_row, bufs, bars,
                    HAS_WEIGHTS, HEADS,
                )),
            ],
            [4, 4], [168, 72],
        )  # fmt: skip


def scores_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    use_relu: bool,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dweights: torch.Tensor,
) -> None:
    """Writes dq and dweights, float32, and adds to dk, float32. Arguments as in `triton_scores.indexer_scores_bwd`."""
    (S, H, _), K = q.shape, indices.shape[1]
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    # Chunks of an even number of rows, equally long but for the last, so that none leaves the device idle for long.
    chunks = -(-S * K * 12 // config.PAIRS_BYTES)
    step = -(-S // (2 * chunks)) * 2
    for first in range(0, S, step):
        rows = slice(first, min(first + step, S))
        keys, grads, counts = pair_lists(grad[rows], indices[rows], len(k))
        scores_bwd_kernel[(min(len(counts), programs),)](
            q[rows], k, q if weights is None else weights[rows], keys, grads, counts, dq[rows], dk, dweights[rows],
            rows.stop - first, K, len(counts),
            q.stride(0), q.stride(1), k.stride(0), 0 if weights is None else weights.stride(0),
            HAS_WEIGHTS=weights is not None, RELU=use_relu, HEADS=H, num_warps=4,
        )  # fmt: skip
