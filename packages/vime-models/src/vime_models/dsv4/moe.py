# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts of DeepSeek-V4 on Megatron's MoELayer: two routers, and token ids on the way to one of them.

    s = sqrt(softplus(Wg · h))                       in float32
    experts = top-k of s + bias, or tid2eid[token id] in the leading layers
    weight_e = scale · s_e / (Σ over chosen of s + 1e-20)

The bias decides the selection only. Experts are in `experts`, with both halves of the SwiGLU
input clamped. Left out: auxiliary losses, group limits, token dropping.
Source: DeepSeek-V4 technical report, section 2.1.
"""

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_models.dsv4.dispatcher import RepeatableDispatcher
from vime_models.host.linear import wide_linear


class ScoreRouter(TopKRouter):
    """Routes by score: top-k of sqrt(softplus) plus bias."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Casting a model to bfloat16 replaces its buffers. The bias decides ties and the counts exceed 256, so both
        # keep their precision and only follow the move to another device.
        kept = {name: getattr(self, name, None) for name in ("expert_bias", "local_tokens_per_expert")}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            if buffer is not None:
                wide = torch.promote_types(getattr(self, name).dtype, buffer.dtype)
                setattr(self, name, buffer.to(device=getattr(self, name).device, dtype=wide))
        return self

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[s, b, h] to logits [s, b, E]; a float32 product whatever the parameter dtype."""
        logits_TE = wide_linear(input.flatten(0, 1), self.weight, wide_gradient=True)
        return logits_TE.unflatten(0, input.shape[:2])

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, E], zero for experts not chosen, and the boolean map [T, E].

        Args:
            logits: [s, b, E].
            padding_mask: [s, b], True for padding, which does not count as load.
        """
        scores_TE = router_scores(logits.flatten(0, 1))
        picks_TK = self._select(scores_TE + self.expert_bias)
        weights, routing_map = self.combine_weights(scores_TE, picks_TK)
        # Counts for Megatron's bias update; the first pass of a recomputed layer has no gradients and is not counted.
        if torch.is_grad_enabled() and self.config.moe_router_bias_update_rate:
            counted = routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1)
            self.local_tokens_per_expert += counted.sum(0)
        return weights, routing_map

    def _select(self, biased_TE: torch.Tensor) -> torch.Tensor:
        """int64 [T, K] best experts, or those that a replay of routes gives."""

        def best(scores: torch.Tensor, k: int, **ignored: object) -> tuple[torch.Tensor, torch.Tensor]:
            values, indices = scores.topk(k, dim=-1)
            return values, indices

        if self.router_replay is None:
            return best(biased_TE, self.topk)[1]
        picks: torch.Tensor = self.router_replay.get_replay_topk(
            biased_TE, self.topk, default_compute_topk=best
        )[1]
        return picks

    def combine_weights(
        self, scores_TE: torch.Tensor, picks_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised, scaled weights and the routing map, both [T, E], for given picks."""
        chosen_TK = scores_TE.gather(1, picks_TK)
        weights_TK = chosen_TK / (chosen_TK.sum(-1, keepdim=True) + 1e-20)
        weights_TK = weights_TK * self.config.moe_router_topk_scaling_factor
        weights_TE = torch.zeros_like(scores_TE).scatter(1, picks_TK, weights_TK)
        return weights_TE, torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, picks_TK, True)


def router_scores(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(logits)). The floor keeps the root's gradient finite where softplus underflows to zero."""
    return torch.nn.functional.softplus(logits).clamp_min(1e-30).sqrt()


class HashRouter(ScoreRouter):
    """Routes by token id: a fixed table says which experts, the scores say with which weight.

    Args:
        config: with `vime_dsv4`.
        pg_collection: process groups of the model.
        is_mtp_layer: as in Megatron.
    """

    tid2eid: torch.Tensor

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        biasless = copy.copy(config)
        biasless.moe_router_enable_expert_bias = False
        super().__init__(biasless, pg_collection, is_mtp_layer)
        # Megatron updates whatever has an attribute of this name, and would trip over None.
        del self.expert_bias
        vocab_size, topk = config.vime_dsv4.vocab_size, config.moe_router_topk
        # Every expert id is invalid until a checkpoint fills the table: a model without it must not train.
        table = torch.full((vocab_size, topk), -1, dtype=torch.int64, device=self.weight.device)
        self.register_buffer("tid2eid", table)

    def forward(
        self,
        input: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and routing map, both [T, E].

        Args:
            input: [s, b, h].
            padding_mask: [s, b], True for padding; such tokens may carry any id.
            token_ids: [s, b] int64.

        Raises:
            ValueError: no ids, ids of another shape, an id outside the table, or a table that was never loaded.
        """
        if token_ids is None:
            raise ValueError(
                f"vime_models.dsv4: layer {self.layer_number} routes by token id but got no ids; build the model with "
                "vime_models.host.provider, or put token_ids into VimePackedSeqParams on every pipeline stage"
            )
        if token_ids.shape != input.shape[:2]:
            raise ValueError(
                f"vime_models.dsv4: expected token ids of shape {tuple(input.shape[:2])} (s, b of the hidden states), "
                f"got {tuple(token_ids.shape)}"
            )
        if padding_mask is not None:
            token_ids = token_ids.masked_fill(padding_mask, 0)
        scores_TE = router_scores(self.gating(input).flatten(0, 1))
        return self.combine_weights(scores_TE, self._lookup(token_ids.reshape(-1)))

    def _lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """int64 [T, K] experts. Raises on the CPU; on a GPU a bad id or a -1 is caught by a device assertion."""
        if ids_T.device.type == "cpu":
            vocab_size = self.tid2eid.shape[0]
            if bad := ids_T[(ids_T < 0) | (ids_T >= vocab_size)].tolist():
                raise ValueError(
                    f"vime_models.dsv4: expected token ids in [0, {vocab_size}), got {bad[:5]}; "
                    "mark padding in padding_mask or use a real id for it"
                )
            if (self.tid2eid[ids_T] < 0).any():
                raise ValueError(
                    f"vime_models.dsv4: tid2eid of layer {self.layer_number} is not loaded; load a checkpoint first"
                )
        return torch.nn.functional.embedding(ids_T, self.tid2eid)


class DSv4MoELayer(MoELayer):
    """Megatron's MoE layer whose router may need token ids, and whose sums have a fixed order.

    Args:
        config: with `vime_dsv4`.
        submodules: `router`, `experts` and `shared_experts`.
        layer_number: 1-based.
        pg_collection: process groups of the model.
        **kwargs: as for Megatron's MoELayer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, submodules, layer_number, groups, **kwargs)
        if RepeatableDispatcher.replaces_that_of(config):
            self.token_dispatcher = RepeatableDispatcher(
                self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=groups
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """[s, b, h] to the pair (same shape, no bias).

        Args:
            hidden_states: normalised input, this rank's sequence shard under sequence parallelism.
            padding_mask: [b, s] of the same shard, True for padding.
            token_ids: [b, s] of the whole sequence; the shard is cut out here.
        """
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        route_by = {}
        if isinstance(self.router, HashRouter):
            route_by = {"token_ids": self._shard(token_ids)}

        # A closure and not module state: when the layer is recomputed, another microbatch may have run since.
        def compute(hidden: torch.Tensor) -> torch.Tensor:
            probs, routing_map = self.router(hidden, padding_mask, **route_by)
            permuted, probs = self.preprocess(hidden, probs, routing_map)
            # Here, because the device has it to do while the host waits for the counts of rows.
            shared = self.shared_experts_compute(hidden)
            dispatched, probs = self.dispatch(permuted, probs)
            output, _ = self.routed_experts_compute(dispatched, probs)
            return self.postprocess(self.combine(output), shared)

        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None

    def _shard(self, token_ids: torch.Tensor | None) -> torch.Tensor | None:
        """[b, s] to [s, b] of this rank's sequence shard."""
        if token_ids is None:
            return None
        ids = token_ids.transpose(0, 1)
        if self.config.sequence_parallel:
            ids = ids.chunk(self.attn_tp_group.size())[self.attn_tp_group.rank()]
        return ids
