# SPDX-License-Identifier: Apache-2.0
"""The split of the projection into pre, post and comb, with Sinkhorn, in Triton, forward and backward."""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.hyper_connection.triton_sinkhorn import BLOCK_T, normalise, normalise_grad


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
    """Gradient of the logits [T, W]."""
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
    g = tl.load(dcomb + t3 * (n * n) + ij, mask=t3 < T, other=0.0)
    g = normalise_grad(g, logit, divisors, t3, T, eps, ITERS, n)
    tl.store(dlogit + t3 * W + 2 * n + ij, g, mask=t3 < T)


@torch.library.custom_op("vime_kernels::mhc_split", mutates_args=())
def mhc_split(
    m: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, n: int, eps: float, iters: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre [T, n], post [T, n], comb [T, n, n]) from m [T, (2 + n) n], all float32."""
    T = len(m)
    pre, post, comb = m.new_empty(T, n), m.new_empty(T, n), m.new_empty(T, n, n)
    if T:
        _split_kernel[(triton.cdiv(T, BLOCK_T),)](
            m, scale, base, pre, post, comb, T, eps, ITERS=iters, n=n, BLOCK_T=BLOCK_T, num_warps=4
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
        _split_bwd_kernel[(triton.cdiv(T, BLOCK_T),)](
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
            BLOCK_T=BLOCK_T,
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
    gain = torch.cat([part.expand(size) for part, size in zip(scale.split(1), (n, n, n * n), strict=True)])
    by_column = (dlogit * m).sum(0).split([n, n, n * n])
    return dlogit * gain, torch.stack([part.sum() for part in by_column]), dlogit.sum(0), None, None, None


mhc_split.register_autograd(_split_backward, setup_context=_save_split)
