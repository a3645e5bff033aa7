# SPDX-License-Identifier: Apache-2.0
"""Writes a Hugging Face checkpoint directory: shards, index, `config.json`, and the tokenizer files of a source.

Tensors are written as they come, so memory holds one shard. File names are final only at the end, when the number
of shards is known. Source of the layout: safetensors index files as huggingface_hub reads them.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vime_convert.output import staged
from vime_convert.reader import INDEX

SHARD_BYTES = 5_000_000_000

# What is not weights and not rewritten: tokenizer, chat template, generation settings, remote code, licence.
_COMPANIONS = (
    *("tokenizer*", "*.model", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*"),
    *("generation_config.json", "*.py", "LICENSE*"),
)


def write_checkpoint(
    target: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    *,
    total_bytes: int = 0,
    shard_bytes: int = SHARD_BYTES,
    companions_of: str | Path | None = None,
) -> int:
    """The number of tensors written to the new directory `target`.

    `config.json` gets the dtype of most of the weights, so that transformers loads them without a cast.

    Args:
        target: must not exist, or be an empty directory.
        tensors: stored names and values.
        config: contents of `config.json`.
        total_bytes: expected size, compared with the free space before anything is written.
        shard_bytes: largest shard; a single larger tensor gets a shard of its own.
        companions_of: checkpoint directory whose tokenizer files and the like are copied.

    Raises:
        OutputError: the target exists or the disk is too small.
    """
    with staged(target, need_bytes=total_bytes) as directory:
        # First, so that none of them can replace a file written here.
        for path in _companions(companions_of):
            shutil.copyfile(path, directory / path.name)
        shards = _Shards(directory, shard_bytes)
        for name, tensor in tensors:
            shards.add(name, tensor)
        shards.finish()
        _write_json(directory / "config.json", with_dtype(config, shards.bytes_of))
    return len(shards.shard_of)


class _Shards:
    """Collects tensors and writes a file whenever the next tensor would overfill it."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self.count, self.size = 0, 0
        self.waiting: dict[str, torch.Tensor] = {}
        self.shard_of: dict[str, int] = {}
        self.bytes_of: Counter[torch.dtype] = Counter()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.shard_of:
            raise ValueError(
                f"vime_convert.writer: {name} comes twice; names of one checkpoint must be distinct"
            )
        if self.waiting and self.size + tensor.nbytes > self.limit:
            self.write()
        # A copy: safetensors refuses tensors that share storage, as split projections do.
        self.waiting[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self.size += tensor.nbytes
        self.shard_of[name] = self.count + 1
        self.bytes_of[tensor.dtype] += tensor.nbytes

    def write(self) -> None:
        self.count += 1
        save_file(self.waiting, self._path(self.count), metadata={"format": "pt"})
        self.waiting, self.size = {}, 0

    def finish(self) -> None:
        if self.waiting or not self.count:
            self.write()
        if self.count == 1:
            self._path(1).rename(self.directory / "model.safetensors")
            return
        final = {n: f"model-{n:05d}-of-{self.count:05d}.safetensors" for n in range(1, self.count + 1)}
        for number, file in final.items():
            self._path(number).rename(self.directory / file)
        index = {
            "metadata": {"total_size": sum(self.bytes_of.values())},
            "weight_map": {name: final[number] for name, number in sorted(self.shard_of.items())},
        }
        _write_json(self.directory / INDEX, index)

    def _path(self, number: int) -> Path:
        return self.directory / f"model-{number:05d}.safetensors"


def with_dtype(config: Mapping[str, Any], bytes_of: Mapping[torch.dtype, int]) -> dict[str, Any]:
    """The config with its `dtype` set to the floating dtype of most bytes; unchanged for quantised weights."""
    plain = {d: n for d, n in bytes_of.items() if d in (torch.float32, torch.bfloat16, torch.float16)}
    if "quantization_config" in config or not plain:
        return dict(config)
    field = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, field: str(max(plain, key=lambda d: plain[d])).removeprefix("torch.")}


def _companions(source: str | Path | None) -> list[Path]:
    if source is None:
        return []
    return sorted({path for pattern in _COMPANIONS for path in Path(source).glob(pattern) if path.is_file()})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
