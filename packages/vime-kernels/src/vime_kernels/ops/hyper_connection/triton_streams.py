# SPDX-License-Identifier: Apache-2.0
"""`mhc_pre` and `mhc_post` in Triton, forward and backward.

Memory-bound: a forward program, one warp, makes a block of channels of one token, and the next program the next block,
so that memory is read in order. A backward program makes one token with all its channels, so that the gradients of
the weights are sums inside one program and need no second pass. Re-reads of a stream come from the first-level cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.hyper_connection import config


@triton.jit
def _pre_kernel(  # type: ignore[no-untyped-def]
    X, weights, out, C, X_token, X_stream, weights_token,
    n: tl.constexpr, BLOCK_C: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_C], tl.float32)
    for i in tl.static_range(n):
        x = tl.load(X + token * X_token + i * X_stream + c, mask=c < C, other=0.0)
        total += tl.load(weights + token * weights_token + i) * x.to(tl.float32)
    tl.store(out + token * C + c, total.to(out.dtype.element_ty), mask=c < C)


@triton.jit
def _pre_bwd_kernel(  # type: ignore[no-untyped-def]
    grad,
    X,
    weights,
    dX,
    dweights,
    C,
    X_token,
    X_stream,
    weights_token,
    n: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    g = tl.load(grad + token * C + c, mask=c < C, other=0.0).to(tl.float32)
    for i in tl.static_range(n):
        x = tl.load(X + token * X_token + i * X_stream + c, mask=c < C, other=0.0).to(tl.float32)
        dx = tl.load(weights + token * weights_token + i) * g
        tl.store(dX + (token * n + i) * C + c, dx.to(dX.dtype.element_ty), mask=c < C)
        tl.store(dweights + token * n + i, tl.sum(g * x))


@triton.jit
def _post_kernel(  # type: ignore[no-untyped-def]
    y, X, post, comb, out, C, y_token, X_token, X_stream,
    n: tl.constexpr, BLOCK_C: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.arange(0, n)[:, None, None]  # source stream
    j = tl.arange(0, n)[None, :, None]  # target stream
    c = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)[None, None, :]
    inner = tl.load(y + token * y_token + c, mask=c < C, other=0.0).to(tl.float32)
    x = tl.load(X + token * X_token + i * X_stream + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.sum(tl.load(comb + (token * n + i) * n + j) * x, 0, keep_dims=True)
    total += tl.load(post + token * n + j) * inner
    tl.store(out + (token * n + j) * C + c, total.to(out.dtype.element_ty), mask=c < C)


@triton.jit
def _post_bwd_kernel(  # type: ignore[no-untyped-def]
    grad,
    y,
    X,
    post,
    comb,
    dy,
    dX,
    dpost,
    dcomb,
    C,
    y_token,
    X_token,
    X_stream,
    n: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One token. All sums over channels are made together: two exchanges between threads, not two for each number."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, n)[:, None, None]  # source stream
    j = tl.arange(0, n)[None, :, None]  # target stream
    c = tl.arange(0, BLOCK_C)[None, None, :]
    inner = tl.load(y + token * y_token + c, mask=c < C, other=0.0).to(tl.float32)
    x = tl.load(X + token * X_token + i * X_stream + c, mask=c < C, other=0.0, eviction_policy="evict_first")
    x = x.to(tl.float32)
    g = tl.load(grad + (token * n + j) * C + c, mask=c < C, other=0.0).to(tl.float32)
    dinner = tl.sum(tl.load(post + token * n + j) * g, 1, keep_dims=True)
    tl.store(dy + token * C + c, dinner.to(dy.dtype.element_ty), mask=c < C)
    mixing = (token * n + i) * n + j
    dx = tl.sum(tl.load(comb + mixing) * g, 1, keep_dims=True)
    tl.store(dX + (token * n + i) * C + c, dx.to(dX.dtype.element_ty), mask=c < C)
    tl.store(dpost + token * n + j, tl.sum(g * inner, 2, keep_dims=True))
    tl.store(dcomb + mixing, tl.sum(x * g, 2, keep_dims=True))


def _block(C: int) -> dict[str, int]:
    block = min(config.STREAM_CHANNELS, max(32, triton.next_power_of_2(C)))
    return {"BLOCK_C": block, "BLOCKS": triton.cdiv(C, block), "num_warps": config.num_warps(block)}


def _block_bwd(C: int) -> dict[str, int]:
    block = max(32, triton.next_power_of_2(C))
    return {"BLOCK_C": block, "num_warps": config.num_warps(block, config.CHANNELS_PER_THREAD_BWD)}


@torch.library.custom_op("vime_kernels::mhc_pre", mutates_args=())
def mhc_pre(X: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, C] = sum over streams of weights [T, n] times X [T, n, C]; checked, last dimensions contiguous."""
    T, n, C = X.shape
    out = X.new_empty(T, C)
    if out.numel():
        block = _block(C)
        _pre_kernel[(T * block["BLOCKS"],)](
            X, weights, out, C, X.stride(0), X.stride(1), weights.stride(0), n=n, **block
        )
    return out


@mhc_pre.register_fake
def _(X: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return X.new_empty(X.shape[0], X.shape[2])


@torch.library.custom_op("vime_kernels::mhc_pre_bwd", mutates_args=())
def mhc_pre_bwd(
    grad: torch.Tensor, X: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of X and weights."""
    T, n, C = X.shape
    dX, dweights = X.new_empty(T, n, C), weights.new_empty(T, n)
    if dX.numel():
        _pre_bwd_kernel[(T,)](
            grad,
            X,
            weights,
            dX,
            dweights,
            C,
            X.stride(0),
            X.stride(1),
            weights.stride(0),
            n=n,
            **_block_bwd(C),
        )
    return dX, dweights


@mhc_pre_bwd.register_fake
def _(grad: torch.Tensor, X: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return X.new_empty(X.shape), weights.new_empty(weights.shape)


@torch.library.custom_op("vime_kernels::mhc_post", mutates_args=())
def mhc_post(y: torch.Tensor, X: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """[T, n, C]: the streams after a sub-layer; checked, post and comb contiguous."""
    T, n, C = X.shape
    out = X.new_empty(T, n, C)
    if out.numel():
        block = _block(C)
        _post_kernel[(T * block["BLOCKS"],)](
            y, X, post, comb, out, C, y.stride(0), X.stride(0), X.stride(1), n=n, **block
        )
    return out


@mhc_post.register_fake
def _(y: torch.Tensor, X: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return X.new_empty(X.shape)


@torch.library.custom_op("vime_kernels::mhc_post_bwd", mutates_args=())
def mhc_post_bwd(
    grad: torch.Tensor, y: torch.Tensor, X: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of y, X, post and comb."""
    T, n, C = X.shape
    dy, dX, dpost, dcomb = (
        y.new_empty(T, C),
        X.new_empty(T, n, C),
        torch.empty_like(post),
        torch.empty_like(comb),
    )
    if dX.numel():
        _post_bwd_kernel[(T,)](
            grad,
            y,
            X,
            post,
            comb,
            dy,
            dX,
            dpost,
            dcomb,
            C,
            y.stride(0),
            X.stride(0),
            X.stride(1),
            n=n,
            **_block_bwd(C),
        )
    return dy, dX, dpost, dcomb


@mhc_post_bwd.register_fake
def _(
    grad: torch.Tensor, y: torch.Tensor, X: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return y.new_empty(y.shape), X.new_empty(X.shape), post.new_empty(post.shape), comb.new_empty(comb.shape)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pre_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return mhc_pre_bwd(grad.contiguous(), *ctx.saved_tensors)


def _post_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return mhc_post_bwd(grad.contiguous(), *ctx.saved_tensors)


mhc_pre.register_autograd(_pre_backward, setup_context=_save)
mhc_post.register_autograd(_post_backward, setup_context=_save)
