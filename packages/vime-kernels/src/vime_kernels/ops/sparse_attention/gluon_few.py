# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with at most 32 heads on Hopper: neighbouring query rows share a program of the kernels for 64.

Those kernels multiply 64 columns in any case, and gather a row of keys for each of its query rows. Here the columns are
the heads of two, four or eight neighbouring query rows, and the keys are the united list of their own
(`triton_unite`), so each key is gathered, and its gradient added, once for all of them. How the terms of a row's sums
are ordered then depends on its neighbours' lists, and with it the last bits of its output. A NaN or an infinity in one
row's operands reaches the rows that share its program. Leaves a backward without gradients of the keys to the others.
"""

import torch

from vime_kernels.ops.sparse_attention import gluon_bwd_keys, gluon_bwd_wide, gluon_fwd
from vime_kernels.ops.sparse_attention.sources import Sources
from vime_kernels.ops.sparse_attention.triton_unite import unite


def _columns(rows: torch.Tensor, group: int) -> torch.Tensor:
    """[S, H, ...] as [groups, group · H, ...]; the last group is filled up with zeros."""
    missing = -len(rows) % group
    if missing:
        rows = torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])
    return rows.reshape(len(rows) // group, group * rows.shape[1], *rows.shape[2:])


def _rows(grouped: torch.Tensor, S: int, H: int) -> torch.Tensor:
    """The inverse of `_columns`."""
    return grouped.view(-1, H, *grouped.shape[2:])[:S]


def forward(
    q: torch.Tensor, sources: Sources, sink: torch.Tensor | None, scale: float, d_v: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gluon_fwd.forward`, `group` query rows at a time."""
    S, H, _ = q.shape
    sinks = None if sink is None else sink.repeat(group)
    out, lse = gluon_fwd.forward(_columns(q, group), unite(sources, S, H, group), sinks, scale, d_v)
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
    """As `gluon_bwd_keys.backward` and `gluon_bwd_wide.backward`, `group` query rows at a time."""
    S, H, _ = q.shape
    sinks = None if sink is None else sink.repeat(group)
    q, out, lse, do = (_columns(each, group) for each in (q, out, lse, do))
    dlse = None if dlse is None else _columns(dlse, group)
    fused = gluon_bwd_keys.backward if q.shape[-1] == out.shape[-1] else gluon_bwd_wide.backward
    dq, dkv_a, dkv_b, dsink = fused(q, unite(sources, S, H, group), sinks, out, lse, do, dlse, scale)
    return _rows(dq, S, H), dkv_a, dkv_b, None if dsink is None else dsink.view(group, H).sum(0)
