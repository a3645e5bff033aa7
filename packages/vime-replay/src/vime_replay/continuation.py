# SPDX-License-Identifier: Apache-2.0
"""Rows of one sample that several requests built: continuation, abort and resume, tool tokens, trimming.

A sample holds rows [0, held) with held <= N - 1. The next request asks for rows from `start` = held on; what it
returns replaces rows from `start` up to its own end. Tokens that no pass has seen yet (tool output, the last token)
have no rows until then. Rows keep the picks of the policy that made them; a weight update does not change them.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from vime_replay.errors import ReplayDecodeError
from vime_replay.rows import Picks, check_rows, expected_rows
from vime_replay.spec import ReplaySpec


def request_start(held: Picks | None, num_tokens: int, sample: int | None = None) -> int:
    """`indexer_topk_prompt_start` of the next request: rows that the sample holds already.

    Args:
        held: rows of the sample, or None.
        num_tokens: tokens that the request sends.
        sample: index of the sample, for messages.

    Raises:
        ReplayDecodeError: more rows than the tokens can have.
    """
    count = 0 if held is None else len(held)
    if count > max(num_tokens - 1, 0):
        raise ReplayDecodeError(
            "shape.rows",
            sample,
            f"{count} rows held for a prompt of {num_tokens} tokens, expected at most {max(num_tokens - 1, 0)}; "
            "trim the rows together with the tokens",
        )
    return count


def append_rows(
    held: Picks | None,
    new: Picks | None,
    *,
    spec: ReplaySpec,
    num_tokens: int,
    start: int,
    mode: Literal["additive", "full"] = "additive",
    sample: int | None = None,
) -> Picks | None:
    """Rows [0, num_tokens - 1) of a sample after a response.

    Args:
        held: rows before the request, or None.
        new: checked rows of the response, from `start` on; None if it was aborted before any pass, which keeps `held`.
        spec: of the rows.
        num_tokens: tokens of the sample, the response's included.
        start: what the request asked for. Rows from there on are replaced.
        mode: "additive", or "full": every response carries all rows, so `start` is 0 and rows never get fewer.
        sample: index of the sample, for messages.

    Raises:
        ReplayDecodeError: a gap between `held` and `new`, or shapes that do not fit.
    """
    if new is None:
        return held
    checked = check_rows(new, spec, num_tokens=num_tokens, start=start, level="off", sample=sample)
    count = 0 if held is None else len(held)
    if start > count:
        raise ReplayDecodeError(
            "shape.rows",
            sample,
            f"rows {count}..{start - 1} are missing: {count} held, the response starts at {start}; request from "
            f"{count} or from 0",
        )
    if mode == "full" and (start or count > len(new)):
        raise ReplayDecodeError(
            "shape.rows",
            sample,
            f"expected all rows, at least the {count} held, got {len(new)} from start {start}; a later turn repeats "
            "the earlier tokens, otherwise keep the sample up to the turn before",
        )
    if held is None or not start:
        return checked
    if held.shape[1:] != new.shape[1:] or held.dtype != new.dtype:
        raise ReplayDecodeError(
            "shape.streams",
            sample,
            f"rows held are {held.dtype} {list(held.shape[1:])}, the response's are {new.dtype} "
            f"{list(new.shape[1:])}; both must come from one model",
        )
    return np.concatenate([held[:start], new])


def trim_rows(rows: Picks | None, num_tokens: int) -> Picks | None:
    """The rows that `num_tokens` tokens still have, after tokens were cut off the end (stop strings, rollback)."""
    return None if rows is None else rows[: expected_rows(num_tokens, 0)]


def fill_tail(
    rows: Picks | None,
    *,
    spec: ReplaySpec,
    num_tokens: int,
    loss_mask: npt.ArrayLike,
    sample: int | None = None,
) -> Picks:
    """Rows of all `num_tokens` tokens; those after the last captured one are -1 and will be recomputed.

    For a trajectory that ends on tokens which no pass saw, such as a tool's last message.

    Args:
        rows: captured rows, or None.
        spec: of the rows.
        num_tokens: tokens of the sample.
        loss_mask: of the sample's last tokens, aligned to its end, as long as the response; 0 where no loss is taken.
        sample: index of the sample, for messages.

    Raises:
        ReplayDecodeError: a token without a row counts in the loss.
    """
    expected, held = expected_rows(num_tokens, 0, sample), 0 if rows is None else len(rows)
    if held > expected:
        raise ReplayDecodeError(
            "shape.rows",
            sample,
            f"{held} rows for {num_tokens} tokens, expected at most {expected}; trim them first",
        )
    # Row r decides token r + 1, so the last `short` tokens are the ones without a captured row.
    short, mask = expected - held, np.asarray(loss_mask)
    counted = int(np.count_nonzero(mask[max(len(mask) - short, 0) :])) if short else 0
    if counted:
        raise ReplayDecodeError(
            "value.hole",
            sample,
            f"{counted} of the {short} tokens without rows count in the loss; request their rows, or mask them",
        )
    if rows is not None and not short:
        return rows
    filled = np.full((expected, spec.num_streams, spec.topk), -1, np.int32)
    if rows is not None:
        filled[:held] = rows
    return filled
