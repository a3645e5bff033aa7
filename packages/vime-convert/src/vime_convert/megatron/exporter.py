# SPDX-License-Identifier: Apache-2.0
"""Release tensors out of a Megatron model, and a checkpoint directory made of them.

The same rules as in the loader, applied backwards. With several ranks every rank gets every tensor, in the same
order: parts are gathered over tensor parallelism, experts and layers are broadcast by the rank that has them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from vime_convert.checkpoint import Checkpoint, open_checkpoint
from vime_convert.errors import ConfigError, ConvertError, NamesError
from vime_convert.hf2hf import config_for, writable
from vime_convert.megatron.gather import whole_tensors
from vime_convert.megatron.names import Entry, entries
from vime_convert.megatron.parallel import current
from vime_convert.megatron.together import write_on_first_rank
from vime_convert.output import refuse_existing
from vime_convert.reader import CheckpointReader, read_json
from vime_convert.rules import RuleTable, TensorSpec, to_hf
from vime_convert.writer import SHARD_BYTES, write_checkpoint

Policy = Literal["keep", "release", "like"]
Value = Callable[[torch.Tensor], torch.Tensor | None]


class LossyCast(ConvertError, ValueError):
    """A tensor does not fit the dtype that it was to be stored in."""


def export_tensors(
    chunks: Sequence[torch.nn.Module],
    table: RuleTable,
    *,
    dtype: Policy = "keep",
    like: CheckpointReader | Checkpoint | None = None,
    value: Value | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Release names and tensors, in the order of the model.

    Args:
        chunks: Megatron model chunks of this rank (wrapped or not).
        table: the model's rules.
        dtype: "keep": the parameter's dtype. "release": what the release stores, cast. "like": what `like` stores
            (bfloat16 where it is block-scaled), and every value must survive the cast.
        like: checkpoint whose dtypes are matched.
        value: what to export of a parameter instead of itself, e.g. `lambda p: p.grad`; None leaves it out.

    Raises:
        LossyCast: policy "like", and a value would change.
        NamesError: a parameter that no rule covers, or (without `value`) a release tensor that no parameter gives.
    """
    if (dtype == "like") != (like is not None):
        raise ConfigError(f"export_tensors: expected like= exactly with dtype='like', got dtype={dtype!r}")
    checkpoint = open_checkpoint(like, table) if like is not None else None
    parallel, expected = current(), table.expected_hf()
    found = [
        Entry(bound, chosen.detach())
        for bound, tensor in entries(chunks, table, parallel)
        if (chosen := tensor if value is None else value(tensor)) is not None
    ]
    given = set()
    for bound, whole in whole_tensors(found, table, parallel):
        for name, tensor in zip(bound.hf, to_hf(bound.rule, whole), strict=True):
            given.add(name)
            yield name, _cast(name, tensor, expected[name], dtype, checkpoint)
    if value is None and (absent := [name for name in expected if name not in given]):
        raise NamesError(f"{len(absent)} release tensors have no parameter in the model, first {absent[0]}")


def _cast(
    name: str, tensor: torch.Tensor, spec: TensorSpec, policy: Policy, like: Checkpoint | None
) -> torch.Tensor:
    if policy == "keep":
        return tensor
    if like is None:
        return tensor.to(spec.dtype)
    info = like.info(name)
    target = torch.bfloat16 if info.quantised else info.dtype
    out = tensor.to(target)
    if torch.promote_types(tensor.dtype, target) != target and not _same(out.to(tensor.dtype), tensor):
        raise LossyCast(
            f"{name}: {like.reader.directory} stores {target}, which does not hold the model's {tensor.dtype} values "
            "exactly; export with dtype 'keep' or 'release'"
        )
    return out


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def save_hf(
    chunks: Sequence[torch.nn.Module],
    table: RuleTable,
    target: str | Path,
    *,
    dialect: str = "release",
    dtype: Policy | None = None,
    like: CheckpointReader | Checkpoint | None = None,
    config: Mapping[str, Any] | None = None,
    config_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """The number of tensors of the checkpoint written to `target` (by rank 0; all ranks must call).

    Args:
        chunks, table: the model.
        target: must not exist, or be an empty directory.
        dialect: in which to write.
        dtype: see `export_tensors`; the default is "like" when `like` is given, otherwise "keep".
        like: source checkpoint: its dtypes are matched, and its draft layers are carried over.
        config: contents of `config.json`; the default is the one of `config_from`.
        config_from: checkpoint directory whose config and tokenizer files are used.
        shard_bytes: largest shard.

    Raises:
        OutputError: the target exists, the disk is too small, or the dialect is read only; on every rank.
        LossyCast, NamesError: as in `export_tensors`.
    """
    if config is None:
        if config_from is None:
            raise ConfigError("save_hf: expected config= or config_from=, got neither")
        config = read_json(Path(config_from) / "config.json")
    to = writable(table, dialect)
    checkpoint = open_checkpoint(like, table) if like is not None else None
    policy: Policy = dtype or ("keep" if checkpoint is None else "like")

    def released() -> Iterator[tuple[str, torch.Tensor]]:
        yield from export_tensors(chunks, table, dtype=policy, like=checkpoint if policy == "like" else None)
        if checkpoint is not None:
            yield from ((name, checkpoint.get_plain(name)) for name in checkpoint.extras)

    widest = max((p.dtype.itemsize for chunk in chunks for p in chunk.parameters()), default=4)
    itemsize = widest if policy == "keep" else 2
    total = sum(spec.nbytes // spec.dtype.itemsize * itemsize for spec in table.expected_hf().values())
    if checkpoint is not None:
        total += sum(checkpoint.nbytes(name, quantised=False) for name in checkpoint.extras)

    def write(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        return write_checkpoint(
            target,
            tensors,
            config_for(config, to, quantised=False),
            total_bytes=total,
            shard_bytes=shard_bytes,
            companions_of=config_from,
        )

    stored = to.from_release(released(), table.num_experts)
    return write_on_first_rank(stored, write, ready=lambda: refuse_existing(Path(target)))
