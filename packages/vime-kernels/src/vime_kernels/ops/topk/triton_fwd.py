# SPDX-License-Identifier: Apache-2.0
"""Canonical top-k in Triton: a row is read from memory once, whatever its length, and a sample of it once more.

A row that fits in the registers of a program is selected exactly: the bits of the k-th best score are decided from the
top, each by a count. A long row is thinned out first. From a sample a threshold is guessed that somewhat more than k
scores exceed; one walk over the row appends those in column order, and what is left is selected exactly. When the walk
finds fewer than k or more than fit, it is repeated with another threshold; when one value is so frequent that no
threshold does, its leftmost occurrences are appended. Both ways the candidates hold the k best and stay in column
order, so ties go to the smaller column. On Hopper `gluon_fwd` does the same in one launch.

The result equals `reference.topk(..., ascending=True)` exactly. Source of the ideas: radix selection as in RadiK (Li
et al., 2024) and the top-k kernels of SGLang; a threshold from a sample as in Floyd and Rivest (1975).
"""

from math import isqrt

import torch
import triton
import triton.language as tl

from vime_kernels.ops.topk import config

MINUS_INF, PLUS_INF = tl.constexpr(0x007FFFFF), tl.constexpr(0xFF800000)  # as `_ordered` would have them
CHUNK = tl.constexpr(32)  # consecutive columns of the sample, 128 bytes of float32


@triton.jit
def _range(starts, ends, row, N):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.load(starts + row), 0), tl.minimum(tl.load(ends + row), N)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """uint32 with the order of the scores; 0 for what is never picked, -inf and NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)  # -0 is +0
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x > float("-inf"), key, 0)


@triton.jit
def _score(key):  # type: ignore[no-untyped-def]
    """The score that `_ordered` turns into this key."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _count(mask):  # type: ignore[no-untyped-def]
    return tl.sum(mask.to(tl.int32))


@triton.jit
def _threshold(key, fewest, most):  # type: ignore[no-untyped-def]
    """A threshold that `fewest` to `most` keys reach; with too many ties at it, the only one that `fewest` reach."""
    # Invariant: `at_low` keys, at least `fewest` if there are so many, reach `low`; `at_high`, fewer, reach `high`.
    at_low = _count(key != 0)
    low = tl.where(at_low > most, tl.min(tl.where(key != 0, key, 0xFFFFFFFF)), 1)
    high = tl.max(key) + 1
    at_high = 0
    trial = 0
    while (at_low > most) & (high - low > 1):
        # The number of keys falls nearly evenly between the two, most of the time: every third trial halves the gap.
        share = tl.where(trial % 3 == 2, 0.5, (at_low - fewest + 0.5) / (at_low - at_high).to(tl.float32))
        gap = high - low
        step = tl.minimum(tl.maximum((gap.to(tl.float32) * share).to(tl.uint32), 1), gap - 1)
        count = _count(key >= low + step)
        enough = count >= fewest
        at_low, at_high = tl.where(enough, count, at_low), tl.where(enough, at_high, count)
        low, high = tl.where(enough, low + step, low), tl.where(enough, high, low + step)
        trial += 1
    return low


@triton.jit
def _guess_kernel(scores, starts, ends, guesses, row_stride, N, aim, most, SAMPLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """For every row a key that about `aim` scores exceed."""
    row = tl.program_id(0).to(tl.int64)
    low, high = _range(starts, ends, row, N)
    span = high - low
    guess = tl.full((), MINUS_INF, tl.uint32)
    if span > most:
        sample = tl.arange(0, SAMPLE)
        chunk = (sample // CHUNK).to(tl.int64) * span // (SAMPLE // CHUNK)
        position = low + chunk + sample % CHUNK
        x = tl.load(scores + row * row_stride + position, mask=position < high, other=float("-inf"))
        rank = tl.maximum(aim * SAMPLE // span, 1)
        reached = _threshold(_ordered(x.to(tl.float32)), rank - rank // 16, rank + rank // 16)
        # The key before that of 0 belongs to -0, which no zero exceeds.
        guess = tl.maximum(reached - tl.where(reached == 0x80000000, 2, 1).to(tl.uint32), guess)
    tl.store(guesses + row, guess)


@triton.jit
def _rank(mask):  # type: ignore[no-untyped-def]
    """Number of set elements of [32, groups, 4] before each, in the order group, line, lane; and of all of them.

    The four lines of a group are counted at once, in the four bytes of an integer.
    """
    shift = tl.arange(0, 4)[None, None, :] * 8
    lines = tl.sum(mask.to(tl.int32) << shift, 2)
    whole = tl.sum(lines, 0) * 0x01010101  # byte i: lines up to i
    before = tl.cumsum(lines, 0) - lines + (whole << 8)[None, :]
    group = (whole >> 24) & 0xFF
    first = tl.cumsum(group, 0) - group
    return first[None, :, None] + ((before[:, :, None] >> shift) & 0xFF), tl.sum(group)


@triton.jit
def _append(scores, kept, low, high, bound, ties, most, GROUPS: tl.constexpr, TIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the first `most` scores above the bound, and with TIES the first `ties` at it. How many are above."""
    BLOCK: tl.constexpr = GROUPS * 128
    # A lane has one column of each line, as the stores below need it: wider loads would be exchanged between threads,
    # and so would be anything else that the compiler makes of a run of columns.
    line = tl.arange(0, GROUPS)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    within = tl.arange(0, 32)[:, None, None] + line * 32
    start = low // 32 * 32
    position = tl.max_contiguous(start + within, [1, 1, 1])
    ahead = tl.load(scores + position, mask=(position >= low) & (position < high), other=float("-inf"))
    above = 0
    equal = 0
    for first in range(start, high, BLOCK):
        x = ahead.to(tl.float32)
        position = tl.max_contiguous(first + BLOCK + within, [1, 1, 1])
        ahead = tl.load(scores + position, mask=position < high, other=float("-inf"))
        take = x > bound
        rank, total = _rank(take)
        slot = above + rank
        above += total
        if TIES:
            rank, total = _rank(x == bound)
            take = take | ((x == bound) & (equal + rank < ties))
            slot += tl.minimum(equal + rank, ties)
            equal += total
        candidate = (x.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | (first + within).to(tl.uint64)
        tl.store(kept + slot, candidate, mask=take & (slot < most))
    return above


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    scores, starts, ends, guesses, kept, counts, row_stride, N, k, most, GROUPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    low, high = _range(starts, ends, row, N)
    scores += row * row_stride
    kept += row * most
    threshold = tl.load(guesses + row)
    # More than `most` scores exceed `lower`, as far as it was tried; fewer than k exceed `upper`.
    lower = tl.full((), MINUS_INF - 1, tl.uint32)
    upper = tl.full((), PLUS_INF, tl.uint32)
    above_upper = 0
    count = 0
    step = tl.full((), 1, tl.uint32)
    found = low >= high
    while found == 0:
        if upper - lower == 1:
            _append(scores, kept, low, high, _score(upper), most - above_upper, most, GROUPS, True)
            count = most
            found = found | True
        else:
            count = _append(scores, kept, low, high, _score(threshold), 0, most, GROUPS, False)
            found = (count <= most) & ((count >= k) | (threshold == MINUS_INF))
            many = count > most
            lower = tl.where(many, threshold, lower)
            upper = tl.where(many, upper, threshold)
            above_upper = tl.where(many, above_upper, count)
            # The first guess may be a frequent value: try the next one. An eighth of its size is a good step otherwise.
            step = tl.where(many, step, tl.maximum(step, 1 << 20))
            jump = tl.minimum(step, (upper - lower) // 2)
            threshold = tl.where(many, lower + jump, upper - jump)
            step = tl.minimum(tl.maximum(step * 2, 1 << 20), 1 << 30)
    tl.store(counts + row, count)


@triton.jit
def _select_kernel(  # type: ignore[no-untyped-def]
    source,
    starts,
    ends,
    picks,
    row_stride,
    N,
    k,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The exact selection, from the scores or from the candidates of `_gather_kernel`; `ends` are then their number."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    source += row * row_stride + lane
    if CANDIDATES:
        inside = lane < tl.load(ends + row)
        candidate = tl.load(source, mask=inside, other=0)
        x = (candidate >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
        key = tl.where(inside, _ordered(x), 0)
        column = candidate.to(tl.int32)
    else:
        low, high = _range(starts, ends, row, N)
        key = _ordered(
            tl.load(source, mask=(lane >= low) & (lane < high), other=float("-inf")).to(tl.float32)
        )
        column = lane
    threshold = _threshold(key, k, k)
    above = key > threshold
    equal = (key == threshold) & (key != 0)
    # Both counts in one number; a block has fewer than 2**15 columns.
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both) - both
    total = tl.sum(both)
    ties = k - (total & 0xFFFF)
    take = above | (equal & ((before >> 16) < ties))
    picks += row * k
    tl.store(picks + (before & 0xFFFF) + tl.minimum(before >> 16, ties), column, mask=take)
    slot = tl.arange(0, BLOCK_K)
    tl.store(picks + slot, -1, mask=(slot >= (total & 0xFFFF) + (total >> 16)) & (slot < k))


@torch.library.custom_op("vime_kernels::topk", mutates_args=())
def topk(logits: torch.Tensor, k: int, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """int32 [S, k]: the picks under the canonical rule. Arguments as in `interface.topk`, already checked."""
    S, N = logits.shape
    picks = torch.empty(S, k, dtype=torch.int32, device=logits.device)
    if not S or not N:
        return picks.fill_(-1)
    if config.hopper(logits):
        from vime_kernels.ops.topk import gluon_fwd

        gluon_fwd.topk(logits, k, starts, ends, picks)
        return picks
    if N <= config.EXACT_WIDTH:
        _select(logits, starts, ends, picks)
        return picks
    most = config.most_kept(k, N)
    step = max(1, config.SCRATCH_BYTES // (8 * most))
    for first in range(0, S, step):
        rows = slice(first, min(first + step, S))
        kept, counts = _thin_out(logits[rows], k, starts[rows], ends[rows], most)
        _select(kept, counts, counts, picks[rows])
    return picks


@topk.register_fake
def _(logits: torch.Tensor, k: int, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], k, dtype=torch.int32)


def _thin_out(
    logits: torch.Tensor, k: int, starts: torch.Tensor, ends: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates [S, most], score and column in one integer, in column order; and their numbers [S]."""
    S, N = logits.shape
    guesses = torch.empty(S, dtype=torch.uint32, device=logits.device)
    counts = torch.empty_like(starts)
    kept = torch.empty(S, most, dtype=torch.uint64, device=logits.device)
    sample = min(config.MAX_SAMPLE, triton.next_power_of_2(max(128, N // config.SAMPLED_ONE_OF)))
    stride = logits.stride(0)
    # The geometric mean of k and `most`: as far from too few as from too many.
    _guess_kernel[(S,)](
        logits,
        starts,
        ends,
        guesses,
        stride,
        N,
        isqrt(k * most),
        most,
        SAMPLE=sample,
        num_warps=max(1, sample // 1024),
    )
    _gather_kernel[(S,)](
        logits,
        starts,
        ends,
        guesses,
        kept,
        counts,
        stride,
        N,
        k,
        most,
        GROUPS=config.GATHER_WARPS * config.GATHER_GROUPS,
        num_warps=config.GATHER_WARPS,
    )
    return kept, counts


def _select(source: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, picks: torch.Tensor) -> None:
    S, N = source.shape
    k = picks.shape[1]
    block = max(128, triton.next_power_of_2(N))
    _select_kernel[(S,)](
        source,
        starts,
        ends,
        picks,
        source.stride(0),
        N,
        k,
        CANDIDATES=source.dtype == torch.uint64,
        BLOCK=block,
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=max(1, block // config.SELECT_COLUMNS),
        maxnreg=config.SELECT_REGISTERS,
    )
