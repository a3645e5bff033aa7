# SPDX-License-Identifier: Apache-2.0
"""Rows in files: written once, under the final name only when complete; opened by what they are, read in part.

    format "vime-replay/1"   safetensors, tensor `topk` [L, R, K]: a rank reads its streams and its rows only
    vime's DiskTensorRef     safetensors, tensor `tensor` [R, L, K]
    .npy                     [R, L, K]
    encoded                  a blob of `codec`

`io="pread"` reads bytes into the destination. It is the default, because a mapped file that another host truncates
kills the process. `io="mmap"` shares pages between the processes of a node: a file in SHARED_MEMORY is memory that
they have in common. Files are never changed; who wrote a rollout's directory removes it when all trainers are done.
"""

import errno
import json
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from vime_replay.codec import MAGIC, EncodedSource, Encoding, encode_rows
from vime_replay.errors import ReplayConfigError, ReplayPayloadError
from vime_replay.files import FileSource, Header, checksums, read_header
from vime_replay.rows import Picks
from vime_replay.sources import ArraySource, RowSource
from vime_replay.spec import ReplaySpec

FORMAT = "vime-replay/1"
# Data of a file starts at a multiple of this.
ALIGNMENT = 64
SHARED_MEMORY = Path("/dev/shm")


def write_rows(
    path: Path,
    rows: Picks,
    spec: ReplaySpec,
    *,
    encoding: Encoding | Literal["int32"] = "int32",
    validated: bool = False,
    versions: Sequence[tuple[int, int]] = (),
) -> None:
    """Writes the rows of a sample beside `path` and renames: a reader sees all of the file or none.

    Args:
        path: final name. Its directory exists; an existing file is replaced as a whole.
        rows: int32 [R, L, K], checked.
        spec: of the rows.
        encoding: "int32", format vime-replay/1; or an encoding of `codec`.
        validated: noted in the file: values were checked.
        versions: (first row, version of the weights) of each span of rows, for metrics; format vime-replay/1 only.

    Raises:
        ReplayConfigError: rows that the encoding cannot hold.
        OSError: as the file system says; nothing is left behind.
    """
    if encoding == "int32":
        _write(path, _safetensors(rows, spec, validated, versions))
    else:
        _write(path, [encode_rows(rows, spec, encoding, validated=validated)])


def keep(path: Path, link: Path) -> None:
    """A second name for a file, which survives the removal of the first; a copy if `link` is on another device."""
    try:
        os.link(path, link)
    except OSError:
        with path.open("rb") as file:
            _write(link, iter(lambda: file.read(1 << 20), b""))


def remove(directory: Path) -> None:
    """Removes a rollout's directory; files that `keep` gave a second name stay."""
    shutil.rmtree(directory, ignore_errors=True)


def open_rows(
    path: Path, spec: ReplaySpec, *, root: Path | None = None, io: Literal["pread", "mmap"] = "pread"
) -> RowSource:
    """A source of the rows in a file, of any of the four formats; the caller closes it.

    Args:
        path: of the file.
        spec: what the rows must be.
        root: directory that the file must be in after symbolic links are resolved.
        io: see the module; encoded blobs are always read.

    Raises:
        ReplayPayloadError: missing, outside of `root`, truncated, or not rows of `spec`.
    """
    if io not in ("pread", "mmap"):
        raise ReplayConfigError(f"io: expected pread or mmap, got {io!r}")
    where = path.resolve()
    if root is not None and not where.is_relative_to(root.resolve()):
        raise ReplayPayloadError(f"{path}: expected a file in {root}, it leads to {where}")
    try:
        if where.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReplayPayloadError(
            f"{path}: cannot be opened ({error.strerror}); keep a rollout's files until all trainers are done"
        ) from error
    try:
        if os.pread(descriptor, len(MAGIC), 0) == MAGIC:
            return _encoded(descriptor, spec)
        header = read_header(descriptor)
        _require_spec(header, spec)
        if io == "pread":
            return FileSource(descriptor, header)
        source = _mapped(where, header)
        os.close(descriptor)
        return source
    except ReplayPayloadError as error:
        os.close(descriptor)
        raise ReplayPayloadError(f"{path}: {error}") from error


def _encoded(descriptor: int, spec: ReplaySpec) -> EncodedSource:
    return EncodedSource(
        lambda offset, count: os.pread(descriptor, count, offset),
        spec,
        size=os.fstat(descriptor).st_size,
        close=lambda: os.close(descriptor),
    )


def _mapped(path: Path, header: Header) -> ArraySource:
    # Nothing can be mapped from a file without data.
    empty = 0 in header.shape
    rows: Any = (
        np.empty(header.shape, np.int32)
        if empty
        else np.memmap(path, np.int32, "r", header.offset, header.shape)
    )
    # A note that values are legal does not count here: nothing has compared the file's bytes with its checksums.
    return ArraySource(rows.transpose(1, 0, 2) if header.stream_major else rows)


def _require_spec(header: Header, spec: ReplaySpec) -> None:
    streams = header.shape[0] if header.stream_major else header.shape[1]
    found = (streams, header.shape[2], header.metadata.get("spec", spec.digest))
    expected = (spec.num_streams, spec.topk, spec.digest)
    if found != expected:
        raise ReplayPayloadError(
            f"expected streams, topk and spec {expected}, got {found}; the rows are of another model"
        )


def _safetensors(
    rows: Picks, spec: ReplaySpec, validated: bool, versions: Sequence[tuple[int, int]]
) -> list[Any]:
    if rows.ndim != 3 or rows.shape[1:] != (spec.num_streams, spec.topk) or rows.dtype != np.int32:
        raise ReplayConfigError(
            f"rows to write: expected int32 [rows, {spec.num_streams}, {spec.topk}], got {rows.dtype} of shape "
            f"{list(rows.shape)}"
        )
    stored = np.ascontiguousarray(rows.transpose(1, 0, 2))
    metadata = {
        "format": FORMAT,
        "spec": spec.digest,
        "ratio": str(spec.ratio),
        "validated": "true" if validated else "false",
        "versions": json.dumps([list(span) for span in versions]),
        "crc32": checksums(stored),
    }
    entry = {"dtype": "I32", "shape": list(stored.shape), "data_offsets": [0, stored.nbytes]}
    text = json.dumps({"__metadata__": metadata, "topk": entry}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return [struct.pack("<Q", len(text)), text, memoryview(stored.reshape(-1).view(np.uint8))]


def _write(path: Path, chunks: Any) -> None:
    beside = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with beside.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
