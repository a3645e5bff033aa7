# SPDX-License-Identifier: Apache-2.0
"""Routes of experts, replayed by the same manager: entries are expert ids, and a router sees its share of the rows.

Megatron's routers ask an attribute `router_replay` for their picks, with a function that selects natively; `Router`
answers them. Rows that nobody recorded (last tokens, padding) are routed natively: a row of made-up experts would
count as load, and one that repeats an expert has fewer routes than the dispatcher expects.
Source: routing replay, arXiv 2507.18071 and arXiv 2510.11370; the attribute is that of megatron-core 0.19.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from vime_replay.manager import ReplayManager
from vime_replay.spec import ReplaySpec
from vime_replay.topk import hook_ticket


def routing_spec(
    num_layers: int, topk: int, num_experts: int, layers: Iterable[int], *, sequence_parallel: bool = False
) -> ReplaySpec:
    """The spec of rollout routes: one stream for every layer, those without experts too.

    Args:
        num_layers: layers of the model.
        topk: experts per token.
        num_experts: experts of a layer.
        layers: those that route by score, from 0.
        sequence_parallel: whether a router sees only the rows of its tensor-parallel rank.
    """
    return ReplaySpec(
        "routing",
        "rollout_routed_experts",
        num_layers,
        topk,
        {layer: layer for layer in layers},
        ratio=0,
        shard_rows_by_tp=sequence_parallel,
        num_values=num_experts,
    )


class RoutingReplayManager(ReplayManager):
    """A manager of routes; its arguments are those of `ReplayManager`, with a spec of ratio 0."""

    def attach(self, layer_module: torch.nn.Module, router: Any, *, layer: int, chunk: int = 0) -> None:
        """The router of a layer asks this manager from now on; nothing changes while it is disabled.

        Args:
            layer_module: the transformer layer, which is given the packing object.
            router: with the attribute `router_replay`.
            layer: number in the whole model, from 0.
            chunk: model chunk of this rank.
        """
        if self.register(router, layer=layer, chunk=chunk) is not None:
            hook_ticket(layer_module, self)
            router.router_replay = Router(self)


class Router:
    """What a router asks for its picks."""

    layer_number: int | None = None

    def __init__(self, manager: ReplayManager) -> None:
        self.manager = manager

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores at the picks [T, K], picks int64 [T, K]).

        Args:
            scores: [T, E].
            topk: experts per token.
            num_groups: groups of experts, for the native selection.
            group_topk: groups per token, for the native selection.
            default_compute_topk: the native selection.
        """
        if default_compute_topk is None:
            raise TypeError(
                "vime_replay.routing: expected default_compute_topk, got None; pass the native selection"
            )
        native = partial(default_compute_topk, num_groups=num_groups, group_topk=group_topk)
        values, picks = self.manager.wrap_topk(native, return_values=True)(scores, topk)
        return values, picks.long()
