# SPDX-License-Identifier: Apache-2.0
"""Sums of gathered rows' gradients in a fixed order, for backward passes that have to repeat bitwise.

A kernel that would add the gradient of every slot to the row that the slot names writes it to a place of its own
instead, the places sorted by row; `add_segments` then adds up each row's run. No atomics, at the price of the sort
and of one row of memory for every slot.
"""

import torch
import triton
import triton.language as tl


def key_dtype(n: int) -> torch.dtype:
    """What holds 0 to n: half the digits to sort by, where they suffice."""
    return torch.int16 if n < 2**15 else torch.int32


def order(valid_SK: torch.Tensor, indices_SK: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`order_keys` of the rows that slots name; a slot that is not valid names none."""
    return order_keys(torch.where(valid_SK, indices_SK, n).flatten().to(key_dtype(n)), n)


def order_keys(keys: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of every slot in a stable sort by key, int32, and where each key's run begins, int32 [n + 1].

    Args:
        keys: one a slot, `key_dtype(n)`; n is no key, and such a slot has place -1.
    """
    keys, slots = keys.sort(stable=True)
    place = torch.empty(keys.shape, dtype=torch.int32, device=keys.device)
    if total := len(keys):
        _place_kernel[(triton.cdiv(total, 2048),)](keys, slots, place, n, total, BLOCK=2048, num_warps=8)
    boundaries = torch.arange(n + 1, dtype=keys.dtype, device=keys.device)
    return place, torch.searchsorted(keys, boundaries, out_int32=True)


@triton.jit(do_not_specialize=["n", "total"])
def _place_kernel(keys, slots, place, n, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """place[slots[i]] = i, or -1 where there is no key."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < total, other=0)
    slot = tl.load(slots + at, mask=at < total, other=0)
    tl.store(place + slot, tl.where(key < n, at, -1).to(tl.int32), mask=at < total)


@triton.jit(do_not_specialize=["per_slot"])
def _segment_kernel(  # type: ignore[no-untyped-def]
    parts, offsets, out, per_slot, D, stride_out, BD: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """out[n] += Σ parts[offsets[n]:offsets[n + 1]], blocks of BR rows in order."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    begin = tl.load(offsets + row) * per_slot
    end = tl.load(offsets + row + 1) * per_slot
    if begin < end:
        acc = tl.zeros([BR, BD], tl.float32)
        for r0 in tl.range(begin, end, BR, num_stages=3):
            r = r0 + tl.arange(0, BR)
            at = parts + r.to(tl.int64)[:, None] * D + d[None, :]
            acc += tl.load(at, mask=(r < end)[:, None], other=0.0).to(tl.float32)
        at = out + row * stride_out + d
        tl.store(at, tl.load(at) + tl.sum(acc, 0))


def add_segments(
    parts: torch.Tensor, offsets: torch.Tensor, out_nD: torch.Tensor, *, per_slot: int = 1
) -> None:
    """Adds every run of `parts` [slots * per_slot, D] to its row of `out_nD`, float32."""
    n, D = out_nD.shape
    # The largest power of two, up to 512, of which D is a multiple.
    BD = min(512, D & -D)
    _segment_kernel[(n, D // BD)](
        parts, offsets, out_nD, per_slot, D, out_nD.stride(0), BD=BD, BR=4096 // BD, num_warps=4
    )
