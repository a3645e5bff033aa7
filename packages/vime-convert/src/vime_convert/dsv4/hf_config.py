# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 `config.json` as one checked dataclass.

Two spellings are read: the released one (`compress_ratios`, `num_hash_layers`, `rope_scaling`,
`qk_rope_head_dim`) and the one that transformers folds it into (`layer_types`, `mlp_layer_types`,
`rope_parameters`, `partial_rotary_factor`). When both are present they must agree. Whatever the trainer cannot
reproduce is refused here, before any tensor is read. Not read: quantisation settings (tensors are recognised by
dtype and shape) and generation settings. Source of the folding: transformers 5.24,
`models/deepseek_v4/configuration_deepseek_v4.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from vime_convert.errors import ConfigError
from vime_convert.refused import REFUSED

MODEL_TYPE = "deepseek_v4"

LAYER_TYPE_OF_RATIO = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
RATIO_OF_LAYER_TYPE = {layer_type: ratio for ratio, layer_type in LAYER_TYPE_OF_RATIO.items()}

# Fields with exactly one supported value. Absent is fine: both spellings may leave them out.
_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "compress_rate_csa": 4,
    "compress_rate_hca": 128,
}


@dataclass(frozen=True)
class Yarn:
    """YaRN parameters of the compressed layers; cos and sin are never scaled (attention factor 1)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class DSv4HFConfig:
    """Everything about a DeepSeek-V4 model that its checkpoint and its forward pass depend on.

    Attributes:
        window: sliding-window length in tokens.
        compress_ratios: one entry per decoder layer: 0 sliding only, 4 CSA with indexer, 128 HCA.
        num_mtp_layers: next-token-prediction layers in the checkpoint (not trained).
        num_hash_layers: leading layers that route by token id.
        yarn: scaling of the compressed layers' rotary frequencies; None means plain RoPE.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    compress_ratios: tuple[int, ...]
    num_mtp_layers: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int


def read_config(cfg: Mapping[str, Any]) -> DSv4HFConfig:
    """The checked, normalised config of a DeepSeek-V4 checkpoint.

    Args:
        cfg: the parsed `config.json`, in the released or in the folded spelling.

    Raises:
        ConfigError: another model type, a missing field, an unsupported value, or spellings that disagree.
    """
    _check_model_type(cfg)
    for field, only in _FIXED.items():
        if (value := cfg.get(field, only)) != only:
            _refuse(field, f"the only supported value {only!r}", value)
    num_layers = _integer(cfg, "num_hidden_layers")
    rope_theta, compress_rope_theta, yarn = _rope(cfg)
    config = DSv4HFConfig(
        vocab_size=_integer(cfg, "vocab_size"),
        hidden_size=_integer(cfg, "hidden_size"),
        num_layers=num_layers,
        num_heads=_integer(cfg, "num_attention_heads"),
        head_dim=_integer(cfg, "head_dim"),
        rope_dim=_rope_dim(cfg),
        q_lora_rank=_integer(cfg, "q_lora_rank"),
        o_groups=_integer(cfg, "o_groups"),
        o_lora_rank=_integer(cfg, "o_lora_rank"),
        window=_integer(cfg, "sliding_window"),
        compress_ratios=_compress_ratios(cfg, num_layers),
        num_mtp_layers=_integer(cfg, "num_nextn_predict_layers", least=0, default=0),
        index_n_heads=_integer(cfg, "index_n_heads"),
        index_head_dim=_integer(cfg, "index_head_dim"),
        index_topk=_integer(cfg, "index_topk"),
        hc_mult=_integer(cfg, "hc_mult"),
        hc_sinkhorn_iters=_integer(cfg, "hc_sinkhorn_iters"),
        hc_eps=_number(cfg, "hc_eps"),
        rms_norm_eps=_number(cfg, "rms_norm_eps"),
        moe_intermediate_size=_integer(cfg, "moe_intermediate_size"),
        num_experts=_integer(cfg, "n_routed_experts"),
        experts_per_token=_integer(cfg, "num_experts_per_tok"),
        routed_scaling_factor=_number(cfg, "routed_scaling_factor"),
        num_hash_layers=_num_hash_layers(cfg, num_layers),
        swiglu_limit=_number(cfg, "swiglu_limit"),
        rope_theta=rope_theta,
        compress_rope_theta=compress_rope_theta,
        yarn=yarn,
        max_position_embeddings=_integer(cfg, "max_position_embeddings"),
    )
    _check_sizes(config)
    return config


def _refuse(field: str, expected: str, actual: object, advice: str = "") -> NoReturn:
    suffix = f"; {advice}" if advice else ""
    raise ConfigError(f"deepseek_v4 config.json: expected {field} to be {expected}, got {actual!r}{suffix}")


def _check_model_type(cfg: Mapping[str, Any]) -> None:
    model_type = cfg.get("model_type")
    if model_type != MODEL_TYPE:
        advice = REFUSED.get(str(model_type), "use the plugin of that model type")
        _refuse("model_type", repr(MODEL_TYPE), model_type, advice)


def _number(cfg: Mapping[str, Any], field: str) -> float:
    value = cfg.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        _refuse(field, "a positive number", value)
    return float(value)


def _integer(cfg: Mapping[str, Any], field: str, *, least: int = 1, default: int | None = None) -> int:
    value = cfg.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _refuse(field, f"an integer of at least {least}", value)
    return value


def _list(cfg: Mapping[str, Any], field: str) -> list[Any] | None:
    value = cfg.get(field)
    if value is not None and not isinstance(value, list | tuple):
        _refuse(field, "a list", value)
    return None if value is None else list(value)


def _object(cfg: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = cfg.get(field)
    if value is not None and not isinstance(value, Mapping):
        _refuse(field, "an object", value)
    return value or {}


def _compress_ratios(cfg: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    ratios, layer_types = _list(cfg, "compress_ratios"), _list(cfg, "layer_types")
    if ratios is None and layer_types is None:
        # transformers would invent a schedule that no release has.
        _refuse("compress_ratios (or layer_types)", f"a list with {num_layers} entries", None)
    expected_rates = {LAYER_TYPE_OF_RATIO[4]: 4, LAYER_TYPE_OF_RATIO[128]: 128}
    rates = _object(cfg, "compress_rates") or expected_rates
    if rates != expected_rates:
        _refuse("compress_rates", f"{expected_rates}", rates)
    folded: tuple[int, ...] | None = None
    if layer_types is not None:
        if len(layer_types) != num_layers:
            _refuse("layer_types", f"num_hidden_layers = {num_layers} entries", f"{len(layer_types)} entries")
        for index, layer_type in enumerate(layer_types):
            if not isinstance(layer_type, str) or layer_type not in RATIO_OF_LAYER_TYPE:
                _refuse(f"layer_types[{index}]", f"one of {sorted(RATIO_OF_LAYER_TYPE)}", layer_type)
        folded = tuple(RATIO_OF_LAYER_TYPE[layer_type] for layer_type in layer_types)
    if ratios is None:
        assert folded is not None  # refused above
        return folded
    for index, ratio in enumerate(ratios):
        if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio not in LAYER_TYPE_OF_RATIO:
            _refuse(f"compress_ratios[{index}]", "0, 4 or 128", ratio)
    # Entries past the decoder belong to the draft layers, and those never compress.
    if len(ratios) < num_layers or any(ratios[num_layers:]):
        _refuse(
            "compress_ratios",
            f"num_hidden_layers = {num_layers} entries, then only zeros for the draft layers",
            ratios,
            "cut the list when pruning layers",
        )
    decoder = tuple(ratios[:num_layers])
    if layer_types is not None and folded != decoder:
        _refuse("layer_types", f"what compress_ratios says ({list(decoder)})", layer_types)
    return decoder


def _num_hash_layers(cfg: Mapping[str, Any], num_layers: int) -> int:
    types = _list(cfg, "mlp_layer_types")
    if types is None:
        return min(_integer(cfg, "num_hash_layers", least=0), num_layers)
    hashed = types.count("hash_moe")
    if types != ["hash_moe"] * hashed + ["moe"] * (num_layers - hashed):
        _refuse("mlp_layer_types", f"{num_layers} entries, 'hash_moe' first and then 'moe'", types)
    if cfg.get("num_hash_layers") is not None:
        count = _integer(cfg, "num_hash_layers", least=0)
        if min(count, num_layers) != hashed:
            _refuse("num_hash_layers", f"what mlp_layer_types says ({hashed})", count)
    return hashed


def _rope_dim(cfg: Mapping[str, Any]) -> int:
    if cfg.get("partial_rotary_factor") is None:
        return _integer(cfg, "qk_rope_head_dim", least=2)
    rope_dim = int(_integer(cfg, "head_dim") * _number(cfg, "partial_rotary_factor"))
    direct = cfg.get("qk_rope_head_dim")
    if direct not in (None, rope_dim):
        _refuse("qk_rope_head_dim", f"head_dim · partial_rotary_factor = {rope_dim}", direct)
    return rope_dim


def _rope(cfg: Mapping[str, Any]) -> tuple[float, float, Yarn | None]:
    parameters = _object(cfg, "rope_parameters") or _object(cfg, "rope_scaling")
    if isinstance(parameters.get("main"), Mapping) and isinstance(parameters.get("compress"), Mapping):
        main, compress = parameters["main"], parameters["compress"]
        if (kind := main.get("rope_type", "default")) != "default":
            _refuse("rope_parameters.main.rope_type", "'default'", kind)
        if compress.get("rope_type") == "yarn" and compress.get("attention_factor") != 1.0:
            # Left unset, transformers would scale cos and sin by 0.1·ln(factor) + 1.
            _refuse("rope_parameters.compress.attention_factor", "1.0", compress.get("attention_factor"))
        return _number(main, "rope_theta"), _number(compress, "rope_theta"), _yarn(compress)
    return _number(cfg, "rope_theta"), _number(cfg, "compress_rope_theta"), _yarn(parameters)


def _yarn(parameters: Mapping[str, Any]) -> Yarn | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        _refuse("the rope type of the compressed layers", "'yarn' or 'default'", kind)
    if parameters.get("attention_factor", 1.0) != 1.0:
        _refuse("the yarn attention_factor", "1.0", parameters["attention_factor"])
    if parameters.get("truncate", True) is not True:
        _refuse("the yarn field truncate", "true", parameters["truncate"])
    return Yarn(
        factor=_number(parameters, "factor"),
        original_max_position_embeddings=_integer(parameters, "original_max_position_embeddings"),
        beta_fast=_number(parameters, "beta_fast"),
        beta_slow=_number(parameters, "beta_slow"),
    )


def _check_sizes(config: DSv4HFConfig) -> None:
    if config.rope_dim % 2 or not 2 <= config.rope_dim <= min(config.head_dim, config.index_head_dim):
        limit = min(config.head_dim, config.index_head_dim)
        _refuse(
            "qk_rope_head_dim", f"even, and at most head_dim and index_head_dim ({limit})", config.rope_dim
        )
    if config.num_heads % config.o_groups:
        _refuse("o_groups", f"a divisor of num_attention_heads = {config.num_heads}", config.o_groups)
    if config.experts_per_token > config.num_experts:
        _refuse(
            "num_experts_per_tok",
            f"at most n_routed_experts = {config.num_experts}",
            config.experts_per_token,
        )
