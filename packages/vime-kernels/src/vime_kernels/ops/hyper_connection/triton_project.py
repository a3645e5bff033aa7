# SPDX-License-Identifier: Apache-2.0
"""The projection of the rms-normalised streams in Triton, forward and backward.

The projection multiplies bfloat16 streams by float32 rows of fn. fn is cut into three bfloat16 terms, which hold all
its 24 bits; the products are then exact and only the float32 sum rounds. Sums over channels are cut into pieces of
fixed length, so that a token's mixes do not depend on its neighbours.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.hyper_connection import config


@triton.jit
def _high_part(x):  # type: ignore[no-untyped-def]
    """(bfloat16 term, what it leaves of x)."""
    high = x.to(tl.bfloat16)
    return high, x - high.to(tl.float32)


@triton.jit
def _terms_kernel(fn, terms, W, K, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """fn as a sum of three bfloat16 tensors, [3, BLOCK_W, K], rows from W on zero."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.arange(0, BLOCK_W)
    rest = tl.load(fn + w[:, None] * K + k[None, :], mask=(w < W)[:, None] & (k < K)[None, :], other=0.0)
    for term in tl.static_range(3):
        high, rest = _high_part(rest)
        tl.store(terms + (term * BLOCK_W + w[:, None]) * K + k[None, :], high, mask=(k < K)[None, :])


@triton.jit(do_not_specialize=["T"])
def _project_kernel(  # type: ignore[no-untyped-def]
    X,
    fn,
    partial,
    squares,
    T,
    W,
    K,
    X_token,
    EXACT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One piece of the sums over channels: fn · X and X · X. fn is float32 [W, K], or its terms [3, BLOCK_W, K]."""
    piece = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_W)
    total_TW = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    square_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)  # summed over K at the end, once
    for first in range(piece * SPLIT_K, tl.minimum((piece + 1) * SPLIT_K, K), BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(
            X + t.to(tl.int64)[:, None] * X_token + k[None, :],
            mask=(t < T)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        if EXACT:
            f = tl.load(fn + w[None, :] * K + k[:, None], mask=(w < W)[None, :] & (k < K)[:, None], other=0.0)
            total_TW = tl.dot(x, f, total_TW, input_precision="ieee")
        else:
            # A fresh sum for every tile, small terms first: the tensor core truncates when it adds to a large one.
            sum_TW = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
            for term in tl.static_range(3):
                f = tl.load(
                    fn + ((2 - term) * BLOCK_W + w[None, :]) * K + k[:, None],
                    mask=(k < K)[:, None],
                    other=0.0,
                )
                sum_TW = tl.dot(x, f, sum_TW)
            total_TW += sum_TW
        x = x.to(tl.float32)
        square_TK += x * x
    row = piece.to(tl.int64) * T + t
    tl.store(partial + row[:, None] * BLOCK_W + w[None, :], total_TW, mask=(t < T)[:, None])
    tl.store(squares + row, tl.sum(square_TK, 1), mask=t < T)


@triton.jit(do_not_specialize=["T"])
def _normalise_kernel(  # type: ignore[no-untyped-def]
    partial,
    squares,
    m,
    inverse_rms,
    T,
    W,
    K,
    norm_eps,
    PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_W)
    total_TW = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    square_T = tl.zeros([BLOCK_T], tl.float32)
    for piece in range(PIECES):
        row = tl.cast(piece, tl.int64) * T + t
        total_TW += tl.load(partial + row[:, None] * BLOCK_W + w[None, :], mask=(t < T)[:, None], other=0.0)
        square_T += tl.load(squares + row, mask=t < T, other=0.0)
    scale_T = tl.rsqrt(square_T / K + norm_eps)
    tl.store(
        m + t[:, None] * W + w[None, :], total_TW * scale_T[:, None], mask=(t < T)[:, None] & (w < W)[None, :]
    )
    tl.store(inverse_rms + t, scale_T, mask=t < T)


@triton.jit(do_not_specialize=["T"])
def _unnormalise_kernel(  # type: ignore[no-untyped-def]
    dm, m, inverse_rms, dp, shrink, T, W, K, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, EXACT: tl.constexpr
):
    """Gradient of the sums before the norm, float32 or as two bfloat16 terms, and the share of the norm in dX / X."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_W)
    live_TW = (t < T)[:, None] & (w < W)[None, :]
    dm_TW = tl.load(dm + t[:, None] * W + w[None, :], mask=live_TW, other=0.0)
    m_TW = tl.load(m + t[:, None] * W + w[None, :], mask=live_TW, other=0.0)
    scale_T = tl.load(inverse_rms + t, mask=t < T, other=0.0)
    tl.store(shrink + t, -scale_T * scale_T * tl.sum(dm_TW * m_TW, 1) / K, mask=t < T)
    dp_TW = dm_TW * scale_T[:, None]
    target = dp + t[:, None] * BLOCK_W + w[None, :]
    if EXACT:
        tl.store(target, dp_TW, mask=(t < T)[:, None])
    else:
        high, rest = _high_part(dp_TW)
        tl.store(target, high, mask=(t < T)[:, None])
        tl.store(target + T * BLOCK_W, rest.to(tl.bfloat16), mask=(t < T)[:, None])


@triton.jit(do_not_specialize=["T"])
def _project_bwd_kernel(  # type: ignore[no-untyped-def]
    dp, shrink, X, fn, weights, grad, dX, dfn_partial, T, W, C, X_token,
    EXACT: tl.constexpr, ADD: tl.constexpr, SPAN: tl.constexpr, n: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dX of a block of channels for SPAN tokens, and their share of dfn; X is read once for both.

    With ADD the streams had another use, the sum weights [T, n] · X, and its gradient is added on the way.
    """
    stream = tl.program_id(0) % n
    c = tl.program_id(0) // n * BLOCK_C + tl.arange(0, BLOCK_C)
    k, K = stream * C + c, n * C
    span = tl.program_id(1)
    w = tl.arange(0, BLOCK_W)
    if EXACT:
        f0 = tl.load(fn + w[:, None] * K + k[None, :], mask=(w < W)[:, None] & (c < C)[None, :], other=0.0)
    else:
        f0 = tl.load(fn + w[:, None] * K + k[None, :], mask=(c < C)[None, :], other=0.0)
        f1 = tl.load(fn + (BLOCK_W + w[:, None]) * K + k[None, :], mask=(c < C)[None, :], other=0.0)
    dfn_CW = tl.zeros([BLOCK_C, BLOCK_W], tl.float32)
    for first in range(span * SPAN, tl.minimum((span + 1) * SPAN, T), BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        live_TC = (t < T)[:, None] & (c < C)[None, :]
        x = tl.load(X + t.to(tl.int64)[:, None] * X_token + k[None, :], mask=live_TC, other=0.0)
        d0 = tl.load(dp + t[:, None] * BLOCK_W + w[None, :], mask=(t < T)[:, None], other=0.0)
        if EXACT:
            dx = tl.dot(d0, f0, input_precision="ieee")
            dfn_CW = tl.dot(tl.trans(x), d0, dfn_CW, input_precision="ieee")
        else:
            # Products of two second terms are below the rounding of the results.
            d1 = tl.load(dp + (T + t[:, None]) * BLOCK_W + w[None, :], mask=(t < T)[:, None], other=0.0)
            dx = tl.dot(d1, f0)
            dx = tl.dot(d0, f1, dx)
            dx = tl.dot(d0, f0, dx)
            dfn_CW = tl.dot(tl.trans(x), d1, dfn_CW)
            dfn_CW = tl.dot(tl.trans(x), d0, dfn_CW)
        shrink_T = tl.load(shrink + t, mask=t < T, other=0.0)
        dx += shrink_T[:, None] * x.to(tl.float32)
        if ADD:
            weight_T = tl.load(weights + t * n + stream, mask=t < T, other=0.0)
            g = tl.load(grad + t.to(tl.int64)[:, None] * C + c[None, :], mask=live_TC, other=0.0)
            dx += weight_T[:, None] * g.to(tl.float32)
        tl.store(dX + t.to(tl.int64)[:, None] * K + k[None, :], dx.to(dX.dtype.element_ty), mask=live_TC)
    target = dfn_partial + (span * W + w[None, :]).to(tl.int64) * K + k[:, None]
    tl.store(target, dfn_CW, mask=(w < W)[None, :] & (c < C)[:, None])


def _width(W: int) -> int:
    return max(16, triton.next_power_of_2(W))


def _terms(fn: torch.Tensor, exact: bool) -> torch.Tensor:
    if exact:
        return fn
    W, K = fn.shape
    terms = torch.empty(3, _width(W), K, dtype=torch.bfloat16, device=fn.device)
    _terms_kernel[(triton.cdiv(K, 256),)](fn, terms, W, K, BLOCK_W=_width(W), BLOCK_K=256)
    return terms


@torch.library.custom_op("vime_kernels::mhc_project", mutates_args=())
def mhc_project(
    X: torch.Tensor, fn: torch.Tensor, norm_eps: float, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """fn times the rms-normalised rows of X: (m float32 [T, W], inverse rms float32 [T]); X [T, n C], fn contiguous."""
    T, K = X.shape
    W = len(fn)
    m, inverse_rms = fn.new_empty(T, W), fn.new_empty(T)
    if not T:
        return m, inverse_rms
    exact = X.dtype == torch.float32
    pieces = triton.cdiv(K, config.SPLIT_K)
    partial, squares = fn.new_empty(pieces, T, _width(W)), fn.new_empty(pieces, T)
    block_t, block_k, warps, stages = config.PROJECT_EXACT if exact else config.PROJECT
    _project_kernel[(triton.cdiv(T, block_t), pieces)](
        X,
        _terms(fn, exact),
        partial,
        squares,
        T,
        W,
        K,
        X.stride(0),
        EXACT=exact,
        SPLIT_K=config.SPLIT_K,
        BLOCK_T=block_t,
        BLOCK_W=_width(W),
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    _normalise_kernel[(triton.cdiv(T, 32),)](
        partial, squares, m, inverse_rms, T, W, K, norm_eps, PIECES=pieces, BLOCK_T=32, BLOCK_W=_width(W)
    )
    return m, inverse_rms


@mhc_project.register_fake
def _(X: torch.Tensor, fn: torch.Tensor, norm_eps: float, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return fn.new_empty(X.shape[0], fn.shape[0]), fn.new_empty(X.shape[0])


@torch.library.custom_op("vime_kernels::mhc_project_bwd", mutates_args=())
def mhc_project_bwd(
    dm: torch.Tensor,
    X: torch.Tensor,
    fn: torch.Tensor,
    m: torch.Tensor,
    inverse_rms: torch.Tensor,
    n: int,
    weights: torch.Tensor | None,
    grad: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of X [T, n C] and fn; with `weights` [T, n] that of `mhc_pre`, whose own is `grad` [T, C], is added."""
    T, K = X.shape
    W, C = len(fn), K // n
    dX = X.new_empty(T, K)
    if not T:
        return dX, torch.zeros_like(fn)
    exact = X.dtype == torch.float32
    dp_dtype = torch.float32 if exact else torch.bfloat16
    dp = torch.empty(1 if exact else 2, T, _width(W), dtype=dp_dtype, device=X.device)
    shrink = fn.new_empty(T)
    _unnormalise_kernel[(triton.cdiv(T, 32),)](
        dm, m, inverse_rms, dp, shrink, T, W, K, BLOCK_T=32, BLOCK_W=_width(W), EXACT=exact
    )
    spans = triton.cdiv(T, config.TOKENS_PER_PARTIAL)
    partial = fn.new_empty(spans, W, K)
    block_t, block_c, warps, stages = config.PROJECT_BWD_EXACT if exact else config.PROJECT_BWD
    _project_bwd_kernel[(n * triton.cdiv(C, block_c), spans)](
        dp, shrink, X, _terms(fn, exact), weights, grad, dX, partial, T, W, C, X.stride(0),
        EXACT=exact, ADD=weights is not None, SPAN=config.TOKENS_PER_PARTIAL, n=n,
        BLOCK_T=block_t, BLOCK_W=_width(W), BLOCK_C=block_c, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dX, partial.sum(0)


@mhc_project_bwd.register_fake
def _(
    dm: torch.Tensor,
    X: torch.Tensor,
    fn: torch.Tensor,
    m: torch.Tensor,
    inverse_rms: torch.Tensor,
    n: int,
    weights: torch.Tensor | None,
    grad: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return X.new_empty(X.shape), fn.new_empty(fn.shape)


def _save_project(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    X, fn, _, ctx.n = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(X, fn, *output)


def _project_backward(ctx: Any, dm: torch.Tensor, _: None) -> tuple[Any, ...]:
    X, fn, m, inverse_rms = ctx.saved_tensors
    return (*mhc_project_bwd(dm.contiguous(), X, fn, m, inverse_rms, ctx.n, None, None), None, None)


mhc_project.register_autograd(_project_backward, setup_context=_save_project)
