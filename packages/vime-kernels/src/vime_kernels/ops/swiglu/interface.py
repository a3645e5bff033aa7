# SPDX-License-Identifier: Apache-2.0
"""Public clamped SwiGLU: argument checks, dtype rule and choice of backend around the reference."""

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels.ops.swiglu import reference


def swiglu(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    limit: float = float("inf"),
    backend: str | None = None,
) -> torch.Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit) · weight: [..., F] in the dtype of x, float32 inside, one rounding.

    Args:
        x: gate and up side by side, [..., 2F], bfloat16, float16, float32 or float64; copied where not contiguous.
        weight: a number per row, e.g. the router's, in the shape of x without its last dimension; None for 1.
        limit: bound of the clamps, positive. Beyond it a half passes no gradient.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: Shazeer, "GLU variants improve transformer", 2020; the clamps as in the DeepSeek-V4 release.
    """
    op = "swiglu"
    _checks.tensor(op, x=x)
    if weight is not None:
        _checks.tensor(op, weight=weight)
    _checks.floating(op, x=x, weight=weight)
    _checks.python_float(op, limit=limit)
    if x.ndim < 1 or x.shape[-1] % 2:
        _checks.fail(op, "x of shape [..., 2F]", list(x.shape))
    if weight is not None and weight.shape != x.shape[:-1]:
        _checks.fail(op, f"weight of shape {list(x.shape[:-1])}", list(weight.shape))
    if not limit > 0:
        _checks.fail(op, "a positive limit", limit)
    rows = x[None].flatten(0, -2).contiguous()  # of a single row too, and of none
    weights = None if weight is None else weight.flatten()
    _checks.sizes(op, x=(rows, "R 2F"), weight=(weights, "? R"))
    from vime_kernels.ops.swiglu import config

    tensors = (x,) if weight is None else (x, weight)
    if resolve(op, backend, tensors, config.unsupported(x, weight)) == "triton":
        from vime_kernels.ops.swiglu import triton_op

        out = triton_op.swiglu(rows, None if weights is None else weights.contiguous(), limit)
    else:
        acc = _checks.accum_dtype(x, weight)
        wide = None if weights is None else weights.to(acc)
        out = reference.swiglu(rows.to(acc), limit, wide).to(x.dtype)
    return out.view(*x.shape[:-1], x.shape[-1] // 2)
