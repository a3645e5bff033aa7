# SPDX-License-Identifier: Apache-2.0
"""Rows as sets, in few bytes: what one frame of `codec` holds for one stream of consecutive rows.

Order costs most of the entropy of a selection, and neighbouring queries pick nearly the same keys. Two forms:

    bitmap   a bit per key, each row XORed with the row before: best while keys are at most some 16 times the picks
    delta    gaps between ascending picks, their bytes in planes: best for long contexts

Both hold the number of picks of each row first, and are compressed by the caller. Decoding trusts nothing: sizes,
counts, order and ranges are compared with what the rows may hold. All arrays are little-endian.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vime_replay.errors import ReplayPayloadError
from vime_replay.rows import Picks
from vime_replay.spec import Ints

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SetCodec:
    """One way to write rows as sets.

    Attributes:
        encode: (sorted picks [n, K], counts [n], available [n]) to bytes.
        decode: (bytes, K, available [n]) to sorted picks [n, K], or ReplayPayloadError.
        largest: (n, K, available [n]) to the most bytes that `encode` can return.
    """

    encode: Callable[[Picks, Ints, Ints], bytes]
    decode: Callable[[bytes, int, Ints], Picks]
    largest: Callable[[int, int, Ints], int]


def _width(available: Ints) -> int:
    """Bytes of a row's bitmap."""
    return -(-int(available[-1]) // 8)


def _encode_bitmap(picks: Picks, counts: Ints, available: Ints) -> bytes:
    bits = np.zeros((len(picks), _width(available) * 8), np.uint8)
    used = picks >= 0
    place = picks + np.arange(len(picks))[:, None] * bits.shape[1]
    bits.reshape(-1)[place.ravel() if used.all() else place[used]] = 1
    packed = np.packbits(bits, axis=1, bitorder="little")
    packed[1:] ^= packed[:-1]
    return counts.astype("<u2").tobytes() + packed.tobytes()


def _decode_bitmap(data: bytes, topk: int, available: Ints) -> Picks:
    rows = len(available)
    _expect(len(data) == _largest_bitmap(rows, topk, available), "size of a bitmap")
    counts = np.frombuffer(data, "<u2", rows).astype(np.int64)
    packed = np.frombuffer(data, np.uint8, offset=2 * rows).reshape(rows, -1)
    bits = np.unpackbits(np.bitwise_xor.accumulate(packed, axis=0), axis=1, bitorder="little")
    place = np.flatnonzero(bits.view(bool))
    # The first bit of each row, among all that are set.
    first = np.searchsorted(place, np.arange(rows + 1) * bits.shape[1])
    _expect(bool((np.diff(first) == counts).all()), "count of bits")
    row = np.repeat(np.arange(rows), counts)
    return _place(row, place - row * bits.shape[1], counts, topk, available)


def _largest_bitmap(rows: int, topk: int, available: Ints) -> int:
    return rows * (2 + _width(available))


def _encode_delta(picks: Picks, counts: Ints, available: Ints) -> bytes:
    gaps = np.diff(picks, axis=1, prepend=np.int32(0))[picks >= 0].astype("<u4")
    planes = max(1, -(-int(gaps.max(initial=0)).bit_length() // 8))
    columns = gaps.view(np.uint8).reshape(-1, 4)[:, :planes]
    return counts.astype("<u2").tobytes() + bytes([planes]) + columns.T.tobytes()


def _decode_delta(data: bytes, topk: int, available: Ints) -> Picks:
    rows = len(available)
    _expect(len(data) > 2 * rows, "size of deltas")
    counts = np.frombuffer(data, "<u2", rows).astype(np.int64)
    planes, total = data[2 * rows], int(counts.sum())
    _expect(1 <= planes <= 4 and len(data) == 2 * rows + 1 + planes * total, "size of deltas")
    columns = np.zeros((total, 4), np.uint8)
    columns[:, :planes] = np.frombuffer(data, np.uint8, offset=2 * rows + 1).reshape(planes, total).T
    gaps = columns.view("<u4").reshape(-1).astype(np.int64)
    row = np.repeat(np.arange(rows), counts)
    # Sums over the whole frame, less what the rows before added.
    running = np.cumsum(gaps)
    first = np.cumsum(counts) - counts
    before = np.concatenate([[0], running])[first]
    inner = np.ones(total, bool)
    inner[first[counts > 0]] = False
    _expect(bool((gaps[inner] > 0).all()), "order of picks")
    return _place(row, running - before[row], counts, topk, available)


def _largest_delta(rows: int, topk: int, available: Ints) -> int:
    return rows * (2 + 4 * topk) + 1


def _place(row: Ints, pick: Ints, counts: Ints, topk: int, available: Ints) -> Picks:
    """Ascending picks of all rows, row by row, as [n, K] with -1 last."""
    _expect(bool((counts <= np.minimum(available, topk)).all()), "picks of a row")
    _expect(bool((pick < available[row]).all()), "range of picks")
    if len(pick) == len(counts) * topk:
        return pick.reshape(-1, topk).astype(np.int32)
    out = np.full((len(counts), topk), -1, np.int32)
    first = np.cumsum(counts) - counts
    out[row, np.arange(len(row)) - first[row]] = pick
    return out


def _expect(ok: bool, what: str) -> None:
    if not ok:
        raise ReplayPayloadError(
            f"encoded rows: the {what} is not what the rows may hold; the payload is corrupt, write it again"
        )


SET_CODECS = {
    "set-bitmap-z": SetCodec(_encode_bitmap, _decode_bitmap, _largest_bitmap),
    "set-delta-z": SetCodec(_encode_delta, _decode_delta, _largest_delta),
}
