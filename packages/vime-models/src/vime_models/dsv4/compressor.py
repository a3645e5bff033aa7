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
from vime_models.dsv4.thd import TokenLayout
from vime_models.host.backend import Backend
from vime_models.host.linear import wide_linear


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
            reach, cu_seqlens, owned, missing = layout.owned_pools(self.ratio, overlap=self.overlap)
            slices = hidden.view(len(layout.starts), layout.halo + layout.length, -1)
            hidden = slices[:, layout.halo - reach :].flatten(0, 1)
        # The pooled entries feed a discrete selection, so the projections are not rounded to bfloat16 first.
        pooled, _ = gated_pool(
            wide_linear(hidden, self.wkv.weight),
            wide_linear(hidden, self.wgate.weight),
            self.ape,
            cu_seqlens,
            self.ratio,
            overlap=self.overlap,
            backend=self.config.vime_dsv4.backend,
        )
        if layout.halo:
            pooled = pooled.index_select(0, owned).masked_fill(missing, 0.0)
        entries = self.norm(pooled.to(hidden.dtype))
        rotation = layout.entry_rotation(table, self.ratio, hidden.dtype)
        return rotate(entries, *rotation, backend=self.config.vime_dsv4.backend)
