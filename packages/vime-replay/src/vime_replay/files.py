# SPDX-License-Identifier: Apache-2.0
"""Uncompressed rows in a file: headers of the formats that `store` knows, and a source that reads such a file.

Headers are read here and not by safetensors or numpy, because these map the file, and reading straight into the
destination needs the offset of the data. A header is compared with the size of the file before anything else is read.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vime_replay.errors import ReplayPayloadError
from vime_replay.rows import Picks
from vime_replay.sources import ArraySource, Shape

NPY_MAGIC = b"\x93NUMPY"
MAX_HEADER = 1 << 20
CRC_BLOCK = 8 << 20


class Header(NamedTuple):
    """What a file's first bytes say.

    Attributes:
        offset: first byte of the data.
        shape: as stored.
        stream_major: stored as [L, R, K].
        metadata: of the file, as strings.
    """

    offset: int
    shape: Shape
    stream_major: bool
    metadata: dict[str, str]


def read_header(descriptor: int) -> Header:
    """The header of a `.npy` or safetensors file with int32 rows.

    Raises:
        ReplayPayloadError: not such a file, or its size is not what the header promises.
    """
    start = os.pread(descriptor, 12, 0)
    try:
        if len(start) < 12:
            raise ValueError("fewer bytes than a header has")
        header = (_npy if start.startswith(NPY_MAGIC) else _safetensors)(descriptor, start)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ReplayPayloadError(f"expected int32 rows in .npy or safetensors, got {error!r}") from error
    size, promised = os.fstat(descriptor).st_size, header.offset + math.prod(header.shape) * 4
    if size != promised:
        raise ReplayPayloadError(f"{size} bytes, the header promises {promised}; truncated, write it again")
    return header


class FileSource:
    """Rows of one file, read straight into the destination.

    Args:
        descriptor: of the open file; this source closes it.
        header: of the file.
    """

    def __init__(self, descriptor: int, header: Header) -> None:
        self._descriptor: int | None = descriptor
        self._header = header
        streams, rows, topk = header.shape
        self.shape: Shape = (rows, streams, topk) if header.stream_major else header.shape
        # The note in a file holds for the bytes that were written; only `verify` knows that these are the same.
        self.validated = False

    @property
    def metadata(self) -> dict[str, str]:
        """Of the file, as strings; empty for formats of others."""
        return self._header.metadata

    def read_into(self, dst_LRK: Picks, *, rows: slice, streams: Sequence[int]) -> None:
        """See `RowSource`."""
        total, count, topk = self.shape
        if not self._header.stream_major:
            part = np.empty((rows.stop - rows.start, count, topk), np.int32)
            self._read(part, rows.start * count * topk * 4)
            ArraySource(part).read_into(dst_LRK, rows=slice(0, len(part)), streams=streams)
            return
        for target, stream in zip(dst_LRK, streams, strict=True):
            self._read(target, (stream * total + rows.start) * topk * 4)

    def verify(self) -> None:
        """Reads the whole file and compares its checksums, if it has any; a note that values are legal then counts.

        Raises:
            ReplayPayloadError: bytes differ from those that were written.
        """
        data = np.empty(self._header.shape, np.int32)
        self._read(data, 0)
        recorded = self.metadata.get("crc32")
        if recorded is not None and recorded != checksums(data):
            raise ReplayPayloadError("stored rows differ from what was written; write the file again")
        self.validated = recorded is not None and self.metadata.get("validated") == "true"

    def close(self) -> None:
        """Closes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _read(self, target: npt.NDArray[Any], offset: int) -> None:
        if self._descriptor is None:
            raise ReplayPayloadError("stored rows: expected an open source, it was closed")
        buffer = target if target.flags.c_contiguous else np.empty_like(target, order="C")
        left, at = memoryview(buffer.reshape(-1).view(np.uint8)), self._header.offset + offset
        while left:
            # A read returns at most 2 GiB at a time.
            count = os.preadv(self._descriptor, [left], at)
            if not count:
                raise ReplayPayloadError(
                    f"stored rows end at byte {at}, {len(left)} too early; write the file again"
                )
            left, at = left[count:], at + count
        if buffer is not target:
            target[...] = buffer


def checksums(rows: Picks) -> str:
    """CRC-32 of each 8 MiB of the data, as text."""
    data = memoryview(rows.reshape(-1).view(np.uint8))
    return json.dumps([zlib.crc32(data[at : at + CRC_BLOCK]) for at in range(0, len(data), CRC_BLOCK)])


def _npy(descriptor: int, start: bytes) -> Header:
    length = int.from_bytes(start[8:10], "little")
    if start[6:8] != b"\x01\x00" or length > MAX_HEADER:
        raise ValueError(f".npy version {start[6]}.{start[7]}, header of {length} bytes")
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(8)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran or dtype != np.dtype("<i4"):
        raise ValueError(f"{dtype} in {'Fortran' if fortran else 'C'} order")
    return Header(10 + length, _three(shape), False, {})


def _safetensors(descriptor: int, start: bytes) -> Header:
    (length,) = struct.unpack("<Q", start[:8])
    if not 2 <= length <= MAX_HEADER:
        raise ValueError(f"a safetensors header of {length} bytes")
    fields = json.loads(os.pread(descriptor, length, 8))
    metadata = fields.pop("__metadata__", {})
    (name,) = fields
    entry = fields[name]
    shape = _three(entry["shape"])
    if name not in ("topk", "tensor") or entry["dtype"] != "I32":
        raise ValueError(f"tensor {name!r} of dtype {entry['dtype']}")
    if entry["data_offsets"] != [0, math.prod(shape) * 4]:
        raise ValueError(f"data at {entry['data_offsets']} for shape {list(shape)}")
    return Header(8 + length, shape, name == "topk", {str(k): str(v) for k, v in metadata.items()})


def _three(shape: Sequence[Any]) -> Shape:
    if len(shape) != 3 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shape}")
    rows, streams, topk = shape
    return rows, streams, topk
