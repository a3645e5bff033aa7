# SPDX-License-Identifier: Apache-2.0
"""Public rotation of heads: argument checks, dtype rule and choice of backend around the reference."""

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels.ops.rotary import reference


def rotate(
    x_THD: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    *,
    inverse: bool = False,
    norm_eps: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Heads [T, H, D] with their last 2P channels rotated, in the dtype of x; one rounding at the end.

        y[2i]     = x[2i] · cos[i] - x[2i + 1] · sin[i]
        y[2i + 1] = x[2i + 1] · cos[i] + x[2i] · sin[i]        of the last 2P channels; the first D - 2P are kept

    With `norm_eps` a head is first divided by its root mean square, sqrt(mean(x²) + norm_eps), without a weight.

    Args:
        x_THD: heads [T, H, D], bfloat16, float16, float32 or float64; Triton copies them where they are not contiguous.
        cos_TP: [T, P], float32 (or float64), no gradient.
        sin_TP: as `cos_TP`.
        inverse: turn back by the same angles.
        norm_eps: epsilon of the norm, None for no norm.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: Su et al., "RoFormer", 2021; the norm of the query heads as in the DeepSeek-V4 release.
    """
    op = "rotate"
    found = _checks.sizes(op, x_THD=(x_THD, "T H D"), cos_TP=(cos_TP, "T P"), sin_TP=(sin_TP, "T P"))
    _checks.floating(op, x_THD=x_THD)
    _checks.full_precision(op, cos_TP=cos_TP, sin_TP=sin_TP)
    if norm_eps is not None:
        _checks.python_float(op, norm_eps=norm_eps)
        if not norm_eps >= 0:
            _checks.fail(op, "norm_eps >= 0, or None for no norm", norm_eps)
    cos_TP, sin_TP = cos_TP.detach(), sin_TP.detach()
    if 2 * found["P"] > found["D"]:
        _checks.fail(op, f"cos_TP of at most D / 2 = {found['D'] // 2} pairs", found["P"])
    from vime_kernels.ops.rotary import config

    if resolve(op, backend, (x_THD, cos_TP, sin_TP), config.unsupported(x_THD, cos_TP, sin_TP)) == "triton":
        from vime_kernels.ops.rotary import triton_op

        x, cos, sin = x_THD.contiguous(), cos_TP.contiguous(), sin_TP.contiguous()
        return triton_op.rotate(x, cos, sin, inverse, -1.0 if norm_eps is None else norm_eps)
    acc = _checks.accum_dtype(x_THD, cos_TP, sin_TP)
    wide = x_THD.to(acc)
    if norm_eps is not None:
        wide = reference.unit_rms(wide, norm_eps)
    sin = sin_TP.to(acc)
    return reference.rotate(wide, cos_TP.to(acc), -sin if inverse else sin).to(x_THD.dtype)
