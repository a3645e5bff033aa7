# SPDX-License-Identifier: Apache-2.0
"""The streams collapsed after the last layer, in Triton, forward and backward.

The projection and the weighted sum read the streams once each. Their gradients meet in one kernel: it writes the
gradient of the streams once, where two operations would each write one and a third would add them. What
`config.one_pass` admits goes to `gluon_head`, which reads the streams once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.hyper_connection import config
from vime_kernels.ops.hyper_connection.triton_project import mhc_project, mhc_project_bwd
from vime_kernels.ops.hyper_connection.triton_streams import mhc_pre


@triton.jit(do_not_specialize=["T"])
def _gate_kernel(m, scale, base, weights, T, eps, n: tl.constexpr, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    t, i = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None], tl.arange(0, n)[None, :]
    logit = tl.load(m + t * n + i, mask=t < T, other=0.0) * tl.load(scale) + tl.load(base + i)
    tl.store(weights + t * n + i, tl.sigmoid(logit) + eps, mask=t < T)


@triton.jit
def _weights_bwd_kernel(grad, X, dweights, C, X_token, X_stream, n: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    i, c = tl.arange(0, n)[:, None], tl.arange(0, BLOCK_C)[None, :]
    g = tl.load(grad + token * C + c, mask=c < C, other=0.0).to(tl.float32)
    x = tl.load(X + token * X_token + i * X_stream + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(dweights + token * n + i, tl.sum(g * x, 1, keep_dims=True))


@triton.jit(do_not_specialize=["T"])
def _gate_bwd_kernel(  # type: ignore[no-untyped-def]
    dweights, m, scale, base, dm, partial, T, n: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Gradient of m [T, n], and of base and scale, summed over the program's tokens, [programs, n + 1]."""
    t, i = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None], tl.arange(0, n)[None, :]
    gain, value = tl.load(scale), tl.load(m + t * n + i, mask=t < T, other=0.0)
    s = tl.sigmoid(value * gain + tl.load(base + i))
    dlogit = tl.load(dweights + t * n + i, mask=t < T, other=0.0) * s * (1 - s)
    tl.store(dm + t * n + i, dlogit * gain, mask=t < T)
    share = partial + tl.program_id(0) * (n + 1)
    tl.store(share + i, tl.sum(dlogit, 0, keep_dims=True))
    tl.store(share + n, tl.sum(dlogit * value))


@torch.library.custom_op("vime_kernels::mhc_head", mutates_args=())
def mhc_head(
    X: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [T, C], m [T, n], inverse rms [T], weights [T, n]); arguments as in `interface.mhc_head`, checked."""
    if config.one_pass(X):
        from vime_kernels.ops.hyper_connection import gluon_head

        return gluon_head.forward(X, fn, scale, base, eps, norm_eps)
    T, n = X.shape[:2]
    m, inverse_rms = mhc_project(X.flatten(1), fn, norm_eps, n)
    weights = torch.empty_like(m)
    if T:
        _gate_kernel[(triton.cdiv(T, config.GATE_TOKENS),)](
            m, scale, base, weights, T, eps, n=n, BLOCK_T=config.GATE_TOKENS
        )
    return mhc_pre(X, weights), m, inverse_rms, weights


@mhc_head.register_fake
def _(
    X: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    T, n, C = X.shape
    return X.new_empty(T, C), fn.new_empty(T, n), fn.new_empty(T), fn.new_empty(T, n)


@torch.library.custom_op("vime_kernels::mhc_head_bwd", mutates_args=())
def mhc_head_bwd(
    grad: torch.Tensor,
    X: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    m: torch.Tensor,
    inverse_rms: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of X and fn, and of base and scale one behind the other, [n + 1]."""
    if config.one_pass(X, grad):
        from vime_kernels.ops.hyper_connection import gluon_head_bwd

        return gluon_head_bwd.backward(grad, X, fn, scale, base, m, inverse_rms, weights)
    T, n, C = X.shape
    programs = triton.cdiv(T, config.GATE_TOKENS)
    dweights, dm, partial = torch.empty_like(m), torch.empty_like(m), m.new_empty(programs, n + 1)
    if T:
        block = max(32, triton.next_power_of_2(C))
        _weights_bwd_kernel[(T,)](
            grad,
            X,
            dweights,
            C,
            X.stride(0),
            X.stride(1),
            n=n,
            BLOCK_C=block,
            num_warps=config.num_warps(block),
        )
        _gate_bwd_kernel[(programs,)](
            dweights, m, scale, base, dm, partial, T, n=n, BLOCK_T=config.GATE_TOKENS
        )
    dX, dfn = mhc_project_bwd(dm, X.flatten(1), fn, m, inverse_rms, n, weights, grad)
    return dX.view(T, n, C), dfn, partial.sum(0)


@mhc_head_bwd.register_fake
def _(
    grad: torch.Tensor,
    X: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    m: torch.Tensor,
    inverse_rms: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return X.new_empty(X.shape), fn.new_empty(fn.shape), fn.new_empty(len(base) + 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:4], *output[1:])


def _backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[Any, ...]:
    dX, dfn, sums = mhc_head_bwd(grad.contiguous(), *ctx.saved_tensors)
    return dX, dfn, sums[-1:], sums[:-1], None, None


mhc_head.register_autograd(_backward, setup_context=_save)
