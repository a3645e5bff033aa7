# SPDX-License-Identifier: Apache-2.0
"""Layer specs of this pipeline stage: which attention and which router each layer gets."""

from argparse import Namespace
from functools import partial

from megatron.core.transformer.identity_op import IdentityFuncOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from vime_models.dsv4 import native
from vime_models.dsv4.attention import DSv4Attention
from vime_models.dsv4.config import DSv4Options, attach
from vime_models.dsv4.experts import SharedExpert
from vime_models.dsv4.head import StreamHead
from vime_models.dsv4.layer import DSv4TransformerLayer
from vime_models.dsv4.moe import DSv4MoELayer, HashRouter, ScoreRouter
from vime_models.dsv4.mtp import draft_block
from vime_models.dsv4.qat import experts_of
from vime_models.host.backend import Backend
from vime_models.host.specs import stage_layer_ids


def block_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The spec of this stage; attaches the options to the config unless they are there already.

    Raises:
        DSv4OptionError: a flag is missing or wrong.
        RuntimeError: the host's own variant was asked for and is not usable.
    """
    options = getattr(config, "vime_dsv4", None) or DSv4Options.from_args(args)
    attach(options, config)
    if options.impl == "megatron":
        return native.block_spec(options, config, vp_stage)
    backend = Backend.from_config(config)
    layers = [
        _layer_spec(options, backend, options.compress_ratios[layer], hashed=layer < options.num_hash_layers)
        for layer in stage_layer_ids(config, vp_stage)
    ]
    if config.mtp_num_layers:
        config.vime_mtp_block = draft_block(config, _layer_spec(options, backend, 0, hashed=False))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=StreamHead)


def _layer_spec(options: DSv4Options, backend: Backend, ratio: int, *, hashed: bool) -> ModuleSpec:
    """Args: ratio: compression of the attention; hashed: whether experts are chosen by token id."""
    mlp = MLPSubmodules(linear_fc1=backend.column_linear, linear_fc2=backend.row_linear)
    moe = MoESubmodules(
        experts=experts_of(backend, options),
        shared_experts=partial(SharedExpert, submodules=mlp),
        router=HashRouter if hashed else ScoreRouter,
    )
    return ModuleSpec(
        module=DSv4TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=backend.norm,
            self_attention=ModuleSpec(module=DSv4Attention, params={"compress_ratio": ratio}),
            self_attn_bda=IdentityFuncOp,
            pre_mlp_layernorm=backend.norm,
            mlp=partial(DSv4MoELayer, submodules=moe),
            mlp_bda=IdentityFuncOp,
        ),
    )
