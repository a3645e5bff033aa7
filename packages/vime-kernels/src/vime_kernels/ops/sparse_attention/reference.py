# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch: the specification.

    s[h, j] = sm_scale · <q[h], kv[i_j]>             j over the valid slots of the row
    o[h]    = Σ_j e^{s[h, j]} kv[i_j, :d_v] / (Σ_j e^{s[h, j]} + e^{sink[h]})
    lse[h]  = log Σ_j e^{s[h, j]}                     natural, without the sink

All tensors come in the dtype to compute in. Gather semantics: a row listed twice counts twice. Every query is its own
pair of matrix products, so that its result is the same bits whichever queries share its chunk. The gradients are
autograd's. Leaves out chunking, the public dtypes and how the list comes about.

Source: DeepSeek-V3.2 (arXiv 2512.02556); sink and window of the DeepSeek-V4 release.
"""

import torch

from vime_kernels._backend import without_autocast
from vime_kernels._rows import gather


@without_autocast
def attend(
    q_SHD: torch.Tensor,
    kv_ND: torch.Tensor,
    indices_SK: torch.Tensor,
    valid_SK: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [S, H, d_v] and lse [S, H]. A row without a valid slot gives 0 and -inf, and no gradient."""
    kv_SKD = gather(kv_ND, indices_SK, valid_SK)
    # A dead row would be a softmax over nothing. With scores of zero it averages gathered zeros: output 0, no gradient.
    dead_S11 = ~valid_SK.any(1)[:, None, None]
    scores_SHK = torch.bmm(q_SHD, kv_SKD.mT) * sm_scale
    scores_SHK = scores_SHK.masked_fill(~valid_SK[:, None], float("-inf")).masked_fill(dead_S11, 0.0)
    if attn_sink is None:
        p_SHK = scores_SHK.softmax(-1)
    else:
        sink_SH1 = attn_sink[None, :, None].expand(len(q_SHD), -1, 1).masked_fill(dead_S11, 0.0)
        p_SHK = torch.cat([scores_SHK, sink_SH1], -1).softmax(-1)[..., :-1]
    out_SHD = torch.bmm(p_SHK, kv_SKD[..., :d_v])
    return out_SHD, scores_SHK.logsumexp(-1).masked_fill(dead_S11[..., 0], float("-inf"))


def window_indices(first_S: torch.Tensor, positions_S: torch.Tensor, window: int) -> torch.Tensor:
    """int32 [S, window]: rows positions - window + 1 up to positions, -1 where the sequence had not begun."""
    back_W = torch.arange(window - 1, -1, -1, device=positions_S.device, dtype=torch.int32)
    rows_SW = positions_S[:, None] - back_W
    return rows_SW.masked_fill(rows_SW < first_S[:, None], -1)


def range_indices(starts: torch.Tensor, ends: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 [S, rows]: all of [starts, ends), then -1.

    As wide as the buffer and not as the longest range: a query's sum would round differently with its neighbours'.
    """
    columns_SK = starts[:, None] + torch.arange(rows, device=starts.device, dtype=torch.int32)
    return columns_SK.masked_fill(columns_SK >= ends[:, None], -1)
