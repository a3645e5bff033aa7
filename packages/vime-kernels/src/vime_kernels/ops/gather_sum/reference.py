# SPDX-License-Identifier: Apache-2.0
"""Sums of listed rows in plain torch: the specification. Tensors are in the dtype to compute in."""

import torch


def gather_sum(x_RC: torch.Tensor, rows_TK: torch.Tensor) -> torch.Tensor:
    """[T, C]: Σ over k of x[rows[t, k]]; rows outside x add nothing."""
    exists_TK = (rows_TK >= 0) & (rows_TK < len(x_RC))
    # A row of zeros behind the others stands for the rows outside.
    padded = torch.cat([x_RC, x_RC.new_zeros(1, x_RC.shape[1])])
    return padded[rows_TK.masked_fill(~exists_TK, len(x_RC))].sum(1)
