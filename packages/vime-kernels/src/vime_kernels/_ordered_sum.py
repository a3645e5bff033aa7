# SPDX-License-Identifier: Apache-2.0
"""Sums of gathered rows' gradients in a fixed order, for backward passes that have to repeat bitwise.

A kernel that would add the gradient of every slot to the row that the slot names writes it to a place of its own
instead, the places sorted by row; `add_segments` then adds up each row's run. No atomics, at the price of the sort
and of one row of memory for every slot.
"""

import torch
import triton
import triton.language as tl


def order(valid_SK: torch.Tensor, indices_SK: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of every slot in a stable sort by row, int32 [S * K], and where each row's run begins, int32 [n + 1].

    Slots that are not valid come last, behind the run of row n - 1.
    """
    rows = torch.where(valid_SK, indices_SK, n).flatten()
    # Half the digits to sort by, where they suffice.
    rows, slots = rows.to(torch.int16 if n < 2**15 else rows.dtype).sort(stable=True)
    place = torch.empty(rows.shape, dtype=torch.int32, device=rows.device)
    place[slots] = torch.arange(len(slots), dtype=torch.int32, device=rows.device)
    boundaries = torch.arange(n + 1, dtype=rows.dtype, device=rows.device)
    return place, torch.searchsorted(rows, boundaries, out_int32=True)


@triton.jit
def _segment_kernel(parts, offsets, out, D, stride_out, BD: tl.constexpr, BR: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[n] += Σ parts[offsets[n]:offsets[n + 1]], blocks of BR rows in order."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if begin < end:
        acc = tl.zeros([BR, BD], tl.float32)
        for r0 in tl.range(begin, end, BR, num_stages=3):
            r = r0 + tl.arange(0, BR)
            at = parts + r.to(tl.int64)[:, None] * D + d[None, :]
            acc += tl.load(at, mask=(r < end)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        at = out + row * stride_out + d
        tl.store(at, tl.load(at, mask=d < D, other=0.0) + tl.sum(acc, 0), mask=d < D)


def add_segments(parts: torch.Tensor, offsets: torch.Tensor, out_nD: torch.Tensor) -> None:
    """Adds every run of `parts` [S * K, D] to its row of `out_nD`, float32."""
    n, D = out_nD.shape
    BD = min(512, triton.next_power_of_2(D))
    _segment_kernel[(n, triton.cdiv(D, BD))](
        parts, offsets, out_nD, D, out_nD.stride(0), BD=BD, BR=8, num_warps=4
    )
