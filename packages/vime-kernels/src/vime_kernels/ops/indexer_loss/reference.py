# SPDX-License-Identifier: Apache-2.0
"""Kullback-Leibler loss of the indexer in plain torch: the specification.

    T[t, j] = Σ_h exp(sm_scale · <Q[t, h], K[i_j]> - lse[t, h])      teacher, no gradient
    L[t]    = Σ_j T̂_j (log T̂_j - log softmax_j(I[t, ·]))             T̂ = T / Σ T, over the valid slots

Leaves out the sum of T over tensor parallel ranks (heads are split; the caller adds them up before the loss).

Source: DeepSeek-V3.2 (arXiv 2512.02556); floors and row weighting of Megatron-LM's DSA indexer loss.
"""

import torch

from vime_kernels._backend import without_autocast
from vime_kernels._rows import gather

FLOOR = 1e-10


@without_autocast
def target(
    query_SHD: torch.Tensor,
    key_ND: torch.Tensor,
    indices_SK: torch.Tensor,
    valid_SK: torch.Tensor,
    sm_scale: float,
    lse_SH: torch.Tensor | None,
) -> torch.Tensor:
    """Attention mass [S, K] of every listed key, summed over heads; 0 in invalid slots."""
    scores_SHK = torch.bmm(query_SHD, gather(key_ND, indices_SK, valid_SK).mT) * sm_scale
    scores_SHK = scores_SHK.masked_fill(~valid_SK[:, None], float("-inf"))
    if lse_SH is None:
        lse_SH = scores_SHK.logsumexp(-1)
    mass_SHK = torch.exp(scores_SHK - lse_SH[..., None])
    return mass_SHK.masked_fill(~valid_SK[:, None], 0.0).sum(1)


def row_losses(scores_SK: torch.Tensor, target_SK: torch.Tensor, valid_SK: torch.Tensor) -> torch.Tensor:
    """KL(T̂ ‖ softmax(I)) of every row [S] over its valid slots; 0 for a row without any."""
    T_SK = target_SK.masked_fill(~valid_SK, 0.0)
    T_SK = T_SK / T_SK.sum(-1, keepdim=True).clamp_min(FLOOR)
    # A row without a valid slot would be a softmax over nothing; zeros there keep its gradient at zero.
    logits_SK = scores_SK.masked_fill(~valid_SK, float("-inf")).masked_fill(
        ~valid_SK.any(-1, keepdim=True), 0.0
    )
    log_student_SK = logits_SK.log_softmax(-1).masked_fill(~valid_SK, 0.0)
    return (T_SK * (T_SK.clamp_min(FLOOR).log() - log_student_SK)).sum(-1)
