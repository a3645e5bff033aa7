# SPDX-License-Identifier: Apache-2.0
"""The split of the projection into pre, post and comb, with Sinkhorn, in Triton, forward and backward."""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.hyper_connection.triton_sinkhorn import (
    BLOCK_T,
    WARPS,
    normalise,
    normalise_grad,
    workspace,
)


@triton.jit
def _logits(m, scale, base, t, T, W, part: tl.constexpr, first: tl.constexpr, index):  # type: ignore[no-untyped-def]
    """m · scale + base of one of the three parts, shaped like `index` behind the tokens."""
    offset = first + index
    values = tl.load(m + t * W + offset, mask=t < T, other=0.0)
    return values * tl.load(scale + part) + tl.load(base + offset)


@triton.jit(do_not_specialize=["T"])
def _split_kernel(  # type: ignore[no-untyped-def]
    m, scale, base, pre, post, comb, T, eps, ITERS: tl.constexpr, n: tl.constexpr, BLOCK_T: tl.constexpr
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, n)
    W: tl.constexpr = (2 + n) * n
    t2, t3 = t[:, None], t[:, None, None]
    pre_logit = _logits(m, scale, base, t2, T, W, 0, 0, i[None, :])
    tl.store(pre + t2 * n + i[None, :], tl.sigmoid(pre_logit) + eps, mask=t2 < T)
    post_logit = _logits(m, scale, base, t2, T, W, 1, n, i[None, :])
    tl.store(post + t2 * n + i[None, :], 2 * tl.sigmoid(post_logit), mask=t2 < T)
    ij = i[None, :, None] * n + i[None, None, :]
    logit = _logits(m, scale, base, t3, T, W, 2, 2 * n, ij)
    tl.store(comb + t3 * (n * n) + ij, normalise(logit, eps, ITERS), mask=t3 < T)


@triton.jit
def _put(dm, partial, dlogit, m, scale, t, T, W, part: tl.constexpr, first: tl.constexpr, index):  # type: ignore[no-untyped-def]
    """Stores the gradient of one part of m, and the program's share of those of base and scale."""
    offset = first + index
    tl.store(dm + t * W + offset, dlogit * tl.load(scale + part), mask=t < T)
    share = partial + tl.program_id(0) * (W + 3)
    tl.store(share + offset, tl.sum(dlogit, 0, keep_dims=True))
    value = tl.load(m + t * W + offset, mask=t < T, other=0.0)
    tl.store(share + W + part, tl.sum(dlogit * value))


@triton.jit(do_not_specialize=["T"])
def _split_bwd_kernel(  # type: ignore[no-untyped-def]
    dpre, dpost, dcomb, m, scale, base, divisors, dm, partial, T, eps,
    ITERS: tl.constexpr, n: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradient of m [T, W], and of base and scale, summed over the program's tokens, [programs, W + 3]."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, n)
    W: tl.constexpr = (2 + n) * n
    t2, t3 = t[:, None], t[:, None, None]
    s = tl.sigmoid(_logits(m, scale, base, t2, T, W, 0, 0, i[None, :]))
    g = tl.load(dpre + t2 * n + i[None, :], mask=t2 < T, other=0.0)
    _put(dm, partial, g * s * (1 - s), m, scale, t2, T, W, 0, 0, i[None, :])
    s = tl.sigmoid(_logits(m, scale, base, t2, T, W, 1, n, i[None, :]))
    g = tl.load(dpost + t2 * n + i[None, :], mask=t2 < T, other=0.0)
    _put(dm, partial, 2 * g * s * (1 - s), m, scale, t2, T, W, 1, n, i[None, :])

    ij = i[None, :, None] * n + i[None, None, :]
    logit = _logits(m, scale, base, t3, T, W, 2, 2 * n, ij)
    g = tl.load(dcomb + t3 * (n * n) + ij, mask=t3 < T, other=0.0)
    g = normalise_grad(g, logit, divisors, eps, ITERS, n, BLOCK_T)
    _put(dm, partial, g, m, scale, t3, T, W, 2, 2 * n, ij)


@torch.library.custom_op("vime_kernels::mhc_split", mutates_args=())
def mhc_split(
    m: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, eps: float, iters: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [T, n], post [T, n], comb [T, n, n]) from m [T, (2 + n) n], all float32."""
    T = len(m)
    pre, post, comb = m.new_empty(T, n), m.new_empty(T, n), m.new_empty(T, n, n)
    if T:
        _split_kernel[(triton.cdiv(T, BLOCK_T),)](
            m, scale, base, pre, post, comb, T, eps, ITERS=iters, n=n, BLOCK_T=BLOCK_T, num_warps=WARPS
        )
    return pre, post, comb


@mhc_split.register_fake
def _(
    m: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, eps: float, iters: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T = m.shape[0]
    return m.new_empty(T, n), m.new_empty(T, n), m.new_empty(T, n, n)


@torch.library.custom_op("vime_kernels::mhc_split_bwd", mutates_args=())
def mhc_split_bwd(
    dpre: torch.Tensor,
    dpost: torch.Tensor,
    dcomb: torch.Tensor,
    m: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of m, [T, (2 + n) n], and of base and scale one behind the other, [(2 + n) n + 3]."""
    T, n = dpre.shape
    dm, programs = torch.empty_like(m), triton.cdiv(T, BLOCK_T)
    partial = m.new_empty(programs, m.shape[1] + 3)
    if T:
        _split_bwd_kernel[(programs,)](
            dpre, dpost, dcomb, m, scale, base, workspace(m, n, iters), dm, partial, T, eps,
            ITERS=iters, n=n, BLOCK_T=BLOCK_T, num_warps=WARPS,
        )  # fmt: skip
    return dm, partial.sum(0)


@mhc_split_bwd.register_fake
def _(
    dpre: torch.Tensor,
    dpost: torch.Tensor,
    dcomb: torch.Tensor,
    m: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return m.new_empty(m.shape), m.new_empty(m.shape[1] + 3)


def _save_split(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    m, scale, base, ctx.n, ctx.eps, ctx.iters = inputs
    ctx.save_for_backward(m, scale, base)


def _split_backward(
    ctx: Any, dpre: torch.Tensor, dpost: torch.Tensor, dcomb: torch.Tensor
) -> tuple[Any, ...]:
    m, scale, base = ctx.saved_tensors
    dm, sums = mhc_split_bwd(
        dpre.contiguous(), dpost.contiguous(), dcomb.contiguous(), m, scale, base, ctx.eps, ctx.iters
    )
    dbase, dscale = sums.split([len(base), len(scale)])
    return dm, dscale, dbase, None, None, None


mhc_split.register_autograd(_split_backward, setup_context=_save_split)
