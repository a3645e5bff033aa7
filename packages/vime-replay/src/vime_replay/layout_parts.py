# SPDX-License-Identifier: Apache-2.0
"""Small parts of `layout`: spans of rows, the plan of an exchange, and how a layout is refused."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vime_replay.errors import ReplayError

Ints = npt.NDArray[np.int64]


class LayoutError(ReplayError):
    """A layout that cannot work; the message has the rule and the nearest valid value."""


def require(ok: bool, what: str, expected: str, actual: object, advice: str) -> None:
    """Raises LayoutError unless `ok`."""
    if not ok:
        raise LayoutError(f"vime_replay.layout: {what}: expected {expected}, got {actual}; {advice}")


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Span:
    """Consecutive local rows that are consecutive rows of one sample.

    Attributes:
        dst_start: first local row.
        sample: index of the sample; -1 for padding that belongs to none.
        src_start: position of that row in the sample.
        n_real: rows that hold tokens.
        n_pad: rows after them that hold padding.
    """

    dst_start: int
    sample: int
    src_start: int
    n_real: int
    n_pad: int


@dataclass(frozen=True, eq=False)
class Exchange:
    """How one rank takes part in an all-to-all that reorders rows: `local[send_order]` out, `received[recv_order]` in.

    Attributes:
        send_order: local rows, sorted by the rank that wants them.
        send_counts: rows for each rank.
        recv_counts: rows from each rank.
        recv_order: position in the received buffer of each row of the new order.
    """

    send_order: Ints
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    recv_order: Ints
