# SPDX-License-Identifier: Apache-2.0
"""Canonical top-k for Hopper in one launch: few warps take a row, from its scores to its picks.

The steps are those of `triton_fwd`: from a sample a score is guessed that somewhat more than k reach, one walk over
the row appends those in column order, the exact k-th is searched among them in registers, and a second walk, over the
candidates, appends the picks. A row needs one, two or four warps, so that many rows share a multiprocessor: some wait
for memory while others search, and what warps have to tell each other is little. Leaves other devices to `triton_fwd`.

Source of the ideas: see `triton_fwd`; the search is the Illinois variant of regula falsi (Dowell and Jarratt, 1971).
"""

from math import isqrt

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vime_kernels.ops.topk import config

# Keys, as `_key` makes them: of -inf, of the lowest number, and the one after that of +inf.
MINUS_INF, LOWEST, BEYOND = gl.constexpr(0x007FFFFF), gl.constexpr(0x00800000), gl.constexpr(0xFF800001)
CHUNK = gl.constexpr(32)  # consecutive columns of the sample, 128 bytes of float32


@gluon.jit
def _key(x):  # type: ignore[no-untyped-def]
    """uint32 with the order of the scores, -0 as +0."""
    bits = gl.where(x == 0.0, 0.0, x).to(gl.uint32, bitcast=True)
    return gl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@gluon.jit
def _score(key):  # type: ignore[no-untyped-def]
    """The score that `_key` turns into this key."""
    bits = gl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def _count(mask):  # type: ignore[no-untyped-def]
    return gl.sum(mask.to(gl.int32), 0)


@gluon.jit
def _threshold(x, low, at_low, fewest, most):  # type: ignore[no-untyped-def]
    """A key that `fewest` to `most` scores reach; with too many ties at it, the last one that `fewest` reach.

    `at_low` scores reach `low`. Returns the key, how many reach it, and how many reach the one that was too high.
    """
    high = _key(gl.max(x, 0)) + 1
    at_high = 0
    # How far the counts are from the wanted one. The end that stays gets half of its weight, and the next trial is
    # nearer to it; a plain half now and then bounds the number of trials.
    over = at_low - fewest + 0.5
    under = fewest - 0.5
    moved = 0
    trial = 0
    while (at_low > most) & (high - low > 1):
        trial += 1
        share = gl.where(trial % 8 == 0, 0.5, over / (over + under))
        gap = high - low
        step = gl.minimum(gl.maximum((gap.to(gl.float32) * share).to(gl.uint32), 1), gap - 1)
        count = _count(x >= _score(low + step))
        if count >= fewest:
            low += step
            at_low = count
            over = count - fewest + 0.5
            under = gl.where(moved == 1, under * 0.5, under)
            moved = 1
        else:
            high = low + step
            at_high = count
            under = fewest - count - 0.5
            over = gl.where(moved == 2, over * 0.5, over)
            moved = 2
    return low, at_low, at_high


@gluon.jit
def _guess(source, low, high, aim, zero, SAMPLE: gl.constexpr):  # type: ignore[no-untyped-def]
    """A key that about `aim` scores of a row reach."""
    span = high - low
    sample = zero + gl.arange(0, SAMPLE, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    chunk = (sample // CHUNK).to(gl.int64) * span // (SAMPLE // CHUNK)
    position = low + chunk.to(gl.int32) + sample % CHUNK
    x = gl.load(source + position, mask=position < high, other=float("-inf")).to(gl.float32)
    usable = x > float("-inf")
    x = gl.where(usable, x, float("-inf"))
    number = _count(usable)
    rank = gl.maximum(aim * SAMPLE // span, 1)
    most = rank + rank // 16
    least = _key(gl.min(gl.where(usable, x, float("inf")), 0))
    # With few usable scores everything is wanted.
    least = gl.where(number > most, least, gl.cast(LOWEST, gl.uint32))
    reached, _, _ = _threshold(x, least, number, rank - rank // 16, most)
    return reached


@gluon.jit
def _bytes(x):  # type: ignore[no-untyped-def]
    """The sum of the four bytes of an integer."""
    pairs = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
    return (pairs & 0xFFFF) + (pairs >> 16)


@gluon.jit
def _rank(mask):  # type: ignore[no-untyped-def]
    """Number of set elements of [warps, 4, 32, V] before each, and of all of them.

    The four groups of a warp, each of at most 128, are counted at once, in the four bytes of an integer.
    """
    ones = mask.to(gl.int32)
    lanes = gl.sum(ones, 3)
    W: gl.constexpr = gl.num_warps()
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    GROUPS: gl.constexpr = gl.SliceLayout(2, lanes.type.layout)
    WARPS: gl.constexpr = gl.SliceLayout(1, GROUPS)
    shift = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS)) * 8
    packed = gl.convert_layout(gl.sum(lanes << shift[None, :, None], 1), LINES, assert_trivial=True)
    before = gl.associative_scan(packed, 1, _add) - packed
    before = gl.convert_layout(before, gl.SliceLayout(1, lanes.type.layout), assert_trivial=True)
    whole = gl.convert_layout(gl.sum(packed, 1), WARPS, assert_trivial=True)
    first = _bytes(whole[:, None] & ((1 << shift) - 1)[None, :])
    total = _bytes(whole)
    if W > 1:
        other = gl.arange(0, W, layout=gl.SliceLayout(0, LINES))
        me = gl.arange(0, W, layout=gl.SliceLayout(1, LINES))
        total = gl.convert_layout(total, gl.SliceLayout(0, LINES))
        earlier = gl.sum(gl.where(other[None, :] < me[:, None], total[None, :], 0), 1)
        first += gl.convert_layout(earlier, WARPS, assert_trivial=True)[:, None]
    line = first[:, :, None] + ((before[:, None, :] >> shift[None, :, None]) & 0xFF)
    return line[:, :, :, None] + (gl.associative_scan(ones, 3, _add) - ones), gl.sum(total, 0)


@gluon.jit
def _append(  # type: ignore[no-untyped-def]
    source, out, low, high, bound, ties, room, V: gl.constexpr, TIES: gl.constexpr, LAST: gl.constexpr
):  # fmt: skip
    """Writes, in order, the scores that reach the bound; with TIES those above it and the first `ties` at it.

    From scores to candidates, or with LAST from candidates to columns. Ends early when more than `room` were written.
    Returns how many were.
    """
    W: gl.constexpr = gl.num_warps()
    STEP: gl.constexpr = W * 128 * V
    TILE: gl.constexpr = gl.BlockedLayout([1, 4, 1, V], [1, 1, 32, 1], [W, 1, 1, 1], [3, 2, 1, 0])
    LANES: gl.constexpr = gl.SliceLayout(3, TILE)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LANES)))[:, None, None]
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    element = gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, TILE))))
    vector = ((warp * 4 + group) * 32 + lane) * V
    first = low // 32 * 32
    above = 0
    equal = 0
    while (first < high) & (above <= room):
        column = (first + vector)[:, :, :, None] + element[None, None, None, :]
        address = source + gl.multiple_of(gl.max_contiguous(column, [1, 1, 1, V]), [1, 1, 1, V])
        # Whole vectors: `column` would be compared element by element, and loaded so.
        inside = (first + vector < high)[:, :, :, None] & (element >= 0)[None, None, None, :]
        loaded = gl.load(address, mask=inside)
        if LAST:
            x = (loaded >> 32).to(gl.uint32).to(gl.float32, bitcast=True)
        else:
            x = loaded.to(gl.float32)
        if (first < low) | (first + STEP > high):
            x = gl.where((column >= low) & (column < high), x, float("-inf"))
        if TIES:
            take = x > bound
            rank, total = _rank(take)
            slot = above + rank
            above += total
            rank, total = _rank(x == bound)
            take = take | ((x == bound) & (equal + rank < ties))
            slot += gl.minimum(equal + rank, ties)
            equal += total
        else:
            take = x >= bound
            rank, total = _rank(take)
            slot = above + rank
            above += total
        if LAST:
            gl.store(out + slot, loaded.to(gl.int32), mask=take)
        else:
            # By way of uint32: the upper half needs no instruction then.
            lower_half = column.to(gl.uint32).to(gl.uint64)
            bits = x.to(gl.uint32, bitcast=True).to(gl.uint64)
            gl.store(out + slot, (bits << 32) | lower_half, mask=take)
        first += STEP
    return above + gl.minimum(equal, ties)


@gluon.jit(do_not_specialize=["S", "k", "aim"])
def _topk_kernel(  # type: ignore[no-untyped-def]
    scores, starts, ends, picks, scratch, S, row_stride, N, k, aim,
    MOST: gl.constexpr, SAMPLE: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Programs walk rows. Each has room for MOST candidates, and for what one step may write beyond them."""
    W: gl.constexpr = gl.num_warps()
    kept = scratch + gl.program_id(0).to(gl.int64) * (MOST + W * 128 * V)
    words = kept.to(gl.pointer_type(gl.uint32), bitcast=True)
    rest = gl.arange(0, W * 32, layout=gl.BlockedLayout([1], [32], [W], [0]))
    for r in range(gl.program_id(0), S, gl.num_programs(0)):
        row = gl.cast(r, gl.int64)
        # Nothing, which the compiler cannot know: addresses that it works out ahead of the loop end up in local memory.
        zero = r % gl.num_programs(0) - gl.program_id(0)
        source = scores + row * row_stride
        out = picks + row * k
        low = gl.maximum(gl.load(starts + row), 0)
        high = gl.minimum(gl.load(ends + row), N)
        guess = gl.cast(LOWEST, gl.uint32)
        if high - low > MOST:
            guess = _guess(source, low, high, aim, zero, SAMPLE)
        # More than MOST scores reach `lower`, as far as it was tried; fewer than k, `at_upper`, reach `upper`.
        lower = gl.cast(MINUS_INF, gl.uint32)
        upper = gl.cast(BEYOND, gl.uint32)
        at_upper = 0
        count = 0
        jump = gl.cast(1, gl.uint32)
        found = low >= high
        while found == 0:
            if upper - lower == 1:
                count = _append(source, kept, low, high, _score(lower), MOST - at_upper, MOST, V, True, False)
                guess = lower
                found = found | True
            else:
                count = _append(source, kept, low, high, _score(guess), 0, MOST, V, False, False)
                many = count > MOST
                found = (many == 0) & ((count >= k) | (guess == LOWEST))
                lower = gl.where(many, guess, lower)
                upper = gl.where(many, upper, guess)
                at_upper = gl.where(many, at_upper, count)
                # The guess may be a frequent value: try the next one. An eighth of its size is a good step otherwise.
                jump = gl.where(many, jump, gl.maximum(jump, 1 << 20))
                step = gl.minimum(jump, (upper - lower) // 2)
                guess = gl.where(found, guess, gl.where(many, lower + step, upper - step))
                jump = gl.minimum(gl.maximum(jump * 2, 1 << 20), 1 << 30)
            gl.thread_barrier()
        slot = zero + gl.arange(0, MOST, layout=gl.BlockedLayout([1], [32], [W], [0]))
        upper_half = gl.load(words + 2 * slot + 1, mask=slot < count, other=0xFF800000)
        reached, at_reached, above = _threshold(upper_half.to(gl.float32, bitcast=True), guess, count, k, k)
        if at_reached > k:
            total = _append(kept, out, 0, count, _score(reached), k - above, MOST, V, True, True)
        else:
            total = _append(kept, out, 0, count, _score(reached), 0, MOST, V, False, True)
        for first in range(total, k, W * 32):
            nothing = gl.full([W * 32], -1, gl.int32, rest.type.layout)
            gl.store(out + first + rest, nothing, mask=first + rest < k)
        gl.thread_barrier()


def topk(logits: torch.Tensor, k: int, starts: torch.Tensor, ends: torch.Tensor, picks: torch.Tensor) -> None:
    """Writes int32 [S, k]. Arguments as in `interface.topk`, already checked; at least one score."""
    S, N = logits.shape
    tile = config.row_tile(S, N, k)
    # Vectors of four where all rows consist of them.
    V = 4 if N % 4 == 0 and logits.stride(0) % 16 == 0 and logits.data_ptr() % 16 == 0 else 1
    room = tile.most + 128 * V * tile.warps
    programs = min(S, config.SCRATCH_BYTES // (8 * room))
    scratch = torch.empty(programs, room, dtype=torch.uint64, device=logits.device)
    _topk_kernel[(programs,)](
        logits,
        starts,
        ends,
        picks,
        scratch,
        S,
        logits.stride(0),
        N,
        k,
        isqrt(k * tile.most),  # the geometric mean: as far from too few as from too many
        MOST=tile.most,
        SAMPLE=tile.sample,
        V=V,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
