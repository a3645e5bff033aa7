# SPDX-License-Identifier: Apache-2.0
"""Clamped SwiGLU in Triton, forward and backward: a program holds a row, so the weight's gradient is one sum in it."""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.swiglu import config


@triton.jit
def _halves(X, row, F, limit, BLOCK_F: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gate and up in float32, as they are and clamped (a NaN stays one), the sigmoid of the gate, the channels."""
    f = tl.arange(0, BLOCK_F)
    gate = tl.load(X + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    clamped_gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    clamped_up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    clamped_up = tl.minimum(clamped_up, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, up, clamped_gate, clamped_up, tl.sigmoid(clamped_gate), f


@triton.jit
def _swiglu_kernel(X, weight, out, F, limit, WEIGHTED: tl.constexpr, BLOCK_F: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    _, _, gate, up, sigmoid, f = _halves(X, row, F, limit, BLOCK_F)
    y = gate * sigmoid * up
    if WEIGHTED:
        y *= tl.load(weight + row).to(tl.float32)
    tl.store(out + row * F + f, y.to(out.dtype.element_ty), mask=f < F)


@triton.jit
def _swiglu_bwd_kernel(  # type: ignore[no-untyped-def]
    grad, X, weight, dX, dweight, F, limit, WEIGHTED: tl.constexpr, BLOCK_F: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    gate, up, clamped_gate, clamped_up, sigmoid, f = _halves(X, row, F, limit, BLOCK_F)
    g = tl.load(grad + row * F + f, mask=f < F, other=0.0).to(tl.float32)
    silu = clamped_gate * sigmoid
    if WEIGHTED:
        tl.store(dweight + row, tl.sum(g * silu * clamped_up).to(dweight.dtype.element_ty))
        g *= tl.load(weight + row).to(tl.float32)
    dgate = g * clamped_up * (sigmoid + silu * (1 - sigmoid))
    dgate = tl.where(gate <= limit, dgate, 0.0)
    dup = tl.where((up >= -limit) & (up <= limit), g * silu, 0.0)
    tl.store(dX + row * 2 * F + f, dgate.to(dX.dtype.element_ty), mask=f < F)
    tl.store(dX + row * 2 * F + F + f, dup.to(dX.dtype.element_ty), mask=f < F)


@torch.library.custom_op("vime_kernels::swiglu", mutates_args=())
def swiglu(x: torch.Tensor, weight: torch.Tensor | None, limit: float) -> torch.Tensor:
    """[R, F] of [R, 2F] and a weight [R] or None; checked and contiguous."""
    R, F = x.shape[0], x.shape[1] // 2
    out = x.new_empty(R, F)
    if out.numel():
        _swiglu_kernel[(R,)](x, weight, out, F, limit, WEIGHTED=weight is not None, **config.tile(F))
    return out


@swiglu.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, limit: float) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@torch.library.custom_op("vime_kernels::swiglu_bwd", mutates_args=())
def swiglu_bwd(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight (empty without one)."""
    R, F = grad.shape
    dx = torch.empty_like(x)
    dweight = x.new_empty(0) if weight is None else torch.empty_like(weight)
    if grad.numel():
        _swiglu_bwd_kernel[(R,)](
            grad, x, weight, dx, dweight, F, limit, WEIGHTED=weight is not None, **config.tile(F)
        )
    return dx, dweight


@swiglu_bwd.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.limit = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    x, weight = ctx.saved_tensors
    dx, dweight = swiglu_bwd(grad.contiguous(), x, weight, ctx.limit)
    return dx, None if weight is None else dweight, None


swiglu.register_autograd(_backward, setup_context=_save)
