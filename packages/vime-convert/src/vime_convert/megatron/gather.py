# SPDX-License-Identifier: Apache-2.0
"""Whole Megatron tensors on every rank, from the parts that the ranks hold.

One tensor at a time, so memory holds one whole tensor besides the model. All ranks of a group make the same calls in
the same order, which is why the plan (who has what) is exchanged first.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vime_convert.megatron.names import Entry
from vime_convert.megatron.parallel import Axis, Parallel
from vime_convert.megatron.shards import is_split, join, whole_shape
from vime_convert.rules import Bound, RuleTable


class _Owner(NamedTuple):
    ep_rank: int
    dtype: torch.dtype


def whole_tensors(
    found: Sequence[Entry], table: RuleTable, parallel: Parallel
) -> Iterator[tuple[Bound, torch.Tensor]]:
    """Every parameter of the model whole, without vocabulary padding, in the same order on all ranks.

    Args:
        found: what this rank holds.
        table: the model's rules.
        parallel: this rank's place.
    """
    if parallel.is_trivial:
        for bound, tensor in found:
            whole_shape(bound.rule, tensor.shape, 1, bound.mcore)
            yield bound, join(bound.rule, [tensor])
        return
    mine = {entry.bound.mcore: entry for entry in found}
    device = found[0].tensor.device if found else torch.device("cpu")
    done: set[str] = set()
    for stage, owners in enumerate(_plan(found, table, parallel)):
        for name, owner in owners.items():
            if name in done:
                continue  # the embedding, of which the stage of draft layers has a copy
            done.add(name)
            bound = table.find(name)
            whole: torch.Tensor | None = None
            if parallel.pp.rank == stage:
                if name in mine:
                    whole = _gather(mine[name], parallel.etp if bound.rule.num_experts else parallel.tp)
                if bound.rule.num_experts:
                    whole = _broadcast(whole, bound, owner.dtype, device, parallel.ep, owner.ep_rank)
            yield bound, _broadcast(whole, bound, owner.dtype, device, parallel.pp, stage)


def _plan(found: Sequence[Entry], table: RuleTable, parallel: Parallel) -> list[dict[str, _Owner]]:
    """For each pipeline stage: its parameters in order, with the expert rank that has each."""
    local = {entry.bound.mcore: _Owner(parallel.ep.rank, entry.tensor.dtype) for entry in found}
    stage: dict[str, _Owner] = {}
    for names in _all_gather_object(local, parallel.ep):
        stage = names | stage  # parameters outside experts are on every rank; the first one is named
    # Every rank needs the same order, and expert ranks know only their own.
    ordered = {bound.mcore: stage[bound.mcore] for bound in table.bound() if bound.mcore in stage}
    return _all_gather_object(ordered, parallel.pp)


def _all_gather_object(item: Any, axis: Axis) -> list[Any]:
    if axis.size == 1:
        return [item]
    gathered: list[Any] = [None] * axis.size
    dist.all_gather_object(gathered, item, group=axis.group)
    return gathered


def _gather(entry: Entry, axis: Axis) -> torch.Tensor:
    rule, local = entry.bound.rule, entry.tensor.contiguous()
    whole_shape(rule, local.shape, axis.size, entry.bound.mcore)
    if not is_split(rule, local.shape, axis.size):
        return join(rule, [local])
    parts = [torch.empty_like(local) for _ in range(axis.size)]
    dist.all_gather(parts, local, group=axis.group)
    return join(rule, parts)


def _broadcast(
    whole: torch.Tensor | None,
    bound: Bound,
    dtype: torch.dtype,
    device: torch.device,
    axis: Axis,
    source: int,
) -> torch.Tensor:
    if whole is None:
        whole = torch.empty(bound.rule.mcore_shape, dtype=dtype, device=device)
    if axis.size > 1:
        whole = whole.contiguous()
        dist.broadcast(whole, group=axis.group, group_src=source)
    return whole
