# SPDX-License-Identifier: Apache-2.0
"""Command-line flags: adding them to Megatron's parser, and deriving them from a checkpoint's config.

Sizes that Megatron's parser already has a flag for keep that flag (see `config.FLAG_OF`). Importable without
Megatron.
"""

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vime_convert.dsv4.hf_config import read_config
from vime_models.dsv4.config import (
    CP_LAYOUTS,
    FLAG_OF,
    IMPLEMENTATIONS,
    KERNELS,
    QAT_MODES,
    RUN_FIELDS,
    TRAIN_INDEXER,
    YARN_FLAG_OF,
    DSv4Options,
    check,
)
from vime_models.dsv4.recipes import width_problems


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """The parser with the argument group "dsv4"; usable as Megatron's `extra_args_provider`.

    Defaults are the values that all released sizes share; what differs between sizes has no default.
    """
    group = parser.add_argument_group("dsv4", "DeepSeek-V4")

    def add(flag: str, kind: Any, default: Any, text: str, **more: Any) -> None:
        group.add_argument(flag, type=kind, default=default, help=f"{text} (default: {default})", **more)

    add(
        "--dsv4-impl",
        str,
        "vime",
        "vime (alias miles) or megatron, the host's own variant where it exists",
        choices=IMPLEMENTATIONS,
    )
    add("--dsv4-kernels", str, "auto", "backend of the attention and mHC ops", choices=KERNELS)
    add(
        "--dsv4-qat",
        str,
        "rollout",
        "whose quantisation of keys, indexer and experts is simulated; gradients pass straight through",
        choices=QAT_MODES,
    )
    add(
        "--dsv4-train-indexer",
        str,
        "off",
        "off freezes the indexer, warmup trains nothing else (dense), joint trains it with the rest",
        choices=TRAIN_INDEXER,
    )
    add(
        "--dsv4-cp-layout",
        str,
        "zigzag",
        "order in which the trainer hands out rows to context-parallel ranks; --allgather-cp means contiguous",
        choices=CP_LAYOUTS,
    )
    group.add_argument(
        "--dsv4-cp-balance",
        action="store_true",
        help="move queries so that context-parallel ranks have equal work",
    )
    add("--dsv4-indexer-loss-coeff", float, 1.0, "weight of the loss that trains the indexer")
    add(
        "--dsv4-compress-ratios",
        int,
        None,
        "per decoder layer: 0 sliding window, 4 CSA, 128 HCA",
        nargs="+",
        metavar="RATIO",
    )
    add("--dsv4-window-size", int, 128, "sliding window in tokens")
    add("--dsv4-n-hash-layers", int, 3, "leading layers routed by token id")
    add("--dsv4-o-groups", int, None, "head groups of the output projection")
    add("--dsv4-o-lora-rank", int, 1024, "low-rank output width per group")
    add("--dsv4-hc-mult", int, 4, "residual streams")
    add("--dsv4-hc-sinkhorn-iters", int, 20, "column passes of the Sinkhorn normalisation")
    add("--dsv4-hc-eps", float, 1e-6, "epsilon of the mixing weights")
    add("--dsv4-compress-rope-theta", float, 160000.0, "RoPE base of ratio-4 and ratio-128 layers")
    add("--dsv4-yarn-factor", float, 16.0, "YaRN factor of ratio-4 and ratio-128 layers, 1 for plain RoPE")
    add("--dsv4-yarn-original-max-position-embeddings", int, 65536, "length before scaling")
    add("--dsv4-yarn-beta-fast", float, 32.0, "turns within that length at which scaling starts")
    add("--dsv4-yarn-beta-slow", float, 1.0, "turns within that length at which scaling is complete")
    return parser


def launch_flags(cfg: Mapping[str, Any]) -> list[str]:
    """The command-line words that Megatron needs to build the model of a checkpoint, e.g. ["--swiglu", ...].

    Args:
        cfg: the parsed `config.json`.

    Raises:
        ConfigError: not a DeepSeek-V4 config, or one that cannot be trained.
        DSv4OptionError: a value that no flag can carry.
    """
    hf = read_config(cfg)
    options = DSv4Options.from_hf(hf)
    values: dict[str, Any] = {
        "--spec": ("vime_models.dsv4", "get_dsv4_spec"),
        "--num-layers": hf.num_layers,
        "--hidden-size": hf.hidden_size,
        "--num-attention-heads": hf.num_heads,
        "--ffn-hidden-size": hf.moe_intermediate_size,
        "--max-position-embeddings": hf.max_position_embeddings,
        "--norm-epsilon": hf.rms_norm_eps,
        "--normalization": "RMSNorm",
        "--position-embedding-type": "none",
        "--activation-func-clamp-value": hf.swiglu_limit,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--num-experts": hf.num_experts,
        "--moe-layer-freq": 1,
        "--moe-ffn-hidden-size": hf.moe_intermediate_size,
        "--moe-shared-expert-intermediate-size": hf.moe_intermediate_size,
        "--moe-router-topk": hf.experts_per_token,
        "--moe-router-topk-scaling-factor": hf.routed_scaling_factor,
        "--moe-router-score-function": "sqrtsoftplus",
        "--moe-router-load-balancing-type": "none",
        "--moe-router-dtype": "fp32",
        "--moe-router-bias-update-rate": 0,
        "--moe-token-dispatcher-type": "alltoall",
    }
    values |= {flag: getattr(options, field) for field, flag in FLAG_OF.items() if field not in RUN_FIELDS}
    if any(width_problems(replace(options, qat="rollout"))):
        values["--dsv4-qat"] = "off"
    # Megatron parses the base as an integer.
    theta = float(options.rope_theta)
    check(
        theta.is_integer(), "--rotary-base", theta, "must be a whole number: Megatron's flag takes no other"
    )
    values["--rotary-base"] = int(theta)
    if options.yarn is None:
        values["--dsv4-yarn-factor"] = 1.0
    else:
        values |= {flag: getattr(options.yarn, field) for field, flag in YARN_FLAG_OF.items()}
    words = [
        "--swiglu",
        "--disable-bias-linear",
        "--no-bias-swiglu-fusion",
        "--untie-embeddings-and-output-weights",
        "--moe-router-enable-expert-bias",
    ]
    for flag, value in values.items():
        words += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    return words
