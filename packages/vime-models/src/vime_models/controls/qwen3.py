# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (dense, grouped-query attention with per-head norms) from stock Megatron layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from vime_convert.controls import qwen3_table
from vime_convert.plugin import ModelPlugin, TinyCase
from vime_models.controls import common


def _fields(cfg: Mapping[str, Any]) -> dict[str, Any]:
    common.expect(cfg, "use_sliding_window", False, False)
    return common.shared_fields(cfg) | {
        "num_query_groups": cfg["num_key_value_heads"],
        "kv_channels": cfg["head_dim"],
    }


TINY_CASE = TinyCase(
    "qwen3",
    {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    seq_len=97,
    covers="grouped-query attention whose heads do not add up to the hidden size, per-head norms, dense MLP",
)

PLUGIN = ModelPlugin(
    model_type="qwen3",
    setup=common.setup,
    build=partial(common.build, config_class=TransformerConfig, fields=_fields),
    rules=qwen3_table,
    forward=common.forward,
    layer_states=common.layer_states,
    tiny_cases=(TINY_CASE,),
    init_tiny=common.init_tiny,
)
