# SPDX-License-Identifier: Apache-2.0
"""Checkpoint -> Megatron -> checkpoint, compared byte for byte, in every naming dialect.

Each dialect is written from the same release tensors, loaded into a model whose parameters were wiped, exported
again and compared with the files: names, dtypes, shapes and bytes.
"""

from pathlib import Path

import torch

from vime_convert.hf2hf import rewrite
from vime_convert.megatron.exporter import save_hf
from vime_convert.reader import CheckpointReader
from vime_convert.verify.compare import Check
from vime_convert.verify.runs import Candidate


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's storage as bytes, so that -0.0 and 0.0 or two NaNs are told apart."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def differences(ours: CheckpointReader, reference: CheckpointReader) -> list[str]:
    """One phrase for each tensor that is missing, extra, or not bitwise the same."""
    left, right = set(ours.raw_names()), set(reference.raw_names())
    found = [f"{name} is missing" for name in sorted(right - left)]
    found += [f"{name} is extra" for name in sorted(left - right)]
    for name in sorted(left & right):
        a, b = ours.get_raw(name), reference.get_raw(name)
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append(f"{name} is {a.dtype} {tuple(a.shape)}, was {b.dtype} {tuple(b.shape)}")
        elif raw_bytes(a) != raw_bytes(b):
            found.append(f"{name} differs in {(a != b).sum().item()} of {a.numel()} values")
    return found


def check_round_trips(candidate: Candidate, release_dir: Path, scratch: Path) -> list[Check]:
    """One check per writable dialect; its value is the number of tensors that do not come back bitwise."""
    checks = []
    for dialect in candidate.table.writable_dialects:
        source = release_dir
        if dialect.name != "release":
            source = scratch / f"in-{dialect.name}"
            rewrite(release_dir, source, candidate.table, dialect.name)
        reader = CheckpointReader(source)
        candidate.load(source)
        target = scratch / f"out-{dialect.name}"
        save_hf(
            candidate.chunks, candidate.table, target, dialect=dialect.name, like=reader, config_from=source
        )
        found = differences(CheckpointReader(target), reader)
        detail = found[0] if found else f"{len(reader.raw_names())} tensors"
        checks.append(Check(f"round-trip[{dialect.name}]", len(found), 0, detail))
    return checks
