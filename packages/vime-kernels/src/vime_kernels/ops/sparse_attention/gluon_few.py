# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with at most 32 heads on Hopper: neighbouring query rows share a program of the kernels for 64.

Those kernels multiply 64 columns in any case, and gather a row of keys for each of its query rows. Here the columns are
the heads of two, four or eight neighbouring query rows, and the keys are the united list of their own
(`triton_unite`), so each key is gathered, and its gradient added, once for all of them. How the terms of a row's sums
are ordered then depends on its neighbours' lists, and with it the last bits of its output. A NaN or an infinity in the
operands of a row that has keys reaches the rows that share its program. The lists are made for as many rows at a time
as fit a bounded workspace. Leaves a backward without gradients of the keys to the others.
"""

from collections.abc import Callable

import torch

from vime_kernels.ops.sparse_attention import fused_bwd, gluon_bwd_keys, gluon_bwd_wide, gluon_fwd
from vime_kernels.ops.sparse_attention.sources import Sources
from vime_kernels.ops.sparse_attention.triton_unite import unite, words_of

# Bytes of united lists at a time.
WORDS_BYTES = 2**28


def _columns(rows: torch.Tensor, group: int) -> torch.Tensor:
    """[S, H, ...] as [groups, group · H, ...]; the last group is filled up with zeros."""
    missing = -len(rows) % group
    if missing:
        rows = torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])
    return rows.reshape(len(rows) // group, group * rows.shape[1], *rows.shape[2:])


def _rows(grouped: torch.Tensor, S: int, H: int) -> torch.Tensor:
    """The inverse of `_columns`."""
    return grouped.view(-1, H, *grouped.shape[2:])[:S]


def _lists(sources: Sources, S: int, H: int, group: int) -> tuple[Callable[[slice], Sources], int]:
    """United lists of a slice of the groups, and how many groups to ask for at a time."""

    def lists(groups: slice) -> Sources:
        rows = slice(groups.start * group, min(groups.stop * group, S))
        return unite(sources.rows(rows), rows.stop - rows.start, H, group)

    return lists, max(1, WORDS_BYTES // (4 * max(1, words_of(sources, group))))


def forward(
    q: torch.Tensor, sources: Sources, sink: torch.Tensor | None, scale: float, d_v: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gluon_fwd.forward`, `group` query rows at a time."""
    S, H, _ = q.shape
    q, sinks = _columns(q, group), None if sink is None else sink.repeat(group)
    lists, step = _lists(sources, S, H, group)
    if step >= len(q):
        out, lse = gluon_fwd.forward(q, lists(slice(0, len(q))), sinks, scale, d_v)
    else:
        out, lse = q.new_empty((*q.shape[:2], d_v)), q.new_empty(q.shape[:2], dtype=torch.float32)
        for first in range(0, len(q), step):
            some = slice(first, min(first + step, len(q)))
            out[some], lse[some] = gluon_fwd.forward(q[some], lists(some), sinks, scale, d_v)
    return _rows(out, S, H), _rows(lse, S, H)


def backward(
    q: torch.Tensor,
    sources: Sources,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """As `fused_bwd.backward`, `group` query rows at a time."""
    S, H, _ = q.shape
    launch = (gluon_bwd_keys if q.shape[-1] == out.shape[-1] else gluon_bwd_wide).launch
    sinks = None if sink is None else sink.repeat(group)
    q, out, lse, do = (_columns(each, group) for each in (q, out, lse, do))
    dlse = None if dlse is None else _columns(dlse, group)
    lists, step = _lists(sources, S, H, group)
    dq, dkv_a, dkv_b, dsink = fused_bwd.backward(
        launch, q, sources, sinks, out, lse, do, dlse, scale, lists=lists, step=step
    )
    return _rows(dq, S, H), dkv_a, dkv_b, None if dsink is None else dsink.view(group, H).sum(0)
