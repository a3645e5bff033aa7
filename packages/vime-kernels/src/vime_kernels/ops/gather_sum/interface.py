# SPDX-License-Identifier: Apache-2.0
"""Public sum of listed rows: argument checks, dtype rule and choice of backend around the reference."""

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels.ops.gather_sum import reference


def gather_sum(x_RC: torch.Tensor, rows_TK: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """[T, C]: Σ over k of x[rows[t, k]] in the dtype of x, added in float32 in the order of k and rounded once.

    The same bits on every run. No gradient: a caller whose lists are a permutation has it as a gather.

    Args:
        x_RC: bfloat16, float16, float32 or float64 [R, C].
        rows_TK: int32 or int64 [T, K]. Below 0 or from R on adds nothing.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "gather_sum"
    _checks.sizes(op, x=(x_RC, "R C"), rows=(rows_TK, "T K"))
    _checks.floating(op, x=x_RC)
    if rows_TK.dtype not in (torch.int32, torch.int64):
        _checks.fail(op, "rows in int32 or int64", rows_TK.dtype, kind=TypeError)
    x, rows = x_RC.detach(), rows_TK
    from vime_kernels.ops.gather_sum import config

    if resolve(op, backend, (x, rows), config.unsupported(x, rows)) == "triton":
        from vime_kernels.ops.gather_sum import triton_op

        return triton_op.gather_sum(x.contiguous(), rows.contiguous())
    return reference.gather_sum(x.to(_checks.accum_dtype(x)), rows).to(x.dtype)
