# SPDX-License-Identifier: Apache-2.0
"""Chosen pools as tokens in Triton: expansion, whole prefix, tail and padding of a row in one launch.

And which pools a row may choose from, in one launch before it.
"""

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["S", "B"])
def _ranges_kernel(cu_seqlens, positions, starts, ends, S, B, kpool):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + row, mask=row < S, other=-1)
    base = tl.zeros([BLOCK], tl.int32)
    start = tl.zeros([BLOCK], tl.int32)
    visible = tl.zeros([BLOCK], tl.int32)
    first = tl.load(cu_seqlens)
    for b in range(B):
        end = tl.load(cu_seqlens + b + 1)
        inside = (position >= first) & (position < end)
        start = tl.where(inside, base, start)
        visible = tl.where(inside, (position - first + 1) // kpool, visible)
        base += (end - first) // kpool
        first = end
    tl.store(starts + row, start, mask=row < S)
    tl.store(ends + row, start + visible, mask=row < S)


@triton.jit(do_not_specialize=["B"])
def _expand_kernel(  # type: ignore[no-untyped-def]
    pools, starts, cu_seqlens, positions, tokens, B, P, budget, W, kpool: tl.constexpr, TAIL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    inside = (position >= 0) & (position < tl.load(cu_seqlens + B))
    low, high = 0, B  # the sequence is in [low, high): the last one that starts at or before the position
    while high - low > 1:
        middle = (low + high) // 2
        before = inside & (tl.load(cu_seqlens + middle) <= position)
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    first = tl.load(cu_seqlens + low)
    seen = tl.where(inside, position - first + 1, 0)
    short = seen <= budget
    # Pools come first and are full, so slot w holds token w mod kpool of pool w // kpool.
    chosen = 0
    for begin in range(0, P, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        chosen += tl.sum((tl.load(pools + row * P + slot, mask=slot < P, other=-1) >= 0).to(tl.int32))
    end = tl.where(short, seen, chosen * kpool)
    tail = 0
    if TAIL:
        tail = tl.where(short, 0, seen % kpool)
    base = tl.load(starts + row)
    for begin in range(0, W, BLOCK):
        w = begin + tl.arange(0, BLOCK)
        pool = tl.load(pools + row * P + w // kpool, mask=(w < end) & (short == 0), other=0)
        token = first + tl.where(short, w, (pool - base) * kpool + w % kpool)
        token = tl.where(w < end, token, first + seen - tail + w - end)
        tl.store(tokens + row * W + w, tl.where(w < end + tail, token, -1), mask=w < W)


@torch.library.custom_op("vime_kernels::kpool_ranges", mutates_args=())
def kpool_ranges(
    cu_seqlens: torch.Tensor, positions: torch.Tensor, kpool: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts, ends) int32 [S] of the visible pools, as `causal_ranges` has them."""
    starts, ends = torch.empty_like(positions), torch.empty_like(positions)
    if len(positions):
        _ranges_kernel[(triton.cdiv(len(positions), BLOCK.value),)](
            cu_seqlens, positions, starts, ends, len(positions), len(cu_seqlens) - 1, kpool, num_warps=4
        )
    return starts, ends


@kpool_ranges.register_fake
def _(cu_seqlens: torch.Tensor, positions: torch.Tensor, kpool: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(positions), torch.empty_like(positions)


@torch.library.custom_op("vime_kernels::kpool_expand", mutates_args=())
def kpool_expand(
    pools: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    positions: torch.Tensor,
    kpool: int,
    tail: bool,
    width: int,
) -> torch.Tensor:
    """int32 [S, width] tokens of `pools` [S, P], ascending with -1 last; `starts` [S] is each row's first pool."""
    S, P = pools.shape
    tokens = torch.empty(S, width, dtype=torch.int32, device=pools.device)
    if S:
        _expand_kernel[(S,)](
            pools,
            starts,
            cu_seqlens,
            positions,
            tokens,
            len(cu_seqlens) - 1,
            P,
            P * kpool,
            width,
            kpool=kpool,
            TAIL=tail,
            num_warps=4,
        )
    return tokens


@kpool_expand.register_fake
def _(
    pools: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    positions: torch.Tensor,
    kpool: int,
    tail: bool,
    width: int,
) -> torch.Tensor:
    return pools.new_empty(pools.shape[0], width)
