# SPDX-License-Identifier: Apache-2.0
"""What is measured: four layers of DeepSeek-V4-Flash at their real width, and how they are spread over GPUs, as data.

Cut to one GPU: 4 of 43 layers, one of each kind and a second ratio-4 one; 16 of 256 experts, which with 6 picks a token
gives an expert the rows that it gets at EP 16; an eighth of the vocabulary, about the share of four layers.
"""

from dataclasses import dataclass, field
from typing import Any

FLASH_SLICE: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 16160,
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}

# Lengths of the samples in a pack.
PACKS = {
    "2k": (1024, 512, 320, 192),
    "16k": (8192, 4096, 2560, 1536),
    "64k": (32768, 16384, 10240, 6144),
    "64k-single": (65536,),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CONTIGUOUS = {"cp": 2, "cp_layout": "contiguous"}


@dataclass(frozen=True)
class Case:
    """One measured configuration.

    Attributes:
        world: GPUs.
        pack: name of the lengths of a microbatch.
        microbatches: of a step, on each data-parallel rank.
        options: of the build, on top of the slice.
    """

    world: int
    pack: str
    microbatches: int = 1
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "16k": Case(1, "16k"),
    "16k-rollout-qat": Case(1, "16k", options={"qat": "rollout"}),
    "2k": Case(1, "2k"),
    "16k-recompute": Case(1, "16k", options=FULL),
    "16k-recompute-torch": Case(1, "16k", options={"kernels": "torch"} | FULL),
    "2k-torch": Case(1, "2k", options={"kernels": "torch"}),
    "16k-4x": Case(1, "16k", 4),
    "64k": Case(1, "64k", options=FULL),
    "64k-4x": Case(1, "64k", 4, options=FULL),
    "64k-single": Case(1, "64k-single", options=FULL),
    "cp2-16k": Case(2, "16k", options=CONTIGUOUS),
    "cp2-64k": Case(2, "64k", options=CONTIGUOUS | FULL),
    "cp2-64k-single": Case(2, "64k-single", options=CONTIGUOUS | FULL),
    "cp2-64k-single-balanced": Case(2, "64k-single", options=CONTIGUOUS | FULL | {"cp_balance": True}),
    "tp2-16k": Case(2, "16k", options={"tp": 2}),
    "tp2-64k": Case(2, "64k", options={"tp": 2} | FULL),
    "ep2-16k": Case(2, "16k", options={"ep": 2}),
    "ep2-64k": Case(2, "64k", options={"ep": 2} | FULL),
    "pp2-16k-4x": Case(2, "16k", 4, options={"pp": 2}),
    "pp2-64k-4x": Case(2, "64k", 4, options={"pp": 2} | FULL),
}
