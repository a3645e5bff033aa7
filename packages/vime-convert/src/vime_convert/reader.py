# SPDX-License-Identifier: Apache-2.0
"""A directory of safetensors files as one mapping from stored names to tensors, read one tensor at a time.

Opening looks at headers only and finds every fault that headers can show: truncated or corrupt files, shards that
the index names and the directory lacks, tensors that moved or appear twice. What the tensors mean (dialects, shapes
that a model needs, dequantisation) is `vime_convert.checkpoint`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from vime_convert.errors import CheckpointError, raise_problems

INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class RawInfo(NamedTuple):
    """What a header says about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointReader:
    """Stored tensors of a checkpoint directory by their stored names.

    Args:
        directory: holds `*.safetensors`, and an index file if there are several.

    Raises:
        CheckpointError: no checkpoint there, or its files are damaged or contradict the index.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory}: expected a checkpoint directory, found none; check the path"
            )
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._info: dict[str, RawInfo] = {}
        index = self._read_index()
        files = sorted(set(index.values())) if index else sorted(p.name for p in self._safetensors())
        if not files:
            raise CheckpointError(
                f"{self.directory}: expected *.safetensors files, found none; check the path"
            )
        problems = [problem for file in files for problem in self._open(file)]
        if index and not problems:
            problems = self._compare_with(index)
        advice = "download the checkpoint again, or repair the files named here"
        raise_problems(str(self.directory), problems, advice)

    def raw_names(self) -> list[str]:
        """Stored names, sorted."""
        return sorted(self._info)

    def raw_info(self, name: str) -> RawInfo:
        """Shape and dtype of a stored tensor, without reading it."""
        return self._info[name]

    def get_raw(self, name: str) -> torch.Tensor:
        """A stored tensor, bit for bit."""
        return self._files[self._file_of[name]].get_tensor(name)

    def get_raw_rows(self, name: str, index: int, start: int, stop: int) -> torch.Tensor:
        """`tensor[index, start:stop]` of a stored tensor, reading no more than that."""
        return self._files[self._file_of[name]].get_slice(name)[index, start:stop]

    def config(self) -> dict[str, Any]:
        """The parsed `config.json` of the directory.

        Raises:
            CheckpointError: there is none, or it is not a JSON object.
        """
        return read_json(self.directory / "config.json")

    def _safetensors(self) -> list[Path]:
        return list(self.directory.glob("*.safetensors"))

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not path.exists():
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{path}: expected an object 'weight_map' with entries; download the file again"
            )
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise CheckpointError(
                    f"{path}: expected weight_map[{name!r}] to be a file name, got {file!r}; download the file again"
                )
        return weight_map

    def _open(self, file: str) -> list[str]:
        path = self.directory / file
        if not path.is_file():
            return [f"{file}: named in {INDEX} but not in the directory"]
        problems = []
        try:
            handle = safe_open(path, framework="pt")
            for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                if name in self._file_of:
                    problems.append(f"{name}: stored in both {self._file_of[name]} and {file}")
                    continue
                header = handle.get_slice(name)
                if (dtype := DTYPES.get(header.get_dtype())) is None:
                    problems.append(f"{name}: {file} stores it as {header.get_dtype()}, which no weight uses")
                    continue
                self._file_of[name] = file
                self._info[name] = RawInfo(tuple(header.get_shape()), dtype)
            self._files[file] = handle
        except (SafetensorError, OSError) as error:
            problems.append(
                f"{file}: not a complete safetensors file ({error}), {path.stat().st_size} bytes long"
            )
        return problems

    def _compare_with(self, index: dict[str, str]) -> list[str]:
        problems = []
        for name, file in index.items():
            if name not in self._file_of:
                problems.append(f"{name}: {INDEX} places it in {file}, which does not contain it")
            elif self._file_of[name] != file:
                problems.append(f"{name}: {INDEX} places it in {file}, but it is in {self._file_of[name]}")
        return problems + [
            f"{name}: in {self._file_of[name]} but not in {INDEX}" for name in self._info.keys() - index
        ]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: no such file, not JSON, or not an object.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected this file, found none; check the directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download the file again") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(parsed).__name__}")
    return parsed
