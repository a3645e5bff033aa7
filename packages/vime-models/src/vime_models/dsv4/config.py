# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's own options, and the TransformerConfig that goes with them.

What Megatron's `TransformerConfig` has no field for is in one frozen `DSv4Options`, attached to the config as
`config.vime_dsv4`; modules read only those two. `validate` refuses every combination that would train something
else than the checkpoint's model, and names the flag. Importable without Megatron.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime_convert.dsv4.hf_config import DSv4HFConfig, Yarn, read_config

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

IMPLEMENTATIONS = ("vime", "miles", "megatron")
KERNELS = ("auto", "triton", "torch")
QAT_MODES = ("off", "rollout", "deepseek", "miles")
TRAIN_INDEXER = ("off", "warmup", "joint")
CP_LAYOUTS = ("zigzag", "contiguous")
# Fields that a checkpoint does not decide.
RUN_FIELDS = (
    "impl",
    "kernels",
    "qat",
    "train_indexer",
    "indexer_loss_coeff",
    "cp_layout",
    "cp_balance",
)

# Option field to command-line flag. The destination in the parsed arguments is the flag's name; flags without the
# dsv4 prefix belong to Megatron's own parser.
FLAG_OF = {
    "compress_ratios": "--dsv4-compress-ratios",
    "window": "--dsv4-window-size",
    "num_hash_layers": "--dsv4-n-hash-layers",
    "o_groups": "--dsv4-o-groups",
    "o_lora_rank": "--dsv4-o-lora-rank",
    "hc_mult": "--dsv4-hc-mult",
    "hc_sinkhorn_iters": "--dsv4-hc-sinkhorn-iters",
    "hc_eps": "--dsv4-hc-eps",
    "compress_rope_theta": "--dsv4-compress-rope-theta",
    "impl": "--dsv4-impl",
    "kernels": "--dsv4-kernels",
    "qat": "--dsv4-qat",
    "train_indexer": "--dsv4-train-indexer",
    "indexer_loss_coeff": "--dsv4-indexer-loss-coeff",
    "cp_layout": "--dsv4-cp-layout",
    "cp_balance": "--dsv4-cp-balance",
    "head_dim": "--kv-channels",
    "rope_dim": "--qk-pos-emb-head-dim",
    "q_lora_rank": "--q-lora-rank",
    "rope_theta": "--rotary-base",
    "vocab_size": "--vocab-size",
    "index_n_heads": "--dsa-indexer-n-heads",
    "index_head_dim": "--dsa-indexer-head-dim",
    "index_topk": "--dsa-indexer-topk",
}
YARN_FLAG_OF = {
    "factor": "--dsv4-yarn-factor",
    "original_max_position_embeddings": "--dsv4-yarn-original-max-position-embeddings",
    "beta_fast": "--dsv4-yarn-beta-fast",
    "beta_slow": "--dsv4-yarn-beta-slow",
}


class DSv4OptionError(ValueError):
    """An option or a combination that this plugin does not train; the message names the flag."""


def check(ok: bool, flag: str, value: object, rule: str) -> None:
    """Raises `DSv4OptionError` naming flag, value and rule unless `ok`."""
    if not ok:
        raise DSv4OptionError(f"vime_models.dsv4: {flag} is {value!r}: {rule}")


@dataclass(frozen=True)
class DSv4Options:
    """What a DeepSeek-V4 model needs beyond a TransformerConfig.

    Attributes:
        compress_ratios: per decoder layer: 0 sliding window only, 4 CSA with indexer, 128 HCA.
        window: sliding-window length in tokens, the query included.
        head_dim: channels of a query head and of the one key-value head.
        rope_dim: trailing channels that rotate.
        q_lora_rank: width of the low-rank query.
        o_groups: head groups of the output projection.
        o_lora_rank: width of the low-rank output, per group.
        index_n_heads: indexer heads.
        index_head_dim: channels of an indexer head.
        index_topk: compressed entries that a query keeps in a ratio-4 layer.
        hc_mult: residual streams.
        hc_sinkhorn_iters: column passes of the Sinkhorn normalisation.
        hc_eps: epsilon of the mixing weights (the norms have their own, `layernorm_epsilon`).
        num_hash_layers: leading layers that choose experts by token id.
        vocab_size: rows of the token-to-expert table, without padding.
        rope_theta: base of ratio-0 layers.
        compress_rope_theta: base of ratio-4 and ratio-128 layers.
        yarn: frequency scaling of ratio-4 and ratio-128 layers, None for plain RoPE.
        impl: "vime", its alias "miles", or "megatron" for the host's own variant.
        kernels: backend of the vime-kernels ops.
        qat: whose quantisation is simulated, see `recipes`; "off" for none.
        train_indexer: "off" freezes the indexer, "warmup" trains nothing else, "joint" trains it with the rest.
        indexer_loss_coeff: weight of the loss that trains the indexer.
        cp_layout: order in which the trainer hands out rows to context-parallel ranks.
        cp_balance: whether queries move so that context-parallel ranks have equal work.

    Raises:
        DSv4OptionError: a value out of range.
    """

    compress_ratios: tuple[int, ...]
    window: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    num_hash_layers: int
    vocab_size: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    impl: str = "vime"
    kernels: str = "auto"
    qat: str = "off"
    train_indexer: str = "off"
    indexer_loss_coeff: float = 1.0
    cp_layout: str = "zigzag"
    cp_balance: bool = False

    def __post_init__(self) -> None:
        for field in FLAG_OF:
            value = getattr(self, field)
            may_be_zero = field == "num_hash_layers" or isinstance(value, bool)
            if isinstance(value, int | float) and not may_be_zero:
                check(value > 0, FLAG_OF[field], value, "must be positive")
        words = {
            "impl": IMPLEMENTATIONS,
            "kernels": KERNELS,
            "qat": QAT_MODES,
            "train_indexer": TRAIN_INDEXER,
            "cp_layout": CP_LAYOUTS,
        }
        for field, choices in words.items():
            value = getattr(self, field)
            check(value in choices, FLAG_OF[field], value, f"must be one of {', '.join(choices)}")
        check(
            all(ratio in (0, 4, 128) for ratio in self.compress_ratios),
            FLAG_OF["compress_ratios"],
            self.compress_ratios,
            "every entry must be 0, 4 or 128",
        )
        limit = min(self.head_dim, self.index_head_dim)
        check(
            self.rope_dim % 2 == 0 and self.rope_dim <= limit,
            FLAG_OF["rope_dim"],
            self.rope_dim,
            f"must be even and at most --kv-channels and --dsa-indexer-head-dim (here {limit})",
        )
        check(
            0 <= self.num_hash_layers <= len(self.compress_ratios),
            FLAG_OF["num_hash_layers"],
            self.num_hash_layers,
            f"must be between 0 and the number of layers ({len(self.compress_ratios)})",
        )

    @property
    def backend(self) -> str | None:
        """`backend=` of the vime-kernels ops; None leaves the choice to vime_kernels."""
        return None if self.kernels == "auto" else self.kernels

    @classmethod
    def from_args(cls, args: Namespace) -> "DSv4Options":
        """Options from parsed Megatron arguments.

        Raises:
            DSv4OptionError: a flag is missing, or a value is out of range.
        """
        values = {field: _argument(args, flag) for field, flag in FLAG_OF.items()}
        values["compress_ratios"] = tuple(values["compress_ratios"])
        # vime's own flag for contiguous slices.
        if getattr(args, "allgather_cp", False):
            values["cp_layout"] = "contiguous"
        yarn = Yarn(**{field: _argument(args, flag) for field, flag in YARN_FLAG_OF.items()})
        for field, flag in YARN_FLAG_OF.items():
            check(getattr(yarn, field) > 0, flag, getattr(yarn, field), "must be positive")
        return cls(**values, yarn=None if yarn.factor == 1 else yarn)

    @classmethod
    def from_hf(cls, cfg: Mapping[str, Any] | DSv4HFConfig, **overrides: Any) -> "DSv4Options":
        """Options from a Hugging Face `config.json`.

        Args:
            cfg: the parsed file, or what `read_config` made of it.
            **overrides: any of `RUN_FIELDS`.

        Raises:
            ConfigError: not a DeepSeek-V4 config, or one that cannot be trained.
        """
        hf = cfg if isinstance(cfg, DSv4HFConfig) else read_config(cfg)
        shared = {field: getattr(hf, field) for field in FLAG_OF if hasattr(hf, field)}
        return cls(**shared, yarn=hf.yarn, **overrides)

    def validate(self, config: "TransformerConfig") -> None:
        """Refuses a TransformerConfig under which this model would not be the checkpoint's.

        Raises:
            DSv4OptionError: names the flag, its value and the rule.
        """
        from vime_models.dsv4.validation import validate

        validate(self, config)


def _argument(args: Namespace, flag: str) -> Any:
    value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
    if value is None:
        raise DSv4OptionError(
            f"vime_models.dsv4: {flag} is not set; `vime-models args --hf DIR` prints the flags that a checkpoint "
            "needs"
        )
    return value


def transformer_config(
    cfg: Mapping[str, Any] | DSv4HFConfig,
    *,
    dtype: "torch.dtype",
    device: str = "cpu",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    **overrides: Any,
) -> "TransformerConfig":
    """The TransformerConfig of a checkpoint, with its options attached and validated.

    Args:
        cfg: the parsed `config.json`, or what `read_config` made of it.
        dtype: of parameters and activations.
        device: "cpu" or "cuda".
        tp, pp, ep, etp, cp: sizes of tensor, pipeline, expert, expert-tensor and context parallelism.
        **overrides: further TransformerConfig fields, e.g. `recompute_granularity`, and options that a checkpoint does
            not decide, e.g. `qat` (`RUN_FIELDS`).
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from vime_models.host.cpu import cpu_overrides

    hf = cfg if isinstance(cfg, DSv4HFConfig) else read_config(cfg)
    chosen = {name: overrides.pop(name) for name in RUN_FIELDS if name in overrides}
    fields: dict[str, Any] = {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.moe_intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "activation_func_clamp_value": hf.swiglu_limit,
        "bias_activation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": hf.num_experts,
        "moe_layer_freq": [1] * hf.num_layers,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.experts_per_token,
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "transformer_impl": "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "context_parallel_size": cp,
        "sequence_parallel": tp > 1,
        "variable_seq_lengths": pp > 1,
        **overrides,
    }
    config = TransformerConfig(**(cpu_overrides(fields) if device == "cpu" else fields))
    attach(DSv4Options.from_hf(hf, **chosen), config)
    return config


def attach(options: DSv4Options, config: "TransformerConfig") -> None:
    """Validates, then makes the options readable as `config.vime_dsv4`.

    Megatron copies configs; plain attributes survive that, and its argument code cannot inject a subclass.
    """
    options.validate(config)
    config.vime_dsv4 = options
    # Layers hold different parameters, so a distributed checkpoint must name each layer's tensors separately.
    # Megatron does that when the frequency is a list.
    config.moe_layer_freq = [1] * config.num_layers
    # Also where no layer reads ids: the packing object that carries them keeps what layers derive from lengths.
    config.vime_needs_token_ids = True
    if options.train_indexer == "warmup":
        from vime_models.dsv4.train_indexer import freeze_all_but_indexers

        config.vime_after_build = freeze_all_but_indexers
