# SPDX-License-Identifier: Apache-2.0
"""Sums of listed rows in Triton: a program reads its rows and writes their sum, nothing in between."""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.gather_sum import config


@triton.jit
def _gather_sum_kernel(X, rows, out, R, C, K: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(rows + t * K + k).to(tl.int64)
        exists = (row >= 0) & (row < R)
        total += tl.load(X + row * C + c, mask=(c < C) & exists, other=0.0).to(tl.float32)
    tl.store(out + t * C + c, total.to(out.dtype.element_ty), mask=c < C)


@torch.library.custom_op("vime_kernels::gather_sum", mutates_args=())
def gather_sum(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[T, C] of x [R, C] and rows [T, K]; checked and contiguous."""
    C, (T, K) = x.shape[1], rows.shape
    out = x.new_empty(T, C)
    if out.numel():
        tile = config.tile(C)
        _gather_sum_kernel[(T, triton.cdiv(C, tile["BLOCK_C"]))](x, rows, out, len(x), C, K, **tile)
    return out


@gather_sum.register_fake
def _(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.new_empty(rows.shape[0], x.shape[1])
