# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn in Triton, forward and backward, alone and for the split of the mixes.

A thread has whole matrices: a program is one warp with a token per lane, so that no sum leaves a thread. The gradient
keeps the divisors of every step and undoes the steps from the last to the first, so that no intermediate matrix is
stored.
"""

from typing import Any

import torch
import triton
import triton.language as tl

# Tokens of a program, and its warps; more warps would take the rows of a matrix apart.
BLOCK_T, WARPS = 32, 1


@triton.jit
def softmax_rows(logit):  # type: ignore[no-untyped-def]
    """Softmax over the last dimension of [tokens, n, n]."""
    M = tl.exp(logit - tl.max(logit, 2, keep_dims=True))
    return M * (1.0 / tl.sum(M, 2, keep_dims=True))


@triton.jit
def normalise(logit, eps, ITERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Almost doubly stochastic matrices [tokens, n, n] from logits."""
    M = softmax_rows(logit) + eps
    M *= 1.0 / (tl.sum(M, 1, keep_dims=True) + eps)
    for _ in range(ITERS - 1):
        M *= 1.0 / (tl.sum(M, 2, keep_dims=True) + eps)
        M *= 1.0 / (tl.sum(M, 1, keep_dims=True) + eps)
    return M


@triton.jit
def normalise_grad(g, logit, divisors, eps, ITERS: tl.constexpr, n: tl.constexpr, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of the logits from that of the matrices; `divisors` is workspace, [programs, 2 ITERS, BLOCK_T, n]."""
    i = tl.arange(0, n)
    STEP: tl.constexpr = BLOCK_T * n
    token = tl.program_id(0).to(tl.int64) * (2 * ITERS * STEP) + tl.arange(0, BLOCK_T)[:, None, None] * n
    column_slot = divisors + token + i[None, None, :]
    row_slot = divisors + token + STEP + i[None, :, None]
    softmax = softmax_rows(logit)
    M = softmax + eps
    column = tl.sum(M, 1, keep_dims=True) + eps
    tl.store(column_slot, column)
    M *= 1.0 / column
    for step in range(1, ITERS):
        row = tl.sum(M, 2, keep_dims=True) + eps
        tl.store(row_slot + (step - 1) * 2 * STEP, row)
        M *= 1.0 / row
        column = tl.sum(M, 1, keep_dims=True) + eps
        tl.store(column_slot + step * 2 * STEP, column)
        M *= 1.0 / column
    tl.debug_barrier()  # the divisors may be read by other threads than the ones that wrote them
    for undo in range(1, ITERS):
        step = ITERS - undo
        column = tl.load(column_slot + step * 2 * STEP)
        g = (g - tl.sum(g * M, 1, keep_dims=True)) * (1.0 / column)
        M *= column
        row = tl.load(row_slot + (step - 1) * 2 * STEP)
        g = (g - tl.sum(g * M, 2, keep_dims=True)) * (1.0 / row)
        M *= row
    column = tl.load(column_slot)
    g = (g - tl.sum(g * M, 1, keep_dims=True)) * (1.0 / column)
    return softmax * (g - tl.sum(g * softmax, 2, keep_dims=True))


def workspace(like: torch.Tensor, n: int, iters: int) -> torch.Tensor:
    """Where `normalise_grad` keeps the divisors of matrices for as many tokens as `like` has, float32."""
    return like.new_empty(triton.cdiv(len(like), BLOCK_T), 2 * iters, BLOCK_T, n, dtype=torch.float32)


@triton.jit
def _tile(n: tl.constexpr, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens [BLOCK_T, 1, 1] of this program, and offsets of a matrix [1, n, n]."""
    i = tl.arange(0, n)
    t3 = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]
    return t3, i[None, :, None] * n + i[None, None, :]


@triton.jit(do_not_specialize=["T"])
def _sinkhorn_kernel(logits, out, T, eps, ITERS: tl.constexpr, n: tl.constexpr, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    t3, ij = _tile(n, BLOCK_T)
    at = t3 * (n * n) + ij
    logit = tl.load(logits + at, mask=t3 < T, other=0.0).to(tl.float32)
    tl.store(out + at, normalise(logit, eps, ITERS), mask=t3 < T)


@triton.jit(do_not_specialize=["T"])
def _sinkhorn_bwd_kernel(  # type: ignore[no-untyped-def]
    grad, logits, divisors, dlogits, T, eps, ITERS: tl.constexpr, n: tl.constexpr, BLOCK_T: tl.constexpr
):
    t3, ij = _tile(n, BLOCK_T)
    at = t3 * (n * n) + ij
    logit = tl.load(logits + at, mask=t3 < T, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=t3 < T, other=0.0)
    g = normalise_grad(g, logit, divisors, eps, ITERS, n, BLOCK_T)
    tl.store(dlogits + at, g.to(dlogits.dtype.element_ty), mask=t3 < T)


@torch.library.custom_op("vime_kernels::sinkhorn", mutates_args=())
def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """float32 [T, n, n]; arguments as in `interface.sinkhorn`, already checked, contiguous."""
    T, n, _ = logits.shape
    out = torch.empty(T, n, n, dtype=torch.float32, device=logits.device)
    if T:
        _sinkhorn_kernel[(triton.cdiv(T, BLOCK_T),)](
            logits, out, T, eps, ITERS=iters, n=n, BLOCK_T=BLOCK_T, num_warps=WARPS
        )
    return out


@sinkhorn.register_fake
def _(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


@torch.library.custom_op("vime_kernels::sinkhorn_bwd", mutates_args=())
def sinkhorn_bwd(grad: torch.Tensor, logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Gradient of the logits, in their dtype."""
    T, n, _ = logits.shape
    dlogits = torch.empty_like(logits)
    if T:
        _sinkhorn_bwd_kernel[(triton.cdiv(T, BLOCK_T),)](
            grad,
            logits,
            workspace(grad, n, iters),
            dlogits,
            T,
            eps,
            ITERS=iters,
            n=n,
            BLOCK_T=BLOCK_T,
            num_warps=WARPS,
        )
    return dlogits


@sinkhorn_bwd.register_fake
def _(grad: torch.Tensor, logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    logits, ctx.iters, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return sinkhorn_bwd(grad.contiguous(), *ctx.saved_tensors, ctx.iters, ctx.eps), None, None


sinkhorn.register_autograd(_backward, setup_context=_save)
