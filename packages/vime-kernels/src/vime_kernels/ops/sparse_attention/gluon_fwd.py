# SPDX-License-Identifier: Apache-2.0
"""Forward of sparse attention for Hopper: a producer warpgroup gathers, two consumer warpgroups multiply.

Programs are persistent: each walks query rows (times blocks of 64 heads), and the producer runs ahead into the next
row. Tiles of 64 keys come in pairs. Each consumer scores its own tile of a pair and owns one half of the channels of
the output, to which it adds both tiles: its own weights and its partner's, exchanged through shared memory. The
reference that scores are taken against goes from consumer 0 to consumer 1 and back, so the second one's softmax runs
half a turn after the first one's, under its products; it follows the maximum only once that has grown by GROW. The four
half tiles of a pair have a barrier each, so each is refilled as soon as its last reader is done. Same mathematics and
same contract as `triton_fwd`; widths 512 and 512 + 64, bfloat16 and float16.

Source: the pairing of tiles and the split of the output follow the idea of FlashMLA; warp roles as in FlashAttention-3
(arXiv 2407.08608).
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

from vime_kernels.ops.sparse_attention.gluon_producers import produce_forward
from vime_kernels.ops.sparse_attention.gluon_tiles import (
    BH,
    BK,
    HALF,
    LN2,
    LOG2E,
    NO_MAX,
    count_tiles,
    row_sources,
    tile_rows,
)
from vime_kernels.ops.sparse_attention.sources import Sources, host_or_dummy

# In log2 units. Weights reach 2^8 at most, which float16 holds, and keep their relative precision.
GROW = gl.constexpr(8.0)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse,
    n_a, n_b, H, K, scale, work, head_blocks, stride_is, stride_os, stride_oh,
    q_s, qt_s, kv_s, kvt_s, p_s, max_s, sum_s, full, empty, q_full, q_empty, max_full, p_full, sum_full,
    ME: gl.constexpr, DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Consumer ME of 0, 1: scores tile ME of every pair, owns half ME of the output's channels."""
    OTHER: gl.constexpr = 1 - ME
    MINE: gl.constexpr = 2 * ME + ME  # buffer of my tile, my half
    THEIRS: gl.constexpr = 2 * OTHER + ME  # the other tile, my half
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    scale_log2 = scale * LOG2E
    t = 0
    r = 0
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        row = (w // head_blocks).to(gl.int64)
        hb = w % head_blocks
        start_a, end_a, start_b, count_b = row_sources(
            row, starts_a, ends_a, starts_b, ends_b, lengths, n_a, n_b, K, HAS_A, KIND_B, HAS_LENGTHS
        )
        tiles_a, tiles = count_tiles(start_a, end_a, count_b)
        picks_row = indices + row * stride_is
        heads = hb * BH + gl.arange(0, BH, layout=ROWS)
        o_heads = hb * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, STORE))
        d = gl.arange(0, HALF, layout=gl.SliceLayout(0, STORE))
        o_ptr = out + row * stride_os + o_heads[:, None] * stride_oh + (ME * HALF + d)[None, :]
        o_live = (o_heads < H)[:, None] & (d >= 0)[None, :]

        if tiles > 0:
            m = gl.full([BH], NO_MAX, gl.float32, ROWS)
            norm = gl.zeros([BH], gl.float32, ROWS)
            o = gl.zeros([BH, HALF], gl.float32, OUTPUT)
            mbarrier.wait(q_full.index(0), r & 1)
            for i in range(0, tiles, 2):
                phase = t & 1
                # Zero, but not to the compiler: it would hoist, and then spill, every matrix descriptor of the loop.
                z = t >> 30
                _, valid = tile_rows(
                    i + ME, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, HAS_A, KIND_B,
                    gl.SliceLayout(0, SCORES),
                )  # fmt: skip
                s = gl.zeros([BH, BK], gl.float32, SCORES)
                mbarrier.wait(full.index(2 * ME), phase)
                fence_async_shared()
                s = warpgroup_mma(q_s.index(z), kv_s.index(2 * ME + z).permute((1, 0)), s, is_async=True)
                mbarrier.wait(full.index(2 * ME + 1), phase)
                fence_async_shared()
                s = warpgroup_mma(
                    q_s.index(1 + z), kv_s.index(2 * ME + 1 + z).permute((1, 0)), s, is_async=True
                )
                if DT > 0:
                    mbarrier.wait(full.index(4 + ME), phase)
                    fence_async_shared()
                    s = warpgroup_mma(qt_s, kvt_s.index(ME + z).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                if i + 2 >= tiles:
                    mbarrier.arrive(q_empty.index(0))

                s = gl.where(valid[None, :], s * scale_log2, float("-inf"))
                top = gl.max(s, axis=1)
                m_in = m
                if ME == 1:
                    mbarrier.wait(max_full.index(0), phase)
                    m_in = max_s.index(0).load(ROWS)
                m_mine = gl.where(top > m_in + GROW, top, m_in)
                max_s.index(ME).store(m_mine)
                if ME == 0:
                    mbarrier.arrive(max_full.index(0))
                p = gl.exp2(s - m_mine[:, None])
                norm = norm * gl.exp2(m - m_mine) + gl.sum(p, axis=1)
                p_s.index(ME + z).store(p.to(p_s.dtype))
                fence_async_shared()
                mbarrier.arrive(p_full.index(ME))
                o = o * gl.convert_layout(gl.exp2(m - (m_mine if ME == 0 else m_in)), OUT_ROWS)[:, None]
                if ME == 0:
                    o = warpgroup_mma(p_s.index(z), kv_s.index(MINE + z), o, is_async=True)
                    mbarrier.wait(p_full.index(OTHER), phase)
                    m = max_s.index(1).load(ROWS)
                    late = gl.exp2(m_mine - m)
                    norm = norm * late
                    mbarrier.wait(full.index(THEIRS), phase)
                    o = warpgroup_mma_wait(0, deps=[o])
                    if i + 2 < tiles:
                        mbarrier.arrive(empty.index(MINE))
                    o = o * gl.convert_layout(late, OUT_ROWS)[:, None]
                    fence_async_shared()
                    o = warpgroup_mma(p_s.index(1 + z), kv_s.index(THEIRS + z), o, is_async=True)
                    o = warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(empty.index(THEIRS))
                else:
                    mbarrier.wait(p_full.index(OTHER), phase)
                    mbarrier.wait(full.index(THEIRS), phase)
                    fence_async_shared()
                    o = warpgroup_mma(p_s.index(z), kv_s.index(THEIRS + z), o, is_async=True)
                    m = m_mine
                    o = warpgroup_mma_wait(0, deps=[o])
                    mbarrier.arrive(empty.index(THEIRS))
                    o = o * gl.convert_layout(gl.exp2(m_in - m_mine), OUT_ROWS)[:, None]
                    o = warpgroup_mma(p_s.index(1 + z), kv_s.index(MINE + z), o, is_async=True)
                    o = warpgroup_mma_wait(0, deps=[o])
                    if i + 2 < tiles:
                        mbarrier.arrive(empty.index(MINE))
                if DT > 0:
                    mbarrier.arrive(empty.index(4 + ME))
                    mbarrier.arrive(empty.index(4 + OTHER))
                t += 1

            sum_s.index(ME).store(norm)
            mbarrier.arrive(sum_full.index(ME))
            mbarrier.wait(sum_full.index(OTHER), r & 1)
            r += 1
            norm += sum_s.index(OTHER).load(ROWS)
            total = gl.where(norm > 0, norm, 1.0)
            if HAS_SINK:
                sink_log2 = gl.load(sink + heads, mask=heads < H, other=float("-inf")) * LOG2E
                total += gl.exp2(sink_log2 - m)
            if ME == 0:
                lse_row = gl.where(norm > 0, (m + gl.log2(norm)) * LN2, float("-inf"))
                gl.store(lse + row * H + heads, lse_row, mask=heads < H)
            # My half of my last tile is still mine: it turns the output into whole lines.
            o = o * gl.convert_layout(1.0 / total, OUT_ROWS)[:, None]
            kv_s.index(MINE).store(o.to(p_s.dtype))
            gl.store(o_ptr, kv_s.index(MINE).load(STORE), mask=o_live)
            mbarrier.arrive(empty.index(MINE))
        else:
            gl.store(o_ptr, gl.zeros([BH, HALF], p_s.dtype, STORE), mask=o_live)
            if ME == 0:
                gl.store(
                    lse + row * H + heads, gl.full([BH], float("-inf"), gl.float32, ROWS), mask=heads < H
                )


@gluon.jit(do_not_specialize=["n_a", "n_b", "work"])
def forward_kernel(  # type: ignore[no-untyped-def]
    q, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse,
    n_a, n_b, H, K, scale, work, head_blocks,
    stride_qs, stride_qh, stride_a, stride_b, stride_is, stride_os, stride_oh,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its three roles."""
    BUFFERS: gl.constexpr = 6 if DT > 0 else 4
    dtype: gl.constexpr = q.dtype.element_ty
    q_s = gl.allocate_shared_memory(dtype, [2, BH, HALF], SHARED)
    kv_s = gl.allocate_shared_memory(dtype, [4, BK, HALF], SHARED)
    # A tail has the shape of the weights, and is no longer needed once they are known.
    p_s = gl.allocate_shared_memory(dtype, [2, BH, BK], SHARED)
    kvt_s = p_s
    qt_s = p_s.index(0)
    if DT > 0:
        qt_s = gl.allocate_shared_memory(dtype, [BH, DT], SHARED)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    max_s = gl.allocate_shared_memory(gl.float32, [2, BH], row_layout)
    sum_s = gl.allocate_shared_memory(gl.float32, [2, BH], row_layout)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    max_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=1 if i < 4 else 2)
    for i in gl.static_range(2):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(sum_full.index(i), count=1)
    mbarrier.init(max_full.index(0), count=1)
    mbarrier.init(q_full.index(0), count=128)
    mbarrier.init(q_empty.index(0), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (consume, (
                starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse,
                n_a, n_b, H, K, scale, work, head_blocks, stride_is, stride_os, stride_oh,
                q_s, qt_s, kv_s, kvt_s, p_s, max_s, sum_s,
                full, empty, q_full, q_empty, max_full, p_full, sum_full,
                0, DT, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK,
            )),
            (consume, (
                starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse,
                n_a, n_b, H, K, scale, work, head_blocks, stride_is, stride_os, stride_oh,
                q_s, qt_s, kv_s, kvt_s, p_s, max_s, sum_s,
                full, empty, q_full, q_empty, max_full, p_full, sum_full,
                1, DT, HAS_A, KIND_B, HAS_LENGTHS, HAS_SINK,
            )),
            (produce_forward, (
                q, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths,
                n_a, n_b, H, K, work, head_blocks, stride_qs, stride_qh, stride_a, stride_b, stride_is,
                q_s, qt_s, kv_s, kvt_s, full, empty, q_full, q_empty,
                DT, HAS_A, KIND_B, HAS_LENGTHS,
            )),
        ],
        [4, 4], [216, 80],
    )  # fmt: skip


def forward(
    q: torch.Tensor, sources: Sources, sink: torch.Tensor | None, scale: float, d_v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, H, 512] in the dtype of q and the natural log-sum-exp over keys, without the sink, float32 [S, H]."""
    S, H, d_qk = q.shape
    out = torch.empty((S, H, d_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((S, H), dtype=torch.float32, device=q.device)
    if S == 0 or H == 0:
        return out, lse
    args = sources.kernel_arguments(q)
    dummy = host_or_dummy(q)
    head_blocks = -(-H // 64)
    work = S * head_blocks
    programs = min(work, torch.cuda.get_device_properties(q.device).multi_processor_count)
    forward_kernel[(programs,)](
        q, *args.tensors, dummy(sink), out, lse,
        args.n_a, args.n_b, H, args.K, scale, work, head_blocks,
        q.stride(0), q.stride(1), args.stride_a, args.stride_b, args.stride_is, out.stride(0), out.stride(1),
        DT=d_qk - d_v, HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths,
        HAS_SINK=sink is not None, num_warps=4,
    )  # fmt: skip
    return out, lse
