# SPDX-License-Identifier: Apache-2.0
"""Compressed keys: a learned gated average of every `ratio` consecutive tokens.

Ratio 128 averages its own 128 tokens. Ratio 4 overlaps: an entry averages the first half of the previous group's
channels and the second half of its own, so it covers 8 tokens at stride 4. Tokens after the last full group form
no entry. Sources: DeepSeek-V4 technical report, eqs. 9-12 (CSA) and 20-23 (HCA).
"""

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

        Args:
            hidden: [T, h], the normalised input of the attention.
            layout: of the T tokens.
            table: rotation of the layer.
        """
        pooled, cu_entries = gated_pool(
            _wide_linear(hidden, self.wkv.weight),
            _wide_linear(hidden, self.wgate.weight),
            self.ape,
            layout.cu_seqlens,
            self.ratio,
            overlap=self.overlap,
            backend=self.config.vime_dsv4.backend,
        )
        entries = self.norm(pooled.to(hidden.dtype))
        # An entry stands at the first token of its group.
        positions = local_positions(cu_entries, entries.shape[0]) * self.ratio
        return rotate(entries, *table.cos_sin(positions, hidden.dtype))


def _wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # The pooled entries feed a discrete selection, so the projection is not rounded to bfloat16 first:
    # operands as stored, result in float32, which is what the rollout engine computes.
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide))
