# SPDX-License-Identifier: Apache-2.0
"""Payloads to rows: every row of the validation table has a hostile payload, every policy for holes a case."""

import base64
import io
import tracemalloc

import numpy as np
import packing
import pytest

from vime_replay.errors import ReplayConfigError, ReplayDecodeError, ReplayWarning
from vime_replay.rows import check_rows, decode_rows
from vime_replay.spec import ReplaySpec

TOKENS = 9
SPEC = packing.spec_of(streams=2, topk=4)
COMPRESSED = packing.spec_of(streams=2, topk=4, ratio=4)


def rows_of(spec=SPEC, tokens=TOKENS):
    return packing.random_rows(np.random.default_rng(0), tokens, spec, full=True)


def payload(rows, **options):
    """Base64 of a .npy file as numpy writes it; this is not the package's encoder."""
    file = io.BytesIO()
    np.save(file, rows, **options)
    return base64.b64encode(file.getvalue()).decode()


def npy(header, data=b"", version=b"\x01\x00"):
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    length = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return base64.b64encode(b"\x93NUMPY" + version + length + text + data).decode()


def decode(text, spec=SPEC, **options):
    return decode_rows(text, spec, **{"num_tokens": TOKENS, **options})


@pytest.mark.parametrize("spec", [SPEC, COMPRESSED], ids=["tokens", "compressed"])
@pytest.mark.parametrize("level", ["off", "range", "full"])
def test_rows_come_back_without_a_copy(spec, level):
    rows = rows_of(spec)
    text = payload(rows)
    for form in (text, text.encode(), memoryview(text.encode())):
        back = decode(form, spec, level=level)
        assert back.dtype == np.int32
        assert (back == rows).all()
        assert not back.flags.writeable
        assert back.base is not None


@pytest.mark.parametrize("start", [0, 3, 8])
def test_a_payload_may_start_late(start):
    rows = rows_of()
    assert (decode(payload(rows[start:]), start=start) == rows[start:]).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_sample_without_passes_has_no_rows(tokens):
    assert decode(payload(rows_of()[:0]), num_tokens=tokens).shape == (0, 2, 4)
    assert decode("", num_tokens=tokens, raw_int32=True).shape == (0, 2, 4)


def test_raw_int32_only_if_declared():
    rows = rows_of()
    raw = base64.b64encode(rows.tobytes()).decode()
    assert (decode(raw, raw_int32=True) == rows).all()
    # An engine that may send both is read by what it sends.
    assert (decode(payload(rows), raw_int32=True) == rows).all()
    with pytest.raises(ReplayDecodeError, match="magic string is missing"):
        decode(raw)
    for wrong in (raw[:-4], raw + raw[:4]):
        with pytest.raises(ReplayDecodeError, match=r"npy\.length|wire\.size"):
            decode(wrong, raw_int32=True)


def test_narrow_rows_only_if_allowed():
    rows = rows_of()
    narrow = payload(rows.astype(np.uint16))
    assert (decode(narrow, allow_narrow=True) == rows).all()
    with pytest.raises(ReplayDecodeError, match=r"npy\.dtype"):
        decode(narrow)


def test_a_row_for_the_last_token_only_if_declared():
    rows = rows_of(tokens=TOKENS + 1)
    assert (decode(payload(rows), trailing_row=True) == rows[:-1]).all()
    with pytest.raises(ReplayDecodeError, match=r"shape\.rows|wire\.size"):
        decode(payload(rows))


GOOD = rows_of()
HEADER = "{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}"
DATA = GOOD.tobytes()
HOSTILE = {
    "none": (None, "wire.type"),
    "number": (17, "wire.type"),
    "list": ([1], "wire.type"),
    "too-long": ("A" * 4000, "wire.size"),
    "whitespace": ("\n" + payload(GOOD)[1:], "wire.base64"),
    "url-alphabet": ("-_" + payload(GOOD)[2:], "wire.base64"),
    "length": (payload(GOOD)[:-1], "wire.base64"),
    "not-ascii": ("é" + payload(GOOD)[1:], "wire.base64"),
    "empty": ("", "npy.header"),
    "magic": (base64.b64encode(b"PICKLE" + bytes(60)).decode(), "npy.header"),
    "version-9": (npy(HEADER.format("<i4", False, GOOD.shape), DATA, b"\x09\x00"), "npy.header"),
    "header-size": (base64.b64encode(b"\x93NUMPY\x01\x00\xff\xff" + bytes(60)).decode(), "npy.header"),
    "header-code": (npy("__import__('os').abort()" + " " * 20, DATA), "npy.header"),
    "object": (npy(HEADER.format("|O", False, GOOD.shape), DATA), "npy.object"),
    "structured": (
        npy(f"{{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': {GOOD.shape}}}", DATA),
        "npy.object",
    ),
    "float": (payload(GOOD.astype(np.float32)), "npy.dtype"),
    "bool": (payload(GOOD > 0), "npy.dtype"),
    "big-endian": (payload(GOOD.astype(">i4")), "npy.dtype"),
    "fortran": (payload(np.asfortranarray(GOOD)), "npy.order"),
    "two-dimensions": (payload(GOOD[:, 0]), "npy.ndim"),
    "negative": (npy(HEADER.format("<i4", False, (-1, 2, 4)), DATA), "npy.ndim"),
    "streams": (payload(GOOD[:, :1]), "shape.streams"),
    "topk": (payload(GOOD[:, :, :3]), "shape.topk"),
    "rows": (payload(GOOD[:-1]), "shape.rows"),
    "shift": (payload(GOOD[1:]), "shape.rows"),
    "bomb": (npy(HEADER.format("<i4", False, (2**62, 2, 4)), DATA), "shape.rows"),
    "overflow": (npy(HEADER.format("<i4", False, (2**61 + 8, 2, 4)), DATA), "shape.rows"),
    "truncated": (npy(HEADER.format("<i4", False, GOOD.shape), DATA[:-4]), "npy.length"),
    "trailing": (npy(HEADER.format("<i4", False, GOOD.shape), DATA + b"\0\0\0\0"), "npy.length"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_payloads_are_refused(case):
    text, code = HOSTILE[case]
    with pytest.raises(ReplayDecodeError) as error:
        decode(text, sample=5, level="off")
    assert error.value.code == code
    assert "sample 5: " in str(error.value)


VALUES = {
    "key-of-the-next-query": ((2, 1, 0), 3, r"\[value\.range\] row 2 stream 1 holds 3, allowed -1\.\.2"),
    "below": ((2, 1, 0), -2, r"row 2 stream 1 holds -2, allowed -1\.\.2"),
    "smallest": ((7, 0, 3), -(2**31), r"row 7 stream 0 holds -2147483648"),
    "largest": ((7, 0, 3), 2**31 - 1, r"row 7 stream 0 holds 2147483647, allowed -1\.\.7"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_outside_their_range_are_refused(case):
    place, value, message = VALUES[case]
    rows = rows_of()
    rows[place] = value
    assert decode(payload(rows), level="off") is not None
    with pytest.raises(ReplayDecodeError, match=message):
        decode(payload(rows))
    # Positions count from the start of the sample.
    with pytest.raises(ReplayDecodeError, match=message):
        decode(payload(rows[1:]), start=1)


def test_rows_shifted_by_one_leave_their_range():
    """Row r given to query r - 1: the newest key is one that the query cannot see."""
    for spec, tokens in ((SPEC, 9), (COMPRESSED, 9)):
        rows = packing.newest_first(tokens, spec)
        shifted = np.concatenate([rows[1:], rows[-1:]])
        with pytest.raises(ReplayDecodeError, match=r"value\.range"):
            check_rows(shifted, spec, num_tokens=tokens)


def test_compressed_rows_may_see_complete_groups_only():
    rows = rows_of(COMPRESSED)
    rows[2, 0, 0] = 0
    with pytest.raises(ReplayDecodeError, match=r"row 2 stream 0 holds 0, allowed -1\.\.-1"):
        decode(payload(rows), COMPRESSED)


def test_repeated_entries_are_refused_at_level_full():
    rows = rows_of()
    rows[6, 1] = [5, 2, 5, 0]
    assert decode(payload(rows)) is not None
    with pytest.raises(ReplayDecodeError, match=r"\[value\.duplicate\] row 6 stream 1 repeats position 5"):
        decode(payload(rows), level="full")


def test_short_selections_are_reported_at_level_full():
    rows = rows_of()
    rows[6, 1] = [5, 2, -1, -1]
    with pytest.warns(ReplayWarning, match="row 6 stream 1 selects 2 of 4 available keys"):
        decode(payload(rows), level="full")


ZERO, NONE = 0, -1


@pytest.mark.parametrize("value", [ZERO, NONE], ids=["zeros", "none"])
@pytest.mark.parametrize("spec", [SPEC, COMPRESSED], ids=["tokens", "compressed"])
def test_rows_without_a_capture_are_refused(spec, value):
    rows = rows_of(spec, tokens=40)
    rows[[17, 30]] = value
    with pytest.raises(
        ReplayDecodeError, match=r"\[value\.hole\] 2/39 rows have no capture, first \[17, 30\]"
    ):
        decode(payload(rows), spec, num_tokens=40)
    assert decode(payload(rows), spec, num_tokens=40, missing="drop-sample") is None
    filled = decode(payload(rows), spec, num_tokens=40, missing="recompute")
    assert (filled[[17, 30]] == -1).all()
    others = [r for r in range(39) if r not in (17, 30)]
    assert (filled[others] == rows[others]).all()


@pytest.mark.parametrize("value", [ZERO, NONE], ids=["zeros", "none"])
def test_holes_among_rows_that_use_every_slot(value):
    rows = rows_of(tokens=40)[20:]
    rows[7] = value
    with pytest.raises(ReplayDecodeError, match=r"1/19 rows have no capture, first \[27\]"):
        check_rows(rows, SPEC, num_tokens=40, start=20)


def test_empty_rows_before_the_first_group_are_no_holes():
    rows = rows_of(COMPRESSED)
    assert (rows[:3] == -1).all()
    decode(payload(rows), COMPRESSED)
    rows[1] = 0
    with pytest.raises(ReplayDecodeError, match=r"value\.hole"):
        decode(payload(rows), COMPRESSED)


def test_key_0_alone_is_a_selection():
    spec = packing.spec_of(topk=1)
    check_rows(np.zeros((3, 1, 1), np.int32), spec, num_tokens=4)
    rows = np.full((3, 1, 3), -1, np.int32)
    rows[:, 0, 1] = 0
    check_rows(rows, packing.spec_of(), num_tokens=4)


def test_recompute_accepts_few_holes_and_only_whole_rows():
    spec = packing.spec_of(streams=2, topk=2)
    rows = packing.newest_first(202, spec)
    rows[100:165] = -1
    with pytest.raises(ReplayDecodeError, match=r"65/201 rows have no capture.*accepts at most 64"):
        check_rows(rows, spec, num_tokens=202, missing="recompute")
    rows = packing.newest_first(202, spec)
    rows[100, 1] = 0
    with pytest.raises(ReplayDecodeError, match=r"row 100 lacks streams \[1\] only"):
        check_rows(rows, spec, num_tokens=202, missing="recompute")


def test_blocks_are_checked_to_the_last_row():
    """More rows than one cache block."""
    spec = packing.spec_of(streams=3, topk=512)
    rows = packing.newest_first(300, spec)
    check_rows(rows, spec, num_tokens=300)
    rows[298, 2, 7] = 299
    with pytest.raises(ReplayDecodeError, match="row 298 stream 2 holds 299"):
        check_rows(rows, spec, num_tokens=300)


def test_layers_that_reuse_picks_repeat_them_on_a_dense_wire():
    """Layers 0 and 2 run an indexer; 1 and 3 reuse what they picked."""
    spec = ReplaySpec("indexer", "k", 4, 4, {0: 0, 2: 2})
    rows = np.repeat(rows_of(packing.spec_of(streams=2, topk=4), tokens=30), 2, axis=1)
    # Order inside a row means nothing.
    rows[:, 1] = rows[:, 1, ::-1]
    check_rows(rows, spec, num_tokens=30, level="full")
    shifted = ReplaySpec("indexer", "k", 4, 4, {0: 0, 1: 1, 3: 3})
    with pytest.raises(
        ReplayDecodeError, match=r"value\.shared\] row \d+ stream 2: expected the picks of stream 1"
    ):
        check_rows(rows, shifted, num_tokens=30, level="full")


def test_decoding_holds_the_payload_and_the_rows_only():
    spec = packing.spec_of(streams=21, topk=512)
    rows = packing.newest_first(300, spec)
    text = payload(rows)
    for level in ("off", "range"):
        tracemalloc.start()
        decode_rows(text, spec, num_tokens=300, level=level)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= rows.nbytes + 2**20


def test_rows_of_experts_have_one_bound():
    spec = ReplaySpec("routing", "rollout_routed_experts", 1, 2, {0: 0}, ratio=0, num_values=8)
    rows = np.tile(np.asarray([7, 3], np.int32), (4, 1, 1))
    check_rows(rows, spec, num_tokens=5)
    rows[0, 0, 0] = 8
    with pytest.raises(ReplayDecodeError, match=r"row 0 stream 0 holds 8, allowed -1\.\.7"):
        check_rows(rows, spec, num_tokens=5)


def test_arrays_and_settings_that_do_not_fit_are_refused():
    rows = rows_of()
    with pytest.raises(ReplayDecodeError, match=r"npy\.dtype"):
        check_rows(rows.astype(np.int64), SPEC, num_tokens=TOKENS)
    with pytest.raises(ReplayDecodeError, match=r"shape\.rows.*= \[7, 2, 4\] for 8 tokens from start 0"):
        check_rows(rows, SPEC, num_tokens=8)
    with pytest.raises(ReplayDecodeError, match=r"npy\.ndim"):
        check_rows(rows[0], SPEC, num_tokens=TOKENS)
    with pytest.raises(ReplayDecodeError, match="start: expected 0 <= start <= 8 for 9 tokens, got 9"):
        check_rows(rows, SPEC, num_tokens=TOKENS, start=9)
    with pytest.raises(ReplayConfigError, match="level: expected one of off, range, full, got 'some'"):
        check_rows(rows, SPEC, num_tokens=TOKENS, level="some")
    with pytest.raises(ReplayConfigError, match="missing: expected one of error, recompute, drop-sample"):
        check_rows(rows, SPEC, num_tokens=TOKENS, missing="ignore")
