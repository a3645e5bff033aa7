# SPDX-License-Identifier: Apache-2.0
"""Lightning indexer in plain torch: the specification.

    I[t, n] = Σ_h w[t, h] · ReLU(<q[t, h], k[n]>)

All tensors come in the dtype to compute in. Every row is its own matrix product, so that a row's scores are the same
bits whichever rows share its chunk. Leaves out ranges, selection and chunking.

Source: DeepSeek-V3.2 (arXiv 2512.02556); scale placement of fp8 keys as in DeepGEMM.
"""

import torch

from vime_kernels._backend import without_autocast
from vime_kernels._rows import gather


@without_autocast
def logits(
    q_SHD: torch.Tensor, k_ND: torch.Tensor, weights_SH: torch.Tensor | None, *, use_relu: bool
) -> torch.Tensor:
    """Scores [S, N] of every query against every key."""
    return _head_sum(torch.bmm(q_SHD, k_ND.T.expand(len(q_SHD), -1, -1)), weights_SH, use_relu)


@without_autocast
def logits_at(
    q_SHD: torch.Tensor,
    k_ND: torch.Tensor,
    weights_SH: torch.Tensor | None,
    indices_SK: torch.Tensor,
    *,
    use_relu: bool,
) -> torch.Tensor:
    """Scores [S, K] of every query against its own list of keys; -inf where the index names no key."""
    valid_SK = (indices_SK >= 0) & (indices_SK < len(k_ND))
    k_SKD = gather(k_ND, indices_SK, valid_SK)
    scores_SK = _head_sum(torch.bmm(q_SHD, k_SKD.mT), weights_SH, use_relu)
    return scores_SK.masked_fill(~valid_SK, float("-inf"))


def _head_sum(x_SHN: torch.Tensor, weights_SH: torch.Tensor | None, use_relu: bool) -> torch.Tensor:
    if use_relu:
        x_SHN = x_SHN.relu()
    if weights_SH is None:
        return x_SHN.sum(1)
    return torch.bmm(weights_SH[:, None, :], x_SHN)[:, 0]
