# SPDX-License-Identifier: Apache-2.0
"""Where every query row and every key of a packed microbatch is: the one description that packing and model share.

A microbatch is one stream of rows: its samples one after the other, each padded to its extent, then a tail of padding.
Context parallelism gives every rank a part of the stream, in one of three orders:

    contiguous   rank r holds the r-th of cp_size equal slices
    zigzag       every sample is cut into 2·cp_size chunks and rank r holds chunks r and 2·cp_size - 1 - r
    balanced     the same pair of chunks, of each of `balance_folds` equal parts of the whole stream: causal work is
                 about equal, whatever the samples

Keys are addressed in the whole stream, never in a rank's part. A key of ratio m stands for m consecutive tokens of
one sample; samples drop the tokens after their last full group, so the keys of sample i start at Σ_{j<i} ⌊P_j / m⌋,
which is not the m-th part of where its tokens start. Numpy only. Left out: moving data, and what a row holds.
Sources: layouts of Megatron-LM context parallelism and of vime's batch builder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from vime_replay.layout_parts import Exchange, Ints, LayoutError, Span, require, round_up

__all__ = ["PADDING", "Exchange", "LayoutError", "PackLayout", "Span", "balance_folds"]

Order = Literal["local", "contiguous", "balanced"]
PADDING = -1


# A finer cut evens out unequal samples, but every chunk takes a window of keys along.
_MOST_FOLDS, _LEAST_CHUNK = 16, 128


def balance_folds(extent: int, cp_size: int) -> int:
    """Into how many equal parts row balance cuts a stream (or a row of a batch) before it pairs chunks in each.

    Args:
        extent: rows.
        cp_size: context-parallel ranks.
    """
    folds = 1
    while folds < _MOST_FOLDS and extent % (4 * cp_size * folds) == 0:
        if extent // (4 * cp_size * folds) < _LEAST_CHUNK:
            break
        folds *= 2
    return folds


@dataclass(frozen=True)
class PackLayout:
    """Rows and keys of one microbatch, as one context-parallel rank sees them.

    Attributes:
        lengths: tokens of each sample.
        fmt: "thd", samples end to end; "bshd", every sample padded to `max_seqlen`.
        cp_size: context-parallel ranks.
        cp_rank: this rank.
        mode: order in which the trainer hands out rows.
        pad_multiple: a rank's rows are padded to a multiple of this (thd).
        max_seqlen: extent of every sample (bshd).
        key_space: "padded", keys include those of padding; "compact", padding is removed before keys are built;
            "sample", every sample has keys of its own, counted from 0.
        query_order: order in which the model consumes query rows: "local" is the trainer's `mode`; a model that turns
            zigzag rows into contiguous ones at its entry consumes "contiguous"; "balanced" after row balance.
        tail: rows of padding after the last sample, in the stream; None computes them from `pad_multiple`.

    Raises:
        LayoutError: the numbers do not fit together.
    """

    lengths: tuple[int, ...]
    fmt: Literal["thd", "bshd"] = "thd"
    cp_size: int = 1
    cp_rank: int = 0
    mode: Literal["contiguous", "zigzag"] = "contiguous"
    pad_multiple: int = 1
    max_seqlen: int | None = None
    key_space: Literal["padded", "compact", "sample"] = "padded"
    query_order: Order = "local"
    tail: int | None = None

    def __post_init__(self) -> None:
        choices = {
            "fmt": ("thd", "bshd"),
            "mode": ("contiguous", "zigzag"),
            "key_space": ("padded", "compact", "sample"),
            "query_order": ("local", "contiguous", "balanced"),
        }
        for field, allowed in choices.items():
            value = getattr(self, field)
            require(value in allowed, field, f"one of {', '.join(allowed)}", repr(value), "pass one of these")
        whole = all(isinstance(n, int | np.integer) and n >= 0 for n in self.lengths)
        require(whole, "lengths", "whole numbers from 0", self.lengths, "pass token counts")
        require(self.cp_size >= 1, "cp_size", "at least 1", self.cp_size, "pass 1 for no context parallelism")
        rule, advice = f"0 <= cp_rank < {self.cp_size}", "pass rank and size of the context-parallel group"
        require(0 <= self.cp_rank < self.cp_size, "cp_rank", rule, self.cp_rank, advice)
        multiple = self.pad_multiple
        require(multiple >= 1, "pad_multiple", "at least 1", multiple, "pass 1 for no padding")
        fits = self.tail is None or (self.tail >= 0 and self.fmt == "thd")
        require(
            fits, "tail", "None, or rows from 0 with fmt thd", f"{self.tail} with {self.fmt}", "pass None"
        )
        if self.fmt == "bshd":
            longest, parts = max(self.lengths, default=0), self._parts
            extent = longest if self.max_seqlen is None else self.max_seqlen
            require(
                extent >= longest,
                "max_seqlen",
                f"at least {longest}",
                extent,
                f"pass {round_up(longest, parts)}",
            )
            rule = f"a multiple of {parts} ({'2 * ' if parts > self.cp_size else ''}cp_size)"
            require(extent % parts == 0, "max_seqlen", rule, extent, f"pass {round_up(extent, parts)}")
        require(self.total < 2**31, "rows", "fewer than 2**31", self.total, "split the microbatch")
        require(
            self.total % self.cp_size == 0,
            "rows",
            f"a multiple of cp_size ({self.cp_size})",
            self.total,
            f"pad to {round_up(self.total, self.cp_size)}",
        )
        if self.query_order == "balanced" and self.cp_size > 1:
            extent = self.total if self.fmt == "thd" else self.padded_lengths[0] if self.lengths else 0
            even = 2 * self.cp_size
            require(
                extent % even == 0,
                "rows to balance",
                f"a multiple of 2 * cp_size ({even})",
                extent,
                f"pad to {round_up(extent, even)}",
            )

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int], **fields: object) -> Self:
        """The layout of a packed stream known by its cumulative (padded) lengths alone.

        Args:
            cu_seqlens: [B+1], from 0 to the rows of the whole stream.
            **fields: `cp_size`, `cp_rank`, `mode`, `query_order`.

        Raises:
            LayoutError: under zigzag, a sample that does not fall into 2 · cp_size chunks. The last one need not: rows
                that no chunk size divides are padding, in whatever order.
        """
        extents = tuple(int(n) for n in np.diff(np.asarray(cu_seqlens, dtype=np.int64)))
        probe = cls(lengths=(), **fields)  # type: ignore[arg-type]
        parts = probe._parts
        if probe.mode == "contiguous" or (extents and extents[-1] % parts == 0):
            samples, tail = extents, 0
        else:
            samples, tail = extents[:-1], sum(extents[-1:])
        for index, extent in enumerate(samples):
            require(
                probe.mode == "contiguous" or extent % parts == 0,
                f"zigzag, sample {index}",
                f"a length that is a multiple of 2 * cp_size ({parts})",
                extent,
                f"pad it to {round_up(extent, parts)}",
            )
        return replace(probe, lengths=samples, tail=tail)

    def require(self, *, window: int, group: int) -> None:
        """Refuses a split that a windowed model with compressed keys cannot compute.

        Args:
            window: rows that a rank takes from its neighbour: raw keys that a query sees, or the longest key group.
            group: tokens of the longest key group. A rank of a bshd batch holds whole groups.

        Raises:
            LayoutError: too few rows per rank, or groups that straddle ranks.
        """
        if self.cp_size == 1 or not self.lengths:
            return
        thd = self.fmt == "thd"
        per_rank = self.local_rows // (1 if thd else len(self.lengths))
        unit = 1 if thd else self._parts * group
        require(
            per_rank >= window,
            "rows of a sequence per context-parallel rank" if not thd else "rows per context-parallel rank",
            f"at least the window ({window})",
            per_rank,
            f"pad to {round_up(window * self.cp_size, unit)} rows, or use context parallelism of at most "
            f"{max(1, per_rank * self.cp_size // window)}",
        )
        if not thd:
            extent = self.padded_lengths[0]
            factors = f"{'2 * ' if self.mode == 'zigzag' else ''}cp_size * {group}"
            require(
                extent % unit == 0,
                "max_seqlen",
                f"a multiple of {unit} ({factors})",
                extent,
                f"pass {round_up(extent, unit)}",
            )

    @property
    def _parts(self) -> int:
        return self.cp_size * (2 if self.mode == "zigzag" and self.cp_size > 1 else 1)

    @cached_property
    def padded_lengths(self) -> tuple[int, ...]:
        """Rows of each sample in the stream."""
        if self.fmt == "bshd":
            extent = max(self.lengths, default=0) if self.max_seqlen is None else self.max_seqlen
            return (extent,) * len(self.lengths)
        return tuple(round_up(n, self._parts) if self.mode == "zigzag" else n for n in self.lengths)

    @cached_property
    def total(self) -> int:
        """Rows of the whole stream."""
        rows = sum(self.padded_lengths)
        if self.tail is not None:
            return rows + self.tail
        return rows if self.fmt == "bshd" else round_up(rows, self.cp_size * self.pad_multiple)

    @property
    def local_rows(self) -> int:
        """Rows of one rank."""
        return self.total // self.cp_size

    @cached_property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 [B+1] (B+2 with a tail): stream row where each sample starts, where the tail starts, and the end."""
        ends = np.cumsum(self._extents, dtype=np.int32)
        return np.concatenate([np.zeros(1, np.int32), ends])

    @property
    def _extents(self) -> tuple[int, ...]:
        tail = self.total - sum(self.padded_lengths)
        return self.padded_lengths + ((tail,) if tail else ())

    def key_offsets(self, ratio: int = 1) -> Ints:
        """int64 [B]: first key of each sample, in the key tensor of the whole stream.

        Args:
            ratio: tokens per key; a sample has a key per complete group.
        """
        if self.key_space == "sample":
            return np.zeros(len(self.lengths), np.int64)
        extents = self.lengths if self.key_space == "compact" else self.padded_lengths
        counts = np.asarray(extents, np.int64) // ratio
        return np.cumsum(counts) - counts

    def rows(self, order: Order | None = None, rank: int | None = None) -> Ints:
        """int64 [local_rows]: stream row of each local row.

        Args:
            order: default `query_order`.
            rank: default `cp_rank`.
        """
        order, rank = order or self.query_order, self.cp_rank if rank is None else rank
        resolved = self.mode if order == "local" else order
        # Zigzag pairs chunks of every sample; the other orders cut the stream, or each row of a batch.
        samples = resolved == "zigzag" or self.fmt == "bshd"
        pieces, start = [], 0
        extents = self._extents if samples else (self.total,)
        if resolved == "balanced" and self.cp_size > 1:
            extents = tuple(
                extent // folds
                for extent in extents
                for folds in [balance_folds(extent, self.cp_size)]
                for _ in range(folds)
            )
        for extent in extents:
            share = extent // self.cp_size
            front = share if resolved == "contiguous" else share - share // 2
            back = share - front
            pieces.append(start + rank * front + np.arange(front))
            last = start + self.cp_size * front + (self.cp_size - 1 - rank) * back
            pieces.append(last + np.arange(back))
            start += extent
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def owners(self, order: Order | None = None, rank: int | None = None) -> tuple[Ints, Ints]:
        """Sample and position of each local row, int64 [local_rows] each; sample -1 in the tail.

        A position from the sample's length on is padding inside the sample.
        """
        rows = self.rows(order, rank)
        cu = self.cu_seqlens.astype(np.int64)
        sample = np.searchsorted(cu[1:], rows, side="right")
        position = rows - cu[sample]
        return np.where(sample < len(self.lengths), sample, PADDING), position

    @cached_property
    def query_spans(self) -> list[Span]:
        """The local rows in `query_order`, as runs of one sample."""
        sample, position = self.owners()
        if not len(sample):
            return []
        breaks = np.flatnonzero((np.diff(sample) != 0) | (np.diff(position) != 1)) + 1
        edges = [0, *breaks.tolist(), len(sample)]
        spans = []
        for start, end in pairwise(edges):
            owner, first = int(sample[start]), int(position[start])
            length = self.lengths[owner] if owner != PADDING else 0
            real = min(max(length - first, 0), end - start) if owner != PADDING else 0
            spans.append(Span(start, owner, first, real, end - start - real))
        return spans

    def exchange(self, source: Order, target: Order) -> Exchange:
        """This rank's part in moving rows from one order to another."""
        held = np.stack([self.rows(source, rank) for rank in range(self.cp_size)])
        wanted = np.stack([self.rows(target, rank) for rank in range(self.cp_size)])
        slot, place = np.empty(self.total, np.int64), np.empty(self.total, np.int64)
        slot[held.ravel()] = place[wanted.ravel()] = np.arange(self.total)
        taker = place[held[self.cp_rank]] // self.local_rows
        giver = slot[wanted[self.cp_rank]]
        arrival = np.argsort(giver)
        recv_order = np.empty_like(arrival)
        recv_order[arrival] = np.arange(len(arrival))
        return Exchange(
            np.argsort(taker, kind="stable"),
            tuple(np.bincount(taker, minlength=self.cp_size).tolist()),
            tuple(np.bincount(giver // self.local_rows, minlength=self.cp_size).tolist()),
            recv_order,
        )

    @property
    def key_cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32: cumulative tokens that keys are made of; padding is left out of a compact key space."""
        if self.key_space != "compact":
            return self.cu_seqlens
        return np.concatenate([np.zeros(1, np.int32), np.cumsum(self.lengths, dtype=np.int32)])

    def check(self, cu_seqlens: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Compares with the cumulative lengths that the model takes its keys from.

        Args:
            cu_seqlens: of the whole stream. A tail of padding may be one more sample, part of the last one, or several.

        Raises:
            LayoutError: a sample starts elsewhere, or the stream ends elsewhere: keys would be addressed wrongly.
        """
        given, own = np.asarray(cu_seqlens, np.int64), self.key_cu_seqlens.astype(np.int64)
        samples = len(self.lengths)
        ok = len(given) > samples and given[-1] == own[-1] and np.array_equal(given[:samples], own[:samples])
        require(
            bool(ok),
            "cumulative lengths of the model",
            f"{own.tolist()} ({self.key_space} key space)",
            given.tolist(),
            "build both from one PackLayout",
        )
