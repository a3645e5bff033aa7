# SPDX-License-Identifier: Apache-2.0
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class DiskTensorRef:
    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: str | None = None
    validated: bool = False

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        return torch.from_numpy(np.load(self.path, mmap_mode="r")[rows].copy())

    @property
    def torch_dtype(self):
        return getattr(torch, self.dtype)

    @classmethod
    def write(cls, tensor, path, *, kind=None, validated=False):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("wb") as file:
            np.save(file, tensor.numpy())
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(str(path), tuple(tensor.shape), name, tensor.nbytes, kind, validated)

    def link(self, output_path):
        Path(output_path).parent.mkdir(parents=True, exist_ok=True)
        os.link(self.path, output_path)
        return replace(self, path=str(output_path))

    def load(self, pin_memory=False):
        return self[:]
