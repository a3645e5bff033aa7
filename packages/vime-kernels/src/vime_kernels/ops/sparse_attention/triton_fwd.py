# SPDX-License-Identifier: Apache-2.0
"""Forward of sparse attention in Triton: one program per query row and block of heads.

The keys of a row come from up to two sources: a band `[starts_a, ends_a)` of rows of `kv_a` (the sliding window) and
either picked rows of `kv_b` or a second range of rows of `kv_b`. Both run through one software-pipelined loop, so the
gather of the next tile overlaps the products of this one and nothing drains at the seam. A slot that is no key is never
dereferenced: its row is zero-filled and its score is -inf.

Source: online softmax of FlashAttention (arXiv 2205.14135); the contract of the inputs is `interface.py`.
"""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.sparse_attention.config import forward_tile
from vime_kernels.ops.sparse_attention.sources import Sources, host_or_dummy

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Below every score, and finite: differences of two maxima are never NaN.
NO_MAX = tl.constexpr(-3.0e38)


@triton.jit
def load_range(starts, ends, row, n_rows):  # type: ignore[no-untyped-def]
    """First and one-past-last key row of a range, clamped to the buffer; (x, x) when it is empty."""
    start = tl.minimum(tl.maximum(tl.load(starts + row), 0), n_rows)
    end = tl.minimum(tl.load(ends + row), n_rows)
    return start, tl.maximum(start, end)


@triton.jit
def load_count_b(starts_b, ends_b, lengths, row, n_b, K, KIND_B: tl.constexpr, HAS_LENGTHS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First key row (ranges only) and number of slots of source b."""
    start = 0
    count = 0
    if KIND_B == "range":
        start, end = load_range(starts_b, ends_b, row, n_b)
        count = end - start
    elif KIND_B == "picks":
        count = K
        if HAS_LENGTHS:
            count = tl.minimum(tl.maximum(tl.load(lengths + row), 0), K)
    return start, count


@triton.jit
def tile_rows(  # type: ignore[no-untyped-def]
    i, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b,
    BK: tl.constexpr, HAS_A: tl.constexpr, KIND_B: tl.constexpr,
):  # fmt: skip
    """Key rows of tile i and which of its slots are keys."""
    offs = tl.arange(0, BK)
    if KIND_B == "none":
        rows = start_a + i * BK + offs
        valid = rows < end_a
    else:
        slot = (i - tiles_a) * BK + offs
        if KIND_B == "picks":
            rows = tl.load(picks_row + slot, mask=(slot >= 0) & (slot < count_b), other=-1)
            valid = (rows >= 0) & (rows < n_b)
        else:
            rows = start_b + slot
            valid = slot < count_b
        if HAS_A:
            in_a = i < tiles_a
            rows_a = start_a + i * BK + offs
            rows = tl.where(in_a, rows_a, rows)
            valid = tl.where(in_a, rows_a < end_a, valid)
    return rows, valid


@triton.jit
def tile_pointer(i, tiles_a, kv_a, kv_b, stride_a, stride_b, HAS_A: tl.constexpr, KIND_B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Base and row stride of the buffer that tile i reads."""
    if KIND_B == "none":
        base = kv_a
        stride = stride_a
    elif HAS_A:
        in_a = i < tiles_a
        base = tl.where(in_a, kv_a, kv_b)
        stride = tl.where(in_a, stride_a, stride_b)
    else:
        base = kv_b
        stride = stride_b
    return base, stride


@triton.jit(do_not_specialize=["n_a", "n_b"])
def forward_kernel(  # type: ignore[no-untyped-def]
    q, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths, sink, out, lse,
    n_a, n_b, H, K, scale,
    stride_qs, stride_qh, stride_a, stride_b, stride_is, stride_os, stride_oh,
    DV: tl.constexpr, DT: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    HAS_A: tl.constexpr, KIND_B: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_SINK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One query row and one block of heads."""
    row = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    heads = (tl.program_id(0) % HEAD_BLOCKS) * BH + tl.arange(0, BH)
    live = heads < H
    dv = tl.arange(0, DV)
    dt = tl.arange(0, DT if DT > 0 else 16)

    start_a = 0
    end_a = 0
    if HAS_A:
        start_a, end_a = load_range(starts_a, ends_a, row, n_a)
    tiles_a = tl.cdiv(end_a - start_a, BK)
    start_b, count_b = load_count_b(starts_b, ends_b, lengths, row, n_b, K, KIND_B, HAS_LENGTHS)
    picks_row = indices + row * stride_is

    q_row = q + row * stride_qs + heads.to(tl.int64)[:, None] * stride_qh
    q_v = tl.load(q_row + dv[None, :], mask=live[:, None], other=0.0)
    if DT > 0:
        q_t = tl.load(q_row + DV + dt[None, :], mask=live[:, None], other=0.0)

    scale_log2 = scale * LOG2E
    m = tl.full([BH], NO_MAX, tl.float32)
    norm = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, DV], tl.float32)
    for i in tl.range(0, tiles_a + tl.cdiv(count_b, BK), num_stages=STAGES):
        rows, valid = tile_rows(
            i, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, BK, HAS_A, KIND_B
        )
        base, stride = tile_pointer(i, tiles_a, kv_a, kv_b, stride_a, stride_b, HAS_A, KIND_B)
        kv_rows = base + rows.to(tl.int64)[:, None] * stride
        kv_v = tl.load(kv_rows + dv[None, :], mask=valid[:, None], other=0.0)
        s = tl.dot(q_v, tl.trans(kv_v), input_precision="ieee")
        if DT > 0:
            kv_t = tl.load(kv_rows + DV + dt[None, :], mask=valid[:, None], other=0.0)
            s = tl.dot(q_t, tl.trans(kv_t), s, input_precision="ieee")
        s = tl.where(valid[None, :], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        grow = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        norm = norm * grow + tl.sum(p, 1)
        acc = tl.dot(p.to(kv_v.dtype), kv_v, acc * grow[:, None], input_precision="ieee")
        m = m_new

    # Not `norm > 0`: a NaN is not a row without keys.
    nothing = norm == 0
    total = tl.where(nothing, 1.0, norm)
    if HAS_SINK:
        sink_log2 = tl.load(sink + heads, mask=live, other=float("-inf")) * LOG2E
        total += tl.exp2(sink_log2 - m)
    o_row = out + row * stride_os + heads.to(tl.int64)[:, None] * stride_oh
    tl.store(o_row + dv[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    lse_row = tl.where(nothing, float("-inf"), (m + tl.log2(norm)) * LN2)
    tl.store(lse + row * H + heads, lse_row, mask=live)


def forward(
    q: torch.Tensor,
    sources: Sources,
    sink: torch.Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, H, d_v] in the dtype of q and the natural log-sum-exp over keys, without the sink, float32 [S, H]."""
    S, H, d_qk = q.shape
    out = torch.empty((S, H, d_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((S, H), dtype=torch.float32, device=q.device)
    if S == 0 or H == 0:
        return out, lse
    tile = forward_tile(H, d_v)
    args = sources.kernel_arguments(q)
    dummy = host_or_dummy(q)
    head_blocks = triton.cdiv(H, tile.BH)
    forward_kernel[(S * head_blocks,)](
        q, *args.tensors, dummy(sink), out, lse,
        args.n_a, args.n_b, H, args.K, scale,
        q.stride(0), q.stride(1), args.stride_a, args.stride_b, args.stride_is, out.stride(0), out.stride(1),
        DV=d_v, DT=d_qk - d_v, BH=tile.BH, BK=tile.BK, HEAD_BLOCKS=head_blocks,
        HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths, HAS_SINK=sink is not None,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out, lse
