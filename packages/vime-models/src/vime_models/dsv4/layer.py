# SPDX-License-Identifier: Apache-2.0
"""One decoder layer: attention and MoE, each inside its own hyper-connection.

Between layers and between pipeline stages the n streams travel as [s, b, n·h], stream-major, because Megatron
exchanges three-dimensional tensors. The first layer of the model copies the embedding to every stream.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import make_viewless_tensor

from vime_models.dsv4.hyper_connection import add_hyper_connection, connect


class DSv4TransformerLayer(TransformerLayer):
    """Megatron's layer with residual streams in place of residual additions.

    Args:
        config: with `vime_dsv4`.
        submodules: `input_layernorm`, `self_attention`, `pre_mlp_layernorm` and `mlp`.
        **kwargs: as for Megatron's TransformerLayer.
    """

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, **kwargs)
        add_hyper_connection(self, "hc_attn", config)
        add_hyper_connection(self, "hc_ffn", config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        **ignored: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Streams [s, b, n·h] after the layer, and `context` unchanged.

        Args:
            hidden_states: streams [s, b, n·h]; the embedding [s, b, h] in the first layer of the model.
            attention_mask: not read; the model is causal.
            context: passed through.
            packed_seq_params: packed sequences and, for hash layers, token ids.
            padding_mask: [b, s], True for padding.
            inference_context: must be None.
            **ignored: rotary embeddings and biases of Megatron's own attention.

        Raises:
            ValueError: called for inference, or with a width that is not n·h.
        """
        if inference_context is not None:
            raise ValueError("vime_models.dsv4: inference is not supported; use the rollout engine")
        s, b, width = hidden_states.shape
        n, h = self.config.vime_dsv4.hc_mult, self.config.hidden_size
        if self.layer_number == 1:
            hidden_states = hidden_states.unsqueeze(2).expand(s, b, n, h)
        elif width != n * h:
            raise ValueError(
                f"vime_models.dsv4: layer {self.layer_number} expected hc_mult · hidden_size = {n * h} channels, got "
                f"{width}; with pipeline parallelism set variable_seq_lengths"
            )
        token_ids = getattr(packed_seq_params, "token_ids", None)

        def attention(u_TC: torch.Tensor) -> torch.Tensor:
            normed = self.input_layernorm(u_TC.view(s, b, h))
            return self.self_attention(normed, packed_seq_params=packed_seq_params)[0].reshape(-1, h)

        def moe(u_TC: torch.Tensor) -> torch.Tensor:
            normed = self.pre_mlp_layernorm(u_TC.view(s, b, h))
            return self.mlp(normed, padding_mask=padding_mask, token_ids=token_ids)[0].reshape(-1, h)

        X_TnC = hidden_states.reshape(s * b, n, h)
        X_TnC = connect(self, "hc_attn", X_TnC, attention)
        X_TnC = connect(self, "hc_ffn", X_TnC, moe)
        streams = X_TnC.view(s, b, n * h)
        # A stage frees what it has sent, which a view of another tensor would keep alive.
        return make_viewless_tensor(streams, requires_grad=streams.requires_grad, keep_graph=True), context
