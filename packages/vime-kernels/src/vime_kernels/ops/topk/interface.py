# SPDX-License-Identifier: Apache-2.0
"""Public top-k selection, and the shape of a function that may stand in for it."""

from functools import partial
from typing import Protocol

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels._rows import chunks
from vime_kernels.ops.topk import config, reference

RULES = ("canonical", "torch", "fast")


class TopKFn(Protocol):
    """What selects picks from a chunk of logits: the seam at which a framework records or replays them."""

    def __call__(
        self, logits: torch.Tensor, k: int, starts: torch.Tensor, ends: torch.Tensor, *, row_offset: int = 0
    ) -> torch.Tensor:
        """int32 [rows, k] for rows `row_offset` up to `row_offset + len(logits)` of the call, -1 for nothing.

        Columns outside [starts, ends) may hold anything.
        """


def topk(
    logits: torch.Tensor,
    k: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    rule: str = "canonical",
    backend: str | None = None,
) -> torch.Tensor:
    """The k best columns of every row inside [starts, ends): int32 [S, k], absolute columns, -1 for nothing.

    | rule | set | order |
    | --- | --- | --- |
    | canonical | exact; ties to the smaller column | ascending column, -1 last |
    | torch | exact; which of several equal scores at the cut wins is not promised | descending score, -1 last |
    | fast | as torch | not promised |

    Under every rule -inf and NaN are never picked, -0 equals +0, and columns outside the range are masked before
    anything is compared. Both backends break ties canonically under
    every rule; the Triton one sorts only when the order asks for it.

    Args:
        logits: scores [S, N], any floating dtype.
        k: picks per row, at least 1; may exceed N.
        starts: int32 [S], first column of each row's range, clamped to [0, N].
        ends: int32 [S], one past the last column; at or before starts means an empty row.
        rule: "canonical", "torch" or "fast".
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "topk"
    sizes = _checks.sizes(op, logits=(logits, "S N"), starts=(starts, "S"), ends=(ends, "S"))
    _checks.floating(op, logits=logits)
    _checks.rows_contiguous(op, logits=logits)
    _checks.int32(op, starts=starts, ends=ends)
    _checks.positive(op, k=k)
    _checks.choice(op, "rule", rule, RULES)
    if resolve(op, backend, (logits, starts, ends), config.unsupported(logits, k)) == "triton":
        from vime_kernels.ops.topk import triton_fwd

        with torch.no_grad():
            picks = triton_fwd.topk(logits, k, starts.contiguous(), ends.contiguous())
            return _by_score(logits, picks) if rule == "torch" else picks
    picks = torch.empty(sizes["S"], k, dtype=torch.int32, device=logits.device)
    with torch.no_grad():
        # Sorting holds the scores, their order and two masks: about 24 bytes for every column.
        for rows in chunks(sizes["S"], 24 * sizes["N"]):
            picks[rows] = reference.topk(
                logits[rows], k, starts[rows], ends[rows], ascending=rule == "canonical"
            )
    return picks


def get_topk_fn(rule: str = "canonical", *, backend: str | None = None) -> TopKFn:
    """`topk` with a fixed rule, in the form that `indexer_topk` and `lightning_indexer` take as `topk_fn`.

    Raises:
        ValueError: an unknown rule.
    """
    _checks.choice("get_topk_fn", "rule", rule, RULES)
    return partial(_topk_rows, rule=rule, backend=backend)


def _topk_rows(
    logits: torch.Tensor,
    k: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    rule: str,
    backend: str | None,
    row_offset: int = 0,  # a stateless rule does not care which rows it sees
) -> torch.Tensor:
    return topk(logits, k, starts, ends, rule=rule, backend=backend)


def _by_score(logits: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """The same picks in descending score order, -1 last."""
    if not logits.shape[-1]:
        return picks
    scores = logits.gather(1, picks.clamp_min(0).long()).masked_fill(picks < 0, float("-inf"))
    return picks.gather(1, scores.sort(dim=-1, descending=True, stable=True).indices)
