# SPDX-License-Identifier: Apache-2.0
"""The two spellings of DeepSeek-V4's `config.json`, converted into each other without loss.

A config that is already in the wanted spelling is returned as it is. Fields that mean the same in both are copied.
"""

from collections.abc import Mapping
from typing import Any

from vime_convert.dsv4.hf_config import LAYER_TYPE_OF_RATIO, read_config

_RELEASED_ONLY = (
    "compress_ratios",
    "num_hash_layers",
    "rope_scaling",
    "compress_rate_csa",
    "compress_rate_hca",
)
_FOLDED_ONLY = (
    "layer_types",
    "mlp_layer_types",
    "rope_parameters",
    "partial_rotary_factor",
    "compress_rates",
)


def released(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `compress_ratios`, `num_hash_layers`, `rope_scaling` and `qk_rope_head_dim`."""
    if not any(field in cfg for field in _FOLDED_ONLY):
        return dict(cfg)
    config = read_config(cfg)
    out = {field: value for field, value in cfg.items() if field not in _FOLDED_ONLY}
    out |= {
        "compress_ratios": [*config.compress_ratios, *[0] * config.num_mtp_layers],
        "num_hash_layers": config.num_hash_layers,
        "qk_rope_head_dim": config.rope_dim,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
    }
    if config.yarn is not None:
        out["rope_scaling"] = {"type": "yarn"} | vars(config.yarn)
    return out


def folded(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `layer_types`, `mlp_layer_types`, `rope_parameters` and `partial_rotary_factor`."""
    if not any(field in cfg for field in _RELEASED_ONLY):
        return dict(cfg)
    config = read_config(cfg)
    partial = config.rope_dim / config.head_dim
    main = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": partial}
    compress: dict[str, Any] = main | {"rope_theta": config.compress_rope_theta}
    if config.yarn is not None:
        compress |= {"rope_type": "yarn", "attention_factor": 1.0} | vars(config.yarn)
    out = {field: value for field, value in cfg.items() if field not in _RELEASED_ONLY}
    return out | {
        "layer_types": [LAYER_TYPE_OF_RATIO[ratio] for ratio in config.compress_ratios],
        "mlp_layer_types": [
            "hash_moe" if layer < config.num_hash_layers else "moe" for layer in range(config.num_layers)
        ],
        "compress_rates": {LAYER_TYPE_OF_RATIO[ratio]: ratio for ratio in (4, 128)},
        "partial_rotary_factor": partial,
        "qk_rope_head_dim": config.rope_dim,
        "rope_parameters": {"main": main, "compress": compress},
    }
