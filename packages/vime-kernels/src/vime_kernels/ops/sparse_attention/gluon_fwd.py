# SPDX-License-Identifier: Apache-2.0
"""Forward of sparse attention for Hopper: a producer warpgroup gathers, two consumer warpgroups multiply.

Programs are persistent: each walks query rows (times blocks of 64 heads), and the producer runs ahead into the next
row. Tiles of 64 keys come in pairs. Each consumer scores its own tile of a pair and owns one half of the channels of
the output, to which it adds both tiles: its own weights, from registers, and its partner's, through shared memory. The
reference that scores are taken against goes from consumer 0 to consumer 1 and back, and follows the maximum only once
that has grown by GROW. So consumer 1 can add consumer 0's tile before it knows its own weights, and its softmax runs
under that product. The four half tiles of a pair have a barrier each, so each is refilled as soon as its last reader
is done. The output is multiplied only when its reference has changed. The first scores of the next row are under way
while a row's output is divided and stored. Same mathematics and same contract as `triton_fwd`; widths 512 and
512 + 64, bfloat16 and float16.

Weights pass a proxy fence before they are announced; queries need none, as the bulk copy engine brings them. Gathered
keys have none between their barrier and the products, though PTX asks for one: FlashMLA's binary has none there either,
results are the same bits with and without in every run, and a fence in every reader costs 1 to 2 %. Only capability 9.0
takes this kernel.

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vime_kernels.ops.sparse_attention.gluon_fwd_producer import SLOTS, produce
from vime_kernels.ops.sparse_attention.gluon_tiles import BH, BK, HALF, LN2, LOG2E, NO_MAX, SHARED, seen_by
from vime_kernels.ops.sparse_attention.sources import Sources, host_or_dummy

# In log2 units. Weights reach 2^8 at most, which float16 holds, and keep their relative precision.
GROW = gl.constexpr(8.0)
QUERIES = gl.NVMMASharedLayout(128, 16, 3)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))
OUT_ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]), 2))
# The rows of a warp stay in the warp; four threads have 64 neighbouring bytes of a head.
LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)


@gluon.jit
def begin_scores(q_s, qt_s, kv_s, kvt_s, full, t, live, ME: gl.constexpr, DT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the scores of tile ME of pair t. Where there is none (`live` false), nothing waits and nobody looks."""
    phase = t & 1
    # Zero, but not to the compiler: it would hoist, and then spill, every matrix descriptor of the loop.
    z = t >> 30
    s = gl.zeros([BH, BK], gl.float32, SCORES)
    mbarrier.wait(full.index(2 * ME), phase, pred=live)
    s = warpgroup_mma(q_s.index(z), kv_s.index(2 * ME + z).permute((1, 0)), s, is_async=True)
    mbarrier.wait(full.index(2 * ME + 1), phase, pred=live)
    s = warpgroup_mma(q_s.index(1 + z), kv_s.index(2 * ME + 1 + z).permute((1, 0)), s, is_async=True)
    if DT > 0:
        mbarrier.wait(full.index(4 + ME), phase, pred=live)
        s = warpgroup_mma(qt_s, kvt_s.index(ME + z).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def end_scores(s, scale_log2, slots_s, slots_full, t, live, ME: gl.constexpr, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The scores that `begin_scores` started, in log2 units, -inf where a slot is empty or not for a column."""
    mbarrier.wait(slots_full.index(t & 1), (t >> 1) & 1, pred=live)
    slots = slots_s.index(t & 1).slice(ME * BK, BK).load(gl.SliceLayout(0, SCORES))
    s = warpgroup_mma_wait(0, deps=[s])
    if HEADS > 0:
        column = gl.arange(0, BH, layout=ROWS)
        x = gl.where(seen_by(slots[None, :], column[:, None], HEADS), s * scale_log2, float("-inf"))
    else:
        x = s * scale_log2 + slots[None, :]
    return x


@gluon.constexpr_function
def scaling():  # type: ignore[no-untyped-def]
    """PTX of `rescale`. The 128 numbers of a thread are of two rows, two of one and two of the other in turn."""
    products = " ".join(f"mul.f32 ${i}, ${i}, {'xxyy'[i % 4]};" for i in range(128))
    return (
        "{ .reg .pred p, q; .reg .f32 x, y; setp.neu.f32 p, $256, $384; setp.neu.f32 q, $258, $386; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; sub.f32 x, $256, $384; sub.f32 y, $258, $386; "
        f"ex2.approx.ftz.f32 x, x; ex2.approx.ftz.f32 y, y; {products} DONE: }}"
    )


@gluon.constexpr_function
def scaling_operands():  # type: ignore[no-untyped-def]
    """Its operands: 128 results in the registers of the numbers, then both references of each."""
    return ",".join(["=f"] * 128 + [str(i) for i in range(128)] + ["f"] * 256)


@gluon.jit
def rescale(o, old, new):  # type: ignore[no-untyped-def]
    """The output against a new reference. Nearly always that is the old one, and nothing is multiplied."""
    old = gl.convert_layout(old, OUT_ROWS)[:, None]
    new = gl.convert_layout(new, OUT_ROWS)[:, None]
    return gl.inline_asm_elementwise(
        scaling(), scaling_operands(), [o, old, new], dtype=gl.float32, is_pure=True, pack=128
    )


@gluon.jit
def add_pair_first(x, top, o, m, norm, kv_s, p_s, max_s, empty, p_full, t):  # type: ignore[no-untyped-def]
    """Consumer 0: its own tile as soon as it has its weights, then consumer 1's against that one's reference."""
    z = t >> 30
    m_mine = gl.where(top > m + GROW, top, m)
    max_s.index(0).store(m_mine)
    p = gl.exp2(x - m_mine[:, None])
    norm = norm * gl.exp2(m - m_mine) + gl.sum(p, axis=1)
    p16 = p.to(p_s.dtype)
    p_s.index(z).store(p16)
    fence_async_shared()
    mbarrier.arrive(p_full.index(0))
    o = rescale(o, m, m_mine)
    weights = gl.convert_layout(p16, WEIGHTS)
    o = warpgroup_mma(weights, kv_s.index(z), o, is_async=True)
    mbarrier.wait(p_full.index(1), t & 1)
    m = max_s.index(1).load(ROWS)
    norm = norm * gl.exp2(m_mine - m)
    o, weights = warpgroup_mma_wait(0, deps=[o, weights])
    mbarrier.arrive(empty.index(0))
    o = rescale(o, m_mine, m)
    # Its weights tell that its keys are there.
    o = warpgroup_mma(p_s.index(1 + z), kv_s.index(2 + z), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(empty.index(2))
    return o, m, norm


@gluon.jit
def add_pair_second(x, top, o, m, norm, kv_s, p_s, max_s, empty, p_full, t):  # type: ignore[no-untyped-def]
    """Consumer 1: consumer 0's tile, its own softmax meanwhile, then its own tile."""
    z = t >> 30
    mbarrier.wait(p_full.index(0), t & 1)
    m_in = max_s.index(0).load(ROWS)
    m_mine = gl.where(top > m_in + GROW, top, m_in)
    max_s.index(1).store(m_mine)
    norm = norm * gl.exp2(m - m_mine)
    o = rescale(o, m, m_in)
    o = warpgroup_mma(p_s.index(z), kv_s.index(1 + z), o, is_async=True)
    p = gl.exp2(x - m_mine[:, None])
    norm += gl.sum(p, axis=1)
    p16 = p.to(p_s.dtype)
    p_s.index(1 + z).store(p16)
    fence_async_shared()
    mbarrier.arrive(p_full.index(1))
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(empty.index(1))
    o = rescale(o, m_in, m_mine)
    weights = gl.convert_layout(p16, WEIGHTS)
    o = warpgroup_mma(weights, kv_s.index(3 + z), o, is_async=True)
    o, weights = warpgroup_mma_wait(0, deps=[o, weights])
    mbarrier.arrive(empty.index(3))
    return o, m_mine, norm


@gluon.jit
def consume(  # type: ignore[no-untyped-def]
    sink, out, lse, H, scale, work, head_blocks, stride_os, stride_oh,
    q_s, qt_s, kv_s, kvt_s, p_s, slots_s, pairs_s, max_s, sum_s,
    full, empty, q_full, q_empty, row_full, slots_full, p_full, sum_full,
    ME: gl.constexpr, DT: gl.constexpr, HAS_SINK: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Consumer ME of 0, 1: scores tile ME of every pair, owns half ME of the output's channels."""
    scale_log2 = scale * LOG2E
    mbarrier.wait(row_full.index(0), 0)
    pairs = gl.max(pairs_s.index(0).load(SLOTS), axis=0)
    mbarrier.wait(q_full.index(0), 0)
    s = begin_scores(q_s, qt_s, kv_s, kvt_s, full, 0, True, ME, DT)
    x = end_scores(s, scale_log2, slots_s, slots_full, 0, True, ME, HEADS)
    mbarrier.arrive(q_empty.index(0), pred=pairs == 1)
    t = 0
    r = 0
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        row = (w // head_blocks).to(gl.int64)
        hb = w % head_blocks
        m = gl.full([BH], NO_MAX, gl.float32, ROWS)
        norm = gl.zeros([BH], gl.float32, ROWS)
        o = gl.zeros([BH, HALF], gl.float32, OUTPUT)
        for i in range(0, pairs):
            top = gl.max(x, axis=1)
            if ME == 0:
                o, m, norm = add_pair_first(x, top, o, m, norm, kv_s, p_s, max_s, empty, p_full, t)
            else:
                o, m, norm = add_pair_second(x, top, o, m, norm, kv_s, p_s, max_s, empty, p_full, t)
            t += 1
            if i + 1 < pairs:
                s = begin_scores(q_s, qt_s, kv_s, kvt_s, full, t, True, ME, DT)
                x = end_scores(s, scale_log2, slots_s, slots_full, t, True, ME, HEADS)
                mbarrier.arrive(q_empty.index(0), pred=i + 2 == pairs)

        heads = hb * BH + gl.arange(0, BH, layout=ROWS)
        if HAS_SINK:
            sink_row = gl.load(sink + heads, mask=heads < H, other=float("-inf"))
        sum_s.index(ME).store(norm)
        mbarrier.arrive(sum_full.index(ME))
        more = w + gl.num_programs(0) < work
        mbarrier.wait(row_full.index(0), r ^ 1, pred=more)
        pairs = gl.max(pairs_s.index(r ^ 1).load(SLOTS), axis=0)
        mbarrier.wait(q_full.index(0), r ^ 1, pred=more)
        s = begin_scores(q_s, qt_s, kv_s, kvt_s, full, t, more, ME, DT)

        mbarrier.wait(sum_full.index(1 - ME), r)
        r ^= 1
        norm += sum_s.index(1 - ME).load(ROWS)
        # Not `norm > 0`: a NaN is not a row without keys.
        nothing = norm == 0
        total = gl.where(nothing, 1.0, norm)
        if HAS_SINK:
            total += gl.exp2(sink_row * LOG2E - m)
        if ME == 0:
            lse_row = gl.where(nothing, float("-inf"), (m + gl.log2(norm)) * LN2)
            gl.store(lse + row * H + heads, lse_row, mask=heads < H)
        o = o * gl.convert_layout(1.0 / total, OUT_ROWS)[:, None]
        o_heads = (hb + (t >> 30)) * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, LINES))
        d = ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LINES))
        o_ptr = out + row * stride_os + o_heads[:, None] * stride_oh + d[None, :]
        live = (o_heads < H)[:, None] & (d >= 0)[None, :]
        gl.store(o_ptr, gl.convert_layout(o.to(p_s.dtype), LINES), mask=live)

        x = end_scores(s, scale_log2, slots_s, slots_full, t, more, ME, HEADS)
        mbarrier.arrive(q_empty.index(0), pred=more & (pairs == 1))


@gluon.jit(do_not_specialize=["n_a", "n_b", "work"])
def forward_kernel(  # type: ignore[no-untyped-def]
    q_desc, qt_desc, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse,
    n_a, n_b, H, K, scale, work, head_blocks,
    stride_a, stride_b, stride_is, stride_os, stride_oh,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its three roles."""
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, BH, HALF], SHARED)
    kv_s = gl.allocate_shared_memory(dtype, [4, BK, HALF], SHARED)
    # A tail has the shape of the weights, and is no longer needed once they are known.
    p_s = gl.allocate_shared_memory(dtype, [2, BH, BK], SHARED)
    kvt_s = p_s
    qt_s = p_s.index(0)
    if DT > 0:
        qt_s = gl.allocate_shared_memory(dtype, [BH, DT], SHARED)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    max_s = gl.allocate_shared_memory(gl.float32, [2, BH], flat)
    sum_s = gl.allocate_shared_memory(gl.float32, [2, BH], flat)
    rows_s = gl.allocate_shared_memory(gl.int32, [2, 2 * BK], flat)
    slots_s = rows_s
    if HEADS == 0:
        slots_s = gl.allocate_shared_memory(gl.float32, [2, 2 * BK], flat)
    pairs_s = gl.allocate_shared_memory(gl.int32, [2, 1], flat)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [6, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    row_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    slots_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    sum_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(6):
        mbarrier.init(full.index(i), count=128)
    for i in gl.static_range(4):
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(slots_full.index(i), count=1)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(sum_full.index(i), count=1)
    mbarrier.init(row_full.index(0), count=1)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (consume, (
                sink, out, lse, H, scale, work, head_blocks, stride_os, stride_oh,
                q_s, qt_s, kv_s, kvt_s, p_s, slots_s, pairs_s, max_s, sum_s,
                full, empty, q_full, q_empty, row_full, slots_full, p_full, sum_full,
                0, DT, HAS_SINK, HEADS,
            )),
            (consume, (
                sink, out, lse, H, scale, work, head_blocks, stride_os, stride_oh,
                q_s, qt_s, kv_s, kvt_s, p_s, slots_s, pairs_s, max_s, sum_s,
                full, empty, q_full, q_empty, row_full, slots_full, p_full, sum_full,
                1, DT, HAS_SINK, HEADS,
            )),
            (produce, (
                q_desc, qt_desc, kv_a, kv_b, (starts_a, ends_a, starts_b, ends_b, lengths, K, indices, stride_is),
                n_a, n_b, H, K, work, head_blocks, stride_a, stride_b,
                q_s, qt_s, kv_s, kvt_s, rows_s, slots_s, pairs_s, full, empty, q_full, q_empty, row_full, slots_full,
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
    # A copy cuts off heads behind the last. In shared memory its block is the same bytes as one of two dimensions.
    whole = q.contiguous() if 0 in q.stride() else q
    q_desc, qt_desc = (TensorDescriptor.from_tensor(whole, [1, 64, width], QUERIES) for width in (256, 64))
    forward_kernel[(programs,)](
        q_desc, qt_desc, *args.tensors, dummy(sink), out, lse,
        args.n_a, args.n_b, H, args.K, scale, work, head_blocks,
        args.stride_a, args.stride_b, args.stride_is, out.stride(0), out.stride(1),
        DT=d_qk - d_v, HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths,
        HAS_SINK=sink is not None, HEADS=sources.heads, num_warps=4,
    )  # fmt: skip
    return out, lse
