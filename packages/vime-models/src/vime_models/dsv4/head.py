# SPDX-License-Identifier: Apache-2.0
"""End of the decoder: n residual streams to one, then the final norm.

Megatron builds `TransformerBlockSubmodules.layer_norm` exactly where the final norm belongs (the stage of the
last layer), so the contraction lives in that module. Its parameters are therefore
`decoder.final_layernorm.{weight,hc_head_fn,hc_head_base,hc_head_scale}`.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_kernels.mhc import mhc_head
from vime_models.dsv4.hyper_connection import fp32_parameter
from vime_models.host.norm import RMSNorm


class StreamHead(RMSNorm):
    """[s, b, n·h] streams to the normalised [s, b, h] that the output layer reads.

    With draft layers the result is [normalised | streams], [s, b, (1+n)·h]: they read the streams, and Megatron
    hands them one tensor.

    Args:
        config: with `vime_dsv4`.
        hidden_size: h.
        eps: of the final norm; the streams' own norm uses the same number.
        **ignored: options of other norm classes that Megatron passes along.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **ignored: Any
    ) -> None:
        super().__init__(config, hidden_size, eps)
        self.options = config.vime_dsv4
        self.keeps_streams = bool(config.mtp_num_layers)
        streams = self.options.hc_mult
        self.hc_head_fn = fp32_parameter(config, streams, streams * hidden_size, sequence_shard=True)
        self.hc_head_base = fp32_parameter(config, streams, sequence_shard=True)
        self.hc_head_scale = fp32_parameter(config, 1, sequence_shard=True)
        if config.perform_initialization:
            config.init_method(self.hc_head_fn)
            torch.nn.init.ones_(self.hc_head_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, n·h] to [s, b, h], or to [s, b, (1+n)·h] with draft layers."""
        streams = x.reshape(-1, self.options.hc_mult, self.weight.shape[0])
        hidden = mhc_head(
            streams,
            self.hc_head_fn,
            self.hc_head_scale,
            self.hc_head_base,
            eps=self.options.hc_eps,
            norm_eps=self.eps,
            backend=self.options.backend,
        )
        normed = super().forward(hidden.view(*x.shape[:-1], -1))
        return torch.cat([normed, x], -1) if self.keeps_streams else normed
