# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's config: both spellings mean the same, and what cannot be reproduced is refused by name."""

from typing import Any

import pytest

from vime_convert.dsv4.config_forms import folded, released
from vime_convert.dsv4.hf_config import read_config
from vime_convert.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="the folding is transformers' own")

YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4, "original_max_position_embeddings": 8}
YARN |= {"beta_fast": 32, "beta_slow": 1}
MAIN = {"rope_type": "default", "rope_theta": 1e4}


def test_transformers_folds_our_release_spelling_to_the_same_model(dsv4_config: dict[str, Any]) -> None:
    theirs = transformers.DeepseekV4Config(**dsv4_config).to_dict()
    assert "compress_ratios" not in theirs
    assert read_config(theirs) == read_config(dsv4_config)


def test_both_spellings_convert_into_each_other(dsv4_config: dict[str, Any]) -> None:
    config = read_config(dsv4_config)
    assert read_config(folded(dsv4_config)) == config
    assert read_config(released(folded(dsv4_config))) == config
    assert released(dsv4_config) == dsv4_config
    assert folded(folded(dsv4_config)) == folded(dsv4_config)
    assert released(folded(dsv4_config))["compress_ratios"] == dsv4_config["compress_ratios"]


def test_our_folded_spelling_is_what_transformers_would_write(dsv4_config: dict[str, Any]) -> None:
    theirs = transformers.DeepseekV4Config(**dsv4_config).to_dict()
    theirs["rope_parameters"]["compress"].pop("type")  # the release's word for rope_type, kept beside it
    ours = folded(dsv4_config)
    for field in (
        "layer_types",
        "mlp_layer_types",
        "compress_rates",
        "partial_rotary_factor",
        "rope_parameters",
    ):
        assert ours[field] == theirs[field], field


def test_values(dsv4_config: dict[str, Any]) -> None:
    config = read_config(dsv4_config)
    assert config.compress_ratios == (0, 4, 128, 4)
    assert (config.num_mtp_layers, config.num_hash_layers, config.rope_dim) == (1, 2, 8)
    assert config.yarn is not None
    assert (config.yarn.factor, config.yarn.original_max_position_embeddings) == (16, 64)
    assert read_config(dsv4_config | {"rope_scaling": None}).yarn is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"model_type": "deepseek_v41"}, "V4.1 is a different architecture", id="v4.1"),
        pytest.param(
            {"model_type": "llama"}, "expected model_type to be 'deepseek_v4', got 'llama'", id="type"
        ),
        pytest.param({"norm_topk_prob": False}, "norm_topk_prob .* got False", id="norm-topk-prob"),
        pytest.param({"tie_word_embeddings": True}, "tie_word_embeddings .* got True", id="tied"),
        pytest.param({"attention_bias": True}, "attention_bias .* got True", id="attention-bias"),
        pytest.param({"scoring_func": "sigmoid"}, "scoring_func .* got 'sigmoid'", id="scoring"),
        pytest.param({"n_shared_experts": 2}, "n_shared_experts .* got 2", id="shared-experts"),
        pytest.param({"compress_ratios": [0, 4, 2, 4]}, r"compress_ratios\[2\] .* got 2", id="ratio-2"),
        pytest.param({"compress_ratios": [0, 4, 128]}, "compress_ratios .* 4 entries", id="schedule-short"),
        pytest.param({"compress_ratios": [0, 4, 128, 4, 4]}, "only zeros for the draft", id="schedule-long"),
        pytest.param({"compress_ratios": None}, "compress_ratios .* got None", id="no-schedule"),
        pytest.param({"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates", id="rates"),
        pytest.param(
            {"layer_types": ["sliding_attention"] * 4}, "what compress_ratios says", id="spellings-differ"
        ),
        pytest.param({"layer_types": ["sliding_attention"] * 3}, "got '3 entries'", id="layer-types-short"),
        pytest.param(
            {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "'hash_moe' first", id="hash-late"
        ),
        pytest.param({"mlp_layer_types": ["moe"] * 4}, "num_hash_layers .* got 2", id="hash-differs"),
        pytest.param({"num_hash_layers": None}, "num_hash_layers .* got None", id="no-hash-count"),
        pytest.param({"qk_rope_head_dim": None}, "qk_rope_head_dim .* got None", id="no-rope-dim"),
        pytest.param({"qk_rope_head_dim": 7}, "to be even", id="odd-rope-dim"),
        pytest.param(
            {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 16, got 8", id="rope-dim-differs"
        ),
        pytest.param({"hidden_size": None}, "hidden_size .* got None", id="missing-field"),
        pytest.param({"hidden_size": True}, "hidden_size .* got True", id="boolean-size"),
        pytest.param({"hc_eps": 0}, "hc_eps to be a positive number, got 0", id="zero-eps"),
        pytest.param({"o_groups": 3}, "o_groups to be a divisor", id="groups"),
        pytest.param({"num_experts_per_tok": 5}, "at most n_routed_experts = 4, got 5", id="topk"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 2}}, "got 'linear'", id="rope-type"),
        pytest.param(
            {"rope_parameters": {"main": MAIN, "compress": YARN}},
            "attention_factor to be 1.0, got None",
            id="mscale",
        ),
        pytest.param({"compress_ratios": 4}, "compress_ratios to be a list, got 4", id="ratios-no-list"),
        pytest.param({"compress_ratios": [0, [4], 0, 0]}, r"ratios\[1\] .* got \[4\]", id="ratio-list"),
        pytest.param({"compress_ratios": [0, 4.0, 0, 0]}, r"ratios\[1\] .* got 4.0", id="ratio-float"),
        pytest.param({"compress_rates": 4}, "compress_rates to be an object, got 4", id="rates-no-object"),
        pytest.param({"rope_scaling": "yarn"}, "rope_scaling to be an object, got 'yarn'", id="rope-word"),
        pytest.param({"rope_parameters": [1]}, r"rope_parameters to be an object, got \[1\]", id="rope-list"),
        pytest.param({"layer_types": 4}, "layer_types to be a list, got 4", id="layer-types-no-list"),
        pytest.param({"layer_types": [{}] * 4}, r"layer_types\[0\] .* got {}", id="layer-type-object"),
        pytest.param({"mlp_layer_types": "moe"}, "mlp_layer_types to be a list", id="mlp-types-no-list"),
        pytest.param({"num_hash_layers": "2"}, "num_hash_layers .* got '2'", id="hash-count-word"),
        pytest.param(
            {"num_hash_layers": "2", "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"]},
            "num_hash_layers .* got '2'",
            id="hash-count-word-beside-types",
        ),
        pytest.param(
            {"partial_rotary_factor": "half"}, "partial_rotary_factor .* got 'half'", id="rope-factor-word"
        ),
    ],
)
def test_refused(dsv4_config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(dsv4_config | change)
