# SPDX-License-Identifier: Apache-2.0
"""Rows of one sample: from a payload to a checked array.

With N tokens a sample has N - 1 rows. Row r holds the picks of the query at position r, the pass that predicts token
r + 1; the last token was never a query. A payload that starts at position `start` has N - 1 - start rows. Entries of
a row are a set; -1 is an unused slot and may be anywhere. Bytes and shapes are checked before anything is allocated
(`vime_vllm_patch.wire`), values in blocks that stay in cache. Joining payloads of several requests is `continuation`.
"""

import warnings
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vime_replay.errors import ReplayConfigError, ReplayDecodeError, ReplayWarning
from vime_replay.spec import Ints, ReplaySpec
from vime_vllm_patch import wire

Picks = npt.NDArray[np.int32]
Level = Literal["off", "range", "full"]
Missing = Literal["error", "recompute", "drop-sample"]

# Bytes that are worked on at a time: small enough to stay in cache between the passes, large enough that Python's part
# of the work does not show.
BLOCK_BYTES = 1 << 21
NPY_MAGIC_BASE64 = "k05VTVBZ"


def decode_rows(
    payload: wire.Payload,
    spec: ReplaySpec,
    *,
    num_tokens: int,
    start: int = 0,
    level: Level = "range",
    missing: Missing = "error",
    sample: int | None = None,
    raw_int32: bool = False,
    allow_narrow: bool = False,
    trailing_row: bool = False,
) -> Picks | None:
    """int32 [R, L, K] rows of a response, read-only; None if the sample is to be dropped.

    Args:
        payload: base64 text of a `.npy` file.
        spec: of the model that will replay the rows.
        num_tokens: tokens of the sample so far, prompt and response.
        start: position of the first row: what the request asked for.
        level: "off" checks bytes and shapes; "range" also that every entry is a key its query may see, and holes;
            "full" also repeated entries and rows that pick too few.
        missing: what rows without a capture do. "error" refuses; "recompute" turns them into rows of -1, up to
            max(64, R // 100) of them; "drop-sample" answers None.
        sample: index of the sample, for messages.
        raw_int32: the payload may be bare int32 without a header (SGLang).
        allow_narrow: accept uint16, where 65535 stands for -1.
        trailing_row: the engine also sends a row for the last token; it is dropped.

    Raises:
        ReplayDecodeError: anything else than what was expected. Nothing larger than that was allocated.
    """
    rows = expected_rows(num_tokens, start, sample) + trailing_row
    if raw_int32 and isinstance(payload, str | bytes) and not len(payload):
        picks: Picks = np.empty((0, spec.num_streams, spec.topk), np.int32)
        return check_rows(
            picks, spec, num_tokens=num_tokens + trailing_row, start=start, level="off", sample=sample
        )
    try:
        if raw_int32 and not _looks_like_npy(payload):
            picks = wire.decode_raw(
                payload,
                rows=rows,
                streams=spec.num_streams,
                topk=spec.topk,
                max_bytes=rows * spec.row_nbytes,
            )
        else:
            picks = wire.decode(
                payload,
                rows=rows,
                streams=spec.num_streams,
                topk=spec.topk,
                allow_narrow=allow_narrow,
                max_bytes=rows * spec.row_nbytes + wire.MAX_HEADER,
            )
    except wire.WireError as error:
        raise ReplayDecodeError(error.code, sample, error.detail) from error
    if trailing_row:
        picks = picks[:-1]
    return check_rows(
        picks, spec, num_tokens=num_tokens, start=start, level=level, missing=missing, sample=sample
    )


def check_rows(
    rows: npt.NDArray[Any],
    spec: ReplaySpec,
    *,
    num_tokens: int,
    start: int = 0,
    level: Level = "range",
    missing: Missing = "error",
    sample: int | None = None,
) -> Picks | None:
    """The rows themselves if they are what `spec` and the tokens call for; arguments as for `decode_rows`.

    For rows that did not come as text: from an output store, a file, a tensor's `.numpy()`.

    Raises:
        ReplayDecodeError: shape, dtype, a value, or rows without a capture.
        ReplayConfigError: an unknown level or policy.
    """
    for value, kind, name in ((level, Level, "level"), (missing, Missing, "missing")):
        if value not in get_args(kind):
            raise ReplayConfigError(f"{name}: expected one of {', '.join(get_args(kind))}, got {value!r}")
    if rows.dtype != np.int32:
        raise ReplayDecodeError("npy.dtype", sample, f"dtype {rows.dtype} is not int32; convert it")
    expected = (expected_rows(num_tokens, start, sample), spec.num_streams, spec.topk)
    if rows.shape != expected:
        names = ("rows", "streams", "topk")
        wrong = [name for name, a, b in zip(names, rows.shape, expected, strict=False) if a != b]
        raise ReplayDecodeError(
            f"shape.{wrong[0]}" if rows.ndim == 3 else "npy.ndim",
            sample,
            f"expected [rows, streams, topk] = {list(expected)} for {num_tokens} tokens from start {start}, got "
            f"{list(rows.shape)}; compare the request's start and the model of the rollout engine",
        )
    if level == "off" or not len(rows):
        return rows
    holes = np.zeros(rows.shape[:2], bool)
    for block in row_blocks(len(rows), spec.row_nbytes):
        holes[block] = _check_block(rows[block], spec, start + block.start, level, sample)
    return _resolve(rows, holes, start, missing, sample)


def expected_rows(num_tokens: int, start: int, sample: int | None = None) -> int:
    """Rows of a sample of `num_tokens` tokens from position `start`; a sample without a pass has none."""
    if not 0 <= start <= max(num_tokens - 1, 0):
        raise ReplayDecodeError(
            "shape.rows",
            sample,
            f"start: expected 0 <= start <= {max(num_tokens - 1, 0)} for {num_tokens} tokens, got {start}; pass the "
            "start of the request and the tokens after its response",
        )
    return max(num_tokens - 1 - start, 0)


def row_blocks(rows: int, row_nbytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[slice]:
    """Consecutive slices of rows, each at most `block_bytes` or one row."""
    step = max(1, block_bytes // max(1, row_nbytes))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def raise_out_of_range(
    rows: Picks, positions: Ints, available: Ints, sample: int | None, streams: Any = None
) -> None:
    """Names the first entry of a block [n, L, K] that its query may not pick; returns if there is none."""
    wrong = (rows < -1) | (rows >= available[:, None, None])
    if not wrong.any():
        return
    row, stream, column = (int(each[0]) for each in np.nonzero(wrong))
    name = stream if streams is None else streams[stream]
    raise ReplayDecodeError(
        "value.range",
        sample,
        f"row {positions[row]} stream {name} holds {rows[row, stream, column]}, allowed -1..{available[row] - 1}; "
        "entries count keys of the request up to their own query",
    )


def _looks_like_npy(payload: wire.Payload) -> bool:
    if isinstance(payload, str):
        return payload.startswith(NPY_MAGIC_BASE64)
    # What is no payload at all is refused by the decoder.
    known = isinstance(payload, bytes | bytearray | memoryview)
    return not known or bytes(payload[:8]).startswith(NPY_MAGIC_BASE64.encode())


def _check_block(
    rows: Picks, spec: ReplaySpec, first: int, level: Level, sample: int | None
) -> npt.NDArray[np.bool_]:
    """bool [n, L], True where a stream of a row has no capture; raises on illegal values."""
    positions = np.arange(first, first + len(rows))
    available = spec.available(positions)
    if level == "range" and available[0] >= spec.topk > 1:
        # Rows that see enough keys use every slot; then one maximum checks all.
        most = rows.view(np.uint32).max(axis=2)
        if ((most < available[:, None]) & (most > 0)).all():
            return np.zeros(most.shape, bool)
    largest = rows.max(axis=2)
    holes = (largest < 0) & (available > 0)[:, None]
    if spec.topk > 1:
        # A capture buffer starts as zeros; a captured row never picks key 0 twice. Few rows pick nothing above 0.
        row, stream = np.nonzero(largest == 0)
        zero = (rows[row, stream] == 0).all(axis=1)
        holes[row[zero], stream[zero]] = True
    in_range = (largest < available[:, None]) | holes
    if not in_range.all() or rows.min() < -1:
        raise_out_of_range(np.where(holes[:, :, None], -1, rows), positions, available, sample)
    if level == "full":
        # As unsigned numbers, unused slots sort to the end.
        ordered = np.sort(rows.view(np.uint32), axis=2).view(np.int32)
        _check_sets(ordered, holes, positions, np.minimum(available, spec.topk), sample)
        _check_copies(ordered, spec, positions, sample)
    return holes


def _check_sets(
    ordered: Picks, holes: npt.NDArray[np.bool_], positions: Ints, wanted: Ints, sample: int | None
) -> None:
    repeats = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0) & ~holes[:, :, None]
    if repeats.any():
        row, stream, column = (int(each[0]) for each in np.nonzero(repeats))
        value = ordered[row, stream, column]
        raise ReplayDecodeError(
            "value.duplicate",
            sample,
            f"row {positions[row]} stream {stream} repeats position {value}; a row is a set of keys",
        )
    counts = (ordered >= 0).sum(axis=2)
    short = (counts != wanted[:, None]) & ~holes
    if short.any():
        row, stream = (int(each[0]) for each in np.nonzero(short))
        where = "" if sample is None else f"sample {sample}: "
        warnings.warn(
            f"vime_replay [value.count] {where}row {positions[row]} stream {stream} selects {counts[row, stream]} of "
            f"{wanted[row]} available keys",
            ReplayWarning,
            stacklevel=4,
        )


def _check_copies(ordered: Picks, spec: ReplaySpec, positions: Ints, sample: int | None) -> None:
    """On a dense wire, the stream of a layer that reuses picks repeats the stream that it reuses."""
    owned = set(spec.stream_of_layer.values())
    source = 0
    for stream in range(spec.num_streams):
        source = stream if stream in owned else source
        other = (ordered[:, stream] != ordered[:, source]).any(axis=1)
        if other.any():
            raise ReplayDecodeError(
                "value.shared",
                sample,
                f"row {positions[np.argmax(other)]} stream {stream}: expected the picks of stream {source}, which its "
                "layer reuses, got others; compare the index-sharing settings of engine and trainer",
            )


def _resolve(
    rows: Picks, holes: npt.NDArray[np.bool_], start: int, missing: Missing, sample: int | None
) -> Picks | None:
    some = holes.any(axis=1)
    if not some.any():
        return rows
    if missing == "drop-sample":
        return None
    count, allowed = int(some.sum()), max(64, len(rows) // 100)
    first = (np.flatnonzero(some)[:8] + start).tolist()
    partial = np.flatnonzero(some & ~holes.all(axis=1))
    if len(partial):
        lost = np.flatnonzero(holes[partial[0]]).tolist()
        why = f"row {partial[0] + start} lacks streams {lost} only: the capture is broken"
    elif missing == "error":
        why = "check the engine's prefix cache and capture buffer, or use --indexer-replay-missing recompute"
    elif count > allowed:
        why = f"recompute accepts at most {allowed}; check the engine's prefix cache and capture buffer"
    else:
        filled = rows.copy()
        filled[some] = -1
        filled.flags.writeable = False
        return filled
    raise ReplayDecodeError(
        "value.hole", sample, f"{count}/{len(rows)} rows have no capture, first {first}; {why}"
    )
