# SPDX-License-Identifier: Apache-2.0
"""From Megatron's [s, b, h] or packed [t, 1, h] activations to one packed token axis and back.

Every op of the attention works on packed tokens with `cu_seqlens`: positions, windows and compression groups
restart at each sequence. A batch of b sequences of length s is the special case cu_seqlens = (0, s, 2s, ...).

`cu_seqlens` always describes the whole stream. Under context parallelism a rank holds slices of it; raw keys then
have `halo` more rows in front of each slice, which come from the left neighbour, and a compressed entry belongs to
the rank that holds its last token. Indices of compressed entries always count those of the whole stream. Here is the
arithmetic; `context_parallel` moves the rows. What layers derive from a layout is derived once per microbatch.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime_kernels.dsa import causal_ranges
from vime_models.dsv4.rope import RotaryTable
from vime_models.host.microbatch import packed_lengths


@dataclass(frozen=True)
class TokenLayout:
    """Where this rank's tokens are on the packed token axis.

    Attributes:
        cu_seqlens: int32 [B+1], row where each sequence starts, then the row count of the whole stream; padded
            lengths if the trainer pads.
        starts: int32 [G], first row of each slice that this rank holds.
        length: rows of a slice.
        batch: sequences per microbatch for [s, b, h] input, None for packed input.
        halo: rows of its left neighbour that precede the keys of each slice; 0 where the rank holds everything.
            Before the first row of the stream they hold zeros, and no query sees them.
        real_lengths: int32 [B], tokens of each sequence before its padding; None without padding.
        replay_ticket: which microbatch this is, for the replay of picks; None if the trainer does not say.
    """

    cu_seqlens: torch.Tensor
    starts: torch.Tensor
    length: int
    batch: int | None
    halo: int = 0
    real_lengths: torch.Tensor | None = None
    replay_ticket: Any = None
    _kept: dict[Hashable, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def once[Made](self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returned when this key was first asked for: layers with the same needs share it."""
        if key not in self._kept:
            self._kept[key] = make()
        made: Made = self._kept[key]
        return made

    def pack(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h] to [T, h]: sequences one after the other."""
        return hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, h] back to [s, b, h]."""
        return tokens.view(self.batch or 1, -1, tokens.shape[-1]).transpose(0, 1).contiguous()

    def own(self, keyed: torch.Tensor) -> torch.Tensor:
        """[N, h] with halos to the [T, h] of the slices."""
        if not self.halo:
            return keyed
        return keyed.unflatten(0, (len(self.starts), -1))[:, self.halo :].flatten(0, 1)

    @cached_property
    def rows(self) -> torch.Tensor:
        """int32 [T]: row of each token in the stream."""
        return self._slice_rows(0)

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [T]: position of each token inside its sequence."""
        return position_in_sequence(self.cu_seqlens, self.rows)

    @cached_property
    def real_rows(self) -> torch.Tensor | None:
        """bool [T]: False for padding between packed sequences; None without padding."""
        if self.real_lengths is None:
            return None
        sequence = torch.searchsorted(self.cu_seqlens[1:], self.rows, right=True)
        return self.positions < self.real_lengths[sequence]

    @cached_property
    def key_positions(self) -> torch.Tensor:
        """int64 [N]: position of each raw key; N = T + G · halo."""
        return position_in_sequence(self.cu_seqlens, self._slice_rows(self.halo))

    def rotation(self, table: RotaryTable, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`table.cos_sin` of the tokens."""
        return self.once(("rotation", table, dtype), lambda: table.cos_sin(self.positions, dtype))

    def key_rotation(self, table: RotaryTable, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`table.cos_sin` of the raw keys."""
        if not self.halo:
            return self.rotation(table, dtype)
        return self.once(("keys", table, dtype), lambda: table.cos_sin(self.key_positions, dtype))

    def entry_rotation(
        self, table: RotaryTable, ratio: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`table.cos_sin` of the compressed entries that are made here; one stands at the first token of its group."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            numbers = (
                self.owned_entries(ratio)[0].flatten() if self.halo else self._arange(self.length // ratio)
            )
            return table.cos_sin(self.entry_positions(numbers, ratio), dtype)

        return self.once(("entries", table, ratio, dtype), make)

    def visible(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [T] first and one-past-last compressed entry that each token may see, in rows of all entries."""
        # Explicit rows spare a look at the last entry of cu_seqlens, which is a device round trip.
        return self.once(
            ("visible", ratio),
            lambda: causal_ranges(self.cu_seqlens, ratio=ratio, q_positions=self.rows),
        )

    @cached_property
    def window(self) -> dict[str, Any]:
        """`cu_seqlens` over the raw keys and the raw key `q_positions` of each token, for `sparse_attention_v4`."""
        if not self.halo:
            return {"cu_seqlens": self.cu_seqlens, "q_positions": self.rows}
        width = self.halo + self.length
        first_row = self.starts[:, None] - self.halo
        borders = (self.cu_seqlens - first_row).clamp(0, width) + self._bases(width)
        queries = self._bases(width) + self.halo + self._arange(self.length)
        return {
            "cu_seqlens": torch.cat([borders.new_zeros(1), borders.flatten()]),
            "q_positions": queries.flatten(),
        }

    def entries_before(self, rows: torch.Tensor, ratio: int) -> torch.Tensor:
        """int32: compressed entries of the stream whose last token is before each of the rows."""
        sequence = torch.searchsorted(self.cu_seqlens[1:], rows, right=True)
        inside = (rows - self.cu_seqlens[sequence]) // ratio
        return self._cu_entries(ratio)[sequence] + inside.to(torch.int32)

    def entry_positions(self, entries: torch.Tensor, ratio: int) -> torch.Tensor:
        """int64: position inside its sequence of the first token of each entry."""
        return position_in_sequence(self._cu_entries(ratio), entries) * ratio

    def owned_entries(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries whose last token is in a slice: numbers int32 [G, C] and how many exist [G, 1]."""
        first = self.entries_before(self.starts, ratio)
        count = self.entries_before(self.starts + self.length, ratio) - first
        return first[:, None] + self._arange(-(-self.length // ratio)), count[:, None]

    def pools(self, ratio: int, *, overlap: bool) -> tuple[int, torch.Tensor, torch.Tensor]:
        """How to pool the entries of each slice: (reach, cu_seqlens, first pool of each slice).

        The tokens to pool are each slice with `reach` rows of halo in front. Its first sequence is cut, so it starts
        there with the first group that ends in the slice; with overlap one group earlier, whose own pool is not used.

        Args:
            ratio: tokens per entry.
            overlap: an entry also needs the group before its own.
        """
        reach = ratio * 2 if overlap else ratio
        width = reach + self.length
        sequence = torch.searchsorted(self.cu_seqlens[1:], self.starts, right=True)
        cut = self.cu_seqlens[sequence]
        group = (self.starts - cut) // ratio
        extra = (group > 0).to(torch.int32) if overlap else torch.zeros_like(group)
        first_row = (self.starts - reach)[:, None]
        begin = (cut + (group - extra) * ratio)[:, None]
        borders = (torch.maximum(self.cu_seqlens, begin) - first_row).clamp(max=width)
        # The rows before `begin` are a sequence of their own; its pools are skipped.
        borders = torch.cat([torch.zeros_like(begin), borders], 1) + self._bases(width)
        cu_seqlens = borders.flatten()
        pools = torch.diff(borders, prepend=borders[:, :1]) // ratio
        skipped = pools.sum(1).cumsum(0) - pools.sum(1) + pools[:, 1]
        return reach, cu_seqlens, (skipped + extra)[:, None]

    def owned_pools(
        self, ratio: int, *, overlap: bool
    ) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`pools` with the pool of each owned entry [G · C] in place of the first, and which of them do not exist."""

        def make() -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
            reach, cu_seqlens, first = self.pools(ratio, overlap=overlap)
            numbers, count = self.owned_entries(ratio)
            slots = self._arange(numbers.shape[1])
            missing = slots >= count
            owned = (first + slots).masked_fill(missing, 0)
            return reach, cu_seqlens, owned.flatten(), missing.view(-1, 1)

        return self.once(("pools", ratio, overlap), make)

    def _cu_entries(self, ratio: int) -> torch.Tensor:
        counts = self.cu_seqlens.diff() // ratio
        return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])

    def _slice_rows(self, halo: int) -> torch.Tensor:
        return (self.starts[:, None] - halo + self._arange(halo + self.length)).flatten()

    def _bases(self, width: int) -> torch.Tensor:
        return self._arange(len(self.starts))[:, None] * width

    def _arange(self, n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.int32, device=self.cu_seqlens.device)


def token_layout(
    hidden: torch.Tensor, packed: PackedSeqParams | None, *, cp_size: int = 1, cp_rank: int = 0, halo: int = 0
) -> TokenLayout:
    """The layout of a microbatch whose rows are in contiguous order.

    Args:
        hidden: [s, b, h], all rows of this context-parallel rank (after the gather of sequence parallelism).
        packed: Megatron's packing object; only `qkv_format == "thd"` means packed sequences.
        cp_size: context-parallel ranks.
        cp_rank: this one.
        halo: rows in front of each slice of keys.

    Raises:
        ValueError: packed input with a batch, without `cu_seqlens_q`, or whose last entry is not the token count.
    """
    length, batch = hidden.shape[:2]
    total, first = length * cp_size, length * cp_rank
    ticket = getattr(packed, "replay_ticket", None)
    if packed is None or packed.qkv_format != "thd":
        sequences = torch.arange(batch + 1, dtype=torch.int32, device=hidden.device) * total
        # Slices of a batch that is all here are adjacent.
        starts, length = (sequences[:-1] + first, length) if halo else (sequences[:1], length * batch)
        return TokenLayout(sequences, starts, length, batch, halo, replay_ticket=ticket)
    cu_seqlens = packed_lengths(packed)
    if batch != 1 or cu_seqlens is None:
        raise ValueError(
            "vime_models.dsv4: expected packed (thd) input as [t, 1, h] with cu_seqlens_q, got shape "
            f"{tuple(hidden.shape)} with cu_seqlens_q={cu_seqlens}"
        )
    # Reading the last entry costs a device round trip, so only the CPU checks it.
    if cu_seqlens.device.type == "cpu" and int(cu_seqlens[-1]) != total:
        raise ValueError(
            f"vime_models.dsv4: expected cu_seqlens to end at the number of tokens ({total}), got "
            f"{int(cu_seqlens[-1])}; give padding tokens a sequence of their own or pad the last sequence"
        )
    cu_seqlens = cu_seqlens.to(device=hidden.device, dtype=torch.int32)
    starts = torch.full((1,), first, dtype=torch.int32, device=hidden.device)
    real_lengths = None
    if packed.cu_seqlens_q is not None and packed.cu_seqlens_q_padded is not None:
        real_lengths = packed.cu_seqlens_q.to(device=hidden.device, dtype=torch.int32).diff()
    return TokenLayout(cu_seqlens, starts, length, None, halo, real_lengths, ticket)


def position_in_sequence(cu_seqlens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int64: rows counted from the start of their own sequence; empty sequences are allowed.

    Args:
        cu_seqlens: int32 [B+1].
        rows: int32, any shape.
    """
    sequence = torch.searchsorted(cu_seqlens[1:], rows.contiguous(), right=True)
    return (rows - cu_seqlens[sequence]).long()
