# SPDX-License-Identifier: Apache-2.0
"""The rotation of heads in Triton, forward and backward: one read and one write of the heads.

A program holds some heads with all their channels as (even, odd) pairs.
Without a norm the gradient is the inverse rotation. With it, g' being that and s = 1 / sqrt(mean(x²) + eps),

    dx = s · g' - x · s³ · mean(x · g')

Sums of two products are written as `fma`: which product of `a * b + c * d` is rounded, the compiler decides anew for
each register, so that a head's bits would depend on its place in the program.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.rotary import config


@triton.jit
def _pairs(X, rows, n_rows, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads as float32 (even, odd), each [BLOCK_R, BLOCK_D / 2]."""
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < n_rows)[:, None] & (d < D)
    x = tl.load(X + rows[:, None] * D + d, mask=inside, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, [BLOCK_R, BLOCK_D // 2, 2]))


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    even, odd, cos, sin, rows, n_rows, H, P, BACK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The pairs turned by their angles, or back. Those in front of the last P are kept: 0 · inf would make them NaN."""
    pair = tl.arange(0, BLOCK_D // 2)[None, :] - (D // 2 - P)
    place = (rows // H)[:, None] * P + pair
    turns = (rows < n_rows)[:, None] & (pair >= 0) & (pair < P)
    c, s = tl.load(cos + place, mask=turns, other=1.0), tl.load(sin + place, mask=turns, other=0.0)
    if BACK:
        s = -s
    return tl.where(turns, tl.fma(even, c, -odd * s), even), tl.where(turns, tl.fma(odd, c, even * s), odd)


@triton.jit
def _store(out, even, odd, rows, n_rows, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, BLOCK_D)[None, :]
    y = tl.reshape(tl.join(even, odd), [BLOCK_R, BLOCK_D]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * D + d, y, mask=(rows < n_rows)[:, None] & (d < D))


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    X,
    cos,
    sin,
    out,
    n_rows,
    H,
    P,
    eps,
    D: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    even, odd = _pairs(X, rows, n_rows, D, BLOCK_R, BLOCK_D)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.fma(even, even, odd * odd), 1) / D + eps)[:, None]
        even, odd = even * scale, odd * scale
    even, odd = _turn(even, odd, cos, sin, rows, n_rows, H, P, INVERSE, D, BLOCK_D)
    _store(out, even, odd, rows, n_rows, D, BLOCK_R, BLOCK_D)


@triton.jit
def _rotate_bwd_kernel(  # type: ignore[no-untyped-def]
    grad,
    X,
    cos,
    sin,
    dX,
    n_rows,
    H,
    P,
    eps,
    D: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    g_even, g_odd = _pairs(grad, rows, n_rows, D, BLOCK_R, BLOCK_D)
    g_even, g_odd = _turn(g_even, g_odd, cos, sin, rows, n_rows, H, P, not INVERSE, D, BLOCK_D)
    even, odd = _pairs(X, rows, n_rows, D, BLOCK_R, BLOCK_D)
    scale = tl.rsqrt(tl.sum(tl.fma(even, even, odd * odd), 1) / D + eps)[:, None]
    along = scale * scale * scale * (tl.sum(tl.fma(even, g_even, odd * g_odd), 1) / D)[:, None]
    d_even, d_odd = tl.fma(scale, g_even, -along * even), tl.fma(scale, g_odd, -along * odd)
    _store(dX, d_even, d_odd, rows, n_rows, D, BLOCK_R, BLOCK_D)


@torch.library.custom_op("vime_kernels::rotate", mutates_args=())
def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, norm_eps: float
) -> torch.Tensor:
    """Rotated heads [T, H, D]; checked and contiguous, a negative `norm_eps` for no norm."""
    T, H, D = x.shape
    out, tile = torch.empty_like(x), config.tile(D)
    if out.numel():
        _rotate_kernel[(triton.cdiv(T * H, tile["BLOCK_R"]),)](
            x,
            cos,
            sin,
            out,
            T * H,
            H,
            cos.shape[1],
            norm_eps,
            D=D,
            NORM=norm_eps >= 0,
            INVERSE=inverse,
            **tile,
        )
    return out


@rotate.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, norm_eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("vime_kernels::rotate_bwd", mutates_args=())
def rotate_bwd(
    grad: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, norm_eps: float
) -> torch.Tensor:
    """Gradient of normed and rotated heads with respect to x."""
    T, H, D = x.shape
    dx, tile = torch.empty_like(x), config.tile(D)
    if dx.numel():
        _rotate_bwd_kernel[(triton.cdiv(T * H, tile["BLOCK_R"]),)](
            grad, x, cos, sin, dx, T * H, H, cos.shape[1], norm_eps, D=D, INVERSE=inverse, **tile
        )
    return dx


@rotate_bwd.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, norm_eps: float
) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, cos, sin, ctx.inverse, ctx.norm_eps = inputs
    # Without a norm the heads are not needed, and a layer would keep its largest tensor for nothing.
    ctx.save_for_backward(cos, sin, *((x,) if ctx.norm_eps >= 0 else ()))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    cos, sin, *rest = ctx.saved_tensors
    if rest:
        return (
            rotate_bwd(grad.contiguous(), rest[0], cos, sin, ctx.inverse, ctx.norm_eps),
            None,
            None,
            None,
            None,
        )
    return rotate(grad.contiguous(), cos, sin, not ctx.inverse, -1.0), None, None, None, None


rotate.register_autograd(_backward, setup_context=_save)
