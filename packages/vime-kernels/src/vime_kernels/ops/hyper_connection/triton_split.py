# SPDX-License-Identifier: Apache-2.0
"""The split of the projection into pre, post and comb, with Sinkhorn, in Triton, forward and backward.

Sinkhorn stays in registers. Its gradient keeps the divisors of every step and undoes the steps from the last to the
first, so that no intermediate matrix is stored.
"""

from typing import Any

import torch
import triton
import triton.language as tl


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
    M = tl.exp(logit - tl.max(logit, 2, keep_dims=True))
    M = M / tl.sum(M, 2, keep_dims=True) + eps
    M = M / (tl.sum(M, 1, keep_dims=True) + eps)
    for _ in range(ITERS - 1):
        M = M / (tl.sum(M, 2, keep_dims=True) + eps)
        M = M / (tl.sum(M, 1, keep_dims=True) + eps)
    tl.store(comb + t3 * (n * n) + ij, M, mask=t3 < T)


@triton.jit(do_not_specialize=["T"])
def _split_bwd_kernel(  # type: ignore[no-untyped-def]
    dpre,
    dpost,
    dcomb,
    m,
    scale,
    base,
    divisors,
    dlogit,
    T,
    eps,
    ITERS: tl.constexpr,
    n: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Gradient of the logits [T, W]. Sinkhorn runs once, keeps its divisors, and is then undone."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, n)
    W: tl.constexpr = (2 + n) * n
    t2, t3 = t[:, None], t[:, None, None]
    s = tl.sigmoid(_logits(m, scale, base, t2, T, W, 0, 0, i[None, :]))
    g = tl.load(dpre + t2 * n + i[None, :], mask=t2 < T, other=0.0)
    tl.store(dlogit + t2 * W + i[None, :], g * s * (1 - s), mask=t2 < T)
    s = tl.sigmoid(_logits(m, scale, base, t2, T, W, 1, n, i[None, :]))
    g = tl.load(dpost + t2 * n + i[None, :], mask=t2 < T, other=0.0)
    tl.store(dlogit + t2 * W + n + i[None, :], 2 * g * s * (1 - s), mask=t2 < T)

    ij = i[None, :, None] * n + i[None, None, :]
    logit = _logits(m, scale, base, t3, T, W, 2, 2 * n, ij)
    M = tl.exp(logit - tl.max(logit, 2, keep_dims=True))
    softmax = M / tl.sum(M, 2, keep_dims=True)
    M = softmax + eps
    column_slot = divisors + t3 * (2 * ITERS * n) + i[None, None, :]
    row_slot = divisors + t3 * (2 * ITERS * n) + n + i[None, :, None]
    column = tl.sum(M, 1, keep_dims=True) + eps
    tl.store(column_slot, column, mask=t3 < T)
    M = M / column
    for step in range(1, ITERS):
        row = tl.sum(M, 2, keep_dims=True) + eps
        tl.store(row_slot + (step - 1) * 2 * n, row, mask=t3 < T)
        M = M / row
        column = tl.sum(M, 1, keep_dims=True) + eps
        tl.store(column_slot + step * 2 * n, column, mask=t3 < T)
        M = M / column
    tl.debug_barrier()  # the divisors may be read by other threads than the ones that wrote them
    g = tl.load(dcomb + t3 * (n * n) + ij, mask=t3 < T, other=0.0)
    for undo in range(1, ITERS):
        step = ITERS - undo
        column = tl.load(column_slot + step * 2 * n, mask=t3 < T, other=1.0)
        g = (g - tl.sum(g * M, 1, keep_dims=True)) / column
        M *= column
        row = tl.load(row_slot + (step - 1) * 2 * n, mask=t3 < T, other=1.0)
        g = (g - tl.sum(g * M, 2, keep_dims=True)) / row
        M *= row
    column = tl.load(column_slot, mask=t3 < T, other=1.0)
    g = (g - tl.sum(g * M, 1, keep_dims=True)) / column
    g = softmax * (g - tl.sum(g * softmax, 2, keep_dims=True))
    tl.store(dlogit + t3 * W + 2 * n + ij, g, mask=t3 < T)


@torch.library.custom_op("vime_kernels::mhc_split", mutates_args=())
def mhc_split(
    m: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, eps: float, iters: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [T, n], post [T, n], comb [T, n, n]) from m [T, (2 + n) n], all float32."""
    T = len(m)
    pre, post, comb = m.new_empty(T, n), m.new_empty(T, n), m.new_empty(T, n, n)
    if T:
        _split_kernel[(triton.cdiv(T, 32),)](
            m, scale, base, pre, post, comb, T, eps, ITERS=iters, n=n, BLOCK_T=32, num_warps=4
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
) -> torch.Tensor:
    """Gradient of the logits m · scale + base, [T, (2 + n) n]."""
    T, n = dpre.shape
    dlogit = torch.empty_like(m)
    if T:
        divisors = m.new_empty(T, 2 * iters, n)
        _split_bwd_kernel[(triton.cdiv(T, 32),)](
            dpre,
            dpost,
            dcomb,
            m,
            scale,
            base,
            divisors,
            dlogit,
            T,
            eps,
            ITERS=iters,
            n=n,
            BLOCK_T=32,
            num_warps=4,
        )
    return dlogit


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
) -> torch.Tensor:
    return m.new_empty(m.shape)


def _save_split(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    m, scale, base, ctx.n, ctx.eps, ctx.iters = inputs
    ctx.save_for_backward(m, scale, base)


def _split_backward(
    ctx: Any, dpre: torch.Tensor, dpost: torch.Tensor, dcomb: torch.Tensor
) -> tuple[Any, ...]:
    m, scale, base = ctx.saved_tensors
    n = ctx.n
    dlogit = mhc_split_bwd(
        dpre.contiguous(), dpost.contiguous(), dcomb.contiguous(), m, scale, base, ctx.eps, ctx.iters
    )
    gain = scale.repeat_interleave(torch.tensor([n, n, n * n], device=scale.device), output_size=len(base))
    by_column = (dlogit * m).sum(0).split([n, n, n * n])
    return dlogit * gain, torch.stack([part.sum() for part in by_column]), dlogit.sum(0), None, None, None


mhc_split.register_autograd(_split_backward, setup_context=_save_split)
