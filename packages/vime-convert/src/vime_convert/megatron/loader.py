# SPDX-License-Identifier: Apache-2.0
"""Fills a Megatron model from a checkpoint in any dialect.

Names, shapes and dtypes of files and model are compared first; the first parameter is written only when all fit.
Values keep the stored precision up to the one cast into the parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vime_convert.checkpoint import Checkpoint, open_checkpoint
from vime_convert.errors import raise_problems
from vime_convert.megatron.names import Entry, entries
from vime_convert.megatron.parallel import Axis, Parallel, current
from vime_convert.megatron.shards import split, whole_shape
from vime_convert.reader import CheckpointReader
from vime_convert.rules import Bound, Rule, RuleTable, to_mcore


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank.

    Attributes:
        tensors: parameters and buffers filled.
        nbytes: their size.
        dialect: of the files.
        narrowed: canonical names of parameters whose dtype holds less than what the file stores.
    """

    tensors: int
    nbytes: int
    dialect: str
    narrowed: tuple[str, ...]


def load_checkpoint(
    chunks: Sequence[torch.nn.Module],
    source: CheckpointReader | Checkpoint,
    table: RuleTable,
    *,
    progress: Callable[[int], object] | None = None,
) -> LoadReport:
    """A report, after every parameter and persistent buffer of this rank was set once.

    Args:
        chunks: Megatron model chunks of this rank (wrapped or not), on any device.
        source: the checkpoint.
        table: the model's rules.
        progress: called with 1 after each parameter.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or does not fit the model.
        NamesError: the model has a parameter that no rule covers, or one twice.
    """
    checkpoint, parallel = open_checkpoint(source, table), current()
    found = list(entries(chunks, table, parallel))
    problems = [problem for entry in found if (problem := _judge(entry))]
    problems += [f"{name}: the model has no such parameter" for name in _absent(found, table, parallel)]
    where = f"loading {checkpoint.reader.directory}"
    raise_problems(where, problems, "build the model from the config of this checkpoint")
    for entry in found:
        whole_shape(
            entry.bound.rule, entry.tensor.shape, tp_axis(entry.bound.rule, parallel).size, entry.bound.mcore
        )
    narrowed = []
    with torch.no_grad():
        for bound, parameter in found:
            axis = tp_axis(bound.rule, parallel)
            whole = to_mcore(bound.rule, [checkpoint.get(name) for name in bound.hf])
            parameter.copy_(split(bound.rule, whole, parameter.shape, axis.rank, axis.size))
            if _narrows(checkpoint, bound, parameter.dtype):
                narrowed.append(bound.mcore)
            if progress is not None:
                progress(1)
    nbytes = sum(entry.tensor.nbytes for entry in found)
    return LoadReport(len(found), nbytes, checkpoint.dialect.name, tuple(narrowed))


def tp_axis(rule: Rule, parallel: Parallel) -> Axis:
    """The axis that splits a parameter: experts have their own tensor parallelism."""
    return parallel.etp if rule.num_experts else parallel.tp


def _judge(entry: Entry) -> str | None:
    """Why a parameter cannot take its values without loss that was not asked for, or None."""
    name, dtype = entry.bound.mcore, entry.tensor.dtype
    if dtype.is_floating_point != entry.bound.rule.dtype.is_floating_point:
        return f"{name}: expected a {entry.bound.rule.dtype} parameter, the model has {dtype}"
    if getattr(entry.tensor, "vime_dtype", None) == torch.float32 and dtype.itemsize < 4:
        return f"{name}: marked to stay float32 but is {dtype}; restore the marked dtypes before loading"
    return None


def _absent(found: Sequence[Entry], table: RuleTable, parallel: Parallel) -> list[str]:
    """Canonical names that this rank should hold and does not."""
    held = {entry.bound.mcore for entry in found}
    staged = parallel.pp.size > 1
    layers = {entry.bound.layer for entry in found if _in_decoder(entry.bound)}
    count = table.num_experts // parallel.ep.size
    experts = range(parallel.ep.rank * count, (parallel.ep.rank + 1) * count)
    expected = (
        bound
        for bound in table.bound()
        if (not staged or (_in_decoder(bound) and bound.layer in layers))
        and (bound.expert is None or bound.expert in experts)
    )
    return [bound.mcore for bound in expected if bound.mcore not in held]


def _in_decoder(bound: Bound) -> bool:
    return bound.mcore.startswith("decoder.layers.")


def _narrows(checkpoint: Checkpoint, bound: Bound, dtype: torch.dtype) -> bool:
    # Dequantised values are products of few bits; a bfloat16 parameter holds them.
    infos = [checkpoint.info(name) for name in bound.hf]
    return any(not i.quantised and torch.promote_types(i.dtype, dtype) != dtype for i in infos)
