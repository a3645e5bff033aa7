# SPDX-License-Identifier: Apache-2.0
"""A short description of a checkpoint: dialect, sizes, dtypes, what each layer has, and the first fault if any."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vime_convert.checkpoint import Checkpoint
from vime_convert.errors import ConvertError
from vime_convert.reader import CheckpointReader
from vime_convert.registry import table_for
from vime_convert.rules import RuleTable


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        directory: the checkpoint.
        model_type: of its config.
        dialect: spelling of the names; None if the checkpoint cannot be read as this model.
        dialects: the spellings that the model's checkpoints come in.
        tensors, nbytes: stored tensors and their size.
        parameters: values that the Megatron model takes from it.
        dtypes: stored tensors per dtype.
        quantised: whether weights are block-scaled.
        extras: stored tensors that the Megatron model leaves out.
        schedule: config fields with one entry per layer.
        problem: why it cannot be loaded; empty if it can.
    """

    directory: Path
    model_type: str
    dialect: str | None
    dialects: tuple[str, ...]
    tensors: int
    nbytes: int
    parameters: int
    dtypes: dict[str, int]
    quantised: bool
    extras: int
    schedule: dict[str, list[Any]]
    problem: str

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**vars(self), "directory": str(self.directory)}

    def as_text(self) -> str:
        """One line per field."""
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in self.dtypes.items())
        lines = [
            f"model type   {self.model_type}",
            f"dialect      {self.dialect or 'unknown'} (known: {', '.join(self.dialects)})",
            f"tensors      {self.tensors} ({self.nbytes / 1e9:.3f} GB): {dtypes}",
            f"parameters   {self.parameters:,}",
            f"quantised    {'yes, block-scaled' if self.quantised else 'no'}",
            f"not loaded   {self.extras} tensors (draft layers)",
            *(f"{field:<12} {' '.join(str(v) for v in values)}" for field, values in self.schedule.items()),
            f"problems     {self.problem or 'none'}",
        ]
        return "\n".join(lines)


def inspect(directory: str | Path, plugin: str | None = None) -> Inspection:
    """The description of a checkpoint directory; faults of its contents are reported in it, not raised.

    Raises:
        CheckpointError: the files cannot be opened at all.
        ConfigError: the model type is unknown or its config is refused.
    """
    reader = CheckpointReader(directory)
    config = reader.config()
    table = table_for(config, plugin)
    checkpoint, problem = _open(reader, table)
    infos = [reader.raw_info(name) for name in reader.raw_names()]
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in infos)
    return Inspection(
        directory=Path(directory),
        model_type=table.model_type,
        dialect=checkpoint.dialect.name if checkpoint else None,
        dialects=tuple(dialect.name for dialect in table.dialects),
        tensors=len(infos),
        nbytes=sum(prod(info.shape) * info.dtype.itemsize for info in infos),
        parameters=sum(prod(spec.shape) for spec in table.expected_hf().values()),
        dtypes=dict(dtypes.most_common()),
        quantised=bool(checkpoint and checkpoint.quantised),
        extras=len(checkpoint.extras) if checkpoint else 0,
        schedule={field: list(config[field]) for field in table.schedules if config.get(field)},
        problem=problem,
    )


def _open(reader: CheckpointReader, table: RuleTable) -> tuple[Checkpoint | None, str]:
    try:
        return Checkpoint(reader, table), ""
    except ConvertError as error:
        return None, str(error)
