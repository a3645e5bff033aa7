# SPDX-License-Identifier: Apache-2.0
"""The wire format against numpy's own writer, and every refusal against a payload built to get past it."""

import base64
import io
import pickle
import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_vllm_patch import wire
from vime_vllm_patch.wire import WireError, decode, decode_raw, encode

MIB = 1 << 20


def npy(array: npt.NDArray[np.generic]) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def saved(array: npt.NDArray[np.generic]) -> str:
    """What the server sends: numpy's file, the standard library's base64."""
    return base64.b64encode(npy(array)).decode()


def headed(header: str | bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> str:
    """A payload with this header text, aligned as NEP 1 asks."""
    raw = header.encode() if isinstance(header, str) else header
    width = 2 if version == b"\x01\x00" else 4
    raw = raw.ljust(-(-(8 + width + len(raw) + 1) // 64) * 64 - 8 - width - 1) + b"\n"
    return base64.b64encode(b"\x93NUMPY" + version + len(raw).to_bytes(width, "little") + raw + data).decode()


def fields(descr: object = "<i4", order: object = False, shape: object = (2, 1, 3)) -> str:
    return repr({"descr": descr, "fortran_order": order, "shape": shape})


def picks(rows: int = 5, streams: int = 2, topk: int = 4) -> wire.Picks:
    return np.arange(-1, rows * streams * topk - 1, dtype=np.int32).reshape(rows, streams, topk)


@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 1), (45, 2, 512), (700, 3, 513)], ids=str)
def test_encode_is_numpys_file_in_base64(shape: tuple[int, int, int]) -> None:
    array = np.random.default_rng(0).integers(-1, 2**31, shape, np.int32)
    assert encode(array) == saved(array)


@pytest.mark.parametrize(
    "kind",
    [str, str.encode, lambda s: memoryview(s.encode()), lambda s: bytearray(s.encode())],
    ids=["str", "bytes", "memoryview", "bytearray"],
)
def test_decode_returns_a_read_only_view_of_what_was_saved(kind: Callable[[str], wire.Payload]) -> None:
    array = picks()
    found = decode(kind(saved(array)), rows=5, streams=2, topk=4)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == np.int32
    assert found.flags.c_contiguous
    assert found.flags.aligned
    assert not found.flags.writeable


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_round_trip(rows: int, streams: int, topk: int, seed: int) -> None:
    array = np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, streams, topk), np.int32)
    np.testing.assert_array_equal(decode(encode(array), rows=rows, streams=streams, topk=topk), array)


@pytest.mark.parametrize("version", [b"\x02\x00", b"\x03\x00"], ids=["2.0", "3.0"])
def test_newer_header_versions_are_read(version: bytes) -> None:
    array = picks(2, 1, 3)
    found = decode(headed(fields(), array.tobytes(), version))
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("rows", [0, 3, 4000], ids=str)
def test_narrow_payloads_are_widened_on_request(rows: int) -> None:
    wide = np.random.default_rng(1).integers(-1, 0xFFFF, (rows, 3, 101), np.int32)
    narrow = saved(wide.astype(np.uint16))
    np.testing.assert_array_equal(decode(narrow, allow_narrow=True), wide)
    assert not decode(narrow, allow_narrow=True).flags.writeable
    with pytest.raises(WireError, match="allow_narrow=True") as caught:
        decode(narrow)
    assert caught.value.code == "npy.dtype"


def test_bare_int32_needs_its_shape() -> None:
    array = picks()
    text = base64.b64encode(array.tobytes()).decode()
    np.testing.assert_array_equal(decode_raw(text, rows=5, streams=2, topk=4), array)
    assert decode_raw("", rows=0, streams=2, topk=4).shape == (0, 2, 4)
    with pytest.raises(WireError, match="160 bytes, expected 192") as caught:
        decode_raw(text, rows=6, streams=2, topk=4)
    assert caught.value.code == "npy.length"
    with pytest.raises(WireError, match="is this raw int32"):
        decode(text)


GOOD = saved(picks(2, 1, 3))
# A uint16 payload of more than one step, with a group of padding where the first step ends.
STEP = (3 << 16) // 3 * 4
PADDED_INSIDE = saved(np.zeros((200, 10, 200), np.uint16))
PADDED_INSIDE = PADDED_INSIDE[: STEP - 4] + "AA==" + PADDED_INSIDE[STEP:]

# Complete and consistent, but its data starts at byte 69.
UNALIGNED = b"\x93NUMPY\x01\x00\x3b\x00" + fields().encode().ljust(59) + bytes(24)

HOSTILE = {
    "none": (None, "wire.type"),
    "list": ([GOOD], "wire.type"),
    "int_array": (memoryview(picks()), "wire.type"),
    "strided_bytes": (memoryview(GOOD.encode())[::2], "wire.type"),
    "too_long": ("A" * 1400, "wire.size"),
    "length_not_4": (GOOD[:-1], "wire.base64"),
    "whitespace": (GOOD[:100] + "\n\n\n\n" + GOOD[104:], "wire.base64"),
    "url_alphabet": (GOOD[:200] + "-_-_" + GOOD[204:], "wire.base64"),
    "not_ascii": ("é" * 200, "wire.base64"),
    "padding_inside": (GOOD[:180] + "AA==" + GOOD[184:], "wire.base64"),
    "padding_inside_narrow": (PADDED_INSIDE, "wire.base64"),
    "three_paddings": (GOOD[:-4] + "A===", "wire.base64"),
    "empty": ("", "npy.header"),
    "no_magic": (base64.b64encode(b"PK\x03\x04" * 40).decode(), "npy.header"),
    "pickle": (base64.b64encode(pickle.dumps([1, 2, 3]) + b".").decode(), "npy.header"),
    "version_9": (headed(fields(), version=b"\x09\x00"), "npy.header"),
    "header_too_long": (headed(fields().ljust(2000)), "npy.header"),
    "header_past_the_end": (base64.b64encode(b"\x93NUMPY\x01\x00\xf6\x03{}").decode(), "npy.header"),
    "header_not_aligned": (base64.b64encode(UNALIGNED).decode(), "npy.header"),
    "header_is_code": (headed("__import__('os').system('true')"), "npy.header"),
    "header_nested": (headed("(" * 900), "npy.header"),
    "header_unary": (headed("-" * 900 + "1"), "npy.header"),
    "header_bytes": (headed(b"\xff\xfe\x00{}"), "npy.header"),
    "header_not_dict": (headed("[1, 2]"), "npy.header"),
    "header_unhashable": (headed("{[]: 1}"), "npy.header"),
    "header_missing_key": (headed("{'descr': '<i4', 'shape': (2, 1, 3)}"), "npy.header"),
    "header_extra_key": (
        headed("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1, 3), 'x': 1}"),
        "npy.header",
    ),
    "object": (saved(np.array([[[None]]], object)), "npy.object"),
    "structured": (saved(np.zeros((2, 1, 3), [("a", "<i4")])), "npy.object"),
    "subarray": (headed(fields(descr=("<i4", (2,)))), "npy.object"),
    "float32": (saved(np.zeros((2, 1, 3), np.float32)), "npy.dtype"),
    "bool": (saved(np.zeros((2, 1, 3), bool)), "npy.dtype"),
    "int64": (saved(np.zeros((2, 1, 3), np.int64)), "npy.dtype"),
    "uint32": (saved(np.zeros((2, 1, 3), np.uint32)), "npy.dtype"),
    "big_endian": (saved(np.zeros((2, 1, 3), ">i4")), "npy.dtype"),
    "big_endian_narrow": (saved(np.zeros((2, 1, 3), ">u2")), "npy.dtype"),
    "fortran": (saved(np.asfortranarray(np.arange(12, dtype=np.int32).reshape(2, 2, 3))), "npy.order"),
    "fortran_by_number": (headed(fields(order=0), bytes(24)), "npy.order"),
    "two_dims": (saved(np.zeros((2, 3), np.int32)), "npy.ndim"),
    "four_dims": (saved(np.zeros((2, 1, 3, 1), np.int32)), "npy.ndim"),
    "no_streams": (saved(np.zeros((2, 0, 3), np.int32)), "npy.ndim"),
    "negative_dim": (headed(fields(shape=(-2, -1, 3)), bytes(24)), "npy.ndim"),
    "bool_dim": (headed(fields(shape=(2, True, 3)), bytes(24)), "npy.ndim"),
    "float_dim": (headed(fields(shape=(2.0, 1, 3)), bytes(24)), "npy.ndim"),
    "scalar_shape": (headed(fields(shape=6), bytes(24)), "npy.ndim"),
    "truncated": (base64.b64encode(npy(picks())[:-4]).decode(), "npy.length"),
    "trailing": (base64.b64encode(npy(picks()) + b"\0\0\0\0").decode(), "npy.length"),
    "promises_2_62": (headed(fields(shape=(2**62, 1, 1)), bytes(24)), "npy.length"),
    "overflows_int64": (headed(fields(shape=(2**62, 4, 2**62)), bytes(24)), "npy.length"),
}


@pytest.mark.parametrize("payload, code", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_payloads_are_refused_by_the_check_made_for_them(payload: wire.Payload, code: str) -> None:
    limit = 1024 if code == "wire.size" else MIB
    with pytest.raises(WireError) as caught:
        decode(payload, allow_narrow=True, max_bytes=limit)
    assert caught.value.code == code
    assert str(caught.value).startswith(f"indexer_topk: {code}: ")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "expected, code",
    [
        ({"rows": 4}, "shape.rows"),
        ({"streams": 3}, "shape.streams"),
        ({"topk": 8}, "shape.topk"),
        ({"rows": 0}, "shape.rows"),
    ],
    ids=["rows", "streams", "topk", "no_rows"],
)
def test_a_shape_that_is_not_the_models_is_refused_before_decoding(
    expected: dict[str, int], code: str
) -> None:
    text = encode(np.zeros((MIB, 2, 4), np.int32))
    tracemalloc.start()
    with pytest.raises(WireError) as caught:
        decode(text, **expected)  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code == code
    assert peak < MIB / 4


@pytest.mark.parametrize("dtype", [np.int32, np.uint16], ids=["int32", "uint16"])
def test_decoding_makes_no_more_memory_than_the_array(dtype: type[np.generic]) -> None:
    text = saved(np.zeros((4096, 21, 128), dtype))
    tracemalloc.start()
    found = decode(text, allow_narrow=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < found.nbytes + MIB


def test_encoding_makes_no_more_memory_than_the_text() -> None:
    array = np.zeros((4096, 21, 128), np.int32)
    tracemalloc.start()
    text = encode(array)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(text) + MIB


@pytest.mark.parametrize(
    "array", [np.zeros((2, 1, 3), np.int64), np.zeros((2, 3), np.int32)], ids=["int64", "two_dims"]
)
def test_encode_refuses_what_decode_would(array: wire.Picks) -> None:
    with pytest.raises(WireError):
        encode(array)


def test_a_strided_array_is_encoded_in_its_own_order() -> None:
    array = picks()[::-1, :, ::2]
    np.testing.assert_array_equal(decode(encode(array)), array)


def test_the_error_keeps_its_code_through_pickle() -> None:
    with pytest.raises(WireError) as caught:
        decode("")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.code, str(again)) == (caught.value.code, str(caught.value))
