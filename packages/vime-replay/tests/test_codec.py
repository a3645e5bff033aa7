# SPDX-License-Identifier: Apache-2.0
"""Encodings: the same rows back, read in part as well as whole, and nothing wrong accepted from broken blobs."""

import json
import struct

import numpy as np
import packing
import pytest

from vime_replay.codec import BLOCK_ROWS, EncodedSource, encode_rows
from vime_replay.errors import ReplayConfigError, ReplayPayloadError
from vime_replay.layout import PackLayout
from vime_replay.pack import pack_rows
from vime_replay.rows import check_rows

ENCODINGS = ["u16", "set-bitmap-z", "set-delta-z"]
SETS = ENCODINGS[1:]


def recorded(spec, tokens, churn=0.1, seed=0):
    """Rows that neighbours nearly share, unordered."""
    rng = np.random.default_rng(seed)
    rows = np.full((tokens - 1, spec.num_streams, spec.topk), -1, np.int32)
    for stream in range(spec.num_streams):
        held = set()
        for position in range(tokens - 1):
            available = (position + 1) // spec.ratio
            count = min(available, spec.topk)
            kept = [e for e in held if rng.random() > churn][:count]
            others = rng.permutation(available)
            held = set(kept)
            held |= set([e for e in others.tolist() if e not in held][: count - len(held)])
            rows[position, stream, :count] = rng.permutation(sorted(held))
    check_rows(rows, spec, num_tokens=tokens, level="full")
    return rows


def ordered(rows):
    return np.sort(rows.view(np.uint32), axis=2).view(np.int32)


def read(source, rows=None, streams=None):
    rows = rows or slice(0, source.shape[0])
    streams = range(source.shape[1]) if streams is None else streams
    out = np.full((len(streams), rows.stop - rows.start, source.shape[2]), -9, np.int32)
    source.read_into(out, rows=rows, streams=streams)
    return out.transpose(1, 0, 2)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("tokens", [1, 2, 9, 40, 128, 129, 130, 257, 300])
@pytest.mark.parametrize("ratio", [1, 4])
def test_rows_come_back(encoding, tokens, ratio):
    spec = packing.spec_of(streams=2, topk=9, ratio=ratio)
    rows = recorded(spec, tokens)
    source = EncodedSource(encode_rows(rows, spec, encoding, validated=True), spec)
    assert source.shape == rows.shape
    assert source.validated
    expected = rows if encoding == "u16" else ordered(rows)
    assert (read(source) == expected).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_parts_equal_the_whole(encoding):
    spec = packing.spec_of(streams=3, topk=5)
    rows = recorded(spec, 400)
    source = EncodedSource(encode_rows(rows, spec, encoding), spec)
    whole = read(source)
    for part in [slice(0, 1), slice(127, 129), slice(128, 256), slice(5, 399), slice(398, 399), slice(7, 7)]:
        for streams in [(0, 1, 2), (2,), (2, 0)]:
            assert (read(source, part, streams) == whole[part][:, list(streams)]).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_packing_reads_encoded_rows(encoding):
    spec = packing.spec_of(streams=2, topk=6, ratio=4)
    lengths = (300, 41, 177)
    samples = [recorded(spec, n, seed=n) for n in lengths]
    blobs = [EncodedSource(encode_rows(rows, spec, encoding), spec) for rows in samples]
    for rank in range(2):
        layout = PackLayout(lengths, cp_size=2, cp_rank=rank, mode="zigzag")
        expected = pack_rows(samples, spec, layout, streams=[1])
        part = pack_rows(blobs, spec, layout, streams=[1])
        assert (part.picks_LSK == expected.picks_LSK).all()
        assert (part.empty_LS == expected.empty_LS).all()


@pytest.mark.parametrize("encoding", SETS)
def test_rows_that_select_all_cost_nothing(encoding):
    spec = packing.spec_of(streams=1, topk=64, ratio=4)
    # The last row that selects all sees 64 keys: position 258.
    blobs = [len(encode_rows(recorded(spec, n), spec, encoding)) for n in (8, 120, 260)]
    assert blobs[2] - blobs[0] <= 2 * 8 + 8
    assert len(encode_rows(recorded(spec, 262), spec, encoding)) > blobs[2] + 16


@pytest.mark.parametrize("encoding", SETS)
def test_a_hole_where_all_is_selected_stays_a_hole(encoding):
    """Elision is for rows that were seen to select all, not for rows that should have."""
    spec = packing.spec_of(streams=1, topk=64)
    rows = recorded(spec, 60)
    rows[20] = -1
    rows[30, 0, :5] = -1
    assert (read(EncodedSource(encode_rows(rows, spec, encoding), spec)) == ordered(rows)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_may_start_late(encoding):
    spec = packing.spec_of(streams=1, topk=4)
    rows = recorded(spec, 200)
    source = EncodedSource(encode_rows(rows[150:], spec, encoding, start=150), spec)
    assert (ordered(read(source)) == ordered(rows[150:])).all()


def test_long_contexts_need_more_than_two_bytes():
    spec = packing.spec_of(streams=1, topk=4)
    rows = np.asarray([[[70000, 3, 69999, -1]], [[70001, 1, 0, 65535]]], np.int32)
    for encoding in SETS:
        blob = encode_rows(rows, spec, encoding, start=70000)
        assert (read(EncodedSource(blob, spec)) == ordered(rows)).all()
    with pytest.raises(ReplayConfigError, match="u16: expected keys below 65535, got 70001; use set-delta-z"):
        encode_rows(rows, spec, "u16", start=70000)


def test_what_an_encoding_cannot_hold_is_refused():
    wide = packing.spec_of(streams=1, topk=70000)
    with pytest.raises(ReplayConfigError, match="expected at most 65535 picks a row, got 70000"):
        encode_rows(np.full((1, 1, 70000), -1, np.int32), wide, "set-delta-z")
    spec = packing.spec_of()
    rows = packing.newest_first(5, spec)
    with pytest.raises(ReplayConfigError, match="expected one of u16, set-bitmap-z, set-delta-z, got 'zip'"):
        encode_rows(rows, spec, "zip")
    with pytest.raises(ReplayConfigError, match=r"expected int32 \[rows, 1, 3\], got int64"):
        encode_rows(rows.astype(np.int64), spec, "u16")
    wrong = rows.copy()
    wrong[1, 0, 2] = 2
    with pytest.raises(ReplayConfigError, match="expected entries that their query may pick"):
        encode_rows(wrong, spec, "set-delta-z")
    wrong[1, 0] = [1, 1, 0]
    with pytest.raises(ReplayConfigError, match="expected different entries in a row"):
        encode_rows(wrong, spec, "set-bitmap-z")


def with_header(blob, **changes):
    length = struct.unpack("<I", blob[8:12])[0]
    header = json.dumps(json.loads(blob[12 : 12 + length]) | changes).encode()
    return blob[:8] + struct.pack("<I", len(header)) + header + blob[12 + length :]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 2**40},
        {"rows": 260},
        {"rows": -1},
        {"rows": 1.5},
        {"streams": 1},
        {"topk": 99},
        {"spec": "0"},
        {"encoding": "npy"},
        {"encoding": ["u16"]},
        {"validated": "yes"},
        {"start": -4},
    ],
    ids=str,
)
def test_headers_that_lie_are_refused(change):
    spec = packing.spec_of(streams=2, topk=9)
    blob = encode_rows(recorded(spec, 200), spec, "set-bitmap-z")
    with pytest.raises(ReplayPayloadError):
        EncodedSource(with_header(blob, **change), spec)


def bomb(payload_of):
    """A blob whose second frame is replaced."""
    zstandard = pytest.importorskip("zstandard")
    spec = packing.spec_of(streams=1, topk=4)
    rows = recorded(spec, 2 * BLOCK_ROWS + 1)
    blob = encode_rows(rows, spec, "set-bitmap-z")
    length = struct.unpack("<I", blob[8:12])[0]
    at = 12 + length
    index = np.frombuffer(blob[at : at + 24], "<u8")
    first = blob[at + 24 : at + 24 + int(index[1])]
    frame = struct.pack("<H", 0) + zstandard.ZstdCompressor().compress(payload_of(rows))
    offsets = np.asarray([0, len(first), len(first) + len(frame)], "<u8")
    return blob[:at] + offsets.tobytes() + first + frame, spec


COUNTS = np.full(BLOCK_ROWS, 4, "<u2").tobytes()
BITS = BLOCK_ROWS * 32
FRAMES = {
    "bomb": lambda rows: bytes(1 << 28),
    "short": lambda rows: COUNTS,
    "popcount": lambda rows: COUNTS + bytes(BITS),
    "more-than-k": lambda rows: (
        np.full(BLOCK_ROWS, 5, "<u2").tobytes() + bytes([31] + [0] * 31) + bytes(BITS - 32)
    ),
    "padding-bits": lambda rows: (
        np.full(BLOCK_ROWS, 1, "<u2").tobytes() + bytes([0] * 31 + [128]) + bytes(BITS - 32)
    ),
}


@pytest.mark.parametrize("case", FRAMES)
def test_frames_that_lie_are_refused(case):
    blob, spec = bomb(FRAMES[case])
    source = EncodedSource(blob, spec)
    read(source, slice(0, BLOCK_ROWS))
    with pytest.raises(ReplayPayloadError, match="corrupt"):
        read(source, slice(BLOCK_ROWS, 2 * BLOCK_ROWS))


def test_rows_that_choose_cannot_be_left_out():
    blob, spec = bomb(lambda rows: b"")
    at = 12 + struct.unpack("<I", blob[8:12])[0]
    index = np.frombuffer(blob[at : at + 24], "<u8").copy()
    # The second frame is empty: 128 rows that pick every key, while each sees more keys than it picks.
    index[2] = index[1]
    empty = blob[:at] + index.tobytes() + blob[at + 24 : at + 24 + int(index[1])]
    with pytest.raises(ReplayPayloadError, match="more rows are left out than select all"):
        read(EncodedSource(empty, spec), slice(BLOCK_ROWS, 2 * BLOCK_ROWS))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_truncated_blobs_are_refused(encoding):
    spec = packing.spec_of(streams=2, topk=9)
    blob = encode_rows(recorded(spec, 200), spec, encoding)
    for size in [0, 5, 11, 12, 40, *range(100, len(blob), 97), len(blob) - 1]:
        with pytest.raises(ReplayPayloadError):
            EncodedSource(blob[:size], spec)
    with pytest.raises(ReplayPayloadError):
        EncodedSource(blob + b"\0", spec)


@pytest.mark.parametrize("encoding", SETS)
def test_flipped_bytes_never_change_rows_unseen(encoding):
    spec = packing.spec_of(streams=1, topk=9)
    blob = encode_rows(recorded(spec, 200), spec, encoding)
    whole = read(EncodedSource(blob, spec))
    rng = np.random.default_rng(3)
    refused = 0
    for at in rng.integers(0, len(blob), 400):
        broken = bytearray(blob)
        broken[at] ^= 1 << rng.integers(8)
        try:
            assert (read(EncodedSource(bytes(broken), spec)) == whole).all()
        except ReplayPayloadError:
            refused += 1
    assert refused > 300


def test_a_closed_source_reads_nothing():
    spec = packing.spec_of()
    calls = []
    blob = encode_rows(packing.newest_first(9, spec), spec, "u16")
    source = EncodedSource(
        lambda offset, count: blob[offset : offset + count],
        spec,
        size=len(blob),
        close=lambda: calls.append(1),
    )
    source.close()
    source.close()
    assert calls == [1]
    with pytest.raises(ReplayPayloadError, match="it was closed"):
        read(source)
