# SPDX-License-Identifier: Apache-2.0
"""Indexer logits for Hopper: a warp brings tiles with the bulk copy engine, two or four warpgroups multiply and sum.

Key-major as `triton_fwd`. Programs are persistent: each walks blocks of 256 rows of q (queries times heads), which stay
in shared memory, and tiles of 64 keys. Two warpgroups take the tiles in turn, with both halves of the block; of four,
two share a tile and have one half each. A warpgroup sums a product over heads while others are multiplied. The four
lanes that hold a part of the same sums exchange them so that each ends with some of the sums, and stores only those.
The sums have the order of `triton_fwd`, so a row's scores are the same bits whichever of the two ran. Takes what
`config.hopper` admits; leaves the rest to `triton_fwd`.

Source: the producer and consumer roles of FlashAttention-3 (arXiv 2407.08608).
"""

import torch
import triton.language as tl
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

from vime_kernels.ops.indexer import config

ROWS = gl.constexpr(64)  # keys per tile: the rows of one wgmma
COLS = gl.constexpr(128)  # rows of q per product; a block has two
DIM = gl.constexpr(128)
FILL = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
NAN = gl.constexpr(tl.PropagateNan.ALL)


def _rows(registers: list[list[int]], lanes: list[list[int]], shape: list[int]) -> gl.DistributedLinearLayout:
    """A layout of [64 keys, *shape] whose keys lie as in a product; the other coordinates as given."""
    rest = [0] * len(shape)
    return gl.DistributedLinearLayout(
        [[8, *rest], *([0, *r] for r in registers)],
        [*([0, *lane] for lane in lanes), [1, *rest], [2, *rest], [4, *rest]],
        [[16, *rest], [32, *rest]],
        [],
        [64, *shape],
    )


# Queries, then the two bits of a lane's place in its row. The lanes of a far, then of a near pair hold other queries.
FAR_OF_4 = gl.constexpr(_rows([[0, 1, 0, 0], [0, 0, 1, 0]], [[0, 0, 0, 1], [1, 0, 0, 0]], [2, 2, 2, 2]))
NEAR_OF_4 = gl.constexpr(_rows([[0, 0, 1]], [[0, 1, 0], [1, 0, 0]], [2, 2, 2]))
FAR_OF_2 = gl.constexpr(_rows([[0, 1, 0]], [[0, 0, 1], [1, 0, 0]], [2, 2, 2]))


@gluon.jit
def block_tiles(starts, ends, first_row, S, N, QUERIES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles [first, last) that some query of the block sees."""
    low = N
    high = 0
    for i in gl.static_range(QUERIES):
        row = first_row + i
        start = gl.maximum(gl.load(starts + row, mask=row < S, other=0), 0)
        end = gl.minimum(gl.load(ends + row, mask=row < S, other=0), N)
        low = gl.where(end > start, gl.minimum(low, start), low)
        high = gl.where(end > start, gl.maximum(high, end), high)
    first = low // ROWS
    return first, gl.maximum((high + ROWS - 1) // ROWS, first)


@gluon.jit
def terms(  # type: ignore[no-untyped-def]
    inputs, row, S, HEADS: gl.constexpr, HAS_WEIGHTS: gl.constexpr, HAS_Q_SCALE: gl.constexpr,
    COLUMN: gl.constexpr, QUERY: gl.constexpr,
):  # fmt: skip
    """What one half of a block brings along: weight times scale of every column, and its queries' ranges."""
    weights, q_scale, _, starts, ends, weights_row, q_scale_row = inputs
    flat = gl.arange(0, COLS, layout=COLUMN)
    at = row + flat // HEADS
    w = gl.full([COLS], 1.0, gl.float32, COLUMN)
    if HAS_WEIGHTS:
        w = gl.load(weights + at * weights_row + flat % HEADS, mask=at < S, other=0.0).to(gl.float32)
    if HAS_Q_SCALE:
        w *= gl.load(q_scale + at * q_scale_row + flat % HEADS, mask=at < S, other=0.0).to(gl.float32)
    query = row + gl.arange(0, COLS // HEADS, layout=QUERY)
    start = gl.load(starts + query, mask=query < S, other=0)
    return w, start, gl.load(ends + query, mask=query < S, other=0)


@gluon.jit
def head_sums(x, HEADS: gl.constexpr, OUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over the heads of every query: in a thread, then over the four lanes of a row, the far ones first.

    A step halves the queries that a lane goes on with, where there are several.
    """
    QUERIES: gl.constexpr = COLS // HEADS
    x = gl.permute(gl.reshape(x, [ROWS, QUERIES, HEADS // 8, 4, 2]), (0, 1, 3, 2, 4))
    x = gl.sum(gl.reshape(x, [ROWS, QUERIES, 4, HEADS // 4]), axis=3)
    if QUERIES == 4:
        x = gl.convert_layout(gl.reshape(x, [ROWS, 2, 2, 2, 2]), FAR_OF_4)
        x = gl.convert_layout(gl.sum(x, axis=3), NEAR_OF_4)
        x = gl.reshape(gl.sum(x, axis=3), [ROWS, QUERIES])
    else:
        x = gl.reshape(x, [ROWS, QUERIES, 2, 2])
        if QUERIES == 2:
            x = gl.convert_layout(x, FAR_OF_2)
        x = gl.sum(gl.sum(x, axis=2), axis=2)
    return gl.convert_layout(x, OUT)


@gluon.jit
def score(  # type: ignore[no-untyped-def]
    x, w, scale, n, row, start, end, out, S, N, out_row,
    RELU: gl.constexpr, HAS_K_SCALE: gl.constexpr, CLEAN: gl.constexpr, HEADS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The sums over heads of one product, stored."""
    QUERIES: gl.constexpr = COLS // HEADS
    if RELU:
        x = gl.maximum(x, 0.0, propagate_nan=NAN)
    total = head_sums(x * w[None, :], HEADS, OUT)
    if HAS_K_SCALE:
        total = total * scale[:, None]
    key = n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    query = row + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, OUT))
    if CLEAN:
        inside = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
        total = gl.where(inside, total, float("-inf"))
    at = out + query.to(gl.int64)[None, :] * out_row + key[:, None]
    gl.store(at, total, mask=(query < S)[None, :] & (key < N)[:, None])


@gluon.jit
def fill(  # type: ignore[no-untyped-def]
    out, row, first, last, S, N, out_row, ME: gl.constexpr, WORKERS: gl.constexpr, QUERIES: gl.constexpr
):
    """-inf in the columns outside the tiles."""
    column = ME * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, FILL))
    nothing = gl.full([4, 128], float("-inf"), gl.float32, FILL)
    for q0 in gl.static_range(0, QUERIES, 4):
        query = row + q0 + gl.arange(0, 4, layout=gl.SliceLayout(1, FILL))
        line = out + query.to(gl.int64)[:, None] * out_row + column[None, :]
        live = (query < S) & (query < row + QUERIES)
        for c in range(0, first * ROWS, WORKERS * 128):
            gl.store(line + c, nothing, mask=live[:, None] & (c + column < first * ROWS)[None, :])
        for c in range(last * ROWS, N, WORKERS * 128):
            gl.store(line + c, nothing, mask=live[:, None] & (c + column < N)[None, :])


@gluon.jit
def multiply(  # type: ignore[no-untyped-def]
    inputs, out, S, N, out_row, blocks, q_s, k_s, bars,
    ME: gl.constexpr, WORKERS: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    HAS_WEIGHTS: gl.constexpr, HAS_Q_SCALE: gl.constexpr, HAS_K_SCALE: gl.constexpr, RELU: gl.constexpr,
    CLEAN: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Worker ME: every other tile of this program, with both halves of the block or with one."""
    _, _, k_scale, starts, ends, _, _ = inputs
    q_full, q_empty, full, empty = bars
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, COLS, 256 // k_s.dtype.primitive_bitwidth]
    )
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    KEY: gl.constexpr = gl.SliceLayout(1, OUT)
    QUERY: gl.constexpr = gl.SliceLayout(0, OUT)
    QUERIES: gl.constexpr = COLS // HEADS
    BOTH: gl.constexpr = WORKERS == 2
    HALF: gl.constexpr = 0 if BOTH else ME % 2
    TURN: gl.constexpr = ME if BOTH else ME // 2
    t = 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        b = block // gl.num_programs(0)
        # The last rows of a causal batch see the most keys: they go first.
        block_row = (blocks - 1 - block) * 2 * QUERIES
        first, last = block_tiles(starts, ends, block_row, S, N, 2 * QUERIES)
        row = block_row + HALF * QUERIES
        w0, start0, end0 = terms(inputs, row, S, HEADS, HAS_WEIGHTS, HAS_Q_SCALE, COLUMN, QUERY)
        if BOTH:
            w1, start1, end1 = terms(inputs, row + QUERIES, S, HEADS, HAS_WEIGHTS, HAS_Q_SCALE, COLUMN, QUERY)
        qb = b % Q_STAGES
        mbarrier.wait(q_full.index(qb), (b // Q_STAGES) & 1)
        # Tiles alternate over the whole life of the program, so that no worker has more of them.
        mine = first + (TURN + t) % 2
        for i in range(mine, last, 2):
            u = t + i - first
            slot = u % STAGES
            n = i * ROWS
            scale = gl.full([ROWS], 1.0, gl.float32, KEY)
            if HAS_K_SCALE:
                key = n + gl.arange(0, ROWS, layout=KEY)
                scale = gl.load(k_scale + key, mask=key < N, other=0.0).to(gl.float32)
            mbarrier.wait(full.index(slot), (u // STAGES) & 1)
            k_t = k_s.index(slot)
            x0 = gl.zeros([ROWS, COLS], gl.float32, PRODUCT)
            q0 = q_s.index(2 * qb + HALF).permute((1, 0))
            x0 = warpgroup_mma(k_t, q0, x0, use_acc=False, is_async=True)
            if BOTH:
                x1 = gl.zeros([ROWS, COLS], gl.float32, PRODUCT)
                q1 = q_s.index(2 * qb + 1).permute((1, 0))
                x1 = warpgroup_mma(k_t, q1, x1, use_acc=False, is_async=True)
                x0 = warpgroup_mma_wait(1, deps=[x0])
            else:
                x0 = warpgroup_mma_wait(0, deps=[x0])
                mbarrier.arrive(empty.index(slot))
            score(
                x0, w0, scale, n, row, start0, end0, out, S, N, out_row, RELU, HAS_K_SCALE, CLEAN, HEADS, OUT
            )
            if BOTH:
                x1 = warpgroup_mma_wait(0, deps=[x1])
                mbarrier.arrive(empty.index(slot))
                score(
                    x1, w1, scale, n, row + QUERIES, start1, end1, out, S, N, out_row,
                    RELU, HAS_K_SCALE, CLEAN, HEADS, OUT,
                )  # fmt: skip
        mbarrier.arrive(q_empty.index(qb))
        t += last - first
        if CLEAN:
            fill(out, block_row, first, last, S, N, out_row, ME, WORKERS, 2 * QUERIES)


@gluon.jit
def bring(  # type: ignore[no-untyped-def]
    q_desc, k_desc, starts, ends, S, N, blocks, q_s, k_s, bars,
    HEADS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """The producer's one warp."""
    q_full, q_empty, full, empty = bars
    QUERIES: gl.constexpr = COLS // HEADS
    t = 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        b = block // gl.num_programs(0)
        row = (blocks - 1 - block) * 2 * QUERIES
        first, last = block_tiles(starts, ends, row, S, N, 2 * QUERIES)
        qb = b % Q_STAGES
        mbarrier.wait(q_empty.index(qb), ((b // Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(qb), 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [row * HEADS, 0], q_full.index(qb), q_s.index(2 * qb))
        tma.async_copy_global_to_shared(
            q_desc, [row * HEADS + COLS, 0], q_full.index(qb), q_s.index(2 * qb + 1)
        )
        for i in range(first, last):
            slot = t % STAGES
            mbarrier.wait(empty.index(slot), ((t // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [i * ROWS, 0], full.index(slot), k_s.index(slot))
            t += 1


@gluon.jit(do_not_specialize=["S", "blocks"])  # a row's bits must not depend on how many there are
def logits_kernel(  # type: ignore[no-untyped-def]
    q_desc, k_desc, weights, q_scale, k_scale, starts, ends, out, S, N, weights_row, q_scale_row, out_row, blocks,
    WORKERS: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    HAS_WEIGHTS: gl.constexpr, HAS_Q_SCALE: gl.constexpr, HAS_K_SCALE: gl.constexpr, RELU: gl.constexpr,
    CLEAN: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its roles."""
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2 * Q_STAGES, COLS, DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, ROWS, DIM], k_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=WORKERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WORKERS // 2)
    fence_async_shared()
    gl.thread_barrier()
    inputs = (weights, q_scale, k_scale, starts, ends, weights_row, q_scale_row)
    bars = (q_full, q_empty, full, empty)
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (multiply, (
                    inputs, out, S, N, out_row, blocks, q_s, k_s, bars, 0, WORKERS, HEADS, STAGES, Q_STAGES,
                    HAS_WEIGHTS, HAS_Q_SCALE, HAS_K_SCALE, RELU, CLEAN, OUT,
                )),
                (multiply, (
                    inputs, out, S, N, out_row, blocks, q_s, k_s, bars, 1, WORKERS, HEADS, STAGES, Q_STAGES,
                    HAS_WEIGHTS, HAS_Q_SCALE, HAS_K_SCALE, RELU, CLEAN, OUT,
                )),
                (bring, (
                    q_desc, k_desc, starts, ends, S, N, blocks, q_s, k_s, bars, HEADS, STAGES, Q_STAGES,
                )),
            ],
            [4, 1], [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (
                    inputs, out, S, N, out_row, blocks, q_s, k_s, bars, 0, WORKERS, HEADS, STAGES, Q_STAGES,
                    HAS_WEIGHTS, HAS_Q_SCALE, HAS_K_SCALE, RELU, CLEAN, OUT,
                )),
                (multiply, (
                    inputs, out, S, N, out_row, blocks, q_s, k_s, bars, 1, WORKERS, HEADS, STAGES, Q_STAGES,
                    HAS_WEIGHTS, HAS_Q_SCALE, HAS_K_SCALE, RELU, CLEAN, OUT,
                )),
                (multiply, (
                    inputs, out, S, N, out_row, blocks, q_s, k_s, bars, 2, WORKERS, HEADS, STAGES, Q_STAGES,
                    HAS_WEIGHTS, HAS_Q_SCALE, HAS_K_SCALE, RELU, CLEAN, OUT,
                )),
                (multiply, (
                    inputs, out, S, N, out_row, blocks, q_s, k_s, bars, 3, WORKERS, HEADS, STAGES, Q_STAGES,
                    HAS_WEIGHTS, HAS_Q_SCALE, HAS_K_SCALE, RELU, CLEAN, OUT,
                )),
                (bring, (
                    q_desc, k_desc, starts, ends, S, N, blocks, q_s, k_s, bars, HEADS, STAGES, Q_STAGES,
                )),
            ],
            [4, 4, 4, 1], [112, 112, 112, 24],
        )  # fmt: skip


def _sums(queries: int) -> gl.DistributedLinearLayout:
    """How the sums of one product lie in a warpgroup's registers: lanes of a row have other queries, if there are."""
    return _rows([], {4: [[1], [2]], 2: [[0], [1]], 1: [[0], [0]]}[queries], [queries])


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    use_relu: bool,
    clean_logits: bool,
) -> None:
    """As `triton_fwd.indexer_logits`, for what `config.hopper` admits."""
    (S, H, D), N = q.shape, len(k)
    bits = 8 * q.element_size()
    layout = gl.NVMMASharedLayout(128, bits, 2)
    queries = 128 // H
    blocks = -(-S // (2 * queries))
    programs = min(blocks, torch.cuda.get_device_properties(q.device).multi_processor_count)
    logits_kernel[(programs,)](
        TensorDescriptor.from_tensor(q.view(S * H, D), [128, 128], layout),
        TensorDescriptor.from_tensor(k, [64, 128], layout),
        out if weights is None else weights, out if q_scale is None else q_scale, out if k_scale is None else k_scale,
        starts, ends, out, S, N, 0 if weights is None else weights.stride(0),
        0 if q_scale is None else q_scale.stride(0), out.stride(0), blocks,
        WORKERS=config.logits_workers(q), HEADS=H, STAGES=8 if bits == 8 else 4, Q_STAGES=2 if bits == 8 else 1,
        HAS_WEIGHTS=weights is not None, HAS_Q_SCALE=q_scale is not None, HAS_K_SCALE=k_scale is not None,
        RELU=use_relu, CLEAN=clean_logits, OUT=_sums(queries), num_warps=4,
    )  # fmt: skip
