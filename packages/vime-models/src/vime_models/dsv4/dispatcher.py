# SPDX-License-Identifier: Apache-2.0
"""Sends tokens to experts and adds up what comes back, the same bits on every run.

Megatron adds the K results of a token with atomics in the activation dtype: in any order, and rounded K times. A token
has exactly K rows here (nothing is dropped), so they are gathered and summed in float32 instead, forward and in the
gradient of the dispatch. That is also less traffic. For the same reason the order of rows comes from sorting T · K
expert numbers and not the flags of all T · E pairs.

Each expert's rows are filled up to a multiple of a few dozen by rows whose weight is zero. Row counts differ in every
step, and for a shape that it has not seen cuBLAS thinks longer than the product takes; few shapes are soon all seen.
Left to Megatron: counts, everything between ranks, and permutation by TransformerEngine (`--moe-permute-fusion`).
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_kernels.moe import gather_sum


class RepeatableDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher with a fixed order of summation."""

    @staticmethod
    def replaces_that_of(config: TransformerConfig) -> bool:
        """Whether the options ask for the dispatcher that this one is, and every token keeps its K rows."""
        return (
            config.moe_token_dispatcher_type == "alltoall"
            and not config.moe_permute_fusion
            and not config.moe_router_padding_for_quantization
        )

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows by expert [R, h] and their weights [R]: T · K rows, and behind them more if no rank has to send them.

        Args:
            hidden_states: [s, b, h].
            routing_map: bool [T, E], K per row.
            probs: [T, E].
        """
        topk = self.config.moe_router_topk
        self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.multiple = 1
        if self.config.transformer_impl == "local":
            self.multiple = row_multiple(len(routing_map) * topk * self.tp_size // self.num_local_experts)
        multiple = self.multiple if self._alone else 1
        picks_TK, self.order, self.places_TK = by_expert(routing_map, topk, multiple)
        rows = _Spread.apply(hidden_states.flatten(0, -2), self.order, self.places_TK, self._backend)
        chosen = probs.gather(1, picks_TK).flatten()
        return rows, _Place.apply(chosen, self.places_TK.flatten(), len(self.order))

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of this rank's experts by expert, how many each has, and their weights; more rows may follow.

        Args:
            global_input_tokens: [R, h] by rank that sent them, then by expert.
            global_probs: [R].
        """
        rows, weights = global_input_tokens, global_probs
        if self.tp_size > 1:
            sizes = None if self.output_splits_tp is None else self.output_splits_tp.tolist()
            rows, weights = (
                gather_from_sequence_parallel_region(each, group=self.tp_group, output_split_sizes=sizes)
                for each in (rows, weights)
            )
        counts = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if not self._alone and self.num_local_experts > 1:
            chunks_SE = self._chunks()
            rows, weights = (by_local_expert(each, chunks_SE, self.multiple) for each in (rows, weights))
        counts = self._maybe_dtoh_and_synchronize("before_finish", counts)
        self.tokens_per_expert = None
        if self._alone or self.num_local_experts > 1:
            counts = counts + -counts % self.multiple
        return rows, counts, weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The inverse of `dispatch_postprocess` for rows, with the sum over the ranks that share experts."""
        rows = hidden_states
        if not self._alone and self.num_local_experts > 1:
            rows = by_source(rows, self._chunks(), self.multiple)
        if self.tp_size > 1:
            sizes = None if self.output_splits_tp is None else self.output_splits_tp.tolist()
            wide = rows.to(self.probs.dtype)
            summed = reduce_scatter_to_sequence_parallel_region(
                wide, group=self.tp_group, input_split_sizes=sizes
            )
            rows = summed.to(rows.dtype)
        return rows

    def _chunks(self) -> list[list[int]]:
        """Rows from each rank for each expert of this one."""
        counts: torch.Tensor = self.num_global_tokens_per_local_expert
        chunks_SE: list[list[int]] = counts.view(-1, self.num_local_experts).tolist()
        return chunks_SE

    @property
    def _alone(self) -> bool:
        """Whether this rank has all experts, so that rows are by expert already."""
        return bool(self.tp_size * self.ep_size == 1)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """[s, b, h]: for each token the sum of its K rows."""
        rows = permutated_local_input_tokens
        summed: torch.Tensor = _Sum.apply(rows, self.order, self.places_TK, self._backend)
        return summed.view(self.hidden_shape)

    @property
    def _backend(self) -> str | None:
        backend: str | None = self.config.vime_dsv4.backend
        return backend


def row_multiple(rows: int) -> int:
    """What an expert's number of rows is filled up to a multiple of: a power of two that adds a sixtieth, at most 128.

    Args:
        rows: of an expert on average.
    """
    return 1 << min(7, max(1, rows // 32).bit_length() - 1)


def by_expert(
    routing_map: torch.Tensor, topk: int, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(experts of each token [T, K] ascending, token of each row [R] by expert, row of each pick [T, K]), int64.

    R = T · K + E · (multiple - 1), which is enough whatever the counts are, and needs no look at them. Rows that fill
    up, or follow the last expert's, are token 0.

    Args:
        routing_map: bool [T, E], `topk` per row.
        topk: K.
        multiple: each expert begins at a multiple of it.
    """
    tokens, experts = routing_map.shape
    # A known size spares the device round trip of `nonzero`; a token with fewer experts would leave a -1, which no
    # later index accepts.
    picks = routing_map.nonzero_static(size=tokens * topk)[:, 1]
    # Stable, so rows of an expert are in the order of tokens; keys of 16 bits take a quarter of the passes.
    sorted_picks = picks.to(torch.int16).argsort(stable=True)
    rows = torch.arange(len(picks), device=picks.device)
    if multiple > 1:
        fill = -routing_map.sum(0) % multiple
        rows += (fill.cumsum(0) - fill)[picks[sorted_picks]]
    places = torch.empty_like(picks).index_copy_(0, sorted_picks, rows)
    order = places.new_zeros(len(picks) + experts * (multiple - 1)).index_copy_(0, rows, sorted_picks // topk)
    return picks.view(-1, topk), order, places.view(-1, topk)


def by_local_expert(rows: torch.Tensor, chunks_SE: list[list[int]], multiple: int) -> torch.Tensor:
    """Rows [R, ...] by source to rows by expert, each expert's filled up to the multiple with zeros."""
    experts = len(chunks_SE[0])
    parts = rows.split([size for line in chunks_SE for size in line])
    zeros = rows.new_zeros(multiple - 1, *rows.shape[1:])
    sorted_parts = []
    for expert in range(experts):
        own = parts[expert::experts]
        sorted_parts += [*own, zeros[: -sum(map(len, own)) % multiple]]
    return torch.cat(sorted_parts)


def by_source(rows: torch.Tensor, chunks_SE: list[list[int]], multiple: int) -> torch.Tensor:
    """The inverse of `by_local_expert`."""
    sources = len(chunks_SE)
    sizes = []
    for own in zip(*chunks_SE, strict=True):
        sizes += [*own, -sum(own) % multiple]
    parts = rows.split(sizes)
    return torch.cat([part for source in range(sources) for part in parts[source :: sources + 1]])


class _Spread(torch.autograd.Function):
    """Tokens [T, h] to rows [R, h], as `by_expert` orders them."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, order: torch.Tensor, places_TK: torch.Tensor, backend: str | None
    ) -> torch.Tensor:
        ctx.save_for_backward(places_TK)
        ctx.backend = backend
        return tokens.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return gather_sum(grad, *ctx.saved_tensors, backend=ctx.backend), None, None, None


class _Sum(torch.autograd.Function):
    """Rows [R, h] to tokens [T, h]. Rows that fill up get the gradient of token 0; their weight of zero ends it."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, places_TK: torch.Tensor, backend: str | None
    ) -> torch.Tensor:
        # What follows the last expert's rows has not come back.
        ctx.save_for_backward(order[: len(rows)])
        return gather_sum(rows, places_TK, backend=backend)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.index_select(0, *ctx.saved_tensors), None, None, None


class _Place(torch.autograd.Function):
    """Element i to position places[i] of `size`, zeros elsewhere; its gradient is a gather and not a sorted sum."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return values.new_zeros(size).index_copy_(0, places, values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.index_select(0, *ctx.saved_tensors), None, None
