# SPDX-License-Identifier: Apache-2.0
"""Top-k selection in plain torch: the specification.

The canonical rule makes the picks a pure function of the scores: higher score first, ties to the smaller column,
-inf and NaN never picked, -0 equal to +0, picks ascending, -1 where nothing is left. Two programs that agree on the
scores then agree on the picks, whatever their tiles and threads.
"""

import torch


def topk(
    logits: torch.Tensor, k: int, starts: torch.Tensor, ends: torch.Tensor, *, ascending: bool
) -> torch.Tensor:
    """int32 [S, k]: the picks in ascending column order, or in descending score order."""
    N = logits.shape[-1]
    column = torch.arange(N, device=logits.device, dtype=torch.int32)
    # Ranges come before everything else: outside them the buffer may hold anything, NaN included.
    usable = (column >= starts[:, None]) & (column < ends[:, None]) & ~logits.isnan()
    scores = logits.masked_fill(~usable, float("-inf")) + 0.0  # -0 + 0 = +0
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    picks = order[:, :k].to(torch.int32).masked_fill(best[:, :k] == float("-inf"), N)
    if ascending:
        picks = picks.sort(dim=-1).values
    picks = picks.masked_fill(picks == N, -1)
    return torch.nn.functional.pad(picks, (0, k - picks.shape[-1]), value=-1)
