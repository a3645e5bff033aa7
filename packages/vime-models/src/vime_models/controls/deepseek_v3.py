# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 (latent attention, dense then mixture-of-experts layers) from stock Megatron layers.

Plain rotary embeddings only; the draft layer of the releases is left out.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig

from vime_convert.controls import deepseek_v3_table
from vime_convert.plugin import ModelPlugin, TinyCase
from vime_models.controls import common


def _fields(cfg: Mapping[str, Any]) -> dict[str, Any]:
    common.expect(cfg, "norm_topk_prob", True, True)
    common.expect(cfg, "rope_interleave", True, True)
    layers, dense = cfg["num_hidden_layers"], cfg["first_k_dense_replace"]
    if cfg["num_experts_per_tok"] != 2 * cfg["topk_group"]:
        # Megatron scores a group of experts by its best topk / topk_group, transformers by its best two.
        raise common.ControlConfigError(
            "vime_models.controls: deepseek_v3: expected num_experts_per_tok == 2 * topk_group, "
            f"got {cfg['num_experts_per_tok']} and {cfg['topk_group']}"
        )
    return common.shared_fields(cfg) | {
        "multi_latent_attention": True,
        "q_lora_rank": cfg["q_lora_rank"],
        "kv_lora_rank": cfg["kv_lora_rank"],
        "qk_head_dim": cfg["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": cfg["qk_rope_head_dim"],
        "v_head_dim": cfg["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": common.rope_theta(cfg),
        "rotary_scaling_factor": 1.0,  # Megatron scales the softmax by it even for plain rotary embeddings
        "num_moe_experts": cfg["n_routed_experts"],
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_ffn_hidden_size": cfg["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": cfg["moe_intermediate_size"] * cfg["n_shared_experts"],
        "moe_router_topk": cfg["num_experts_per_tok"],
        "moe_router_num_groups": cfg["n_group"],
        "moe_router_group_topk": cfg["topk_group"],
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": cfg["routed_scaling_factor"],
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


TINY_CASE = TinyCase(
    "deepseek-v3",
    {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    seq_len=97,
    covers="latent attention with narrower values, dense then expert layers, group-limited biased routing",
)

PLUGIN = ModelPlugin(
    model_type="deepseek_v3",
    setup=common.setup,
    build=partial(common.build, config_class=MLATransformerConfig, fields=_fields),
    rules=deepseek_v3_table,
    forward=common.forward,
    layer_states=common.layer_states,
    tiny_cases=(TINY_CASE,),
    init_tiny=common.init_tiny,
)
