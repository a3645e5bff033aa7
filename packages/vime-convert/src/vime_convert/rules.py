# SPDX-License-Identifier: Apache-2.0
"""Rules: how Megatron parameters and released tensors correspond, in both directions.

One `Rule` covers a parameter of one module in all layers that have it. The loader applies `to_mcore`, the exporter
`to_hf`, and the tiny-checkpoint writer reads names, shapes and dtypes from the same rule, so the three cannot
disagree. Shapes are those of whole tensors; how a rank holds a part is `vime_convert.megatron.shards`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from vime_convert.dialects import Dialect, split_indices
from vime_convert.errors import NamesError

Kind = Literal["copy", "gate_up", "qkv_grouped"]
"""copy: one tensor, unchanged. gate_up: two tensors joined along rows, gate first. qkv_grouped: q, k and v joined
along rows, interleaved by key-value head: all query heads of the group, its key head, its value head."""


class TensorSpec(NamedTuple):
    """Shape and stored dtype of one released tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes in the stored dtype."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter and the released tensors that it is made of.

    Attributes:
        mcore: canonical Megatron name with `{layer}` and `{expert}` where it has them.
        hf: release names with the same placeholders, in joining order.
        shapes: shape of each released tensor.
        dtype: what the release stores: bfloat16, float32 or int64.
        kind: how the released tensors are joined.
        layers: decoder layers that have the parameter; empty: it is not part of a layer.
        num_experts: experts that have it; 0: it is not part of an expert.
        tp_dim: dimension that tensor parallelism splits (expert tensor parallelism for experts); None: replicated.
        head_groups: key-value heads, for `qkv_grouped`.
        vocab: rows are vocabulary entries, which Megatron pads.
    """

    mcore: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.bfloat16
    kind: Kind = "copy"
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    tp_dim: int | None = None
    head_groups: int = 0
    vocab: bool = False

    @property
    def mcore_shape(self) -> tuple[int, ...]:
        """Shape of the whole Megatron parameter, without vocabulary padding."""
        rows = sum(shape[0] for shape in self.shapes)
        return (rows, *self.shapes[0][1:])


def to_mcore(rule: Rule, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole Megatron tensor made of released tensors; the inverse of `to_hf`.

    Args:
        rule: which parameter.
        tensors: one per name of `rule.hf`, with the shapes of `rule.shapes`.
    """
    if rule.kind == "copy":
        return tensors[0]
    if rule.kind == "gate_up":
        return torch.cat(list(tensors))
    grouped = [tensor.unflatten(0, (rule.head_groups, -1)) for tensor in tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def to_hf(rule: Rule, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The released tensors that a whole Megatron tensor is made of; the inverse of `to_mcore`."""
    rows = [shape[0] for shape in rule.shapes]
    if rule.kind == "copy":
        return (tensor,)
    if rule.kind == "gate_up":
        return tensor.split(rows)
    grouped = tensor.unflatten(0, (rule.head_groups, -1))
    return tuple(part.flatten(0, 1) for part in grouped.split([n // rule.head_groups for n in rows], dim=1))


class Bound(NamedTuple):
    """A rule at one layer and expert (None where it has none)."""

    rule: Rule
    layer: int | None = None
    expert: int | None = None

    @property
    def mcore(self) -> str:
        """Canonical Megatron name."""
        return self.rule.mcore.format(layer=self.layer, expert=self.expert)

    @property
    def hf(self) -> tuple[str, ...]:
        """Release names."""
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.rule.hf)


def _template(name: str) -> str:
    return name.replace("{layer}", "{}").replace("{expert}", "{}")


@dataclass(frozen=True)
class RuleTable:
    """All names of one model, in both directions.

    Attributes:
        model_type: Hugging Face model type.
        num_layers: decoder layers.
        rules: every parameter and persistent buffer of the Megatron model.
        dialects: spellings on disk; the first one is the release.
        ignored: regular expressions (full match) of release names that the Megatron model leaves out.
        schedules: fields of `config.json` with one entry per layer.
    """

    model_type: str
    num_layers: int
    rules: tuple[Rule, ...]
    dialects: tuple[Dialect, ...]
    ignored: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()

    @cached_property
    def _by_template(self) -> Mapping[str, list[Rule]]:
        found: dict[str, list[Rule]] = {}
        for rule in self.rules:
            found.setdefault(_template(rule.mcore), []).append(rule)
        return found

    @cached_property
    def _ignored(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{pattern})" for pattern in self.ignored) or r"(?!)")

    def find(self, mcore_name: str) -> Bound:
        """The rule of a canonical Megatron name.

        Raises:
            NamesError: no rule has that name at that layer.
        """
        template, indices = split_indices(mcore_name)
        for rule in self._by_template.get(template, ()):
            layer = indices[0] if rule.layers else None
            expert = indices[-1] if rule.num_experts else None
            if (layer is None or layer in rule.layers) and (expert is None or expert < rule.num_experts):
                return Bound(rule, layer, expert)
        raise NamesError(
            f"{self.model_type}: no rule for the Megatron parameter {mcore_name}; "
            "the model was built from another config, or its rule table lacks the parameter"
        )

    def bound(self) -> Iterator[Bound]:
        """Every parameter of the model: those outside layers first, then layer by layer."""
        yield from (Bound(rule) for rule in self.rules if not rule.layers)
        for layer in range(self.num_layers):
            for rule in self.rules:
                if layer not in rule.layers:
                    continue
                if rule.num_experts:
                    yield from (Bound(rule, layer, expert) for expert in range(rule.num_experts))
                else:
                    yield Bound(rule, layer)

    def expected_hf(self) -> dict[str, TensorSpec]:
        """Shape and stored dtype of every released tensor that the model needs, by release name, layer by layer."""
        return {
            name: TensorSpec(shape, bound.rule.dtype)
            for bound in self.bound()
            for name, shape in zip(bound.hf, bound.rule.shapes, strict=True)
        }

    def is_ignored(self, release_name: str) -> bool:
        """Whether a released tensor is known but not part of the Megatron model."""
        return self._ignored.fullmatch(release_name) is not None

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return max((rule.num_experts for rule in self.rules), default=0)

    @property
    def writable_dialects(self) -> tuple[Dialect, ...]:
        """The dialects that can be written."""
        return tuple(dialect for dialect in self.dialects if dialect.writable)

    @property
    def module_dialect(self) -> Dialect:
        """The names that a transformers model has in memory."""
        return next((dialect for dialect in self.dialects if dialect.name == "hf-module"), self.dialects[0])

    def dialect(self, name: str) -> Dialect:
        """The dialect with that name.

        Raises:
            NamesError: there is none.
        """
        for dialect in self.dialects:
            if dialect.name == name:
                return dialect
        known = ", ".join(dialect.name for dialect in self.dialects)
        raise NamesError(f"{self.model_type}: expected a dialect out of {known}, got {name!r}")
