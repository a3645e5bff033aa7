# SPDX-License-Identifier: Apache-2.0
"""What the Hopper kernels share: block sizes, layouts, which rows a tile holds, and how tiles come and go."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NO_MAX = gl.constexpr(-3.0e38)
# exp2 of it is finite: keeps 0 · inf out of the gradient of lse where a sink outweighs every key.
LARGE = gl.constexpr(100.0)

BH = gl.constexpr(64)  # heads per program: the rows of one wgmma
BK = gl.constexpr(64)  # slots per step
DC = gl.constexpr(128)  # channels per chunk: what one barrier guards
CHUNKS = gl.constexpr(4)
HALF = gl.constexpr(256)  # channels of the forward's output per consumer

# A warpgroup takes 32 slots of the scores and 64 channels of every chunk of the output.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
CHUNK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # the producer's 4 warps
COPY_T = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # the same for 64 channels
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # the consumers' 8 warps


@gluon.jit
def row_sources(  # type: ignore[no-untyped-def]
    row, starts_a, ends_a, starts_b, ends_b, lengths, n_a, n_b, K,
    HAS_A: gl.constexpr, KIND_B: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """(start_a, end_a, start_b, count_b) of one query row, ranges clamped to their buffers."""
    start_a = 0
    end_a = 0
    if HAS_A:
        start_a = gl.minimum(gl.maximum(gl.load(starts_a + row), 0), n_a)
        end_a = gl.maximum(gl.minimum(gl.load(ends_a + row), n_a), start_a)
    start_b = 0
    count_b = 0
    if KIND_B == "range":
        start_b = gl.minimum(gl.maximum(gl.load(starts_b + row), 0), n_b)
        count_b = gl.maximum(gl.minimum(gl.load(ends_b + row), n_b), start_b) - start_b
    elif KIND_B == "united":
        count_b = gl.load(lengths + row)
    elif KIND_B == "picks":
        count_b = K
        if HAS_LENGTHS:
            count_b = gl.minimum(gl.maximum(gl.load(lengths + row), 0), K)
    return start_a, end_a, start_b, count_b


@gluon.jit
def tile_rows(  # type: ignore[no-untyped-def]
    i, tiles_a, start_a, end_a, start_b, count_b, picks_row, n_b,
    HAS_A: gl.constexpr, KIND_B: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Key rows of tile i, or words of a united list, and which of its slots are keys."""
    offs = gl.arange(0, BK, layout=layout)
    if KIND_B == "none":
        rows = start_a + i * BK + offs
        valid = rows < end_a
    else:
        slot = (i - tiles_a) * BK + offs
        if KIND_B == "united":
            rows = gl.load(picks_row + slot, mask=slot < count_b, other=-1)
            valid = rows >= 0
        elif KIND_B == "picks":
            rows = gl.load(picks_row + slot, mask=(slot >= 0) & (slot < count_b), other=-1)
            valid = (rows >= 0) & (rows < n_b)
        else:
            rows = start_b + slot
            valid = slot < count_b
        if HAS_A:
            rows_a = start_a + i * BK + offs
            rows = gl.where(i < tiles_a, rows_a, rows)
            valid = gl.where(i < tiles_a, rows_a < end_a, valid)
    return rows, valid


@gluon.jit
def count_tiles(start_a, end_a, count_b):  # type: ignore[no-untyped-def]
    """Tiles of the band and of the whole row."""
    tiles_a = (end_a - start_a + BK - 1) // BK
    return tiles_a, tiles_a + (count_b + BK - 1) // BK


@gluon.jit
def copy_heads(src, stride, H, hb, smem, d0: gl.constexpr, width: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copy of `width` channels of one block of heads."""
    heads = hb * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, layout))
    d = d0 + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    ptrs = (src + heads.to(gl.int64) * stride)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(smem, ptrs, mask=(heads < H)[:, None] & (d >= 0)[None, :])


@gluon.jit
def copy_tile(kv, stride, rows, valid, smem, d0: gl.constexpr, width: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the gather of `width` channels of one tile of key rows; slots without a key are filled with zeros."""
    d = d0 + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    ptrs = (kv + rows.to(gl.int64) * stride)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(smem, ptrs, mask=valid[:, None] & (d >= 0)[None, :])


@gluon.jit
def row_of(word):  # type: ignore[no-untyped-def]
    """Row, in the two buffers laid end to end, that a word of a united list names (`triton_unite`)."""
    return word & 0x7FFFFF


@gluon.jit
def seen_by(word, column, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the query row that a column belongs to has the key; HEADS are the columns of a query row."""
    # Columns behind the last of eight rows see nothing: bit 31 of a word that names a key is 0.
    bit = gl.minimum(23 + column // HEADS, 31)
    return (word >= 0) & (((word >> bit) & 1) != 0)


@gluon.jit
def buffer_of(word, kv_a, kv_b, stride_a, stride_b, n_a):  # type: ignore[no-untyped-def]
    """(buffer, stride, row) of each word."""
    row = row_of(word)
    in_a = row < n_a
    return gl.where(in_a, kv_a, kv_b), gl.where(in_a, stride_a, stride_b), gl.where(in_a, row, row - n_a)


@gluon.jit
def head_lines(base, stride, hb, H):  # type: ignore[no-untyped-def]
    """Pointers to the first DC channels of a block of heads, and which of its heads there are."""
    heads = hb * BH + gl.arange(0, BH, layout=gl.SliceLayout(1, STORE))
    d = gl.arange(0, DC, layout=gl.SliceLayout(0, STORE))
    return base + heads[:, None] * stride + d[None, :], (heads < H)[:, None] & (d >= 0)[None, :]


@gluon.jit
def sum_in_thread(x):  # type: ignore[no-untyped-def]
    """Adds the two rows of a [slots, heads] product that a thread holds: half the registers, and no exchange."""
    return gl.sum(gl.reshape(x, [BK // 16, 2, 8, BH]), axis=1)
