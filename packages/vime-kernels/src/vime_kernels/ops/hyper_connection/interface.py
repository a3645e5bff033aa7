# SPDX-License-Identifier: Apache-2.0
"""Public hyper-connection operations: argument checks, dtype rule and choice of backend around the reference.

All mixing is done in float32 (float64 for float64 inputs) and each result is rounded once. The model owns the
parameters; they stay in float32 when the model is bfloat16.
"""

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels.ops.hyper_connection import config, reference


def mhc_mixes(
    X_TnC: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    eps: float,
    iters: int,
    norm_eps: float,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weightings (pre_Tn, post_Tn, comb_Tnn) with which one sub-layer reads and writes the residual streams.

        m    = (fn · flatten(X)) · rsqrt(mean(flatten(X)²) + norm_eps)        n + n + n² numbers per token
        pre  = sigmoid(m[:n] · scale[0] + base[:n]) + eps
        post = 2 sigmoid(m[n:2n] · scale[1] + base[n:2n])
        comb = sinkhorn(m[2n:] · scale[2] + base[2n:])                        row = source stream

    Args:
        X_TnC: residual streams [T, n, C].
        fn: projection [(2 + n) n, n C], float32 (or float64).
        scale: [3], float32: gains of pre, post and comb.
        base: [(2 + n) n], float32.
        eps: `hc_eps` of the model, added after the sigmoid and in every Sinkhorn division.
        iters: Sinkhorn column passes, at least 1.
        norm_eps: `rms_norm_eps` of the model, inside the square root. Not the same number as `eps`.
        backend: see `vime_kernels.set_backend`.

    Returns:
        Float32 (float64 for float64 inputs) [T, n], [T, n] and [T, n, n].

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: DeepSeek-V4 release; mHC (Xie et al., 2026).
    """
    op = "mhc_mixes"
    n = _streams(op, X_TnC)
    width = (2 + n) * n
    _checks.sizes(
        op,
        X_TnC=(X_TnC, "T n C"),
        fn=(fn, f"{width} {n * X_TnC.shape[-1]}"),
        scale=(scale, "3"),
        base=(base, f"{width}"),
    )
    _checks.full_precision(op, fn=fn, scale=scale, base=base)
    _checks.positive(op, iters=iters)
    _checks.python_float(op, eps=eps, norm_eps=norm_eps)
    if resolve(op, backend, (X_TnC, fn, scale, base), config.unsupported(X_TnC, fn, scale, base)) == "triton":
        from vime_kernels.ops.hyper_connection import triton_project, triton_split

        m, _ = triton_project.mhc_project(X_TnC.flatten(1), fn.contiguous(), norm_eps, n)
        return triton_split.mhc_split(m, scale.contiguous(), base.contiguous(), n, eps, iters)
    acc = _checks.accum_dtype(X_TnC, fn, scale, base)
    return reference.mixes(
        X_TnC.to(acc), fn.to(acc), scale.to(acc), base.to(acc), eps=eps, iters=iters, norm_eps=norm_eps
    )


def sinkhorn(
    logits_Tnn: torch.Tensor, *, iters: int = 20, eps: float = 1e-6, backend: str | None = None
) -> torch.Tensor:
    """Almost doubly stochastic float32 [T, n, n] from logits.

    One softmax over the last dimension, a column pass, then `iters - 1` pairs of a row and a column pass; every
    division adds `eps`. The column pass comes last: column sums are 1 up to eps, row sums only approximately.

    Args:
        logits_Tnn: [T, n, n].
        iters: column passes, at least 1.
        eps: added to the softmax and to every divisor.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: Sinkhorn-Knopp, in the form of the DeepSeek-V4 release.
    """
    op = "sinkhorn"
    _checks.sizes(op, logits_Tnn=(logits_Tnn, "T n n"))
    _checks.floating(op, logits_Tnn=logits_Tnn)
    _checks.positive(op, iters=iters)
    _checks.python_float(op, eps=eps)
    if resolve(op, backend, (logits_Tnn,), config.unsupported_sinkhorn(logits_Tnn)) == "triton":
        from vime_kernels.ops.hyper_connection import triton_sinkhorn

        return triton_sinkhorn.sinkhorn(logits_Tnn.contiguous(), iters, eps)
    return reference.sinkhorn(logits_Tnn.to(_checks.accum_dtype(logits_Tnn)), iters=iters, eps=eps)


def mhc_pre(X_TnC: torch.Tensor, pre_Tn: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """The input of a sub-layer, Σ_i pre[i] X[i]: [T, C] in the dtype of X.

    Args:
        X_TnC: residual streams [T, n, C].
        pre_Tn: weights [T, n] from `mhc_mixes`, float32 (or float64).
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "mhc_pre"
    _streams(op, X_TnC)
    _checks.sizes(op, X_TnC=(X_TnC, "T n C"), pre_Tn=(pre_Tn, "T n"))
    _checks.full_precision(op, pre_Tn=pre_Tn)
    if resolve(op, backend, (X_TnC, pre_Tn), config.unsupported(X_TnC, pre_Tn)) == "triton":
        from vime_kernels.ops.hyper_connection import triton_streams

        return triton_streams.mhc_pre(X_TnC, pre_Tn.contiguous())
    acc = _checks.accum_dtype(X_TnC, pre_Tn)
    return reference.pre(X_TnC.to(acc), pre_Tn.to(acc)).to(X_TnC.dtype)


def mhc_post(
    y_TC: torch.Tensor,
    X_TnC: torch.Tensor,
    post_Tn: torch.Tensor,
    comb_Tnn: torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """The streams after a sub-layer, X'[j] = post[j] y + Σ_i comb[i, j] X[i]: [T, n, C] in the dtype of X.

    Args:
        y_TC: output of the sub-layer [T, C].
        X_TnC: residual streams before it [T, n, C].
        post_Tn: [T, n] from `mhc_mixes`, float32 (or float64).
        comb_Tnn: [T, n, n] from `mhc_mixes`; the row is the source stream, so the product uses its transpose.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "mhc_post"
    _streams(op, X_TnC)
    _checks.sizes(
        op, X_TnC=(X_TnC, "T n C"), y_TC=(y_TC, "T C"), post_Tn=(post_Tn, "T n"), comb_Tnn=(comb_Tnn, "T n n")
    )
    _checks.floating(op, y_TC=y_TC)
    _checks.rows_contiguous(op, y_TC=y_TC)
    _checks.full_precision(op, post_Tn=post_Tn, comb_Tnn=comb_Tnn)
    tensors = (y_TC, X_TnC, post_Tn, comb_Tnn)
    if resolve(op, backend, tensors, config.unsupported(X_TnC, y_TC, post_Tn, comb_Tnn)) == "triton":
        from vime_kernels.ops.hyper_connection import triton_streams

        return triton_streams.mhc_post(y_TC, X_TnC, post_Tn.contiguous(), comb_Tnn.contiguous())
    acc = _checks.accum_dtype(y_TC, X_TnC, post_Tn, comb_Tnn)
    return reference.post(y_TC.to(acc), X_TnC.to(acc), post_Tn.to(acc), comb_Tnn.to(acc)).to(X_TnC.dtype)


def mhc_head(
    X_TnC: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    eps: float,
    norm_eps: float,
    backend: str | None = None,
) -> torch.Tensor:
    """The streams collapsed after the last layer: [T, C] in the dtype of X.

        out = Σ_i (sigmoid(m[i] · scale + base[i]) + eps) X[i],   m as in `mhc_mixes` with n rows of fn

    Args:
        X_TnC: residual streams [T, n, C].
        fn: projection [n, n C], float32 (or float64).
        scale: [1], float32.
        base: [n], float32.
        eps: `hc_eps` of the model.
        norm_eps: `rms_norm_eps` of the model.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "mhc_head"
    n = _streams(op, X_TnC)
    _checks.sizes(
        op,
        X_TnC=(X_TnC, "T n C"),
        fn=(fn, f"{n} {n * X_TnC.shape[-1]}"),
        scale=(scale, "1"),
        base=(base, f"{n}"),
    )
    _checks.full_precision(op, fn=fn, scale=scale, base=base)
    _checks.python_float(op, eps=eps, norm_eps=norm_eps)
    if resolve(op, backend, (X_TnC, fn, scale, base), config.unsupported(X_TnC, fn, scale, base)) == "triton":
        from vime_kernels.ops.hyper_connection import triton_head

        small = [t.contiguous() for t in (fn, scale, base)]
        return triton_head.mhc_head(X_TnC, *small, eps, norm_eps)[0]
    acc = _checks.accum_dtype(X_TnC, fn, scale, base)
    out = reference.head(X_TnC.to(acc), fn.to(acc), scale.to(acc), base.to(acc), eps=eps, norm_eps=norm_eps)
    return out.to(X_TnC.dtype)


def _streams(op: str, X_TnC: torch.Tensor) -> int:
    """n, after the checks that every operation makes on the streams."""
    n = _checks.sizes(op, X_TnC=(X_TnC, "T n C"))["n"]
    _checks.floating(op, X_TnC=X_TnC)
    _checks.rows_contiguous(op, X_TnC=X_TnC)
    return n
