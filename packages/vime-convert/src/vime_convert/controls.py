# SPDX-License-Identifier: Apache-2.0
"""Names of two ordinary models, Qwen3 and DeepSeek-V3, that check the converter and the verifier themselves.

If a comparison fails for these, whose Megatron code is the host's own, the fault is in the harness. Covered is what
such a control needs: no tied embeddings, no attention biases, no multi-token prediction. Source of the names:
`save_pretrained` and `state_dict()` of transformers 5.24, and Megatron's local layer specs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vime_convert.dialects import Dialect, Fused, split_indices
from vime_convert.errors import ConfigError
from vime_convert.rules import Rule, RuleTable

_MCORE, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def qwen3_table(cfg: Mapping[str, Any]) -> RuleTable:
    """All rules of a Qwen3 model.

    Raises:
        ConfigError: a field is missing, or the model ties its embeddings or has attention biases.
    """
    _check(cfg, "qwen3")
    width, heads, groups = cfg["hidden_size"], cfg["num_attention_heads"], cfg["num_key_value_heads"]
    dim = cfg.get("head_dim") or width // heads
    layers = tuple(range(cfg["num_hidden_layers"]))
    attention = _HF + "self_attn."
    rules = [
        *_outer_rules(cfg),
        Rule(
            _MCORE + "self_attention.linear_qkv.weight",
            (attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"),
            ((heads * dim, width), (groups * dim, width), (groups * dim, width)),
            kind="qkv_grouped",
            layers=layers,
            tp_dim=0,
            head_groups=groups,
        ),
        _copy(
            layers, "self_attention.linear_proj.weight", "self_attn.o_proj.weight", (width, heads * dim), tp=1
        ),
        _copy(layers, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight", (dim,)),
        _copy(layers, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight", (dim,)),
        *_norm_rules(layers, width),
        *_gated(layers, "mlp.", "mlp.", width, cfg["intermediate_size"]),
    ]
    return _table(cfg, "qwen3", rules, ())


def deepseek_v3_table(cfg: Mapping[str, Any]) -> RuleTable:
    """All rules of a DeepSeek-V3 model; its draft layers are left out.

    Raises:
        ConfigError: a field is missing, or the model ties its embeddings, has attention biases or no query rank.
    """
    _check(cfg, "deepseek_v3")
    if not cfg.get("q_lora_rank"):
        raise ConfigError("deepseek_v3 config.json: expected q_lora_rank to be positive, got none")
    width, heads, experts = cfg["hidden_size"], cfg["num_attention_heads"], cfg["n_routed_experts"]
    q_rank, kv_rank, rope = cfg["q_lora_rank"], cfg["kv_lora_rank"], cfg["qk_rope_head_dim"]
    nope, value, inner = cfg["qk_nope_head_dim"], cfg["v_head_dim"], cfg["moe_intermediate_size"]
    layers = tuple(range(cfg["num_hidden_layers"]))
    dense, sparse = layers[: cfg["first_k_dense_replace"]], layers[cfg["first_k_dense_replace"] :]
    a, h = "self_attention.", "self_attn."
    rules = [
        *_outer_rules(cfg),
        _copy(layers, a + "linear_q_down_proj.weight", h + "q_a_proj.weight", (q_rank, width)),
        _copy(layers, a + "q_layernorm.weight", h + "q_a_layernorm.weight", (q_rank,)),
        _copy(
            layers,
            a + "linear_q_up_proj.weight",
            h + "q_b_proj.weight",
            (heads * (nope + rope), q_rank),
            tp=0,
        ),
        _copy(
            layers, a + "linear_kv_down_proj.weight", h + "kv_a_proj_with_mqa.weight", (kv_rank + rope, width)
        ),
        _copy(layers, a + "kv_layernorm.weight", h + "kv_a_layernorm.weight", (kv_rank,)),
        _copy(
            layers,
            a + "linear_kv_up_proj.weight",
            h + "kv_b_proj.weight",
            (heads * (nope + value), kv_rank),
            tp=0,
        ),
        _copy(layers, a + "linear_proj.weight", h + "o_proj.weight", (width, heads * value), tp=1),
        *_norm_rules(layers, width),
        *_gated(dense, "mlp.", "mlp.", width, cfg["intermediate_size"]),
        _copy(sparse, "mlp.router.weight", "mlp.gate.weight", (experts, width)),
        _copy(
            *(sparse, "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", (experts,)),
            dtype=torch.float32,
        ),
        *_gated(sparse, "mlp.experts.", "mlp.experts.{expert}.", width, inner, experts),
        *_gated(
            *(sparse, "mlp.shared_experts.", "mlp.shared_experts.", width),
            inner * cfg.get("n_shared_experts", 1),
        ),
    ]
    stacked, one = "model.layers.{}.mlp.experts.", "model.layers.{}.mlp.experts.{}."
    fused = (
        Fused(stacked + "gate_up_proj", (one + "gate_proj.weight", one + "up_proj.weight")),
        Fused(stacked + "down_proj", (one + "down_proj.weight",)),
    )
    # The draft layers of a release come after the decoder layers.
    first = len(layers)
    drafts = tuple(rf"model\.layers\.{first + i}\..*" for i in range(cfg.get("num_nextn_predict_layers", 0)))
    return _table(cfg, "deepseek_v3", rules, fused, ignored=drafts)


def _check(cfg: Mapping[str, Any], model_type: str) -> None:
    if cfg.get("model_type") != model_type:
        raise ConfigError(f"config.json: expected model_type {model_type!r}, got {cfg.get('model_type')!r}")
    for field in ("tie_word_embeddings", "attention_bias"):
        if cfg.get(field):
            raise ConfigError(f"{model_type} config.json: expected {field} to be false, got {cfg[field]!r}")


def _table(
    cfg: Mapping[str, Any],
    model_type: str,
    rules: Sequence[Rule],
    fused: tuple[Fused, ...],
    ignored: tuple[str, ...] = (),
) -> RuleTable:
    rules = tuple(rule for rule in rules if rule.layers or "{layer}" not in rule.mcore)
    names = {split_indices(name.format(layer=0, expert=0))[0] for rule in rules for name in rule.hf}
    release = Dialect("release", {name: name for name in names}, scale_suffix="weight_scale_inv")
    dialects = [release]
    if fused:
        parts = {part for entry in fused for part in entry.parts}
        dialects.append(Dialect("hf-module", {name: name for name in names - parts}, fused=fused))
    return RuleTable(model_type, cfg["num_hidden_layers"], rules, tuple(dialects), ignored, ("layer_types",))


def _copy(
    layers: tuple[int, ...],
    mcore: str,
    hf: str,
    shape: tuple[int, ...],
    *,
    tp: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Rule:
    return Rule(_MCORE + mcore, (_HF + hf,), (shape,), dtype, layers=layers, tp_dim=tp)


def _outer_rules(cfg: Mapping[str, Any]) -> list[Rule]:
    vocab = (cfg["vocab_size"], cfg["hidden_size"])
    return [
        Rule(
            "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocab,), tp_dim=0, vocab=True
        ),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), ((cfg["hidden_size"],),)),
        Rule("output_layer.weight", ("lm_head.weight",), (vocab,), tp_dim=0, vocab=True),
    ]


def _norm_rules(layers: tuple[int, ...], width: int) -> list[Rule]:
    return [
        _copy(layers, "input_layernorm.weight", "input_layernorm.weight", (width,)),
        _copy(layers, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (width,)),
    ]


def _gated(
    layers: tuple[int, ...], mcore: str, hf: str, width: int, inner: int, experts: int = 0
) -> list[Rule]:
    suffix = "{expert}" if experts else ""
    names = (_HF + hf + "gate_proj.weight", _HF + hf + "up_proj.weight")
    first, second = (f"{_MCORE}{mcore}linear_fc{i}.weight{suffix}" for i in (1, 2))
    halves, down = ((inner, width), (inner, width)), (_HF + hf + "down_proj.weight",)
    return [
        Rule(first, names, halves, kind="gate_up", layers=layers, num_experts=experts, tp_dim=0),
        Rule(second, down, ((width, inner),), layers=layers, num_experts=experts, tp_dim=1),
    ]
