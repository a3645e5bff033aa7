# SPDX-License-Identifier: Apache-2.0
"""What a consumer of the Hopper backward knows of its heads before the first tile of a row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vime_kernels.ops.sparse_attention.gluon_bwd_roles import HB, SCORES, STORE, tiles_of
from vime_kernels.ops.sparse_attention.gluon_tiles import BH, DC, LARGE, LOG2E


@gluon.jit
def of_row(  # type: ignore[no-untyped-def]
    w, work, head_blocks, ranges, sink, out, lse, H, stride_os, stride_oh,
    ME: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Tiles of a row, and of a consumer's heads: the output, in four chunks, the lse of the keys and the sinks.

    All that is loaded from global memory, so that it can be asked for early. Behind the last row, of the last.
    """
    w = gl.minimum(w, work - 1)
    row = (w // head_blocks).to(gl.int64)
    hb = w % head_blocks
    heads = hb * BH + ME * HB + gl.arange(0, HB, layout=gl.SliceLayout(0, SCORES))
    o_heads = hb * BH + ME * HB + gl.arange(0, HB, layout=gl.SliceLayout(1, STORE))
    d = gl.arange(0, DC, layout=gl.SliceLayout(0, STORE))
    o_ptr = out + row * stride_os + o_heads[:, None] * stride_oh + d[None, :]
    o_live = (o_heads < H)[:, None] & (d >= 0)[None, :]
    o0 = gl.load(o_ptr, mask=o_live, other=0.0)
    o1 = gl.load(o_ptr + DC, mask=o_live, other=0.0)
    o2 = gl.load(o_ptr + 2 * DC, mask=o_live, other=0.0)
    o3 = gl.load(o_ptr + 3 * DC, mask=o_live, other=0.0)
    lse_keys = gl.load(lse + row * H + heads, mask=heads < H, other=float("inf"))
    sinks = lse_keys
    if HAS_SINK:
        sinks = gl.load(sink + heads, mask=heads < H, other=float("-inf"))
    tiles = tiles_of(w, work, head_blocks, ranges, HAS_A, KIND_B, HAS_LENGTHS)
    return tiles, o0, o1, o2, o3, lse_keys, sinks


@gluon.jit
def head_terms(  # type: ignore[no-untyped-def]
    row, hb, o0, o1, o2, o3, lse_keys, sinks, dlse, H, q_s, do_s, qt_s, q_full, phase,
    DT: gl.constexpr, ME: gl.constexpr, HAS_SINK: gl.constexpr, HAS_DLSE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Of a consumer's heads: log2 of the whole softmax's sum, <o, do> less the gradient of lse, weight of the sink."""
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    heads = hb * BH + ME * HB + gl.arange(0, HB, layout=COLS)
    live = heads < H
    lse_keys = lse_keys * LOG2E
    total = lse_keys
    p_sink = lse_keys
    if HAS_SINK:
        sink_log2 = sinks * LOG2E
        peak = gl.maximum(gl.maximum(lse_keys, sink_log2), -3.0e38)
        joint = peak + gl.log2(gl.exp2(lse_keys - peak) + gl.exp2(sink_log2 - peak))
        total = gl.where(live, joint, float("inf"))
        p_sink = gl.where(sink_log2 > float("-inf"), gl.exp2(sink_log2 - total), 0.0)
    prod = times_do(o0, do_s, q_full, phase, ME, 0)
    prod += times_do(o1, do_s, q_full, phase, ME, 1)
    prod += times_do(o2, do_s, q_full, phase, ME, 2)
    prod += times_do(o3, do_s, q_full, phase, ME, 3)
    delta = gl.convert_layout(gl.sum(prod, axis=1), COLS)
    if HEADS > 0:
        # Query rows without keys may hold anything, and their neighbours' products would meet it.
        dead = lse_keys == float("-inf")
        delta = gl.where(dead, 0.0, delta)
        if gl.max(dead.to(gl.int32), axis=0) > 0:
            blank(q_s, dead, ME, 4)
            blank(do_s, dead, ME, 4)
            if DT > 0:
                blank(qt_s, dead, ME, 1)
            fence_async_shared()
    if HAS_DLSE:
        grad = gl.load(dlse + row * H + heads, mask=live, other=0.0)
        share = gl.exp2(gl.minimum(total - lse_keys, LARGE))
        # Of a row without keys the gradient of lse may be anything.
        delta -= gl.where(live & (lse_keys > float("-inf")), grad * share, 0.0)
    return total, delta, p_sink


@gluon.jit
def times_do(o, do_s, q_full, phase, ME: gl.constexpr, c: gl.constexpr):  # type: ignore[no-untyped-def]
    """One chunk of o · do."""
    mbarrier.wait(q_full.index(c), phase)
    return o.to(gl.float32) * do_s.index(c).slice(ME * HB, HB, dim=0).load(STORE).to(gl.float32)


@gluon.jit
def blank(smem, dead, ME: gl.constexpr, CHUNKS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros in some of a consumer's heads."""
    dead = gl.convert_layout(dead, gl.SliceLayout(1, STORE))[:, None]
    for c in gl.static_range(CHUNKS):
        mine = smem.index(c).slice(ME * HB, HB, dim=0)
        x = mine.load(STORE)
        mine.store(gl.where(dead, gl.zeros_like(x), x))
