# SPDX-License-Identifier: Apache-2.0
"""Compressed keys: a learned gated average of every `ratio` consecutive tokens.

Ratio 128 averages its own 128 tokens. Ratio 4 overlaps: an entry averages the first half of the previous group's
channels and the second half of its own, so it covers 8 tokens at stride 4. Tokens after the last full group form
no entry. Sources: DeepSeek-V4 technical report, eqs. 9-12 (CSA) and 20-23 (HCA).
"""

from typing import Any, cast

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_kernels.dsa import gated_pool
from vime_models.dsv4.hyper_connection import fp32_parameter
from vime_models.dsv4.rope import RotaryTable, rotate
from vime_models.dsv4.thd import TokenLayout, local_positions
from vime_models.host.backend import Backend


class Compressor(MegatronModule):
    """Hidden states [T, h] to rotated compressed entries [M, width].

    Args:
        config: with `sequence_parallel` off, because the compressor sees whole sequences.
        ratio: tokens per entry, 4 or 128.
        width: channels of an entry.
    """

    def __init__(self, config: TransformerConfig, ratio: int, width: int) -> None:
        super().__init__(config)
        self.ratio = ratio
        self.overlap = ratio == 4
        backend = Backend.from_config(config)
        channels = width * (2 if self.overlap else 1)
        given = {"config": config, "init_method": config.init_method, "bias": False}
        self.wkv = backend.replicated_linear(config.hidden_size, channels, **given)
        self.wgate = backend.replicated_linear(config.hidden_size, channels, **given)
        self.ape = fp32_parameter(config, ratio, channels, sequence_shard=False)
        self.norm = backend.norm(config=config, hidden_size=width, eps=config.layernorm_epsilon)

    def forward(self, hidden: torch.Tensor, layout: TokenLayout, table: RotaryTable) -> torch.Tensor:
        """Entries [T // ratio, width] of all sequences, in the dtype of `hidden`; unused rows are zero.

        Of a slice of the stream, the entries [G · C, width] that it owns (`TokenLayout.owned_entries`).

        Args:
            hidden: [N, h], the normalised input of the attention, with the halo of each slice.
            layout: of the tokens.
            table: rotation of the layer.
        """
        cu_seqlens = layout.cu_seqlens
        if layout.halo:
            reach, cu_seqlens, first = layout.pools(self.ratio, overlap=self.overlap)
            slices = hidden.view(len(layout.starts), layout.halo + layout.length, -1)
            hidden = slices[:, layout.halo - reach :].flatten(0, 1)
        pooled, cu_entries = gated_pool(
            _wide_linear(hidden, self.wkv.weight),
            _wide_linear(hidden, self.wgate.weight),
            self.ape,
            cu_seqlens,
            self.ratio,
            overlap=self.overlap,
            backend=self.config.vime_dsv4.backend,
        )
        if layout.halo:
            numbers, count = layout.owned_entries(self.ratio)
            slots = torch.arange(numbers.shape[1], device=pooled.device)
            exists = slots < count
            pooled = pooled.index_select(0, torch.where(exists, first + slots, 0).flatten())
            pooled = pooled.masked_fill(~exists.view(-1, 1), 0.0)
            positions = layout.entry_positions(numbers.flatten(), self.ratio)
        else:
            # An entry stands at the first token of its group.
            positions = local_positions(cu_entries, pooled.shape[0]) * self.ratio
        entries = self.norm(pooled.to(hidden.dtype))
        backend = self.config.vime_dsv4.backend
        return rotate(entries, *table.cos_sin(positions, hidden.dtype), backend=backend)


class _WideLinear(torch.autograd.Function):
    """x · wᵀ with operands as stored and the result in float32, on tensor cores and without wide copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        # Rounded as every other gradient that enters a product with a bfloat16 weight.
        grad = grad.to(x.dtype)
        needs_x, needs_weight = ctx.needs_input_grad
        return grad @ weight if needs_x else None, grad.t() @ x if needs_weight else None


def _wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # The pooled entries feed a discrete selection, so the projection is not rounded to bfloat16 first:
    # operands as stored, result in float32, which is what the rollout engine computes.
    if x.is_cuda and x.dtype is weight.dtype is torch.bfloat16 and "dtype" in torch.ops.aten.mm.overloads():
        return cast(torch.Tensor, _WideLinear.apply(x, weight))
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide))
