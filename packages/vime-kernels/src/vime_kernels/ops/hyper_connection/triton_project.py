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
from triton.tools.tensor_descriptor import TensorDescriptor

from vime_kernels.ops.hyper_connection import config


@triton.jit
def _high_part(x):  # type: ignore[no-untyped-def]
    """(bfloat16 term, what it leaves of x)."""
    high = x.to(tl.bfloat16)
    return high, x - high.to(tl.float32)


@triton.jit
def _terms_kernel(fn, terms, W, K, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """fn as a sum of three bfloat16 tensors, [3 BLOCK_W, K], rows from W on zero."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.arange(0, BLOCK_W)
    rest = tl.load(fn + w[:, None] * K + k[None, :], mask=(w < W)[:, None] & (k < K)[None, :], other=0.0)
    for term in tl.static_range(3):
        high, rest = _high_part(rest)
        tl.store(terms + (term * BLOCK_W + w[:, None]) * K + k[None, :], high, mask=(k < K)[None, :])


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    tensor, row, column, rows, columns, stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """[BLOCK_R, BLOCK_C] of a matrix, 0 outside; `tensor` is a descriptor for the copy engine, or a pointer."""
    if TMA:
        tile = tensor.load([row, column])
    else:
        r, c = row + tl.arange(0, BLOCK_R)[:, None], column + tl.arange(0, BLOCK_C)[None, :]
        tile = tl.load(tensor + r.to(tl.int64) * stride + c, mask=(r < rows) & (c < columns), other=0.0)
    return tile


@triton.jit(do_not_specialize=["T"])
def _project_kernel(  # type: ignore[no-untyped-def]
    X, fn, partial, squares, T, W, K, X_token,
    EXACT: tl.constexpr, TMA: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One piece of the sums over channels: fn · X and X · X. fn is float32 [W, K], or its terms [3 BLOCK_W, K]."""
    piece = tl.program_id(1)
    first_token = tl.program_id(0) * BLOCK_T
    total_TW = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    square_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)  # summed over K at the end, once
    for k in range(piece * SPLIT_K, tl.minimum((piece + 1) * SPLIT_K, K), BLOCK_K):
        x = _tile(X, first_token, k, T, K, X_token, BLOCK_T, BLOCK_K, TMA)
        if EXACT:
            f = _tile(fn, 0, k, W, K, K, BLOCK_W, BLOCK_K, TMA)
            total_TW = tl.dot(x, f.T, total_TW, input_precision="ieee")
        else:
            # A fresh sum for every tile, small terms first: the tensor core truncates when it adds to a large one.
            sum_TW = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
            for term in tl.static_range(3):
                f = _tile(fn, (2 - term) * BLOCK_W, k, 3 * BLOCK_W, K, K, BLOCK_W, BLOCK_K, TMA)
                sum_TW = tl.dot(x, f.T, sum_TW)
            total_TW += sum_TW
        x = x.to(tl.float32)
        square_TK += x * x
    t, w = first_token + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_W)
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


@triton.jit(do_not_specialize=["T", "rows"])
def _unnormalise_kernel(  # type: ignore[no-untyped-def]
    dm, m, inverse_rms, dp, shrink, T, rows, W, K,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradient of the sums before the norm, float32 or as two bfloat16 terms, and the share of the norm in dX / X.

    Rows from T on are zero.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_W)
    live_TW = (t < T)[:, None] & (w < W)[None, :]
    dm_TW = tl.load(dm + t[:, None] * W + w[None, :], mask=live_TW, other=0.0)
    m_TW = tl.load(m + t[:, None] * W + w[None, :], mask=live_TW, other=0.0)
    scale_T = tl.load(inverse_rms + t, mask=t < T, other=0.0)
    tl.store(shrink + t, -scale_T * scale_T * tl.sum(dm_TW * m_TW, 1) / K, mask=t < rows)
    dp_TW = dm_TW * scale_T[:, None]
    target = dp + t[:, None] * BLOCK_W + w[None, :]
    if EXACT:
        tl.store(target, dp_TW, mask=(t < rows)[:, None])
    else:
        high, rest = _high_part(dp_TW)
        tl.store(target, high, mask=(t < rows)[:, None])
        tl.store(target + rows * BLOCK_W, rest.to(tl.bfloat16), mask=(t < rows)[:, None])


@triton.jit(do_not_specialize=["T", "rows", "span"])
def _project_bwd_kernel(  # type: ignore[no-untyped-def]
    dp, shrink, X, fn, weights, grad, dX, dfn_partial, T, rows, W, C, X_token, span,
    EXACT: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr, n: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dX of a block of channels for `span` tokens, and their share of dfn; X is read once for both.

    With ADD the streams had another use, the sum weights [T, n] · X, and its gradient is added on the way. What no
    product needs is read one step ahead: the compiler does so only for the factors of products.
    """
    stream = tl.program_id(0) % n
    first_channel = tl.program_id(0) // n * BLOCK_C
    first_k, K = stream * C + first_channel, n * C
    end = first_k + tl.minimum(C - first_channel, BLOCK_C)  # of the channels that are this program's
    w, c = tl.arange(0, BLOCK_W), first_channel + tl.arange(0, BLOCK_C)
    f0 = _tile(fn, 0, first_k, W if EXACT else BLOCK_W, end, K, BLOCK_W, BLOCK_C, TMA)
    if not EXACT:
        f1 = _tile(fn, BLOCK_W, first_k, 2 * BLOCK_W, end, K, BLOCK_W, BLOCK_C, TMA)
    dfn_CW = tl.zeros([BLOCK_C, BLOCK_W], tl.float32)
    begin = tl.program_id(1) * span
    shrink_T = tl.load(shrink + begin + tl.arange(0, BLOCK_T))
    if ADD:
        weight_T, g = _addend(weights, grad, begin, stream, c, T, C, n, BLOCK_T)
    for first in range(begin, tl.minimum(begin + span, T), BLOCK_T):
        x = _tile(X, first, first_k, T, end, X_token, BLOCK_T, BLOCK_C, TMA)
        d0 = _tile(dp, first, 0, rows, BLOCK_W, BLOCK_W, BLOCK_T, BLOCK_W, TMA)
        ahead = first + BLOCK_T + tl.arange(0, BLOCK_T)
        shrink_ahead = tl.load(shrink + ahead, mask=ahead < rows, other=0.0)
        if ADD:
            weight_ahead, g_ahead = _addend(weights, grad, first + BLOCK_T, stream, c, T, C, n, BLOCK_T)
        if EXACT:
            dx = tl.dot(d0, f0, input_precision="ieee")
            dfn_CW = tl.dot(x.T, d0, dfn_CW, input_precision="ieee")
        else:
            # Products of two second terms are below the rounding of the results.
            d1 = _tile(dp, rows + first, 0, 2 * rows, BLOCK_W, BLOCK_W, BLOCK_T, BLOCK_W, TMA)
            dx = tl.dot(d1, f0)
            dx = tl.dot(d0, f1, dx)
            dx = tl.dot(d0, f0, dx)
            dfn_CW = tl.dot(x.T, d1, dfn_CW)
            dfn_CW = tl.dot(x.T, d0, dfn_CW)
        dx += shrink_T[:, None] * x.to(tl.float32)
        shrink_T = shrink_ahead
        if ADD:
            dx += weight_T[:, None] * g.to(tl.float32)
            weight_T, g = weight_ahead, g_ahead
        if TMA:
            dX.store([first, first_k], dx.to(dX.dtype))
        else:
            t = first + tl.arange(0, BLOCK_T)[:, None]
            target = dX + t.to(tl.int64) * K + (stream * C + c)[None, :]
            tl.store(target, dx.to(dX.dtype.element_ty), mask=(t < T) & (c < C)[None, :])
    target = dfn_partial + (tl.program_id(1) * W + w[None, :]).to(tl.int64) * K + (stream * C + c)[:, None]
    tl.store(target, dfn_CW, mask=(w < W)[None, :] & (c < C)[:, None])


@triton.jit
def _addend(weights, grad, first, stream, c, T, C, n: tl.constexpr, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two factors of what ADD adds to the gradient of a stream."""
    t = first + tl.arange(0, BLOCK_T)
    weight_T = tl.load(weights + t * n + stream, mask=t < T, other=0.0)
    live_TC = (t < T)[:, None] & (c < C)[None, :]
    return weight_T, tl.load(grad + t.to(tl.int64)[:, None] * C + c[None, :], mask=live_TC, other=0.0)


def _width(W: int) -> int:
    return max(16, triton.next_power_of_2(W))


def _described(tensor: torch.Tensor, rows: int, columns: int, tma: bool) -> torch.Tensor | TensorDescriptor:
    """A matrix as a kernel takes it, in tiles of rows x columns."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns]) if tma else tensor


def _terms(fn: torch.Tensor, exact: bool, width: int) -> torch.Tensor:
    """fn itself, or its bfloat16 terms of `width` rows each."""
    if exact:
        return fn
    W, K = fn.shape
    terms = torch.empty(3 * width, K, dtype=torch.bfloat16, device=fn.device)
    _terms_kernel[(triton.cdiv(K, 256),)](fn, terms, W, K, BLOCK_W=width, BLOCK_K=256)
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
    hopper = config.hopper(X, W)
    width = 32 if hopper else _width(W)
    partial, squares = fn.new_empty(pieces, T, width), fn.new_empty(pieces, T)
    if hopper:
        from vime_kernels.ops.hyper_connection import gluon_project

        gluon_project.sums(X, _terms(fn, False, width), partial, squares)
    else:
        block_t, block_k, warps, stages = config.PROJECT_EXACT if exact else config.PROJECT
        tma = not exact and config.copy_engine(X, K % block_k)
        _project_kernel[(triton.cdiv(T, block_t), pieces)](
            _described(X, block_t, block_k, tma), _described(_terms(fn, exact, width), width, block_k, tma),
            partial, squares, T, W, K, X.stride(0),
            EXACT=exact, TMA=tma, SPLIT_K=config.SPLIT_K, BLOCK_T=block_t, BLOCK_W=width, BLOCK_K=block_k,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    _normalise_kernel[(triton.cdiv(T, 32),)](
        partial, squares, m, inverse_rms, T, W, K, norm_eps, PIECES=pieces, BLOCK_T=32, BLOCK_W=width
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
    add = weights is not None
    rounded = config.PROJECT_BWD_ADD if add else config.PROJECT_BWD
    block_t, block_c, warps, stages = config.PROJECT_BWD_EXACT if exact else rounded
    width, rows = _width(W), triton.cdiv(T, block_t) * block_t
    dp = X.new_empty(rows if exact else 2 * rows, width)
    shrink = fn.new_empty(rows)
    _unnormalise_kernel[(triton.cdiv(rows, 32),)](
        dm, m, inverse_rms, dp, shrink, T, rows, W, K, BLOCK_T=32, BLOCK_W=width, EXACT=exact
    )
    blocks = n * triton.cdiv(C, block_c)
    span = config.tokens_per_partial(T, blocks, block_t)
    partial = fn.new_empty(triton.cdiv(T, span), W, K)
    tma = not exact and config.copy_engine(X, C % block_c)
    _project_bwd_kernel[(blocks, len(partial))](
        _described(dp, block_t, width, tma), shrink, _described(X, block_t, block_c, tma),
        _described(_terms(fn, exact, width), width, block_c, tma), weights, grad,
        _described(dX, block_t, block_c, tma), partial, T, rows, W, C, X.stride(0), span,
        EXACT=exact, ADD=add, TMA=tma, n=n,
        BLOCK_T=block_t, BLOCK_W=width, BLOCK_C=block_c, num_warps=warps, num_stages=stages,
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
