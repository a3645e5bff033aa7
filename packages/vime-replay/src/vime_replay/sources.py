# SPDX-License-Identifier: Apache-2.0
"""Where rows of a sample come from: one small interface, and the sources that hold rows in memory.

`as_source` takes what trainers pass around: numpy arrays, CPU tensors, and lazy references of the host (anything with
a shape and row slicing, such as vime's DiskTensorRef). Files and shared memory are in `store`, encodings in `codec`.
Left out: reading ahead, which belongs to the queues.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from vime_replay.errors import ReplayPayloadError
from vime_replay.rows import Picks

Shape = tuple[int, int, int]


@runtime_checkable
class RowSource(Protocol):
    """Rows [R, L, K] of one sample that can be read in part.

    Attributes:
        shape: (R, L, K).
        validated: values were checked before they were stored; shapes are checked always.
    """

    shape: Shape
    validated: bool

    def read_into(self, dst_LRK: Picks, *, rows: slice, streams: Sequence[int]) -> None:
        """Fills int32 [len(streams), len(rows), K] with the rows of `slice(start, stop)`, stream-major."""

    def close(self) -> None:
        """Gives back files and mappings; may be called again."""


class ArraySource:
    """Rows in memory, `[R, L, K]`.

    Args:
        rows: any integer array.
        validated: values are known to be legal.
    """

    def __init__(self, rows: npt.NDArray[Any], *, validated: bool = False) -> None:
        _require_rows(rows.shape, rows.dtype, "array")
        if not np.can_cast(rows.dtype, np.int32) and rows.size:
            limits = np.iinfo(np.int32)
            if rows.min() < limits.min or rows.max() > limits.max:
                raise ReplayPayloadError(
                    f"array of {rows.dtype}: expected entries that fit int32, got {rows.min()}..{rows.max()}; picks "
                    "are keys of one sample"
                )
        self._rows = rows
        self.shape: Shape = rows.shape
        self.validated = validated

    def view(self, rows: slice, streams: Sequence[int]) -> Picks | None:
        """int32 [n, len(streams), K] without a copy; None where that is impossible."""
        run = as_slice(streams)
        return self._rows[rows, run] if run is not None and self._rows.dtype == np.int32 else None

    def read_into(self, dst_LRK: Picks, *, rows: slice, streams: Sequence[int]) -> None:
        """See `RowSource`."""
        part = self._rows[rows]
        for target, stream in zip(dst_LRK, streams, strict=True):
            target[...] = part[:, stream]

    def close(self) -> None:
        """Nothing to give back."""


class ReferenceSource:
    """Rows behind a lazy reference that knows its shape and loads on slicing.

    Args:
        reference: has `shape`, `dtype` or `torch_dtype`, `[start:stop]` that returns an array or a CPU tensor, and
            perhaps `validated`. vime's DiskTensorRef is one; nothing is imported from the host.
    """

    def __init__(self, reference: Any) -> None:
        dtype = getattr(reference, "torch_dtype", None) or getattr(reference, "dtype", "int32")
        _require_rows(tuple(reference.shape), _numpy_dtype(dtype), type(reference).__name__)
        self._reference = reference
        self.shape: Shape = tuple(int(n) for n in reference.shape)  # type: ignore[assignment]
        self.validated = bool(getattr(reference, "validated", False))

    def read_into(self, dst_LRK: Picks, *, rows: slice, streams: Sequence[int]) -> None:
        """See `RowSource`."""
        part = np.asarray(self._reference[rows.start : rows.stop])
        expected = (rows.stop - rows.start, *self.shape[1:])
        if part.shape != expected:
            raise ReplayPayloadError(
                f"{type(self._reference).__name__}[{rows.start}:{rows.stop}]: expected shape {expected}, got "
                f"{part.shape}; the stored rows are not what the reference says"
            )
        ArraySource(part).read_into(dst_LRK, rows=slice(0, len(part)), streams=streams)

    def close(self) -> None:
        """Nothing to give back: a reference opens its file for each read."""


def as_source(value: Any) -> RowSource:
    """A source of whatever a trainer holds as rows of a sample.

    Args:
        value: a RowSource, a numpy array, a CPU tensor, a nested list, or a lazy reference.

    Raises:
        ReplayPayloadError: not three-dimensional, or no integers.
    """
    if isinstance(value, RowSource):
        return value
    if isinstance(value, list | np.ndarray) or hasattr(value, "numpy"):
        return ArraySource(np.asarray(value))
    if hasattr(value, "shape") and hasattr(value, "__getitem__"):
        return ReferenceSource(value)
    raise ReplayPayloadError(
        f"rows of a sample: expected an array, a CPU tensor or a reference with shape and slicing, got "
        f"{type(value).__name__}"
    )


def as_slice(streams: Sequence[int]) -> slice | None:
    """The slice that picks the same streams, if they ascend in equal steps."""
    if not streams:
        return slice(0, 0)
    step = streams[1] - streams[0] if len(streams) > 1 else 1
    even = step > 0 and list(streams) == list(range(streams[0], streams[0] + step * len(streams), step))
    return slice(streams[0], streams[-1] + 1, step) if even else None


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(name)
    except TypeError as error:
        raise ReplayPayloadError(f"rows behind a reference: expected an integer dtype, got {name}") from error


def _require_rows(shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> None:
    if len(shape) != 3 or dtype.kind not in "iu":
        raise ReplayPayloadError(
            f"{what}: expected integer rows of shape [rows, streams, topk], got {dtype} of shape {tuple(shape)}"
        )
