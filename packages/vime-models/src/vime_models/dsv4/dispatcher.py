# SPDX-License-Identifier: Apache-2.0
"""Sends tokens to experts and adds up what comes back, the same bits on every run.

Megatron adds the K results of a token with atomics in the activation dtype: in any order, and rounded K times. A token
has exactly K rows here (nothing is dropped), so they are gathered and summed in float32 instead, forward and in the
gradient of the dispatch. That is also less traffic. Left to Megatron: everything between ranks, and permutation by
TransformerEngine (`--moe-permute-fusion`).
"""

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


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
        """Rows [T · K, h] by expert, and their weights [T · K].

        Args:
            hidden_states: [s, b, h].
            routing_map: bool [T, E], K per row.
            probs: [T, E].
        """
        # Megatron counts, permutes the weights and finds the order; one channel is enough for it.
        channel = hidden_states.detach()[..., :1].contiguous()
        _, weights = super().dispatch_preprocess(channel, routing_map, probs)
        self.hidden_shape = hidden_states.shape
        order = self.reversed_local_input_permutation_mapping
        self.places_TK = order.argsort(stable=True).view(-1, self.config.moe_router_topk)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _Spread.apply(tokens, order, self.places_TK), weights

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """[s, b, h]: for each token the sum of its K rows."""
        order = self.reversed_local_input_permutation_mapping
        summed: torch.Tensor = _Sum.apply(permutated_local_input_tokens, order, self.places_TK)
        return summed.view(self.hidden_shape)


def _sum(rows: torch.Tensor, places_TK: torch.Tensor) -> torch.Tensor:
    return rows.index_select(0, places_TK.flatten()).unflatten(0, places_TK.shape).sum(1)


class _Spread(torch.autograd.Function):
    """Tokens [T, h] to rows [T · K, h]."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, places_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places_TK)
        return tokens.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _sum(grad, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    """Rows [T · K, h] to tokens [T, h]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, places_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return _sum(rows, places_TK)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.index_select(0, *ctx.saved_tensors), None, None
