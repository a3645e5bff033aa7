# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (MTP): a draft block that reads the residual streams and predicts one token further.

    X_mtp = e_proj · enorm(embedding of the next token), on every stream, + h_proj · hnorm(streams)
    block without compressed entries, routed by score  →  its own head, the model's embedding and output layer

Megatron's MTP block, loss and pipeline placement are used as they are. They pass one tensor from the decoder to
the draft layer and from there to the next, so on these models that tensor is [normalised | streams] (see
`StreamHead`); `VimeGPTModel` cuts the streams off behind the block. Being a value like any other, the streams survive
recomputation and are those of their own microbatch.
Row t attends as token t; its next token never comes from another sequence, and the last row has no loss.
Left out: context parallelism, drafts on another stage than the last decoder layer, inference.
Source: DeepSeek-V4's released weights and vLLM's draft model, which agree on the input of the block.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules, roll_tensor
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_models.dsv4.head import StreamHead
from vime_models.host.backend import Backend


class StreamMTPLayer(MegatronModule):
    """One draft depth, in place of Megatron's MultiTokenPredictionLayer.

    Args:
        config: with `vime_dsv4`.
        block: spec of the layer inside.
        layer_number: depth, counted from 1.
        pg_collection: process groups of the model.
        vp_stage: virtual stage.
        **ignored: options of Megatron's own layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        block: ModuleSpec,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        width, eps, backend = config.hidden_size, config.layernorm_epsilon, Backend.from_config(config)
        self.enorm = backend.norm(config=config, hidden_size=width, eps=eps)
        self.hnorm = backend.norm(config=config, hidden_size=width, eps=eps)
        for name in ("e_proj", "h_proj"):
            linear = backend.replicated_linear(
                width, width, config=config, init_method=config.init_method, bias=False
            )
            self.add_module(name, linear)
        self.mtp_model_layer = build_module(
            block,
            config=config,
            layer_number=config.num_layers + layer_number,
            is_mtp_layer=True,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        self.final_layernorm = StreamHead(config, width, eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        embedding: Any = None,
        **ignored: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """[normalised | streams] of this depth, and ids, positions and mask moved on by one token.

        Args:
            input_ids: [b, s], the tokens of the depth before.
            position_ids: [b, s] or None; this model does not read them.
            hidden_states: [s, b, (1+n)·h], [normalised | streams] of the depth before.
            attention_mask: not read; the model is causal.
            padding_mask: [b, s], True for padding.
            packed_seq_params: packed sequences.
            embedding: of the model.
            **ignored: rotary embeddings and inference options.
        """

        def moved(rows: Any) -> Any:
            return roll_tensor(rows, shifts=-1, dims=-1, packed_seq_params=packed_seq_params)[0]

        ids, position_ids, padding_mask = moved(input_ids), moved(position_ids), moved(padding_mask)
        following = embedding(input_ids=ids, position_ids=position_ids)

        def compute(hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            width = self.config.hidden_size
            streams = hidden[..., width:].unflatten(-1, (-1, width))
            entering = (
                self.e_proj(self.enorm(following))[0].unsqueeze(-2) + self.h_proj(self.hnorm(streams))[0]
            )
            streams, _ = self.mtp_model_layer(
                entering.flatten(-2), packed_seq_params=packed_seq_params, padding_mask=padding_mask
            )
            return self.final_layernorm(streams)

        if self.config.recompute_granularity == "full" and self.training:
            return (
                tensor_parallel.checkpoint(compute, False, hidden_states, following),
                ids,
                position_ids,
                padding_mask,
            )
        return compute(hidden_states, following), ids, position_ids, padding_mask


def draft_block(config: TransformerConfig, block: ModuleSpec) -> MultiTokenPredictionBlockSubmodules:
    """The spec that GPTModel takes: as many depths as `mtp_num_layers`, all built from one layer spec."""
    layer = ModuleSpec(module=StreamMTPLayer, params={"block": block})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)
