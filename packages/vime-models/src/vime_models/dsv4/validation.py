# SPDX-License-Identifier: Apache-2.0
"""Rules between DeepSeek-V4's options and a TransformerConfig, as data: flag, value, whether it holds, the rule."""

from collections.abc import Iterator

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_models.dsv4.config import FLAG_OF, DSv4Options, check
from vime_models.dsv4.recipes import RECIPES, width_problems
from vime_models.host.bringup import on_gloo
from vime_models.host.specs import stage_problem

_RECOMPUTABLE = ("moe", "shared_experts")


def validate(options: DSv4Options, config: TransformerConfig) -> None:
    """Checks every rule.

    Raises:
        DSv4OptionError: the first rule that does not hold.
    """
    for rules in (_architecture(options, config), _training(options, config), _parallelism(options, config)):
        for flag, value, ok, rule in rules:
            check(ok, flag, value, rule)


Rule = tuple[str, object, bool, str]


def _training(options: DSv4Options, config: TransformerConfig) -> Iterator[Rule]:
    flag, qat = FLAG_OF["qat"], options.qat
    for problem in width_problems(options):
        yield flag, qat, False, f"{problem}; pass off"
    if qat in RECIPES and (block := RECIPES[qat].expert_block):
        etp = config.expert_tensor_parallel_size or 1
        for name, width in (
            ("--hidden-size", config.hidden_size),
            (
                "--moe-ffn-hidden-size / --expert-tensor-parallel-size",
                (config.moe_ffn_hidden_size or 0) // etp,
            ),
        ):
            yield flag, qat, width % block == 0, f"needs {name} ({width}) to be a multiple of {block}"
        local = config.transformer_impl == "local" and not config.gradient_accumulation_fusion
        yield (
            flag,
            qat,
            local,
            "rounds the experts' weights on use, which needs --transformer-impl local and "
            "--no-gradient-accumulation-fusion; rollout quantises no weights",
        )
    train = options.train_indexer
    yield (
        FLAG_OF["train_indexer"],
        train,
        train == "off" or 4 in options.compress_ratios,
        "no layer has an indexer (ratio 4); pass off",
    )
    coeff = config.dsa_indexer_loss_coeff
    yield "--dsa-indexer-loss-coeff", coeff, not coeff, "must not be given; use --dsv4-indexer-loss-coeff"


def _architecture(options: DSv4Options, config: TransformerConfig) -> Iterator[Rule]:
    layers, heads = config.num_layers, config.num_attention_heads
    ratios, moe_width = options.compress_ratios, config.moe_ffn_hidden_size
    yield (
        FLAG_OF["compress_ratios"],
        ratios,
        len(ratios) == layers,
        f"expected one entry per decoder layer (--num-layers {layers}), got {len(ratios)}; "
        "leave out the entries of draft layers",
    )
    yield (
        FLAG_OF["o_groups"],
        options.o_groups,
        heads % options.o_groups == 0,
        f"must divide --num-attention-heads ({heads})",
    )
    yield "--kv-channels", config.kv_channels, config.kv_channels == options.head_dim, "must be the head size"
    yield "--normalization", config.normalization, config.normalization == "RMSNorm", "must be RMSNorm"
    yield "--disable-bias-linear", False, not config.add_bias_linear, "must be given: no layer has a bias"
    swiglu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    yield "--swiglu", config.activation_func, swiglu, "must be given: experts use SwiGLU"
    clamp = config.activation_func_clamp_value
    yield "--activation-func-clamp-value", clamp, clamp is not None, "must be swiglu_limit of the config"
    # Both would drop the clamp without a word.
    yield (
        "--no-bias-swiglu-fusion",
        False,
        not config.bias_activation_fusion,
        "must be given: Megatron's fused SwiGLU ignores the clamp",
    )
    yield (
        "--moe-shared-expert-overlap",
        True,
        not config.moe_shared_expert_overlap,
        "must not be given: Megatron's overlapped shared expert ignores the clamp",
    )
    yield "--use-te-activation-func", True, not config.use_te_activation_func, "must not be given"
    yield "--hidden-dropout", config.hidden_dropout, config.hidden_dropout == 0, "must be 0"
    yield "--attention-dropout", config.attention_dropout, config.attention_dropout == 0, "must be 0"
    yield (
        "--num-experts",
        config.num_moe_experts,
        bool(config.num_moe_experts),
        "must be given: every layer is MoE",
    )
    freq = config.moe_layer_freq
    yield "--moe-layer-freq", freq, freq in (1, [1] * layers), "must be 1 for every layer: every layer is MoE"
    shared = config.moe_shared_expert_intermediate_size
    yield (
        "--moe-shared-expert-intermediate-size",
        shared,
        shared == moe_width,
        f"must equal --moe-ffn-hidden-size ({moe_width}): one shared expert of the experts' width",
    )
    yield "--moe-shared-expert-gate", True, not config.moe_shared_expert_gate, "must not be given"
    score = config.moe_router_score_function
    yield "--moe-router-score-function", score, score == "sqrtsoftplus", "must be sqrtsoftplus"
    yield (
        "--moe-router-enable-expert-bias",
        False,
        config.moe_router_enable_expert_bias,
        "must be given: the score router selects with a bias",
    )
    balancing = config.moe_router_load_balancing_type
    yield (
        "--moe-router-load-balancing-type",
        balancing,
        balancing == "none",
        "must be none: the model is balanced by its bias, an auxiliary loss would train something else",
    )
    yield "--moe-z-loss-coeff", config.moe_z_loss_coeff, not config.moe_z_loss_coeff, "must not be given"
    scale = config.moe_router_topk_scaling_factor
    yield (
        "--moe-router-topk-scaling-factor",
        scale,
        scale is not None,
        "must be routed_scaling_factor of the config",
    )
    groups = config.moe_router_num_groups
    yield "--moe-router-num-groups", groups, groups is None, "must not be given: routing has no groups"
    capacity = config.moe_expert_capacity_factor
    yield "--moe-expert-capacity-factor", capacity, capacity is None, "must not be given: no token is dropped"
    jitter = config.moe_input_jitter_eps
    yield "--moe-input-jitter-eps", jitter, jitter is None, "must not be given: routing has no noise"
    forced = config.moe_router_force_load_balancing
    yield "--moe-router-force-load-balancing", True, not forced, "must not be given: it routes at random"
    yield (
        "--moe-router-fusion",
        True,
        not config.moe_router_fusion,
        "must not be given: the router is not Megatron's",
    )
    yield "--moe-enable-routing-replay", True, not config.moe_enable_routing_replay, "is not supported yet"
    yield (
        "--fp32-residual-connection",
        True,
        not config.fp32_residual_connection,
        "streams have the activation dtype",
    )
    yield "--cuda-graph-impl", config.cuda_graph_impl, config.cuda_graph_impl == "none", "is not supported"


def _parallelism(options: DSv4Options, config: TransformerConfig) -> Iterator[Rule]:
    tp = config.tensor_model_parallel_size
    flag = "--tensor-model-parallel-size"
    heads = config.num_attention_heads
    fits = [size for size in range(1, heads + 1) if heads % size == 0 and options.o_groups % size == 0]
    nearest = f"nearest valid value: {min(fits, key=lambda size: abs(size - tp))}"
    yield flag, tp, heads % tp == 0, f"must divide --num-attention-heads ({heads}); {nearest}"
    yield (
        flag,
        tp,
        options.o_groups % tp == 0,
        f"must divide --dsv4-o-groups ({options.o_groups}); {nearest}",
    )
    yield (
        "--sequence-parallel",
        config.sequence_parallel,
        tp == 1 or config.sequence_parallel,
        "must be given with tensor parallelism: Megatron's MoE layer does not train without it",
    )
    virtual = config.virtual_pipeline_model_parallel_size
    yield (
        "--num-layers-per-virtual-pipeline-stage",
        virtual,
        virtual is None or not on_gloo(),
        "must not be given with gloo, over which the exchanges of shapes and payloads cross and hang; use nccl",
    )
    yield (
        "--no-overlap-p2p-communication",
        True,
        virtual is None or config.pipeline_model_parallel_size != 2 or config.overlap_p2p_comm,
        "must not be given with virtual stages on two ranks: both neighbours are one rank there, and the messages that "
        "Megatron batches to it cross",
    )
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    yield (
        "--expert-tensor-parallel-size",
        etp,
        etp == 1 or ep == 1 or not on_gloo(),
        "must be 1 with expert parallelism over gloo, which gathers only parts of one size; pass 1 or use nccl",
    )
    yield (
        "variable_seq_lengths",
        config.variable_seq_lengths,
        config.pipeline_model_parallel_size == 1 or config.variable_seq_lengths,
        "must be true on the TransformerConfig with pipeline parallelism: stages exchange hc_mult · hidden_size "
        "channels; Megatron's argument validation resets it, so set it afterwards",
    )
    split = stage_problem(config)
    yield "--num-layers", config.num_layers, not split, split
    drafts = config.mtp_num_layers
    yield (
        "--mtp-num-layers",
        drafts,
        not drafts or (config.context_parallel_size == 1 and config.pipeline_model_parallel_layout is None),
        "draft layers are trained without context parallelism and on the stage of the last decoder layer; leave out "
        "--pipeline-model-parallel-layout, or this flag",
    )
    yield (
        "--mtp-use-repeated-layer",
        True,
        not config.mtp_use_repeated_layer,
        "must not be given: each draft depth has its own weights",
    )
    modules = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    yield (
        "--recompute-modules",
        sorted(modules),
        modules <= set(_RECOMPUTABLE),
        f"selective recomputation supports {' and '.join(_RECOMPUTABLE)}; or pass --recompute-granularity full",
    )
