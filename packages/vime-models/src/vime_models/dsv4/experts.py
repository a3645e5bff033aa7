# SPDX-License-Identifier: Apache-2.0
"""Experts whose activation is one operation: both halves clamped, multiplied, and weighted by the router in float32.

Megatron's own experts do the same in half a dozen passes over the widest tensor of the layer, rounding after each.
Parameters, names and sharding stay Megatron's. Left out: TransformerEngine's grouped experts, used as they are.
"""

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from vime_kernels.moe import swiglu


class Experts(SequentialMLP):
    """The routed experts of a rank, one after the other."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Rows sorted by expert to the pair (outputs of the counted rows times their weight, no bias).

        Args:
            permuted_local_hidden_states: [R, h].
            tokens_per_expert: [experts of this rank], integers that sum to at most R.
            permuted_probs: [R], the router's weights.
        """
        counts = tokens_per_expert.tolist()
        sizes = [*counts, len(permuted_probs) - sum(counts)]
        parts = zip(
            self.local_experts,
            permuted_local_hidden_states.split(sizes)[:-1],
            permuted_probs.split(sizes)[:-1],
            strict=True,
        )
        return torch.cat([apply(expert, rows, weights) for expert, rows, weights in parts]), None


class SharedExpert(SharedExpertMLP):
    """The expert of every token; it has no gate."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] to the same shape."""
        return apply(self, hidden_states)


def apply(expert: MLP, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """[..., h] to the same shape, through the linears of one expert.

    Args:
        expert: with `config.vime_dsv4`.
        rows: [..., h].
        weights: [...], or None.
    """
    limit = expert.config.activation_func_clamp_value
    hidden = swiglu(
        expert.linear_fc1(rows)[0],
        weights,
        limit=float("inf") if limit is None else limit,
        backend=expert.config.vime_dsv4.backend,
    )
    output: torch.Tensor = expert.linear_fc2(hidden)[0]
    return output
