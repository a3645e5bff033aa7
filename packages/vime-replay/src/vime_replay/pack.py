# SPDX-License-Identifier: Apache-2.0
"""Rows of samples to the rows of one rank's microbatch, in one pass: gather, validate, rebase, order.

The result is stream-major, because each layer reads one stream. It holds the rows of this context-parallel rank, all
of them on every tensor-parallel rank, in the order in which the model consumes queries. An entry becomes a row of the
microbatch's key tensor: it grows by where the keys of its sample start, never by where the rank's own rows start.
`unpack_rows` is the inverse. Left out: what rows without any pick do (`topk`), and moving to a device (`memory`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vime_replay.errors import ReplayConfigError, ReplayDecodeError
from vime_replay.layout import PackLayout
from vime_replay.rows import Picks, raise_out_of_range, row_blocks
from vime_replay.sources import RowSource, as_source
from vime_replay.spec import Ints, ReplaySpec

Order = Literal["sorted", "keep"]
PackLevel = Literal["off", "range"]
UNRECORDED = -1
# -1 as an unsigned number: unused slots are the largest entries, so that sorting puts them last.
UNUSED = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of one microbatch as one rank consumes them.

    Attributes:
        picks_LSK: int32 [L, S, K], entries are rows of the microbatch's key tensor; -1 is an unused slot.
        streams: stream of each of the L blocks.
        layout: by which they were packed.
        spec: of the rows.
        available_S: int64 [S]: keys that the row's query may see, 0 if there is none yet; -1 for rows that nobody
            recorded: the last token of a sample, and padding.
        empty_LS: bool [L, S]: no valid entry. With `available_S > 0` that is a row whose capture is missing.
        local: the local rows that were packed.
    """

    picks_LSK: Picks
    streams: tuple[int, ...]
    layout: PackLayout
    spec: ReplaySpec
    available_S: Ints
    empty_LS: npt.NDArray[np.bool_]
    local: slice


def pack_rows(
    sources: Sequence[Any],
    spec: ReplaySpec,
    layout: PackLayout,
    *,
    streams: Sequence[int] | None = None,
    local: slice | None = None,
    out: Picks | None = None,
    level: PackLevel = "range",
    order: Order = "sorted",
) -> PackedRows:
    """The microbatch's rows for one rank.

    Args:
        sources: rows of each sample, `as_source` takes them; None for a sample without rows, which is recomputed.
        spec: of the rows.
        layout: of the microbatch, as this rank sees it.
        streams: streams to pack, in this order: those of the rank's layers. Default all.
        local: local rows to pack. Default all; only routing under sequence parallelism passes a tensor-parallel share.
        out: int32 [L, S, K], C order, to fill instead of a new array, such as pinned memory.
        level: "range" checks every entry against its query; "off" trusts them. Validated sources are trusted.
        order: "sorted" makes entries ascend, -1 last; "keep" leaves them as recorded.

    Raises:
        ReplayDecodeError: rows that do not fit their sample, or an entry that its query may not pick.
        ReplayConfigError: arguments that do not fit each other.
    """
    for value, kind, name in ((level, PackLevel, "level"), (order, Order, "order")):
        if value not in get_args(kind):
            raise ReplayConfigError(
                f"pack_rows: {name}: expected one of {', '.join(get_args(kind))}, got {value!r}; pass one of these"
            )
    wanted = tuple(range(spec.num_streams) if streams is None else streams)
    window = slice(*(local or slice(None)).indices(layout.local_rows)[:2])
    shape = (len(wanted), window.stop - window.start, spec.topk)
    _check_arguments(spec, wanted, shape, out)
    opened = _opened(sources, spec, layout)
    picks = np.empty(shape, np.int32) if out is None else out
    available, empty = np.full(shape[1], UNRECORDED, np.int64), np.ones(shape[:2], bool)
    offsets = _key_offsets(layout, spec)
    done = 0
    for dst, sample, rows in _recorded(layout, window):
        source = opened[sample]
        if source is None:
            continue
        part = slice(dst, dst + rows.stop - rows.start)
        picks[:, done:dst] = spec.pad_value
        available[part] = spec.available(np.arange(rows.start, rows.stop))
        check = sample if level == "range" and not source.validated else None
        if wanted:
            empty[:, part] = _fill(
                picks[:, part], source, rows, wanted, int(offsets[sample]), available[part], check, order
            )
        done = part.stop
    picks[:, done:] = spec.pad_value
    return PackedRows(picks, wanted, layout, spec, available, empty, window)


def unpack_rows(parts: Iterable[PackedRows]) -> list[Picks]:
    """Rows [R, L, K] of each sample, from the packed rows of all ranks.

    Raises:
        ReplayConfigError: a row that no part holds, or that two parts hold.
    """
    parts = list(parts)
    spec, lengths = parts[0].spec, parts[0].layout.lengths
    samples = [np.full((max(n - 1, 0), spec.num_streams, spec.topk), -1, np.int32) for n in lengths]
    seen = [np.zeros(rows.shape[:2], np.int64) for rows in samples]
    for part in parts:
        offsets = _key_offsets(part.layout, spec)
        for dst, sample, rows in _recorded(part.layout, part.local):
            block = part.picks_LSK[:, dst : dst + rows.stop - rows.start].transpose(1, 0, 2)
            streams = list(part.streams)
            samples[sample][rows, streams] = np.where(block < 0, block, block - np.int32(offsets[sample]))
            seen[sample][rows, streams] += 1
    for sample, counts in enumerate(seen):
        if (counts != 1).any():
            row, stream = (int(each[0]) for each in np.nonzero(counts != 1))
            raise ReplayConfigError(
                f"unpack_rows: expected sample {sample} row {row} stream {stream} in one part, found it in "
                f"{counts[row, stream]}; pass the parts of all ranks once"
            )
    return samples


def _key_offsets(layout: PackLayout, spec: ReplaySpec) -> Ints:
    return layout.key_offsets(spec.ratio) if spec.ratio else np.zeros(len(layout.lengths), np.int64)


def _recorded(layout: PackLayout, window: slice) -> Iterator[tuple[int, int, slice]]:
    """(first packed row, sample, rows of the sample) of every run that has recorded rows in the window."""
    for span in layout.query_spans:
        if span.sample < 0:
            continue
        skipped = max(window.start - span.dst_start, 0)
        dst, first = span.dst_start + skipped, span.src_start + skipped
        # The last token of a sample was never a query.
        stop = min(first + window.stop - dst, span.src_start + span.n_real, layout.lengths[span.sample] - 1)
        if stop > first:
            yield dst - window.start, span.sample, slice(first, stop)


def _fill(
    dst_LnK: Picks,
    source: RowSource,
    rows: slice,
    streams: tuple[int, ...],
    offset: int,
    available: Ints,
    check: int | None,
    order: Order,
) -> npt.NDArray[np.bool_]:
    """Fills one run of rows; bool [L, n], rows without a valid entry. `check` is the sample to blame, or None."""
    view = getattr(source, "view", None)
    src_nLK = view(rows, streams) if view is not None else None
    if src_nLK is None:
        source.read_into(dst_LnK, rows=rows, streams=streams)
        src_nLK = dst_LnK.transpose(1, 0, 2)
    empty = np.empty(dst_LnK.shape[:2], bool)
    topk = dst_LnK.shape[2]
    for block in row_blocks(len(src_nLK), len(streams) * topk * 4):
        dst, src = dst_LnK[:, block], src_nLK[block].transpose(1, 0, 2)
        if order == "sorted" and not _ascends(src_nLK[block]):
            np.copyto(dst, src)
            dst.view(np.uint32).sort(axis=2)
            src = dst
        if available[block].min() >= topk:
            # Rows that see enough keys use every slot; then one maximum checks all, and a plain sum rebases.
            unsigned = src.view(np.uint32)
            largest = unsigned[:, :, -1] if order == "sorted" else unsigned.max(axis=2)
            if (largest < available[block]).all():
                np.add(src, np.int32(offset), out=dst)
                empty[:, block] = False
                continue
        largest = src.max(axis=2)
        if check is not None and ((largest >= available[block]).any() or src.min() < -1):
            positions = np.arange(rows.start, rows.stop)[block]
            raise_out_of_range(src.transpose(1, 0, 2), positions, available[block], check, streams)
        empty[:, block] = largest < 0
        # Saturating addition: unused slots stay the largest number.
        np.minimum(src.view(np.uint32), np.uint32(UNUSED - offset), out=dst.view(np.uint32))
        np.add(dst.view(np.uint32), np.uint32(offset), out=dst.view(np.uint32))
    return empty


def _ascends(rows: Picks) -> bool:
    """Whether every row ascends, unused slots last."""
    unsigned, topk = rows.view(np.uint32), rows.shape[-1]
    if not rows.flags.c_contiguous:
        return bool((unsigned[:, :, 1:] >= unsigned[:, :, :-1]).all())
    # One long comparison is faster than many short ones; steps down may only be between rows.
    flat = unsigned.reshape(-1)
    down = flat[1:] < flat[:-1]
    return np.count_nonzero(down) == np.count_nonzero(down[topk - 1 :: topk])


def _opened(sources: Sequence[Any], spec: ReplaySpec, layout: PackLayout) -> list[RowSource | None]:
    if len(sources) != len(layout.lengths):
        raise ReplayConfigError(
            f"pack_rows: expected rows of {len(layout.lengths)} samples, as in the layout, got {len(sources)}; "
            "build the layout from the same microbatch"
        )
    opened = [None if value is None else as_source(value) for value in sources]
    for sample, (source, length) in enumerate(zip(opened, layout.lengths, strict=True)):
        if start := getattr(source, "start", 0):
            raise ReplayDecodeError(
                "shape.rows",
                sample,
                f"expected rows from position 0, got encoded rows from {start}; join them with those before",
            )
        expected = (max(length - 1, 0), spec.num_streams, spec.topk)
        if source is not None and tuple(source.shape) != expected:
            wrong = [i for i in range(3) if source.shape[i] != expected[i]]
            raise ReplayDecodeError(
                f"shape.{('rows', 'streams', 'topk')[wrong[0]]}",
                sample,
                f"expected [rows, streams, topk] = {list(expected)} for {length} tokens, got {list(source.shape)}; "
                "trim or complete rows together with tokens",
            )
    return opened


def _check_arguments(
    spec: ReplaySpec, streams: tuple[int, ...], shape: tuple[int, ...], out: Picks | None
) -> None:
    outside = [stream for stream in streams if not 0 <= stream < spec.num_streams]
    if outside or len(set(streams)) < len(streams):
        raise ReplayConfigError(
            f"pack_rows: streams: expected different streams below {spec.num_streams}, got {list(streams)}; take them "
            "from ReplaySpec.stream_of_layer"
        )
    if out is not None and (
        out.shape != shape or out.dtype != np.int32 or not out.flags.c_contiguous or not out.flags.writeable
    ):
        raise ReplayConfigError(
            f"pack_rows: out: expected writeable int32 of shape {list(shape)} in C order, got {out.dtype} of shape "
            f"{list(out.shape)}; allocate it from the layout's local_rows"
        )
