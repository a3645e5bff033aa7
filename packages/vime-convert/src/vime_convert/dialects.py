# SPDX-License-Identifier: Apache-2.0
"""A dialect: one spelling of a model's tensor names on disk, as a bijection with the release spelling.

Names are matched as templates: every number that is a whole dotted component becomes `{}`, so that one pair of
templates covers all layers and experts, and lookups cost one dictionary access. Besides renaming, a dialect may
fuse tensors (experts stacked along a new leading dimension, projections joined along rows). Values are never
changed here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vime_convert.errors import CheckpointError, NamesError

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$")


def split_indices(name: str) -> tuple[str, tuple[int, ...]]:
    """The template of a name and its indices: `layers.3.attn.x` gives (`layers.{}.attn.x`, (3,))."""
    return _INDEX.sub("{}", name), tuple(int(index) for index in _INDEX.findall(name))


@dataclass(frozen=True)
class Slot:
    """Where a release tensor lies in a stored one.

    Attributes:
        stored: name on disk.
        expert: index along the leading dimension, or None when the stored tensor is the release tensor.
        part, parts: which of `parts` equal row blocks of that expert.
    """

    stored: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Fused:
    """A stored template whose tensors stack `parts` of all experts: shape [experts, Σ rows, columns]."""

    stored: str
    parts: tuple[str, ...]


def _unchanged(cfg: Mapping[str, Any]) -> dict[str, Any]:
    return dict(cfg)


@dataclass(frozen=True)
class Dialect:
    """One spelling of the names.

    Attributes:
        name: as used on the command line.
        templates: release template to stored template.
        fused: stored templates that hold several release tensors.
        draft_templates, draft_offset: templates of draft layers whose stored layer index is the release's plus
            the offset, because this dialect counts them after the decoder layers.
        unchanged_prefix: names with this prefix are spelt as in the release, whatever follows.
        scale_suffix: last component of a block-scale name, beside `….weight`; None: cannot hold quantised weights.
        writable: False for spellings of old tools that are only read.
        config: turns a `config.json` into the form that goes with this dialect.
    """

    name: str
    templates: Mapping[str, str]
    fused: tuple[Fused, ...] = ()
    draft_templates: Mapping[str, str] | None = None
    draft_offset: int = 0
    unchanged_prefix: str | None = None
    scale_suffix: str | None = None
    writable: bool = True
    config: Callable[[Mapping[str, Any]], dict[str, Any]] = _unchanged

    @cached_property
    def _parts(self) -> dict[str, tuple[str, int, int]]:
        return {
            part: (fused.stored, i, len(fused.parts))
            for fused in self.fused
            for i, part in enumerate(fused.parts)
        }

    @cached_property
    def _inverse(self) -> dict[str, str]:
        return _invert(self.name, self.templates)

    @cached_property
    def _draft_inverse(self) -> dict[str, str]:
        return _invert(self.name, self.draft_templates or {})

    def slot(self, release: str) -> Slot:
        """Where this dialect stores a release tensor.

        Raises:
            NamesError: the release name is unknown.
        """
        template, indices = split_indices(release)
        if (part := self._parts.get(template)) is not None:
            stored, index, count = part
            return Slot(stored.format(*indices[:-1]), expert=indices[-1], part=index, parts=count)
        if (stored_template := self.templates.get(template)) is not None:
            return Slot(stored_template.format(*indices))
        if self.draft_templates and (stored_template := self.draft_templates.get(template)) is not None:
            return Slot(stored_template.format(indices[0] + self.draft_offset, *indices[1:]))
        if self.unchanged_prefix and release.startswith(self.unchanged_prefix):
            return Slot(release)
        raise NamesError(
            f"{release}: no such tensor in the release dialect, so {self.name} has no name for it"
        )

    def release_name(self, stored: str) -> str | None:
        """The release name of a stored tensor; None for an unknown name, a scale or a fused tensor."""
        if self.unchanged_prefix and stored.startswith(self.unchanged_prefix):
            return stored
        template, indices = split_indices(stored)
        if self.draft_templates and indices and indices[0] >= self.draft_offset:
            release = self._draft_inverse.get(template)
            return release.format(indices[0] - self.draft_offset, *indices[1:]) if release else None
        release = self._inverse.get(template)
        return release.format(*indices) if release else None

    def to_release(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors by release name, fused ones taken apart.

        Raises:
            NamesError: a name that this dialect does not have.
        """
        fused = {entry.stored: entry.parts for entry in self.fused}
        out: dict[str, torch.Tensor] = {}
        for stored, tensor in tensors.items():
            template, indices = split_indices(stored)
            if (parts := fused.get(template)) is not None:
                for expert, rows in enumerate(tensor):
                    for part, value in zip(parts, rows.chunk(len(parts)), strict=True):
                        out[part.format(*indices, expert)] = value
            elif (release := self.release_name(stored)) is not None:
                out[release] = tensor
            else:
                raise NamesError(f"{stored}: not a name of dialect {self.name}")
        return out

    def from_release(
        self, tensors: Iterable[tuple[str, torch.Tensor]], num_experts: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Stored names and tensors, experts fused where this dialect stacks them.

        Streams: a stacked tensor is kept back until its last expert has come.

        Raises:
            NamesError: an unknown release name, or experts that are left over at the end.
        """
        waiting: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
        for name, tensor in tensors:
            slot = self.slot(name)
            if slot.expert is None:
                yield slot.stored, tensor
                continue
            members = waiting.setdefault(slot.stored, {})
            members[slot.expert, slot.part] = tensor
            if len(members) == num_experts * slot.parts:
                del waiting[slot.stored]
                experts = [[members[e, p] for p in range(slot.parts)] for e in range(num_experts)]
                yield slot.stored, torch.stack([torch.cat(parts) for parts in experts])
        if waiting:
            raise NamesError(f"{self.name}: {next(iter(waiting))} lacks some of its {num_experts} experts")

    def scale_of(self, stored: str) -> str | None:
        """The name of the block scales that belong to a stored weight."""
        if self.scale_suffix is None or not stored.endswith(".weight"):
            return None
        return stored.removesuffix("weight") + self.scale_suffix

    def weight_of(self, stored: str) -> str | None:
        """The name of the weight that a stored scale belongs to; None when the name is not a scale's."""
        if self.scale_suffix is None or not stored.endswith("." + self.scale_suffix):
            return None
        return stored.removesuffix(self.scale_suffix) + "weight"

    def knows(self, stored: str) -> bool:
        """Whether the name belongs to this dialect (layer and expert numbers are not judged)."""
        template, _ = split_indices(stored)
        if any(template == fused.stored for fused in self.fused):
            return True
        if self.release_name(stored) is not None:
            return True
        weight = self.weight_of(stored)
        return weight is not None and self.release_name(weight) is not None


def _invert(dialect: str, templates: Mapping[str, str]) -> dict[str, str]:
    inverse = {stored: release for release, stored in templates.items()}
    if len(inverse) != len(templates):
        raise NamesError(f"dialect {dialect}: two release names share one stored name")
    return inverse


def detect(dialects: Iterable[Dialect], names: Iterable[str], where: str) -> Dialect:
    """The dialect that a set of stored names is written in.

    Names that no dialect knows are left for the caller to report.

    Raises:
        CheckpointError: no dialect fits at all, or names of two dialects are mixed; the message has one of each.
    """
    names = list(names)
    order, known = {dialect.name: dialect for dialect in dialects}, {}
    for dialect in order.values():
        known[dialect.name] = [name for name in names if dialect.knows(name)]
        if names and len(known[dialect.name]) == len(names):
            return dialect
    best = max(known, key=lambda dialect: len(known[dialect]))
    if not known[best]:
        raise CheckpointError(
            f"{where}: no tensor name fits a known dialect ({', '.join(known)}); "
            f"first name: {next(iter(names), 'none')!r}; check that config.json belongs to these files"
        )
    recognised = set(known[best])
    for other, theirs in known.items():
        if foreign := [name for name in theirs if name not in recognised]:
            own = next((name for name in known[best] if not order[other].knows(name)), known[best][0])
            raise CheckpointError(
                f"{where}: two dialects are mixed: {own!r} is {best} and {foreign[0]!r} is {other}; "
                "convert the parts separately or download the checkpoint again"
            )
    return order[best]
