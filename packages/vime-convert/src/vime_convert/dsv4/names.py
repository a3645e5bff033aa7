# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's tensors: release names, Megatron names, shapes, and the dialects in use.

Dialects: `release` (the published files), `dpsk-hf` (SGLang and miles), `hf-module` (the `state_dict()` of
transformers, experts stacked), `hf-save-5.24` (what `save_pretrained` of transformers 5.24 writes) and
`hf-save-5.12` (the same of 5.12, read only). The draft layers `mtp.*` are carried between dialects; only a table made
with `draft_layers` has Megatron parameters for them. Source of the names: the release's index file, and the state_dict
and save_pretrained output of transformers 5.24, which tests compare with this table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vime_convert.dialects import Dialect, Fused
from vime_convert.dsv4.config_forms import folded, released
from vime_convert.dsv4.hf_config import MODEL_TYPE, DSv4HFConfig, read_config
from vime_convert.errors import ConfigError
from vime_convert.rules import Rule, RuleTable

# Names within one layer: release, and the module of transformers.
_ATTENTION = {
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
}
_COMPRESSOR = {
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
}
_REST = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
_LAYER = _ATTENTION | _COMPRESSOR | _REST
_EXPERTS = ("ffn.experts.{}.w1.weight", "ffn.experts.{}.w2.weight", "ffn.experts.{}.w3.weight")

# Names outside the layers: release, module of transformers, its save_pretrained, dpsk-hf.
_GLOBAL = {
    "embed.weight": ("model.embed_tokens.weight", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    "head.weight": ("lm_head.weight", "head.weight", "lm_head.weight"),
    "norm.weight": ("model.norm.weight", "model.norm.weight", "model.norm.weight"),
    "hc_head_fn": ("model.hc_head.hc_fn", "model.hc_head.hc_fn", "model.hc_head_fn"),
    "hc_head_base": ("model.hc_head.hc_base", "model.hc_head.hc_base", "model.hc_head_base"),
    "hc_head_scale": ("model.hc_head.hc_scale", "model.hc_head.hc_scale", "model.hc_head_scale"),
}

# Components that dpsk-hf spells differently; names outside this table are the release's.
_DPSK = {
    "attn": "self_attn",
    "ffn": "mlp",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_DPSK_LEAF = {"ffn.gate.bias": "mlp.gate.e_score_correction_bias", "ffn.gate.tid2eid": "mlp.topk.tid2eid"}

# A draft layer: a block without compressor, and these; dpsk-hf files it as a decoder layer after the last one.
_DRAFT_DPSK = {
    "e_proj.weight": "e_proj.weight",
    "h_proj.weight": "h_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
    "head.weight": "shared_head.head.weight",
    "emb.tok_emb.weight": "embed_tokens.weight",
    "hc_head_fn": "hc_head_fn",
    "hc_head_base": "hc_head_base",
    "hc_head_scale": "hc_head_scale",
}


def _dpsk(leaf: str) -> str:
    return _DPSK_LEAF.get(leaf) or ".".join(_DPSK.get(part, part) for part in leaf.split("."))


def dialects(config: DSv4HFConfig) -> tuple[Dialect, ...]:
    """The dialects of DeepSeek-V4; the release first."""
    layer, stored = "layers.{}.", "model.layers.{}."
    leaves = [*_LAYER, *_EXPERTS]
    drafts = [leaf for leaf in leaves if leaf not in _COMPRESSOR]
    modules = {layer + leaf: stored + name for leaf, name in _LAYER.items()}
    saved = {layer + leaf: stored + leaf for leaf in leaves}
    # save_pretrained undoes kv_norm -> norm for the compressor's norm and hits the attention's as well.
    saved[layer + "attn.kv_norm.weight"] = stored + "attn.norm.weight"
    saved_512 = modules | {layer + leaf: stored + leaf.replace("ffn", "mlp") for leaf in _EXPERTS}
    module_names, save_names, dpsk_names = (
        {name: spelt[column] for name, spelt in _GLOBAL.items()} for column in range(3)
    )
    gate, down, up = (layer + leaf for leaf in _EXPERTS)
    return (
        Dialect(
            "release",
            {name: name for name in [*_GLOBAL, *(layer + leaf for leaf in leaves)]},
            unchanged_prefix="mtp.",
            scale_suffix="scale",
            config=released,
        ),
        Dialect(
            "dpsk-hf",
            dpsk_names | {layer + leaf: stored + _dpsk(leaf) for leaf in leaves},
            draft_templates={"mtp.{}." + leaf: stored + _dpsk(leaf) for leaf in drafts}
            | {"mtp.{}." + leaf: stored + name for leaf, name in _DRAFT_DPSK.items()},
            draft_offset=config.num_layers,
            scale_suffix="weight_scale_inv",
            config=released,
        ),
        Dialect(
            "hf-module",
            module_names | modules,
            fused=(
                Fused(stored + "mlp.experts.gate_up_proj", (gate, up)),
                Fused(stored + "mlp.experts.down_proj", (down,)),
            ),
            unchanged_prefix="mtp.",
            config=folded,
        ),
        Dialect("hf-save-5.24", save_names | saved, unchanged_prefix="mtp.", config=folded),
        Dialect("hf-save-5.12", save_names | saved_512, unchanged_prefix="mtp.", writable=False),
    )


def rule_table(cfg: Mapping[str, Any], *, draft_layers: int = 0) -> RuleTable:
    """All rules of a DeepSeek-V4 model.

    Args:
        cfg: the parsed `config.json`.
        draft_layers: how many `mtp.*` layers the Megatron model has; of others, nothing is loaded or exported.

    Raises:
        ConfigError: the config is outside what is supported.
    """
    config = read_config(cfg)
    if not 0 <= draft_layers <= config.num_mtp_layers:
        raise ConfigError(
            f"num_nextn_predict_layers: expected at least {draft_layers} to train, got {config.num_mtp_layers}"
        )
    block = (*_attention_rules(config), *_moe_rules(config))
    drafts = _draft_rules(config, block, tuple(range(draft_layers))) if draft_layers else []
    return RuleTable(
        model_type=MODEL_TYPE,
        num_layers=config.num_layers,
        rules=(*_global_rules(config), *block, *drafts),
        dialects=dialects(config),
        # Copies of the model's own embedding and head that some releases store with a draft layer.
        ignored=(r"mtp\.\d+\.(?:emb|head)\..*",) if draft_layers else (r"mtp\..*",),
        schedules=("compress_ratios", "layer_types", "mlp_layer_types"),
    )


def _global_rules(c: DSv4HFConfig) -> list[Rule]:
    n, vocab, fp32 = c.hc_mult, (c.vocab_size, c.hidden_size), torch.float32
    norm = "decoder.final_layernorm."
    return [
        Rule("embedding.word_embeddings.weight", ("embed.weight",), (vocab,), tp_dim=0, vocab=True),
        Rule(norm + "weight", ("norm.weight",), ((c.hidden_size,),)),
        Rule(norm + "hc_head_fn", ("hc_head_fn",), ((n, n * c.hidden_size),), fp32),
        Rule(norm + "hc_head_base", ("hc_head_base",), ((n,),), fp32),
        Rule(norm + "hc_head_scale", ("hc_head_scale",), ((1,),), fp32),
        Rule("output_layer.weight", ("head.weight",), (vocab,), tp_dim=0, vocab=True),
    ]


def _in_layers(layers: tuple[int, ...]) -> Callable[..., Rule]:
    """A shorthand for one-to-one rules of a set of layers: `rule(mcore leaf, release leaf, shape, …)`."""

    def rule(
        mcore: str, hf: str, *shape: int, dtype: torch.dtype = torch.bfloat16, tp: int | None = None
    ) -> Rule:
        names = ("decoder.layers.{layer}." + mcore, ("layers.{layer}." + hf,))
        return Rule(*names, (shape,), dtype, layers=layers, tp_dim=tp)

    return rule


def _attention_rules(c: DSv4HFConfig) -> list[Rule]:
    n, width, fp32 = c.hc_mult, c.hidden_size, torch.float32
    rule = _in_layers(tuple(range(c.num_layers)))
    rules = [
        rule("input_layernorm.weight", "attn_norm.weight", width),
        rule("pre_mlp_layernorm.weight", "ffn_norm.weight", width),
        rule("self_attention.wq_a.weight", "attn.wq_a.weight", c.q_lora_rank, width),
        rule("self_attention.q_norm.weight", "attn.q_norm.weight", c.q_lora_rank),
        rule("self_attention.wq_b.weight", "attn.wq_b.weight", c.num_heads * c.head_dim, c.q_lora_rank, tp=0),
        rule("self_attention.wkv.weight", "attn.wkv.weight", c.head_dim, width),
        rule("self_attention.kv_norm.weight", "attn.kv_norm.weight", c.head_dim),
        rule("self_attention.attn_sink", "attn.attn_sink", c.num_heads, dtype=fp32, tp=0),
        rule(
            "self_attention.wo_a.weight",
            "attn.wo_a.weight",
            c.o_groups * c.o_lora_rank,
            c.num_heads * c.head_dim // c.o_groups,
            tp=0,
        ),
        rule("self_attention.wo_b.weight", "attn.wo_b.weight", width, c.o_groups * c.o_lora_rank, tp=1),
    ]
    for block in ("hc_attn_", "hc_ffn_"):
        rules += [
            rule(block + "fn", block + "fn", (2 + n) * n, n * width, dtype=fp32),
            rule(block + "base", block + "base", (2 + n) * n, dtype=fp32),
            rule(block + "scale", block + "scale", 3, dtype=fp32),
        ]
    for ratio in (4, 128):
        layers = tuple(layer for layer, r in enumerate(c.compress_ratios) if r == ratio)
        if layers:
            rules += _compressor_rules(_in_layers(layers), "", ratio, c.head_dim, width)
        if layers and ratio == 4:
            rule = _in_layers(layers)
            heads, dim = c.index_n_heads, c.index_head_dim
            mcore, hf = "self_attention.indexer.linear_", "attn.indexer."
            rules += [
                rule(mcore + "wq_b.weight", hf + "wq_b.weight", heads * dim, c.q_lora_rank),
                rule(mcore + "weights_proj.weight", hf + "weights_proj.weight", heads, width),
                *_compressor_rules(rule, "indexer.", ratio, dim, width),
            ]
    return rules


def _draft_rules(c: DSv4HFConfig, block: Sequence[Rule], layers: tuple[int, ...]) -> list[Rule]:
    """Rules of the draft layers: a block of ratio 0 that routes by score, its input and its own head."""
    n, width, fp32 = c.hc_mult, c.hidden_size, torch.float32
    decoder, draft = "decoder.layers.{layer}.", "mtp.layers.{layer}."
    rules = [
        replace(
            rule,
            mcore=rule.mcore.replace(decoder, draft + "mtp_model_layer."),
            hf=tuple("mtp" + name.removeprefix("layers") for name in rule.hf),
            layers=layers,
        )
        for rule in block
        if not any(part in rule.mcore for part in ("compressor", "indexer", "tid2eid"))
    ]
    if c.num_hash_layers == c.num_layers:
        raise ConfigError("num_hash_layers: expected fewer than num_hidden_layers to train a draft layer")
    for leaf, hf, shape, dtype in (
        ("enorm.weight", "enorm.weight", (width,), torch.bfloat16),
        ("hnorm.weight", "hnorm.weight", (width,), torch.bfloat16),
        ("e_proj.weight", "e_proj.weight", (width, width), torch.bfloat16),
        ("h_proj.weight", "h_proj.weight", (width, width), torch.bfloat16),
        ("final_layernorm.weight", "norm.weight", (width,), torch.bfloat16),
        ("final_layernorm.hc_head_fn", "hc_head_fn", (n, n * width), fp32),
        ("final_layernorm.hc_head_base", "hc_head_base", (n,), fp32),
        ("final_layernorm.hc_head_scale", "hc_head_scale", (1,), fp32),
    ):
        rules.append(Rule(draft + leaf, ("mtp.{layer}." + hf,), (shape,), dtype, layers=layers))
    return rules


def _compressor_rules(rule: Callable[..., Rule], owner: str, ratio: int, dim: int, width: int) -> list[Rule]:
    # Ratio 4 pools two overlapping windows, so it projects twice the width.
    rows = (2 if ratio == 4 else 1) * dim
    mcore, hf = f"self_attention.{owner}compressor.", f"attn.{owner}compressor."
    return [
        rule(mcore + "ape", hf + "ape", ratio, rows, dtype=torch.float32),
        rule(mcore + "wkv.weight", hf + "wkv.weight", rows, width),
        rule(mcore + "wgate.weight", hf + "wgate.weight", rows, width),
        rule(mcore + "norm.weight", hf + "norm.weight", dim),
    ]


def _moe_rules(c: DSv4HFConfig) -> list[Rule]:
    width, inner, experts = c.hidden_size, c.moe_intermediate_size, c.num_experts
    layers = tuple(range(c.num_layers))
    hashed, scored = layers[: c.num_hash_layers], layers[c.num_hash_layers :]
    rules = [_in_layers(layers)("mlp.router.weight", "ffn.gate.weight", experts, width)]
    if hashed:
        table = ("mlp.router.tid2eid", "ffn.gate.tid2eid", c.vocab_size, c.experts_per_token)
        rules.append(_in_layers(hashed)(*table, dtype=torch.int64))
    if scored:
        rules.append(
            _in_layers(scored)("mlp.router.expert_bias", "ffn.gate.bias", experts, dtype=torch.float32)
        )
    mcore, hf = "decoder.layers.{layer}.mlp.", "layers.{layer}.ffn."
    for owner, stored, suffix, count in (
        ("experts.", "experts.{expert}.", "{expert}", experts),
        ("shared_experts.", "shared_experts.", "", 0),
    ):
        gate, down, up = (f"{hf}{stored}w{i}.weight" for i in (1, 2, 3))
        first, second = (f"{mcore}{owner}linear_fc{i}.weight{suffix}" for i in (1, 2))
        halves = ((inner, width), (inner, width))
        rules += [
            Rule(first, (gate, up), halves, kind="gate_up", layers=layers, num_experts=count, tp_dim=0),
            Rule(second, (down,), ((width, inner),), layers=layers, num_experts=count, tp_dim=1),
        ]
    return rules
