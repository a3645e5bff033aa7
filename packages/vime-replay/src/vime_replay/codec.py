# SPDX-License-Identifier: Apache-2.0
"""Compact encodings of a sample's rows, readable in part.

    u16            entries in two bytes, 65535 for -1; order kept
    set-bitmap-z   rows as sets: bitmaps XORed with the row before, zstd
    set-delta-z    rows as sets: gaps between ascending picks, zstd

A set encoding leaves out rows that pick every key they see (select-all): the first tokens of a sample cost nothing.
It sorts rows, so replay is the same bits only with kernels that do not depend on order, or that get sorted rows.
A blob is: magic, length of the header, header (JSON), then an index of frames and the frames, one for each stream and
128 rows. Sizes are compared with the spec before anything is decompressed. Needs zstandard for the set encodings.
"""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from vime_replay.errors import ReplayConfigError, ReplayPayloadError
from vime_replay.rows import Picks
from vime_replay.set_codecs import SET_CODECS
from vime_replay.sources import Shape
from vime_replay.spec import Ints, ReplaySpec

Encoding = Literal["u16", "set-bitmap-z", "set-delta-z"]
MAGIC = b"\x93VIMERP\x01"
BLOCK_ROWS = 128
MAX_HEADER = 4096
UNUSED_NARROW = 0xFFFF
LEVEL = 3

# Bytes [offset, offset + size) of a blob.
Reader = Callable[[int, int], bytes]


def encode_rows(
    rows: Picks, spec: ReplaySpec, encoding: Encoding, *, start: int = 0, validated: bool = False
) -> bytes:
    """A blob that `EncodedSource` reads.

    Args:
        rows: int32 [R, L, K], checked.
        spec: of the rows.
        encoding: see the module.
        start: position of the first row.
        validated: noted in the blob: values were checked.

    Raises:
        ReplayConfigError: an encoding that cannot hold these rows, or whose library is missing.
    """
    if encoding not in get_args(Encoding):
        raise ReplayConfigError(
            f"encoding: expected one of {', '.join(get_args(Encoding))}, got {encoding!r}"
        )
    if rows.ndim != 3 or rows.shape[1:] != (spec.num_streams, spec.topk) or rows.dtype != np.int32:
        raise ReplayConfigError(
            f"rows to encode: expected int32 [rows, {spec.num_streams}, {spec.topk}], got {rows.dtype} of shape "
            f"{list(rows.shape)}"
        )
    if spec.topk > UNUSED_NARROW:
        raise ReplayConfigError(
            f"rows to encode: expected at most {UNUSED_NARROW} picks a row, got {spec.topk}"
        )
    available = spec.available(np.arange(start, start + len(rows)))
    if rows.size and (rows.min() < -1 or (rows.max(axis=(1, 2)) >= available).any()):
        raise ReplayConfigError(
            "rows to encode: expected entries that their query may pick; check_rows says which is not"
        )
    frames = list(_frames(rows, spec, encoding, available))
    header = {
        "encoding": encoding,
        "rows": len(rows),
        "streams": spec.num_streams,
        "topk": spec.topk,
        "start": start,
        "spec": spec.digest,
        "validated": validated,
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 12) % 8)
    index = np.zeros(len(frames) + 1, "<u8")
    index[1:] = np.cumsum([len(frame) for frame in frames])
    return b"".join([MAGIC, struct.pack("<I", len(text)), text, index.tobytes(), *frames])


class EncodedSource:
    """Rows in a blob; reads the blocks that it is asked for.

    Args:
        read: bytes of the blob at an offset, or the blob itself.
        size: bytes of the blob, if `read` is a function.
        spec: of the rows; a blob of another spec is refused.
        close: called once by `close`.

    Raises:
        ReplayPayloadError: not such a blob, truncated, or of another spec.
    """

    def __init__(
        self,
        read: Reader | bytes,
        spec: ReplaySpec,
        *,
        size: int | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        if isinstance(read, bytes):
            blob, size = read, len(read)
            self._read: Reader = lambda offset, count: blob[offset : offset + count]
        else:
            self._read = read
        self._spec, self._close = spec, close
        header, at = self._header(size or 0)
        self._encoding: str = header["encoding"]
        self.start: int = header["start"]
        self.shape: Shape = (header["rows"], spec.num_streams, spec.topk)
        self.validated: bool = header["validated"]
        self._blocks = -(-self.shape[0] // BLOCK_ROWS)
        count = self._blocks * spec.num_streams + 1
        self._data = at + 8 * count
        if self._data > (size or 0):
            raise ReplayPayloadError(f"encoded rows: truncated in the index, {size} bytes; write it again")
        self._index = np.frombuffer(self._read(at, 8 * count), "<u8").astype(np.int64)
        if self._index[0] != 0 or (np.diff(self._index) < 0).any() or self._data + self._index[-1] != size:
            raise ReplayPayloadError(
                f"encoded rows: the index does not describe the {size} bytes there are; truncated, write it again"
            )

    def read_into(self, dst_LRK: Picks, *, rows: slice, streams: Sequence[int]) -> None:
        """See `RowSource`."""
        for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
            first = block * BLOCK_ROWS
            begin, end = max(rows.start, first), min(rows.stop, first + BLOCK_ROWS, self.shape[0])
            for target, stream in zip(dst_LRK, streams, strict=True):
                decoded = self._block(stream, block)
                target[begin - rows.start : end - rows.start] = decoded[begin - first : end - first]

    def close(self) -> None:
        """Gives back the file, if there is one."""
        close, self._close, self._read = self._close, lambda: None, _closed
        close()

    def _block(self, stream: int, block: int) -> Picks:
        first = block * BLOCK_ROWS
        available = self._spec.available(
            self.start + np.arange(first, min(first + BLOCK_ROWS, self.shape[0]))
        )
        number = stream * self._blocks + block
        at, end = self._index[number], self._index[number + 1]
        frame = self._read(self._data + int(at), int(end - at))
        if self._encoding == "u16":
            return _decode_u16(frame, self._spec.topk, available)
        return _decode_set(frame, self._encoding, self._spec.topk, available)

    def _header(self, size: int) -> tuple[dict[str, Any], int]:
        start = self._read(0, 12)
        length = struct.unpack("<I", start[8:])[0] if len(start) == 12 else 0
        if start[:8] != MAGIC or not 0 < length <= MAX_HEADER or 12 + length > size:
            raise ReplayPayloadError("encoded rows: expected a blob of encode_rows, got something else")
        try:
            header = json.loads(self._read(12, length))
            numbers = [header["rows"], header["start"]]
            known = header["encoding"] in get_args(Encoding) and isinstance(header["validated"], bool)
            expected = (self._spec.digest, self._spec.num_streams, self._spec.topk)
            found = (header["spec"], header["streams"], header["topk"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ReplayPayloadError(
                f"encoded rows: unreadable header ({error}); write the blob again"
            ) from error
        if not known or any(type(n) is not int or not 0 <= n < 2**31 for n in numbers):
            raise ReplayPayloadError(
                f"encoded rows: expected an encoding of {get_args(Encoding)} and counts, got {header}"
            )
        if expected != found:
            raise ReplayPayloadError(
                f"encoded rows: expected spec, streams and topk {expected}, got {found}; they are of another model"
            )
        return header, 12 + length


def _closed(offset: int, count: int) -> bytes:
    raise ReplayPayloadError("encoded rows: expected an open source, it was closed")


def _frames(rows: Picks, spec: ReplaySpec, encoding: str, available: Ints) -> Iterator[bytes]:
    compress = (
        None if encoding == "u16" else _zstd().ZstdCompressor(level=LEVEL, write_checksum=True).compress
    )
    if compress is None and rows.size and rows.max() >= UNUSED_NARROW:
        raise ReplayConfigError(
            f"encoding u16: expected keys below {UNUSED_NARROW}, got {rows.max()}; use set-delta-z"
        )
    for stream in range(spec.num_streams):
        for first in range(0, len(rows), BLOCK_ROWS):
            part = rows[first : first + BLOCK_ROWS, stream]
            seen = available[first : first + BLOCK_ROWS]
            if compress is None:
                yield part.astype("<u2").tobytes()
                continue
            picks = np.sort(part.view(np.uint32), axis=1).view(np.int32)
            if ((picks[:, 1:] == picks[:, :-1]) & (picks[:, 1:] >= 0)).any():
                raise ReplayConfigError("rows to encode: expected different entries in a row; they are sets")
            counts = (picks >= 0).sum(axis=1)
            rest = _select_all(counts, seen)
            if rest == len(picks):
                yield b""
                continue
            payload = SET_CODECS[encoding].encode(picks[rest:], counts[rest:], seen[rest:])
            yield struct.pack("<H", rest) + compress(payload)


def _select_all(counts: Ints, available: Ints) -> int:
    """Leading rows that pick every key they see."""
    partial = np.flatnonzero(counts != available)
    return int(partial[0]) if len(partial) else len(counts)


def _decode_u16(frame: bytes, topk: int, available: Ints) -> Picks:
    if len(frame) != 2 * topk * len(available):
        raise ReplayPayloadError(
            f"encoded rows: expected a frame of {2 * topk * len(available)} bytes, got {len(frame)}; truncated"
        )
    narrow = np.frombuffer(frame, "<u2").reshape(-1, topk)
    rows = narrow.astype(np.int32)
    rows[narrow == UNUSED_NARROW] = -1
    if (rows.max(axis=1) >= available).any():
        raise ReplayPayloadError("encoded rows: an entry that its query may not pick; the payload is corrupt")
    return rows


def _decode_set(frame: bytes, encoding: str, topk: int, available: Ints) -> Picks:
    rows = len(available)
    rest = struct.unpack("<H", frame[:2])[0] if len(frame) >= 2 else rows
    if rest > rows or (rest < rows) != bool(frame) or (available[:rest] > topk).any():
        raise ReplayPayloadError(
            "encoded rows: more rows are left out than select all; the payload is corrupt"
        )
    out = np.full((rows, topk), -1, np.int32)
    columns = np.arange(min(topk, int(available[:rest].max(initial=0))), dtype=np.int32)
    out[:rest, : len(columns)] = np.where(columns < available[:rest, None], columns, -1)
    if rest < rows:
        codec, seen = SET_CODECS[encoding], available[rest:]
        out[rest:] = codec.decode(_decompress(frame[2:], codec.largest(rows - rest, topk, seen)), topk, seen)
    return out


def _decompress(frame: bytes, limit: int) -> bytes:
    zstd = _zstd()
    try:
        size = zstd.get_frame_parameters(frame).content_size
        if size > limit:
            raise ReplayPayloadError(
                f"encoded rows: a frame declares {size} bytes, expected at most {limit}; the payload is corrupt"
            )
        return zstd.ZstdDecompressor().decompress(frame, max_output_size=limit, allow_extra_data=False)
    except zstd.ZstdError as error:
        raise ReplayPayloadError(
            f"encoded rows: a frame does not decompress ({error}); write it again"
        ) from error


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ReplayConfigError(
            "set encodings need zstandard, which is not installed; pip install 'vime-replay[store]'"
        ) from error
    return zstandard
