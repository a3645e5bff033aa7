# SPDX-License-Identifier: Apache-2.0
"""Explains a payload to a person: what it is, whom its rows belong to, and what is odd about it.

Takes everything that rows travel in: base64 text, a response of the server, a `.npy` file, stored rows, encoded rows.
Without a model's configuration the ratio of tokens to keys is a guess, from the largest entries.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vime_replay.codec import MAGIC, EncodedSource
from vime_replay.errors import ReplayPayloadError
from vime_replay.files import NPY_MAGIC, FileSource, read_header
from vime_replay.rows import Picks
from vime_replay.sources import RowSource
from vime_replay.spec import ReplaySpec, indexer_spec
from vime_vllm_patch import wire

SHOWN = 6


def inspect(path: Path, *, hf: Path | None = None, ratio: int | None = None, start: int = 0) -> Iterator[str]:
    """Lines that describe the payload in a file.

    Args:
        path: of the file.
        hf: directory with the model's `config.json`; rows are then compared with it.
        ratio: tokens per key, if there is no configuration.
        start: position of the first row.

    Raises:
        ReplayPayloadError: nothing that holds rows.
        ReplayDecodeError: rows of another model than `hf`.
    """
    if not path.is_file():
        raise ReplayPayloadError(f"{path}: expected a file with a payload, found none")
    if start < 0 or (ratio is not None and ratio < 1):
        raise ReplayPayloadError(f"expected --start >= 0 and --ratio >= 1, got {start} and {ratio}")
    config = None if hf is None else _json(hf / "config.json")
    spec = None if config is None else indexer_spec(config.get("text_config", config))
    yield f"{path.name}: {path.stat().st_size} bytes"
    for name, rows in _arrays(path, spec):
        yield name
        yield from _describe(rows, spec.ratio if spec is not None else ratio, start)
        if spec is not None:
            expected, found = (spec.num_streams, spec.topk), rows.shape[1:]
            verdict = "as the model has" if found == expected else f"NOT the {expected} of the model"
            yield f"  streams, picks   {found}: {verdict}; layers {list(spec.layer_ids)}"


def _arrays(path: Path, spec: ReplaySpec | None) -> Iterator[tuple[str, Picks]]:
    """(what it is, rows [R, L, K]) of every payload in a file."""
    with path.open("rb") as file:
        start = file.read(16)
        if start.startswith(MAGIC):
            yield _encoded(path.read_bytes(), spec)
        elif start.startswith(NPY_MAGIC) or start[8:9] == b"{":
            yield f"{'.npy' if start.startswith(NPY_MAGIC) else 'safetensors'} file", _stored(file.fileno())
        elif start.lstrip()[:1] == b"{":
            yield from _response(_json(path))
        else:
            yield "base64 of a .npy file", wire.decode(_text(path).strip(), allow_narrow=True)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise ReplayPayloadError(
            f"{path}: expected base64 text, JSON, .npy, safetensors or encoded rows, got other bytes ({error.reason} "
            f"at byte {error.start}); pass the file as the server or the store wrote it"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ReplayPayloadError(f"{path}: not JSON ({error}); is the file cut off?") from error
    if not isinstance(value, dict):
        raise ReplayPayloadError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _response(body: Any) -> Iterator[tuple[str, Picks]]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(each, dict) for each in choices):
        raise ReplayPayloadError("JSON without choices; expected a response of the server")
    for number, choice in enumerate(choices):
        field = choice.get(wire.FIELD)
        if field is None:
            raise ReplayPayloadError(
                f"choice {number}: {wire.FIELD} is null: the server's flag is off, the request opted out, or it ended "
                "before any pass"
            )
        yield (
            f"choice {number}: base64, layers {choice.get(wire.LAYER_IDS_FIELD)}",
            wire.decode(field, allow_narrow=True),
        )


def _encoded(blob: bytes, spec: ReplaySpec | None) -> tuple[str, Picks]:
    if spec is None:
        raise ReplayPayloadError("encoded rows are read with a model's configuration; pass --hf DIR")
    rows = _all_rows(EncodedSource(blob, spec))
    return f"encoded rows, {rows.nbytes / len(blob):.1f} times smaller than int32", rows


def _stored(descriptor: int) -> Picks:
    source = FileSource(os.dup(descriptor), read_header(descriptor))
    rows = _all_rows(source)
    source.close()
    return rows


def _all_rows(source: RowSource) -> Picks:
    count, streams, topk = source.shape
    rows = np.empty((streams, count, topk), np.int32)
    source.read_into(rows, rows=slice(0, count), streams=range(streams))
    return rows.transpose(1, 0, 2)


def _describe(rows: Picks, ratio: int | None, start: int) -> Iterator[str]:
    count, streams, topk = rows.shape
    yield f"  shape            {count} rows x {streams} streams x {topk} picks, {rows.nbytes / 2**20:.1f} MiB of int32"
    if not rows.size:
        return
    yield f"  rows             queries at positions {start}..{start + count - 1}; tokens {start + count + 1} in all"
    if ratio is None:
        ratio, guess = _guess_ratio(rows, start), ", a guess"
    else:
        guess = ""
    available = (np.arange(start, start + count) + 1) // ratio
    counts = (rows >= 0).sum(axis=2)
    yield f"  entries          {rows.min()}..{rows.max()}, keys of {ratio} token{'s' * (ratio > 1)}{guess}"
    wanted = np.minimum(available, topk)
    full = int(((counts == wanted[:, None]).all(axis=1)).sum())
    all_keys = int((available <= topk).sum())
    yield f"  complete         {full} of {count} rows pick min(K, keys they see); {all_keys} see at most K"
    unsigned = rows.view(np.uint32)
    ascending = bool((unsigned[:, :, 1:] >= unsigned[:, :, :-1]).all())
    yield f"  order            {'ascending, unused slots last' if ascending else 'not sorted'}"
    beyond = np.flatnonzero((rows.max(axis=(1, 2)) >= available) | (rows.min(axis=(1, 2)) < -1))
    yield _odd("out of range", beyond + start, "entries their query cannot see")
    zero = (rows == 0).all(axis=2) & (topk > 1)
    lost = np.flatnonzero((zero | ((counts == 0) & (available > 0)[:, None])).any(axis=1))
    yield _odd("no capture", lost + start, "zero or empty although keys are visible")
    yield f"  churn            {_churn(rows, available, topk)}"
    for row in sorted({0, count // 2, count - 1}):
        picks = ", ".join(str(e) for e in rows[row, 0, :SHOWN])
        yield f"  row {start + row:<12} stream 0: [{picks}{', ...' if topk > SHOWN else ''}]"


def _odd(what: str, rows: np.ndarray, why: str) -> str:
    shown = f"{len(rows)} rows ({why}), first {rows[:8].tolist()}" if len(rows) else "none"
    return f"  {what:<16} {shown}"


def _guess_ratio(rows: Picks, start: int) -> int:
    """The largest power of two that still lets every query see its entries."""
    positions = np.arange(start, start + len(rows)) + 1
    largest = rows.max(axis=(1, 2)) + 1
    seen = largest > 0
    if not seen.any():
        return 1
    return 1 << max(0, math.floor(math.log2(float((positions[seen] / largest[seen]).min()))))


def _churn(rows: Picks, available: np.ndarray, topk: int) -> str:
    """Share of picks that the row before did not have, over rows that choose."""
    choosing = np.flatnonzero(available[1:] > topk) + 1
    if not len(choosing):
        return "no row chooses: all see at most K keys"
    sampled = choosing[:: max(1, len(choosing) // 256)]
    new = [
        len(np.setdiff1d(rows[r, s], rows[r - 1, s])) / topk for r in sampled for s in range(rows.shape[1])
    ]
    return f"{np.mean(new):.1%} of a row's picks are not in the row before ({len(sampled)} rows sampled)"
