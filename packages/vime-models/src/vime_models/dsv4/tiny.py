# SPDX-License-Identifier: Apache-2.0
"""Seeded small models for `verify --tiny`: together they have every layer kind and the shapes that expose mistakes.

Chosen so that agreement means something: clamps bite, YaRN changes frequencies within the sequence, more entries
exist than the indexer keeps, mixing weights vary from token to token, and the two epsilons differ visibly in one
case. Enough indexer heads that scores rarely tie exactly.
"""

from typing import Any

import torch

from vime_convert.plugin import TinyCase


def _config(ratios: list[int], hash_layers: int, *, yarn: bool, **sizes: Any) -> dict[str, Any]:
    """A complete `config.json` in the released spelling."""
    config = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 160,
        "hidden_size": 64,
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "index_n_heads": 12,
        "index_head_dim": 24,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "num_hash_layers": hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 0.5,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    if yarn:
        # A short original length: with 65536 nothing would change within a short sequence.
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    return config | sizes


TINY_CASES = (
    TinyCase(
        "flash",
        # The extra entry is that of a draft layer, as in the releases.
        _config([0, 0, 4, 128, 4], 2, yarn=True)
        | {"compress_ratios": [0, 0, 4, 128, 4, 0], "num_nextn_predict_layers": 1},
        seq_len=300,
        covers="sliding, CSA and HCA layers; hash and score routing; a draft layer's entry in the schedule",
    ),
    TinyCase(
        "pro",
        _config([128, 128, 4, 128, 4], 3, yarn=True, num_attention_heads=6, o_groups=6, hc_mult=2),
        seq_len=389,
        covers="HCA first; as many output groups as heads; two streams; three hash layers",
    ),
    TinyCase(
        "pruned",
        _config(
            [0, 0, 4, 128],
            0,
            yarn=False,
            num_attention_heads=5,
            o_groups=1,
            hc_mult=3,
            hc_sinkhorn_iters=1,
            routed_scaling_factor=2.5,
        ),
        seq_len=301,
        covers="plain RoPE; odd heads in one group; three streams; one Sinkhorn pass; score routing only",
    ),
    TinyCase(
        "csa",
        _config(
            [4, 4],
            1,
            yarn=True,
            num_attention_heads=3,
            o_groups=3,
            index_head_dim=16,
            index_n_heads=16,
            index_topk=5,
            num_experts_per_tok=2,
        ),
        seq_len=517,
        covers="CSA only, few picks; an indexer head that rotates whole",
    ),
    TinyCase(
        "large-eps",
        _config([0, 4, 128], 1, yarn=True, hc_eps=2e-2, rms_norm_eps=3e-3),
        seq_len=300,
        covers="two large, different epsilons: a misplaced one shows even in float32",
    ),
)


def init_tiny(hf_name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The value of one floating tensor of a tiny checkpoint, in float32.

    Args:
        hf_name: release name.
        shape: of the tensor.
        generator: on the CPU.
    """
    noise = torch.randn(shape, generator=generator)
    if hf_name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if hf_name.endswith("_scale"):
        return 1 + 0.25 * noise
    if hf_name.endswith(("_base", ".ape")):
        return 0.5 * noise
    if hf_name.endswith("gate.bias"):
        return 0.3 * noise
    if hf_name.endswith("attn_sink") or hf_name == "embed.weight":
        return noise
    # What is left multiplies vectors of unit size; outputs of the clamped experts are small, logits should not be.
    gain = 4.0 if hf_name.endswith(".w2.weight") else 2.0 if hf_name == "head.weight" else 1.0
    return gain * noise * shape[-1] ** -0.5
