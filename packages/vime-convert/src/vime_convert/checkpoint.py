# SPDX-License-Identifier: Apache-2.0
"""A stored checkpoint seen through the release names of its model: whatever the dialect, unfused and dequantised.

Creating the view checks every header against the rule table, so that a checkpoint which cannot be loaded completely
is refused before the first parameter changes.
"""

import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from vime_convert.dialects import Slot, detect
from vime_convert.errors import CheckpointError, raise_problems
from vime_convert.quant import block_sizes, dequantise, is_quantised, logical_shape
from vime_convert.reader import CheckpointReader, RawInfo
from vime_convert.rules import RuleTable, TensorSpec

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)


class StoredInfo(NamedTuple):
    """A release tensor as stored: shape after unfusing and dequantising, stored dtype, and whether it has scales."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantised: bool


class Checkpoint:
    """Release tensors of a stored checkpoint.

    Attributes:
        reader: the files.
        table: the model's rules.
        dialect: the spelling that the files use.
        extras: release names of stored tensors that the Megatron model leaves out (draft layers), sorted.

    Args:
        first_layers: accept a checkpoint with more decoder layers than the table; the others are not seen.

    Raises:
        CheckpointError: mixed dialects; tensors that are missing, unexpected, misshaped or of a wrong dtype; block
            scales that are missing or do not fit; NaN or infinity in a norm weight; expert ids that name no expert or
            one expert twice for a token. Of block scales only those that are read are checked for NaN: reading all
            would take as long as a conversion.
    """

    def __init__(self, reader: CheckpointReader, table: RuleTable, *, first_layers: bool = False) -> None:
        self.reader, self.table = reader, table
        names = [name for name in reader.raw_names() if not (first_layers and self._beyond(name))]
        where = str(reader.directory)
        self.dialect = detect(table.dialects, names, where)
        self._expected = table.expected_hf()
        self._slots: dict[str, Slot] = {name: self.dialect.slot(name) for name in self._expected}
        self._members = Counter(slot.stored for slot in self._slots.values())
        self._stored = set(names)
        self.extras = self._find_extras()
        problems = [problem for name in self._expected if (problem := self._judge(name))]
        problems += [problem for name in self.extras if (problem := self._judge_scales(name, name))]
        problems += self._unexplained()
        raise_problems(
            f"{where} ({self.dialect.name} names)",
            problems or [*self._bad_norms(), *self._bad_expert_ids()],
            "check that config.json belongs to these files, and convert or download them again",
        )

    def names(self) -> list[str]:
        """Release names of the tensors that the model needs, layer by layer."""
        return list(self._expected)

    def info(self, name: str) -> StoredInfo:
        """How a release tensor is stored."""
        slot = self._slot(name)
        raw = self.reader.raw_info(slot.stored)
        quantised = self._is_quantised(slot, raw)
        if slot.expert is not None:
            return StoredInfo((raw.shape[1] // slot.parts, *raw.shape[2:]), raw.dtype, False)
        return StoredInfo(
            logical_shape(raw.shape, raw.dtype) if quantised else raw.shape, raw.dtype, quantised
        )

    def get(self, name: str) -> torch.Tensor:
        """A release tensor in its stored dtype; float32 where it was stored quantised."""
        slot = self._slot(name)
        if slot.expert is not None:
            rows = self.info(name).shape[0]
            return self.reader.get_raw_rows(
                slot.stored, slot.expert, slot.part * rows, (slot.part + 1) * rows
            )
        tensor = self.reader.get_raw(slot.stored)
        if self._is_quantised(slot, self.reader.raw_info(slot.stored)):
            return dequantise(tensor, self._finite_scale(slot))
        return tensor

    @cached_property
    def quantised(self) -> bool:
        """Whether any tensor needs block scales."""
        return any(self.info(name).quantised for name in [*self._expected, *self.extras])

    def get_plain(self, name: str) -> torch.Tensor:
        """A release tensor in its stored dtype; bfloat16 where it was stored quantised."""
        tensor = self.get(name)
        return tensor.bfloat16() if self.info(name).quantised else tensor

    def get_raw(self, name: str) -> torch.Tensor:
        """A release tensor as stored, quantised or not."""
        return self.reader.get_raw(self._slot(name).stored) if self.info(name).quantised else self.get(name)

    def get_scale(self, name: str) -> torch.Tensor | None:
        """The block scales of a release tensor as stored; None when it has none."""
        return self._finite_scale(self._slot(name)) if self.info(name).quantised else None

    def nbytes(self, name: str, *, quantised: bool) -> int:
        """Size of a release tensor as `get_raw` (with its scales) or as `get_plain` returns it."""
        info, slot = self.info(name), self._slot(name)
        if not info.quantised:
            return math.prod(info.shape) * info.dtype.itemsize
        if not quantised:
            return math.prod(info.shape) * torch.bfloat16.itemsize
        stored = (self.reader.raw_info(slot.stored), self.reader.raw_info(self._scale(slot)))
        return sum(math.prod(raw.shape) * raw.dtype.itemsize for raw in stored)

    def _slot(self, name: str) -> Slot:
        return self._slots.get(name) or self.dialect.slot(name)

    def _beyond(self, name: str) -> bool:
        before, found, after = name.partition("layers.")
        number = after.partition(".")[0]
        return (
            bool(found)
            and before in ("", "model.")
            and number.isdigit()
            and int(number) >= self.table.num_layers
        )

    def _is_quantised(self, slot: Slot, raw: RawInfo) -> bool:
        return is_quantised(raw.dtype) and self._scale(slot) in self._stored

    def _scale(self, slot: Slot) -> str:
        return self.dialect.scale_of(slot.stored) or ""

    def _finite_scale(self, slot: Slot) -> torch.Tensor:
        name = self._scale(slot)
        scale = self.reader.get_raw(name)
        # Plain bytes hold e8m0 exponents, of which the largest means NaN.
        exponents = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
        if not exponents.float().isfinite().all():
            raise CheckpointError(
                f"{self.reader.directory}: {name}: holds NaN or infinity; download the checkpoint again"
            )
        return scale

    def _find_extras(self) -> list[str]:
        found = (self.dialect.release_name(name) for name in self._stored)
        scales = {scale for name in self._stored if (scale := self.dialect.scale_of(name))}
        return sorted(
            name
            for name in found
            if name and self.table.is_ignored(name) and self.dialect.slot(name).stored not in scales
        )

    def _judge(self, name: str) -> str | None:
        """What is wrong with the header of a needed tensor, or None."""
        slot, spec = self._slots[name], self._expected[name]
        label = name if slot.stored == name else f"{name} (stored as {slot.stored})"
        if slot.stored not in self._stored:
            return f"{label}: missing"
        raw = self.reader.raw_info(slot.stored)
        if slot.expert is not None:
            return self._judge_fused(label, slot, raw, spec)
        quantised = self._is_quantised(slot, raw)
        if quantised and (problem := self._judge_scales(label, name)):
            return problem
        shape = logical_shape(raw.shape, raw.dtype) if quantised else raw.shape
        if shape != spec.shape:
            return f"{label}: expected shape {list(spec.shape)}, got {list(shape)}"
        return None if quantised and spec.dtype.is_floating_point else _judge_dtype(label, raw.dtype, spec)

    def _judge_scales(self, label: str, name: str) -> str | None:
        """What is wrong with the block scales of a tensor that needs them, or None."""
        slot = self._slot(name)
        raw = self.reader.raw_info(slot.stored)
        if not is_quantised(raw.dtype):
            return None
        if self._scale(slot) not in self._stored:
            return f"{label}: stored as {raw.dtype}, but its block scales are missing"
        scales = self.reader.raw_info(self._scale(slot))
        blocks = block_sizes(raw.shape, raw.dtype, scales.shape, scales.dtype)
        return f"{label}: {blocks}" if isinstance(blocks, str) else None

    def _judge_fused(self, label: str, slot: Slot, raw: RawInfo, spec: TensorSpec) -> str | None:
        expected = (self._members[slot.stored] // slot.parts, spec.shape[0] * slot.parts, *spec.shape[1:])
        if raw.shape != expected:
            return f"{label}: expected shape {list(expected)} of all experts, got {list(raw.shape)}"
        return _judge_dtype(label, raw.dtype, spec)

    def _unexplained(self) -> list[str]:
        slots = [*self._slots.values(), *(self.dialect.slot(name) for name in self.extras)]
        explained = {slot.stored for slot in slots}
        explained |= {
            self._scale(slot)
            for slot in slots
            if slot.stored in self._stored and self._is_quantised(slot, self.reader.raw_info(slot.stored))
        }
        return [f"{name}: no tensor of this model" for name in sorted(self._stored - explained)]

    def _bad_norms(self) -> list[str]:
        norms = [name for name in self._expected if name.endswith("norm.weight")]
        return [f"{name}: holds NaN or infinity" for name in norms if not self.get(name).isfinite().all()]

    def _bad_expert_ids(self) -> Iterator[str]:
        for name, spec in self._expected.items():
            if spec.dtype.is_floating_point:
                continue
            ids, last = self.get(name), self.table.num_experts - 1
            outside = ((ids < 0) | (ids > last)).nonzero().tolist()
            ordered = ids.sort(dim=-1).values
            twice = (ordered[:, 1:] == ordered[:, :-1]).nonzero().tolist()
            if outside:
                row, pick = outside[0]
                yield f"{name}: row {row} names expert {ids[row, pick]}, expected 0 to {last}"
            elif twice:
                row, pick = twice[0]
                yield f"{name}: row {row} names expert {ordered[row, pick]} twice, expected distinct experts"


def _judge_dtype(label: str, dtype: torch.dtype, spec: TensorSpec) -> str | None:
    allowed = _FLOATS if spec.dtype.is_floating_point else _INTEGERS
    if dtype in allowed:
        return None
    hint = " (quantised weights need their scales beside them)" if is_quantised(dtype) else ""
    return f"{label}: expected one of {', '.join(str(d).removeprefix('torch.') for d in allowed)}, got {dtype}{hint}"


def open_checkpoint(source: CheckpointReader | Checkpoint, table: RuleTable) -> Checkpoint:
    """The view of a reader, or the view itself."""
    if isinstance(source, CheckpointReader):
        return Checkpoint(source, table)
    if not isinstance(source, Checkpoint):
        raise CheckpointError(f"expected a CheckpointReader or Checkpoint, got {type(source).__name__}")
    return source
