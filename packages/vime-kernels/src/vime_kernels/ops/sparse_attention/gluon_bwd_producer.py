# SPDX-License-Identifier: Apache-2.0
"""The producer warpgroup of `gluon_bwd`: it gathers queries and tiles of keys, and computes nothing.

A buffer is filled as soon as its barrier in `empty` says that the consumers let go of it; its barrier in `full` is
arrived at by the copies themselves. Which rows a tile holds is `gluon_tiles.tile_rows`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from vime_kernels.ops.sparse_attention.gluon_tiles import (
    CHUNKS,
    COPY,
    COPY_T,
    DC,
    copy_heads,
    copy_tile,
    count_tiles,
    row_sources,
    tile_rows,
)


@gluon.jit
def copy_source(  # type: ignore[no-untyped-def]
    kv_a, kv_b, stride_a, stride_b, from_a, rows, valid, smem,
    d0: gl.constexpr, width: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr,
):  # fmt: skip
    """Start the gather of `width` channels of one tile from the buffer it comes from."""
    if KIND_B == "none":
        copy_tile(kv_a, stride_a, rows, valid, smem, d0, width, COPY)
    elif HAS_A:
        if from_a:
            copy_tile(kv_a, stride_a, rows, valid, smem, d0, width, COPY)
        else:
            copy_tile(kv_b, stride_b, rows, valid, smem, d0, width, COPY)
    else:
        copy_tile(kv_b, stride_b, rows, valid, smem, d0, width, COPY)


@gluon.jit
def produce_tile(  # type: ignore[no-untyped-def]
    t, i, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, kv_a, kv_b, stride_a, stride_b,
    kv_s, kvt_s, full, empty,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr,
):  # fmt: skip
    """Gather tile i of a row, the t-th tile of this program, as soon as the consumers let go of its buffers."""
    rows, valid = tile_rows(
        i, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b, HAS_A, KIND_B, gl.SliceLayout(1, COPY)
    )
    mbarrier.wait(empty.index(0), (t & 1) ^ 1)
    for c in gl.static_range(CHUNKS):
        copy_source(
            kv_a, kv_b, stride_a, stride_b, i < tiles_a, rows, valid, kv_s.index(c), c * DC, DC, HAS_A, KIND_B,
        )  # fmt: skip
        async_copy.mbarrier_arrive(full.index(c), increment_count=False)
    if DT > 0:
        rows_t = gl.convert_layout(rows, gl.SliceLayout(1, COPY_T))
        valid_t = gl.convert_layout(valid, gl.SliceLayout(1, COPY_T))
        copy_tile(kv_b, stride_b, rows_t, valid_t, kvt_s.index(0), CHUNKS * DC, DT, COPY_T)
        async_copy.mbarrier_arrive(full.index(CHUNKS), increment_count=False)


@gluon.jit
def produce_backward(  # type: ignore[no-untyped-def]
    q, do, kv_a, kv_b, starts_a, ends_a, starts_b, ends_b, indices, lengths,
    n_a, n_b, H, K, work, head_blocks,
    stride_qs, stride_qh, stride_gs, stride_gh, stride_a, stride_b, stride_is,
    q_s, do_s, qt_s, kv_s, kvt_s, full, empty, q_full, q_empty,
    DT: gl.constexpr, HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """Producer: the first tile of a row, its queries and output gradients, then the other tiles."""
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
        for i in range(0, tiles):
            # The first keys do not wait for the last row's queries to be let go.
            produce_tile(
                t, i, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b,
                kv_a, kv_b, stride_a, stride_b, kv_s, kvt_s, full, empty, DT, HAS_A, KIND_B,
            )  # fmt: skip
            t += 1
            if i == 0:
                mbarrier.wait(q_empty.index(0), (r & 1) ^ 1)
                # Plus zero, but not to the compiler: it would hoist, and then spill, the places of all heads.
                q_hb = hb + (t >> 30)
                for c in gl.static_range(CHUNKS):
                    copy_heads(q + row * stride_qs, stride_qh, H, q_hb, q_s.index(c), c * DC, DC, COPY)
                    copy_heads(do + row * stride_gs, stride_gh, H, q_hb, do_s.index(c), c * DC, DC, COPY)
                if DT > 0:
                    copy_heads(q + row * stride_qs, stride_qh, H, q_hb, qt_s, CHUNKS * DC, DT, COPY_T)
                async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
                r += 1
