# SPDX-License-Identifier: Apache-2.0
"""The wire format of the indexer channel: base64 of a `.npy` file <-> an int32 array [R rows, L streams, K picks].

Row r holds the picks of the query token at position r + start, start being the request's `indexer_topk_prompt_start`:
the forward pass that predicts token r + start + 1. The last sampled token was never forwarded, so a request of N tokens
has N - 1 - start rows. Stream l is the l-th layer, by ascending layer id, that owns an indexer. A pick is a position
relative to the request (a token, or a compressed group of tokens), -1 an unused slot; a row is a set.

The payload comes over the network and is not trusted: everything that its length and the `.npy` header can show is
checked before the data is decoded, so a hostile payload never makes more memory than the array the caller expects.
Left out: which values are legal in a row, appending the rows of several turns, holes (vime_replay).
Source of the format: vLLM's encoding of routed experts and its open pull request 49555; numpy's NEP 1.
"""

import ast
import re
from typing import Any, Final, NamedTuple, Never

import numpy as np
import numpy.typing as npt
import pybase64

Picks = npt.NDArray[np.int32]
Payload = str | bytes | bytearray | memoryview

# Names on the wire; the patched server declares the same ones.
FIELD: Final = "indexer_topk"
LAYER_IDS_FIELD: Final = "indexer_topk_layer_ids"
PROMPT_START_OPTION: Final = "indexer_topk_prompt_start"
OPT_OUT_OPTION: Final = "return_indexer_topk"

UNUSED: Final = -1
UNUSED_NARROW: Final = 0xFFFF
MAX_BYTES: Final = 8 << 30
MAX_HEADER: Final = 1024

_MAGIC = b"\x93NUMPY"
_DTYPES: dict[str, np.dtype[Any]] = {"<i4": np.dtype("<i4"), "<u2": np.dtype("<u2")}
# Bytes a step; a multiple of 3 (whole base64 groups) and of 2 (whole uint16).
_STEP = 3 << 16
_NOT_BASE64 = r"[^A-Za-z0-9+/]"


class WireError(ValueError):
    """A payload that is refused; `code` says which check refused it.

    Codes: wire.type, wire.size, wire.base64, npy.header, npy.object, npy.dtype, npy.order, npy.ndim, npy.length,
    shape.rows, shape.streams, shape.topk.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{FIELD}: {code}: {detail}")
        self.code = code
        self.detail = detail

    def __reduce__(self) -> tuple[type["WireError"], tuple[str, str]]:
        # Errors cross process boundaries; the default would call __init__ with the message alone.
        return WireError, (self.code, self.detail)


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, int, int]
    size: int


def encode(picks_RLK: Picks) -> str:
    """The payload of an array: byte for byte what the server sends for it.

    Args:
        picks_RLK: int32 [R, L, K]; -1 marks an unused slot.

    Raises:
        WireError: another dtype or number of dimensions, or no stream or no pick.
    """
    if picks_RLK.dtype != np.int32:
        raise WireError("npy.dtype", f"expected an int32 array, got {picks_RLK.dtype}; convert it first")
    _check_dims(picks_RLK.shape)
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {picks_RLK.shape}, }}"
    # NEP 1: magic, version and length (10 bytes), then the header, padded with spaces to 64 bytes, a newline last.
    size = -(-(10 + len(header) + 1) // 64) * 64
    start = (
        _MAGIC + b"\x01\x00" + (size - 10).to_bytes(2, "little") + header.encode().ljust(size - 11) + b"\n"
    )
    flat = np.ascontiguousarray(picks_RLK, "<i4").reshape(-1).view(np.uint8)
    text = pybase64.b64encode_as_string(start + flat[: _STEP - size].tobytes())
    # CPython grows a string in place here: the whole text is never held twice.
    for at in range(_STEP - size, flat.size, _STEP):
        text += pybase64.b64encode_as_string(flat[at : at + _STEP])
    return text


def decode(
    payload: Payload,
    *,
    rows: int | None = None,
    streams: int | None = None,
    topk: int | None = None,
    allow_narrow: bool = False,
    max_bytes: int = MAX_BYTES,
) -> Picks:
    """The array in a payload: int32 [R, L, K], read-only, C order, a view of the decoded bytes (no second copy).

    Args:
        payload: base64 of a complete `.npy` file, as text or ASCII bytes.
        rows: rows that must be there: len(tokens) - 1 - prompt start. None accepts any number.
        streams: streams that must be there: the layers of the model that own an indexer. None accepts any number.
        topk: picks of a row that must be there: the model's `index_topk`. None accepts any number.
        allow_narrow: also accept uint16, where 65535 stands for -1, and widen it.
        max_bytes: largest decoded size of the `.npy` file.

    Raises:
        WireError: the payload is refused.
    """
    data, decoded_bytes = _check_text(payload, max_bytes)
    header = _read_header(data, decoded_bytes)
    if header.dtype.itemsize == 2 and not allow_narrow:
        raise WireError(
            "npy.dtype", "dtype <u2 is not int32; pass allow_narrow=True if 65535 stands for -1 in it"
        )
    _check_shape(header.shape, rows, streams, topk)
    promised = header.shape[0] * header.shape[1] * header.shape[2] * header.dtype.itemsize
    if decoded_bytes - header.size != promised:
        detail = (
            f"data section has {decoded_bytes - header.size} bytes, header promises {promised}; resend it"
        )
        raise WireError("npy.length", detail)
    if header.dtype.itemsize == 2:
        return _widen(data, header)
    return np.frombuffer(_b64decode(data), "<i4", offset=header.size).reshape(header.shape)


def decode_raw(payload: Payload, *, rows: int, streams: int, topk: int, max_bytes: int = MAX_BYTES) -> Picks:
    """As `decode`, for base64 of bare little-endian int32 without a header, which is what SGLang sends.

    Raises:
        WireError: the payload is refused.
    """
    data, decoded_bytes = _check_text(payload, max_bytes)
    expected = rows * streams * topk * 4
    if decoded_bytes != expected:
        detail = (
            f"{decoded_bytes} bytes, expected {expected} for {rows} rows x {streams} streams x {topk} picks"
        )
        raise WireError("npy.length", f"{detail}; compare the engine's model with the trainer's")
    return np.frombuffer(_b64decode(data), "<i4").reshape(rows, streams, topk)


def _check_text(payload: Payload, max_bytes: int) -> tuple[str | memoryview, int]:
    """The payload as text or bytes that slice without copying all, and how many bytes it decodes to."""
    data: str | memoryview
    if isinstance(payload, str):
        data = payload
    elif isinstance(payload, bytes | bytearray | memoryview) and _is_flat(memoryview(payload)):
        data = memoryview(payload).cast("B")
    else:
        detail = f"expected a base64 string (or contiguous bytes), got {type(payload).__name__}"
        raise WireError("wire.type", f"{detail}; pass the field as it came")
    if len(data) > 4 * -(-max_bytes // 3) + 8:
        detail = f"payload of {len(data)} characters exceeds what {max_bytes} bytes (max_bytes) encode to"
        raise WireError("wire.size", f"{detail}; raise max_bytes if the sample is really that long")
    if len(data) % 4:
        _refuse_base64(data, f"{len(data)} characters, expected a multiple of 4")
    if isinstance(data, str) and not data.isascii():
        _refuse_base64(data, "characters outside ASCII")
    tail = data[-2:] if isinstance(data, str) else bytes(data[-2:]).decode("latin-1")
    return data, len(data) // 4 * 3 - tail.count("=")


def _is_flat(view: memoryview) -> bool:
    return view.ndim == 1 and view.itemsize == 1 and view.c_contiguous


def _b64decode(data: str | memoryview) -> bytes:
    try:
        return pybase64.b64decode(data, validate=True)
    except ValueError:
        _refuse_base64(data, "a character or padding that base64 does not have there")


def _refuse_base64(data: str | memoryview, why: str) -> Never:
    # Bytes are searched as bytes: turning a memoryview into text would copy it.
    found = re.search(_NOT_BASE64, data) if isinstance(data, str) else re.search(_NOT_BASE64.encode(), data)
    offset = found.start() if found else len(data)
    raise WireError(
        "wire.base64", f"invalid base64 at or near offset {offset}: {why}; expected strict base64"
    ) from None


def _read_header(data: str | memoryview, decoded_bytes: int) -> _Header:
    """Parses the first bytes alone; accepts dtypes by name, so that numpy never builds one from the payload."""

    def refuse(why: str) -> Never:
        raise WireError("npy.header", f"not a supported .npy header: {why}")

    # Four base64 characters are three bytes; at most 12 bytes stand before the header.
    start = _b64decode(data[: 4 * -(-(MAX_HEADER + 12) // 3)])
    if start[:6] != _MAGIC:
        refuse("the magic string is missing; is this raw int32?")
    version = tuple(start[6:8])
    if version not in ((1, 0), (2, 0), (3, 0)):
        refuse(f"version {version}, expected (1, 0), (2, 0) or (3, 0)")
    text_at = 10 if version == (1, 0) else 12
    length = int.from_bytes(start[8:text_at], "little")
    size = text_at + length
    if length > MAX_HEADER or size > decoded_bytes:
        refuse(f"header of {length} bytes, expected at most {MAX_HEADER} and no more than the payload has")
    if size % 16:
        refuse(f"data starts at byte {size}, expected a multiple of 16")
    try:
        fields = ast.literal_eval(start[text_at:size].decode("latin-1").rstrip(" \n"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        refuse("it is not a Python literal")
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        refuse("expected the keys descr, fortran_order and shape")
    descr, fortran_order, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    if not isinstance(descr, str) or descr.lstrip("|<>=") in ("O", "object"):
        raise WireError("npy.object", "object and structured arrays are refused; expected int32")
    if descr not in _DTYPES:
        raise WireError("npy.dtype", f"dtype {descr[:16]!r} is not int32 ('<i4'); convert it on the server")
    if fortran_order is not False:
        raise WireError("npy.order", "Fortran order is refused; expected C order")
    return _Header(_DTYPES[descr], _check_dims(shape), size)


def _check_dims(shape: object) -> tuple[int, int, int]:
    match shape:
        case (int(rows), int(streams), int(topk)) if not any(
            isinstance(n, bool) for n in (rows, streams, topk)
        ):
            if rows >= 0 and streams > 0 and topk > 0:
                return rows, streams, topk
    detail = f"expected [rows >= 0, streams > 0, topk > 0], got {str(shape)[:80]}"
    raise WireError("npy.ndim", f"{detail}; is the field really {FIELD}?")


def _check_shape(
    shape: tuple[int, int, int], rows: int | None, streams: int | None, topk: int | None
) -> None:
    if streams not in (None, shape[1]):
        detail = f"server sent {shape[1]} streams, model has {streams}; replaying would map streams to wrong layers"
        raise WireError("shape.streams", detail)
    if topk not in (None, shape[2]):
        detail = (
            f"server sent {shape[2]} picks a row, model has index_topk {topk}; is it the same checkpoint?"
        )
        raise WireError("shape.topk", detail)
    if rows not in (None, shape[0]):
        detail = f"{shape[0]} rows, expected {rows}; rows = len(tokens) - 1 - {PROMPT_START_OPTION}"
        raise WireError("shape.rows", detail)


def _widen(data: str | memoryview, header: _Header) -> Picks:
    """uint16 data as int32, a step at a time: the narrow bytes never exist as a whole."""
    picks = np.empty(header.shape[0] * header.shape[1] * header.shape[2], np.int32)
    filled = 0
    for at in range(0, len(data), _STEP // 3 * 4):
        text = data[at : at + _STEP // 3 * 4]
        step = _b64decode(text)
        if len(step) < _STEP and at + len(text) < len(data):
            _refuse_base64(data, "padding before the end")
        narrow = np.frombuffer(step, "<u2", offset=header.size if at == 0 else 0)
        part = picks[filled : filled + narrow.size]
        part[:] = narrow
        part[narrow == UNUSED_NARROW] = UNUSED
        filled += narrow.size
    picks.flags.writeable = False
    return picks.reshape(header.shape)
