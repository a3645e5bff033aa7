# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints: seeded random ones, and the first layers of a large one."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vime_convert.checkpoint import Checkpoint
from vime_convert.errors import ConfigError, ConvertError
from vime_convert.hf2hf import config_for, stored_items, writable
from vime_convert.reader import CheckpointReader
from vime_convert.rules import RuleTable, TensorSpec
from vime_convert.writer import write_checkpoint

if TYPE_CHECKING:
    from vime_convert.plugin import ModelPlugin

Init = Callable[[str, tuple[int, ...], torch.Generator], torch.Tensor]


def make_tiny(
    config: Mapping[str, Any],
    target: str | Path,
    *,
    seed: int,
    plugin: "ModelPlugin | None" = None,
    table: RuleTable | None = None,
    init: Init | None = None,
    dialect: str = "release",
    dtype: torch.dtype | None = None,
) -> int:
    """The number of tensors of a seeded random checkpoint, written to `target`.

    A tensor depends on the seed and its own name only, so models that share names share values.

    Args:
        config: contents of `config.json`.
        target: must not exist, or be an empty directory.
        seed: of all tensors.
        plugin: the model; gives `table` and `init` where these are left out.
        table: the model's rules.
        init: `init(release_name, shape, generator)`; the value of one floating tensor, rounded here to the stored
            dtype. Integer tables are not asked for: their rows are distinct experts in random order.
        dialect: in which to write.
        dtype: floating dtype of all tensors instead of the one that the release stores.

    Raises:
        OutputError: the target exists, the disk is too small, or the dialect is read only.
    """
    if table is None or init is None:
        if plugin is None:
            raise ConfigError("make_tiny: expected plugin=, or both table= and init=")
        table, init = table or plugin.rules(config), init or plugin.init_tiny
    to, expected = writable(table, dialect), table.expected_hf()

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in expected.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
            if not spec.dtype.is_floating_point:
                yield name, _expert_ids(spec, table.num_experts, generator)
                continue
            value = init(name, spec.shape, generator)
            if tuple(value.shape) != spec.shape:
                raise ConfigError(f"init of {name}: expected shape {spec.shape}, got {tuple(value.shape)}")
            yield name, value.to(dtype or spec.dtype)

    size = sum(spec.nbytes for spec in expected.values())
    stored = to.from_release(values(), table.num_experts)
    return write_checkpoint(target, stored, config_for(config, to, quantised=False), total_bytes=size)


def _expert_ids(spec: TensorSpec, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    order = torch.rand(spec.shape[0], num_experts, generator=generator).argsort(-1)
    return order[:, : spec.shape[1]].to(spec.dtype)


def truncate(source: str | Path, target: str | Path, num_layers: int, plugin: "ModelPlugin") -> int:
    """The number of tensors of a checkpoint with the first `num_layers` layers of `source`, bit for bit.

    Draft layers are left out. Files are written in the dialect of the source.

    Raises:
        ConvertError: the source has fewer layers.
        CheckpointError: it is damaged in the part that is read.
        OutputError: the target exists, or the disk is too small.
    """
    reader = CheckpointReader(source)
    config = reader.config()
    available = plugin.rules(config)
    if not 1 <= num_layers <= available.num_layers:
        raise ConvertError(f"{source}: expected 1 to {available.num_layers} layers to keep, got {num_layers}")
    shorter = config | {"num_hidden_layers": num_layers}
    shorter |= {field: config[field][:num_layers] for field in available.schedules if config.get(field)}
    checkpoint = Checkpoint(reader, plugin.rules(shorter), first_layers=True)
    size = sum(checkpoint.nbytes(name, quantised=True) for name in checkpoint.names())
    items = stored_items(checkpoint, checkpoint.dialect, checkpoint.names(), keep_scales=checkpoint.quantised)
    return write_checkpoint(target, items, shorter, total_bytes=size, companions_of=source)
