# SPDX-License-Identifier: Apache-2.0
"""Blobs to break, ways to break them, and what an accepted blob must be according to the standard library and numpy."""

import base64
import io
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import packing

from vime_replay.codec import EncodedSource, encode_rows
from vime_replay.errors import ReplayDecodeError, ReplayPayloadError
from vime_replay.rows import decode_rows

SPEC = packing.spec_of(streams=2, topk=4)
COMPRESSED = packing.spec_of(streams=3, topk=8, ratio=4)
MAX_BLOB = 4096


@dataclass(frozen=True)
class Target:
    """Something that reads blobs.

    Attributes:
        blobs: whole ones, each under 4 KiB.
        read: the array in a blob; a refusal is one of `refusals`, and anything else is a crash.
        oracle: the array by other means, or None if these refuse it.
        decoded: bytes of the array that is expected.
    """

    blobs: list[bytes]
    read: Callable[[bytes], np.ndarray]
    oracle: Callable[[bytes], np.ndarray | None]
    decoded: int
    refusals: tuple[type[Exception], ...]


def _npy(rows: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def _strict(text: bytes) -> bytes | None:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return data


def _numpy(text: bytes) -> np.ndarray | None:
    data = _strict(text)
    if data is None:
        return None
    file = io.BytesIO(data)
    try:
        rows = np.load(file, allow_pickle=False, max_header_size=1024)
    except Exception:
        # Whatever stops numpy is a refusal.
        return None
    return rows if file.tell() == len(data) else None


def wire_target(spec, tokens: int, *, raw: bool = False) -> Target:
    """Base64 from the network, `.npy` or bare int32, mutated as text and as bytes under the text."""
    rows = packing.random_rows(np.random.default_rng(0), tokens, spec, full=True)
    data = rows.tobytes() if raw else _npy(rows)

    def read(text: bytes) -> np.ndarray:
        found = decode_rows(text, spec, num_tokens=tokens, level="range", raw_int32=raw)
        assert found is not None
        return found

    def oracle(text: bytes) -> np.ndarray | None:
        if not raw or text.startswith(b"k05VTVBZ"):
            return _numpy(text)
        found = _strict(text)
        return (
            None
            if found is None or len(found) != rows.nbytes
            else np.frombuffer(found, "<i4").reshape(rows.shape)
        )

    return Target([base64.b64encode(data)], read, oracle, rows.nbytes, (ReplayDecodeError,))


def encoded_target(encoding: str) -> Target:
    """Encoded rows from a file, where a checksum guards the sets."""
    rows = packing.random_rows(np.random.default_rng(1), 300, packing.spec_of(topk=3), full=True)
    spec = packing.spec_of(topk=3)
    blob = encode_rows(rows, spec, encoding)

    def read(data: bytes) -> np.ndarray:
        source = EncodedSource(data, spec)
        out = np.empty((1, source.shape[0], 3), np.int32)
        source.read_into(out, rows=slice(0, source.shape[0]), streams=[0])
        return out[0][:, None]

    ordered = np.sort(rows.view(np.uint32), axis=2).view(np.int32)

    def oracle(data: bytes) -> np.ndarray | None:
        if encoding != "u16":
            # Nothing but the rows that were written can come out.
            return ordered[: len(read(data))]
        count = len(read(data))
        narrow = np.frombuffer(data[len(data) - count * 6 :], "<u2").astype(np.int32)
        return np.where(narrow == 0xFFFF, -1, narrow).reshape(count, 1, 3)

    return Target([blob], read, oracle, rows.nbytes, (ReplayPayloadError,))


def mutate(blob: bytes, rng: random.Random, *, under_base64: bool) -> bytes:
    """One to three small changes; under base64 they are made to what the text stands for, mostly in its header."""
    data = bytearray(base64.b64decode(blob) if under_base64 else blob)
    for _ in range(rng.randint(1, 3)):
        end = min(len(data), 140) if rng.random() < 0.7 else len(data)
        at = rng.randrange(end) if end else 0
        match rng.randrange(6):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at] = rng.choice(b"0123456789<>|=uif84'(), -+/\x00\xff\x7fOV")
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            case 3:
                del data[at : at + rng.randint(1, 8)]
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 64)]
            case _:
                del data[rng.randrange(len(data) + 1) :]
    data = data[: MAX_BLOB * 3 // 4 - 3] if under_base64 else data[:MAX_BLOB]
    return base64.b64encode(bytes(data)) if under_base64 else bytes(data)
