# SPDX-License-Identifier: Apache-2.0
"""Moves rows between context-parallel ranks, exactly: every rank computes what one rank alone would have computed.

Inside the attention a rank holds contiguous slices of the stream. It gets
- the last `window` hidden rows of its left neighbour, for the raw keys and the groups that begin there;
- the compressed entries of all ranks, put into stream order, so that indices need no translation.

Rows that a trainer hands out in zigzag order are made contiguous by one all-to-all and put back by another. With a
group of one rank every method returns what it got. Backward passes are the transposed movements; gradients of shared
entries are summed in float32. Left out: ring attention, which a softmax over a selection cannot use.
Sources: contiguous split with a boundary exchange as in Megatron-LM's DeepSeek-V4; all-gathered keys as in miles.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import all_to_all

from vime_models.dsv4 import row_balance
from vime_models.dsv4.thd import TokenLayout, token_layout
from vime_models.host.microbatch import VimePackedSeqParams, packed_lengths
from vime_replay.layout import PackLayout

# Tokens of the longest compression group: a rank of an unpacked batch holds whole groups.
GROUP = 128


@dataclass(frozen=True)
class ContextParallel:
    """The context-parallel side of one attention layer.

    Attributes:
        group: process group of the ranks that share a stream.
        mode: order of the rows that the trainer hands out, "contiguous" or "zigzag".
        balanced: queries are computed in balanced order (see `row_balance`).
        window: raw keys that a query sees.
    """

    group: Any
    mode: str
    balanced: bool
    window: int

    def layout(self, hidden: torch.Tensor, packed: PackedSeqParams | None) -> TokenLayout:
        """Where this rank's rows are once they are contiguous; the layers of a microbatch share one object.

        Args:
            hidden: [s, b, h], all rows of this rank.
            packed: the microbatch's packing object.

        Raises:
            LayoutError: a split that this attention cannot compute.
            ValueError: `packed` does not describe `hidden`, or was split for other ranks.
        """
        size, rank = self.group.size(), self.group.rank()
        halo = max(self.window, GROUP) if size > 1 else 0
        described = (hidden.shape[:2], hidden.device, halo)
        known = getattr(packed, "token_layout", None)
        if known is not None and known[0] == described:
            made: TokenLayout = known[1]
            return made
        if halo:
            self._pack_layout(hidden, packed).require(window=halo, group=GROUP)
        made = token_layout(hidden, packed, cp_size=size, cp_rank=rank, halo=halo)
        if isinstance(packed, VimePackedSeqParams):
            packed.token_layout = described, made
        return made

    def enter(
        self, hidden: torch.Tensor, packed: PackedSeqParams | None, layout: TokenLayout
    ) -> torch.Tensor:
        """[s, b, h] as the trainer hands it out to contiguous [T, h]."""
        tokens = layout.pack(hidden)
        if self.group.size() == 1 or self.mode == "contiguous":
            return tokens
        plan = self._plan(hidden, packed, layout)
        moved = all_to_all(self.group, tokens.index_select(0, plan.send), plan.recv_counts, plan.send_counts)
        return moved.index_select(0, plan.recv)

    def leave(
        self, tokens: torch.Tensor, hidden: torch.Tensor, packed: PackedSeqParams | None, layout: TokenLayout
    ) -> torch.Tensor:
        """The inverse of `enter`; `hidden` is what was given to it."""
        if self.group.size() > 1 and self.mode == "zigzag":
            plan = self._plan(hidden, packed, layout)
            back = tokens.index_select(0, plan.recv_inverse)
            moved = all_to_all(self.group, back, plan.send_counts, plan.recv_counts)
            tokens = moved.index_select(0, plan.send_inverse)
        return layout.unpack(tokens)

    def with_halo(self, tokens: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """[T, h] to [N, h]: the left neighbour's last rows in front of every slice, zeros on the first rank."""
        if not layout.halo:
            return tokens
        size, rank = self.group.size(), self.group.rank()
        slices = tokens.view(len(layout.starts), layout.length, -1)
        rows = layout.halo * len(slices)
        send = [rows if peer == rank + 1 else 0 for peer in range(size)]
        receive = [rows if peer == rank - 1 else 0 for peer in range(size)]
        edge = slices[:, -layout.halo :].flatten(0, 1)
        received = all_to_all(self.group, edge[: sum(send)], receive, send)
        if not rank:
            # Joined to the received nothing, so that the gradient's way back exists on this rank as well.
            received = torch.cat([received, torch.zeros_like(edge)])
        return torch.cat([received.view(len(slices), layout.halo, -1), slices], 1).flatten(0, 1)

    def gather_entries(self, entries: torch.Tensor, layout: TokenLayout, ratio: int) -> torch.Tensor:
        """Entries that the ranks own to all entries of the stream [M, D], in stream order; unused rows are zero.

        Args:
            entries: [G · C, D], what `Compressor` returns.
            layout: of the tokens they were made of.
            ratio: tokens per entry.
        """
        if not layout.halo:
            return entries
        place, missing = layout.once(("gather", ratio), partial(self._places, layout, ratio))
        gathered = _GatherRows.apply(entries, self.group)
        return gathered.index_select(0, place).masked_fill(missing, 0.0)

    def _places(self, layout: TokenLayout, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathered row of each entry of the stream [M], and which of them do not exist [M, 1]."""
        size, rank, device = self.group.size(), self.group.rank(), layout.starts.device
        slices, length = len(layout.starts), layout.length
        ranks = torch.arange(size, dtype=torch.int32, device=device)
        starts = (layout.starts[:, None] + (ranks - rank) * length).flatten()
        first = layout.entries_before(starts, ratio)
        total = layout.entries_before(starts[-1:] + length, ratio)
        numbers = torch.arange(slices * size * length // ratio, dtype=torch.int32, device=device)
        part = torch.searchsorted(first, numbers, right=True) - 1
        # Entries that a slice can own.
        share = -(-length // ratio)
        slot = (numbers - first[part]).clamp(max=share - 1)
        # Gathered rows are rank-major, the stream is slice-major.
        return (part % size * slices + part // size) * share + slot, (numbers >= total)[:, None]

    def queries(self, layout: TokenLayout) -> TokenLayout:
        """The layout in which this rank computes queries."""
        if not self._balances(layout):
            return layout
        size, rank = self.group.size(), self.group.rank()
        return layout.once("balanced", lambda: row_balance.balanced(layout, size, rank))

    def balance(self, rows: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """[T, ...] in contiguous order to the order of `queries`."""
        return row_balance.balance(rows, layout, self.group) if self._balances(layout) else rows

    def balance_keys(self, keys: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """Raw keys [N, D] of the contiguous slices to those of the slices of `queries`."""
        return row_balance.balance_keys(keys, layout, self.group) if self._balances(layout) else keys

    def restore(self, rows: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """The inverse of `balance`."""
        return row_balance.restore(rows, layout, self.group) if self._balances(layout) else rows

    def _plan(self, hidden: torch.Tensor, packed: PackedSeqParams | None, layout: TokenLayout) -> "_Plan":
        def make() -> _Plan:
            exchange = self._pack_layout(hidden, packed).exchange("local", "contiguous")
            permutations = (exchange.send_order, exchange.recv_order)
            send, recv = (torch.from_numpy(rows).to(hidden.device) for rows in permutations)
            counts = list(exchange.send_counts), list(exchange.recv_counts)
            return _Plan(send, recv, send.argsort(), recv.argsort(), *counts)

        return layout.once("exchange", make)

    @property
    def _query_order(self) -> Any:
        return "balanced" if self.balanced else "contiguous"

    def _balances(self, layout: TokenLayout) -> bool:
        return self.balanced and layout.halo > 0

    def _pack_layout(self, hidden: torch.Tensor, packed: PackedSeqParams | None) -> PackLayout:
        length, batch = hidden.shape[:2]
        size, rank = self.group.size(), self.group.rank()
        total = length * size
        if packed is None or packed.qkv_format != "thd":
            return _described((total,) * batch, "bshd", size, rank, self.mode, self._query_order)
        if packed.local_cp_size not in (None, size):
            raise ValueError(
                f"vime_models.dsv4: expected a context-parallel group of {size} ranks for every microbatch, got "
                f"local_cp_size={packed.local_cp_size}; hybrid context parallelism is not supported"
            )
        given: PackLayout | None = getattr(packed, "layout", None)
        cu_seqlens = packed_lengths(packed)
        if given is not None:
            consumed = given.mode if given.query_order == "local" else given.query_order
            asked = (self.mode, self._query_order, size, rank)
            found = (given.mode, consumed, given.cp_size, given.cp_rank)
            if asked != found:
                raise ValueError(
                    f"vime_models.dsv4: expected a PackLayout with (mode, query_order, cp_size, cp_rank) = {asked}, "
                    f"got {found}; --dsv4-cp-layout must be the order in which the trainer hands out rows, and queries "
                    "are consumed in contiguous order, or balanced with --dsv4-cp-balance"
                )
            if given.total != total:
                raise ValueError(
                    f"vime_models.dsv4: expected a PackLayout of {total} rows ({length} on each of {size} ranks), got "
                    f"{given.total}; it must be that of this microbatch, with its padding"
                )
            if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
                given.check(cu_seqlens.numpy())
            return given
        if self.mode == "contiguous" or cu_seqlens is None:
            # A contiguous split does not depend on the sequences.
            return _described((total,), "thd", size, rank, "contiguous", self._query_order)
        # One device read in each pass through a stage, remembered on its packing object; a layout that the trainer
        # attaches spares it.
        packed.layout = PackLayout.from_cu_seqlens(
            cu_seqlens.tolist(),
            cp_size=size,
            cp_rank=rank,
            mode=self.mode,
            query_order=self._query_order,
        )
        return packed.layout


@lru_cache(maxsize=64)
def _described(lengths: tuple[int, ...], fmt: Any, size: int, rank: int, mode: Any, order: Any) -> PackLayout:
    return PackLayout(lengths, fmt, cp_size=size, cp_rank=rank, mode=mode, query_order=order)


@dataclass(frozen=True, eq=False)
class _Plan:
    """`vime_replay.layout.Exchange` on the device: both permutations and their inverses."""

    send: torch.Tensor
    recv: torch.Tensor
    send_inverse: torch.Tensor
    recv_inverse: torch.Tensor
    send_counts: list[int]
    recv_counts: list[int]


class _GatherRows(torch.autograd.Function):
    """Rows of all ranks, rank-major; the gradient of a rank's rows is the float32 sum over ranks, rounded once."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.count = group, len(rows)
        gathered = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        own = wide.new_empty(ctx.count, *grad.shape[1:])
        dist.reduce_scatter_tensor(own, wide, group=ctx.group)
        return own.to(grad.dtype), None
