# SPDX-License-Identifier: Apache-2.0
"""Before and behind the Hopper backward: where the picks of a row end, and dKV from places to channels.

A place is where `gluon_bwd_roles` keeps a channel of dKV: a thread of the kernel has RUN neighbours of 4 RUN.
"""

import torch
import triton
import triton.language as tl

from vime_kernels._slots import used_slots


@triton.jit
def in_order_kernel(src, dst, n, RUN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """From places to channels, in the dtype of dst."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.reshape(tl.load(src + at, mask=at < n, other=0.0), [BLOCK // (4 * RUN), 4, RUN // 2, 2])
    x = tl.reshape(tl.permute(x, (0, 2, 1, 3)), [BLOCK])
    tl.store(dst + at, x.to(dst.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def used_kernel(indices, lengths, used, n, K, stride_is, HAS_LENGTHS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One past the last slot of each row that names a key."""
    row = tl.program_id(0)
    count = used_slots(indices + row.to(tl.int64) * stride_is, n, K)
    if HAS_LENGTHS:
        count = tl.minimum(count, tl.load(lengths + row))
    tl.store(used + row, count)


def used_lengths(indices: torch.Tensor, lengths: torch.Tensor | None, n: int) -> torch.Tensor:
    """Lengths, int32 [S], that leave out the empty slots at the end of each row: no role goes through their tiles."""
    S, K = indices.shape
    used = torch.empty(S, dtype=torch.int32, device=indices.device)
    has = lengths is not None
    used_kernel[(S,)](indices, lengths if has else used, used, n, K, indices.stride(0), has, num_warps=1)
    return used


def in_order(dkv: torch.Tensor, like: torch.Tensor | None, run: int) -> torch.Tensor | None:
    """The gradient of one source, in its dtype, from its rows of the sum in places; `run` is 4 or 8."""
    if like is None:
        return None
    grad = torch.empty(dkv.shape, dtype=like.dtype, device=dkv.device)
    if n := dkv.numel():
        in_order_kernel[(triton.cdiv(n, 4096),)](dkv, grad, n, RUN=run, BLOCK=4096, num_warps=8)
    return grad
