# SPDX-License-Identifier: Apache-2.0
"""Which parameters get gradients, weight decay and updates: what a training step really does to a model.

A frozen part can move without a gradient, through weight decay or through a buffer that somebody updates, and a
trained part can stand still, because nobody gave it to the optimizer. `snapshot` before a step and `report` after it
show both; `problems` says what should not be.
Left out: other ranks. Each one reports its own shards.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One parameter or buffer.

    Attributes:
        name: in the model.
        shape: of this rank's shard.
        dtype: of the model's tensor.
        kind: "trained", "frozen" (a parameter without gradients) or "buffer".
        weight_decay: of its optimizer group; None if the optimizer does not have it.
        gradient: norm of the gradient; None if there is none.
        update: largest change since the snapshot; None without one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    weight_decay: float | None
    gradient: float | None
    update: float | None


Model = torch.nn.Module | Sequence[torch.nn.Module]


def snapshot(model: Model) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, for `report(..., before=...)`."""
    return {name: tensor.detach().clone() for name, tensor, _ in _tensors(model)}


def report(model: Model, optimizer: Any, before: Mapping[str, torch.Tensor] | None = None) -> list[Row]:
    """One row for every parameter and persistent buffer, in the model's order.

    Args:
        model: a module or the model chunks of this rank, wrapped or not.
        optimizer: a torch optimizer, or one of Megatron's: with float32 copies, distributed, or a chain of them.
        before: `snapshot` taken before the step.
    """
    groups = _groups(optimizer)
    rows = []
    for name, tensor, kind in _tensors(model):
        group = groups.get(id(tensor))
        gradient = getattr(tensor, "main_grad", None)
        gradient = tensor.grad if gradient is None else gradient
        update = None
        if before is not None:
            update = (
                (tensor.detach().double() - before[name].double()).abs().max().item()
                if tensor.numel()
                else 0.0
            )
        rows.append(
            Row(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                kind=kind,
                weight_decay=None if group is None else float(group["weight_decay"]),
                gradient=None if gradient is None else gradient.norm().item(),
                update=update,
            )
        )
    return rows


def problems(rows: Iterable[Row]) -> list[str]:
    """What contradicts itself, one line each: frozen but moving, trained but standing still or unknown."""
    lines = []
    for row in rows:
        if row.kind != "trained":
            if row.weight_decay is not None:
                lines.append(f"{row.name}: {row.kind}, but the optimizer has it")
            if row.update:
                lines.append(f"{row.name}: {row.kind}, but it changed by {row.update:.1e}")
        elif row.weight_decay is None:
            lines.append(f"{row.name}: trained, but the optimizer does not have it")
        elif row.gradient is None:
            lines.append(f"{row.name}: trained, but it has no gradient")
        elif row.update == 0 and row.gradient:
            lines.append(f"{row.name}: trained, but it did not change")
    return lines


def table(rows: Iterable[Row]) -> str:
    """The rows as text, layers and experts with equal answers on one line."""

    def key(row: Row) -> tuple[Any, ...]:
        name = re.sub(r"\.\d+(?=\.|$)", ".*", row.name)
        return (
            name,
            row.kind,
            row.weight_decay,
            row.gradient is not None,
            bool(row.update),
            row.update is None,
        )

    lines = [f"{'tensors':>7}  {'kind':<8}{'gradient':<10}{'decay':<8}{'update':<9}name"]
    for (name, kind, decay, has_gradient, moved, unknown), same in groupby(
        sorted(rows, key=lambda r: str(key(r))), key
    ):
        lines.append(
            f"{len(list(same)):>7}  {kind:<8}{'yes' if has_gradient else '-':<10}"
            f"{'-' if decay is None else format(decay, 'g'):<8}{'?' if unknown else 'yes' if moved else '-':<9}{name}"
        )
    return "\n".join(lines)


def _tensors(model: Model) -> Iterator[tuple[str, torch.Tensor, str]]:
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            yield prefix + name, parameter, "trained" if parameter.requires_grad else "frozen"
        # Names instead of a flag, which torch keeps private: what is saved persists.
        saved = chunk.state_dict(keep_vars=True)
        for name, buffer in chunk.named_buffers():
            if name in saved:
                yield prefix + name, buffer, "buffer"


def _groups(optimizer: Any) -> dict[int, dict[str, Any]]:
    """Identity of a model's parameter to its optimizer group."""
    found: dict[int, dict[str, Any]] = {}
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = each.param_groups
        found |= {id(parameter): group for group in groups for parameter in group["params"]}
        # Megatron's optimizers step float32 copies, which know nothing of the model's parameters.
        for parameter, (index, _) in getattr(each, "model_param_group_index_map", {}).items():
            found[id(parameter)] = groups[index]
        for model_group, copies in zip(
            getattr(each, "float16_groups", []), getattr(each, "fp32_from_float16_groups", []), strict=True
        ):
            for parameter, copy in zip(model_group, copies, strict=True):
                found[id(parameter)] = found[id(copy)]
    return found
