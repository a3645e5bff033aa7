# SPDX-License-Identifier: Apache-2.0
"""Rewrites a Hugging Face checkpoint from one dialect to another, bit for bit.

Block-scaled weights travel as they are between dialects that can hold them; for the others `dequantise=True` turns
them into bfloat16. Draft layers travel along.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vime_convert.checkpoint import Checkpoint
from vime_convert.dialects import Dialect
from vime_convert.errors import CheckpointError, OutputError
from vime_convert.output import refuse_existing
from vime_convert.progress import progress
from vime_convert.reader import CheckpointReader
from vime_convert.rules import RuleTable
from vime_convert.writer import SHARD_BYTES, write_checkpoint

_QUANTISATION_FIELDS = ("quantization_config", "expert_dtype")


def rewrite(
    source: str | Path,
    target: str | Path,
    table: RuleTable,
    dialect: str,
    *,
    dequantise: bool = False,
    shard_bytes: int = SHARD_BYTES,
    quiet: bool = True,
) -> int:
    """The number of tensors written to `target` in the named dialect.

    Args:
        source: checkpoint directory in any dialect of the table.
        target: must not exist, or be an empty directory.
        table: the model's rules.
        dialect: name of a writable dialect.
        dequantise: store block-scaled weights as bfloat16.
        shard_bytes: largest shard.
        quiet: no progress bar.

    Raises:
        CheckpointError: the source is not a complete checkpoint of the model, or it is block-scaled and neither
            the dialect holds scales nor `dequantise` is set.
        OutputError: the dialect is read only, the target exists, or the disk is too small.
    """
    to = writable(table, dialect)
    refuse_existing(Path(target))
    reader = CheckpointReader(source)
    checkpoint = Checkpoint(reader, table)
    if checkpoint.quantised and to.scale_suffix is None and not dequantise:
        raise CheckpointError(
            f"{source}: holds block-scaled weights, which dialect {to.name} cannot; "
            "pass --dequantise to store them as bfloat16"
        )
    keep = checkpoint.quantised and not dequantise
    config = config_for(reader.config(), to, quantised=keep)
    names = [*checkpoint.names(), *checkpoint.extras]
    with progress(total=len(names), description=f"to {to.name}", quiet=quiet) as bar:

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for item in stored_items(checkpoint, to, names, keep_scales=keep):
                bar.update(1)
                yield item

        size = sum(checkpoint.nbytes(name, quantised=keep) for name in names)
        options: dict[str, Any] = {"total_bytes": size, "shard_bytes": shard_bytes, "companions_of": source}
        return write_checkpoint(target, counted(), config, **options)


def writable(table: RuleTable, dialect: str) -> Dialect:
    """The named dialect.

    Raises:
        NamesError: there is none.
        OutputError: it is only read.
    """
    found = table.dialect(dialect)
    if not found.writable:
        names = ", ".join(d.name for d in table.writable_dialects)
        raise OutputError(f"dialect {dialect} is only read; choose one of {names}")
    return found


def config_for(config: Mapping[str, Any], dialect: Dialect, *, quantised: bool) -> dict[str, Any]:
    """`config.json` for a checkpoint in a dialect; without quantisation fields if the weights are plain."""
    out = dialect.config(config)
    return out if quantised else {k: v for k, v in out.items() if k not in _QUANTISATION_FIELDS}


def stored_items(
    checkpoint: Checkpoint, to: Dialect, names: Sequence[str], *, keep_scales: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored names and tensors of a dialect, from release tensors of a checkpoint.

    Args:
        checkpoint: where the values come from.
        to: how to spell and fuse them.
        names: release names.
        keep_scales: leave block-scaled weights as they are, with their scales; otherwise they become bfloat16.
    """
    if not keep_scales:
        plain = ((name, checkpoint.get_plain(name)) for name in names)
        yield from to.from_release(plain, checkpoint.table.num_experts)
        return
    for name in names:
        stored = to.slot(name).stored
        yield stored, checkpoint.get_raw(name)
        scale, scale_name = checkpoint.get_scale(name), to.scale_of(stored)
        if scale is not None and scale_name is not None:
            yield scale_name, scale
