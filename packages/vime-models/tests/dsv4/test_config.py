# SPDX-License-Identifier: Apache-2.0
"""Options, flags and what they refuse; the three ways in which the spec function is called."""

import dataclasses
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from vime_convert.dsv4.hf_config import ConfigError, read_config
from vime_models.dsv4 import DSv4Options, add_arguments, get_dsv4_spec
from vime_models.dsv4.arguments import launch_flags
from vime_models.dsv4.config import FLAG_OF, DSv4OptionError, transformer_config
from vime_models.dsv4.head import StreamHead
from vime_models.dsv4.moe import HashRouter
from vime_models.dsv4.tiny import TINY_CASES
from vime_models.host import training

# Megatron's argument module imports fla where it is installed, which warns on a machine without a GPU, and it uses
# an option of argparse that Python 3.12 deprecates.
pytestmark = [
    pytest.mark.filterwarnings("default:Triton is not supported on current platform:UserWarning"),
    pytest.mark.filterwarnings("default:Flash Attention is not installed:ImportWarning"),
    pytest.mark.filterwarnings("default:'type' is deprecated as of Python 3.12:DeprecationWarning"),
]

FLASH = TINY_CASES[0].config
PLAIN_ROPE = TINY_CASES[2].config


def parsed(cfg, *extra: str) -> Namespace:
    run = ["--micro-batch-size", "1", "--seq-length", "64", "--lr", "1e-3", "--train-iters", "1"]
    return training.parse([*launch_flags(cfg), *run, *extra], add_arguments)


def config_of(args: Namespace):
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


@pytest.mark.parametrize("cfg", [FLASH, PLAIN_ROPE], ids=["flash", "plain-rope"])
def test_launch_flags_rebuild_the_options_and_pass_validation(cfg):
    args = parsed(cfg)
    options = DSv4Options.from_args(args)
    assert options == DSv4Options.from_hf(cfg)
    config = config_of(args)
    options.validate(config)
    direct = transformer_config(cfg, dtype=torch.float32)
    for field in (
        "layernorm_epsilon",
        "activation_func_clamp_value",
        "moe_router_topk_scaling_factor",
        "kv_channels",
    ):
        assert getattr(config, field) == getattr(direct, field), field


def test_flag_defaults_are_what_the_releases_share():
    args = add_arguments(ArgumentParser()).parse_args([])
    assert (args.dsv4_impl, args.dsv4_kernels, args.dsv4_qat) == ("vime", "auto", "rollout")
    assert (args.dsv4_train_indexer, args.dsv4_indexer_loss_coeff) == ("off", 1.0)
    assert (args.dsv4_window_size, args.dsv4_hc_mult, args.dsv4_hc_sinkhorn_iters) == (128, 4, 20)
    assert (args.dsv4_compress_rope_theta, args.dsv4_yarn_factor, args.dsv4_n_hash_layers) == (
        160000.0,
        16.0,
        3,
    )
    assert args.dsv4_compress_ratios is None
    assert args.dsv4_o_groups is None


@pytest.mark.parametrize("impl", ["miles", "vime"])
def test_miles_is_an_alias(impl):
    args = parsed(FLASH, "--dsv4-impl", impl)
    assert isinstance(get_dsv4_spec(args, config_of(args)), TransformerBlockSubmodules)


def test_three_callers_get_the_same_layers():
    args = parsed(FLASH)
    by_vime = get_dsv4_spec(args, config_of(args), None)
    # megatron.training passes its model config and keeps the arguments in a global, which `parse` has set.
    by_megatron = get_dsv4_spec(SimpleNamespace(transformer=config_of(args)), vp_stage=None)
    plain = get_dsv4_spec(Namespace(), transformer_config(FLASH, dtype=torch.float32))
    kinds = [
        [
            (spec.submodules.self_attention.params, spec.submodules.mlp.keywords["submodules"].router)
            for spec in block.layer_specs
        ]
        for block in (by_vime, by_megatron, plain)
    ]
    assert kinds[0] == kinds[1] == kinds[2]
    assert [attention["compress_ratio"] for attention, _ in kinds[0]] == [0, 0, 4, 128, 4]
    assert [router is HashRouter for _, router in kinds[0]] == [True, True, False, False, False]
    assert by_vime.layer_norm is StreamHead


def test_config_asks_for_a_packing_object_with_ids():
    assert transformer_config(FLASH, dtype=torch.float32).vime_needs_token_ids
    assert transformer_config(PLAIN_ROPE, dtype=torch.float32).vime_needs_token_ids


def test_a_spec_function_without_config_names_what_it_expects():
    with pytest.raises(TypeError, match="expects \\(args, config, vp_stage\\)"):
        get_dsv4_spec(Namespace())


def test_a_missing_flag_is_named():
    args = parsed(FLASH)
    args.dsv4_o_groups = None
    with pytest.raises(DSv4OptionError, match="--dsv4-o-groups is not set; `vime-models args --hf DIR`"):
        DSv4Options.from_args(args)


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("compress_ratios", (0, 8), "every entry must be 0, 4 or 128"),
        ("window", 0, "must be positive"),
        ("hc_eps", -1e-6, "must be positive"),
        ("rope_dim", 15, "must be even"),
        ("rope_dim", 26, "at most --kv-channels and --dsa-indexer-head-dim \\(here 24\\)"),
        ("num_hash_layers", 6, "between 0 and the number of layers \\(5\\)"),
        ("impl", "native", "must be one of vime, miles, megatron"),
        ("kernels", "cuda", "must be one of auto, triton, torch"),
        ("qat", "fp8", "must be one of off, rollout, deepseek, miles"),
        ("train_indexer", "on", "must be one of off, warmup, joint"),
        ("indexer_loss_coeff", 0.0, "must be positive"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_options_out_of_range_name_flag_value_and_rule(field, value, rule):
    with pytest.raises(DSv4OptionError, match=rule) as error:
        dataclasses.replace(DSv4Options.from_hf(FLASH), **{field: value})
    assert f"{FLAG_OF[field]} is {value!r}" in str(error.value)


def test_a_checkpoint_that_fills_whole_blocks_trains_with_the_default_quantisation():
    wide = FLASH | {"head_dim": 80, "index_head_dim": 128}
    assert "--dsv4-qat" not in launch_flags(wide)
    words = launch_flags(FLASH)
    assert words[words.index("--dsv4-qat") + 1] == "off"


NARROW = [
    ("rollout", {"head_dim": 48}, "needs head_dim - rope_dim \\(32\\) to be a multiple of 64; pass off"),
    ("rollout", {"index_head_dim": 64}, "needs --dsa-indexer-head-dim \\(64\\) to be a multiple of 128"),
    ("deepseek", {"index_head_dim": 96}, "needs --dsa-indexer-head-dim \\(96\\) to be a power of two"),
    ("deepseek", {"hidden_size": 48}, "needs --hidden-size \\(48\\) to be a multiple of 32"),
    ("deepseek", {"moe_intermediate_size": 16}, "needs --moe-ffn.* \\(16\\) to be a multiple of 32"),
]


@pytest.mark.parametrize("qat, sizes, rule", NARROW, ids=[f"{q}-{next(iter(s))}" for q, s, _ in NARROW])
def test_widths_that_leave_a_block_unfilled_are_refused(qat, sizes, rule):
    config = FLASH | {"head_dim": 80, "index_head_dim": 128} | sizes
    with pytest.raises(DSv4OptionError, match=f"--dsv4-qat is '{qat}': {rule}"):
        transformer_config(config, dtype=torch.float32, qat=qat)


def test_a_mode_that_rounds_expert_weights_needs_the_local_experts():
    wide = FLASH | {"head_dim": 80, "index_head_dim": 128}
    config = transformer_config(wide, dtype=torch.float32, qat="deepseek")
    config.gradient_accumulation_fusion = True
    with pytest.raises(DSv4OptionError, match="needs --transformer-impl local and"):
        config.vime_dsv4.validate(config)


def test_training_the_indexer_needs_one():
    with pytest.raises(DSv4OptionError, match="--dsv4-train-indexer is 'joint': no layer has an indexer"):
        transformer_config(
            FLASH | {"compress_ratios": [0, 0, 0, 128, 128]}, dtype=torch.float32, train_indexer="joint"
        )


REFUSED = [
    ("bias_activation_fusion", True, "--no-bias-swiglu-fusion", "ignores the clamp"),
    ("moe_shared_expert_overlap", True, "--moe-shared-expert-overlap", "ignores the clamp"),
    ("activation_func_clamp_value", None, "--activation-func-clamp-value", "swiglu_limit"),
    ("activation_func", torch.nn.functional.gelu, "--swiglu", "must be given"),
    ("add_bias_linear", True, "--disable-bias-linear", "no layer has a bias"),
    ("normalization", "LayerNorm", "--normalization", "RMSNorm"),
    ("hidden_dropout", 0.1, "--hidden-dropout", "must be 0"),
    ("attention_dropout", 0.1, "--attention-dropout", "must be 0"),
    ("kv_channels", 16, "--kv-channels", "head size"),
    ("num_layers", 4, "--dsv4-compress-ratios", "--num-layers 4\\), got 5"),
    ("num_attention_heads", 3, "--dsv4-o-groups", "must divide --num-attention-heads \\(3\\)"),
    ("moe_layer_freq", 2, "--moe-layer-freq", "every layer is MoE"),
    ("num_moe_experts", None, "--num-experts", "every layer is MoE"),
    (
        "moe_shared_expert_intermediate_size",
        64,
        "--moe-shared-expert-intermediate-size",
        "--moe-ffn-hidden-size",
    ),
    ("moe_router_score_function", "sigmoid", "--moe-router-score-function", "sqrtsoftplus"),
    ("moe_router_enable_expert_bias", False, "--moe-router-enable-expert-bias", "bias"),
    ("moe_router_load_balancing_type", "aux_loss", "--moe-router-load-balancing-type", "auxiliary loss"),
    ("moe_router_topk_scaling_factor", None, "--moe-router-topk-scaling-factor", "routed_scaling_factor"),
    ("moe_router_num_groups", 2, "--moe-router-num-groups", "no groups"),
    ("moe_expert_capacity_factor", 1.0, "--moe-expert-capacity-factor", "no token is dropped"),
    ("moe_input_jitter_eps", 0.1, "--moe-input-jitter-eps", "no noise"),
    ("moe_router_force_load_balancing", True, "--moe-router-force-load-balancing", "at random"),
    ("moe_enable_routing_replay", True, "--moe-enable-routing-replay", "not supported yet"),
    ("mtp_use_repeated_layer", True, "--mtp-use-repeated-layer", "its own weights"),
    ("fp32_residual_connection", True, "--fp32-residual-connection", "streams"),
    ("cuda_graph_impl", "local", "--cuda-graph-impl", "not supported"),
    (
        "tensor_model_parallel_size",
        3,
        "--tensor-model-parallel-size",
        "must divide --num-attention-heads \\(4\\); nearest valid value: 2",
    ),
    ("tensor_model_parallel_size", 4, "--tensor-model-parallel-size", "must divide --dsv4-o-groups \\(2\\)"),
    ("tensor_model_parallel_size", 2, "--sequence-parallel", "must be given with tensor parallelism"),
    ("virtual_pipeline_model_parallel_size", 2, "--num-layers-per-virtual-pipeline-stage", "use nccl"),
    ("dsa_indexer_loss_coeff", 0.1, "--dsa-indexer-loss-coeff", "use --dsv4-indexer-loss-coeff"),
    ("pipeline_model_parallel_size", 2, "variable_seq_lengths", "must be true"),
    ("recompute_granularity", "selective", "--recompute-modules", "supports moe and shared_experts"),
]


@pytest.mark.parametrize(
    "field, value, flag, rule", REFUSED, ids=[f"{row[0]}={row[1]}"[:50] for row in REFUSED]
)
def test_a_config_that_would_train_another_model_is_refused(field, value, flag, rule):
    config = transformer_config(FLASH, dtype=torch.float32)
    setattr(config, field, value)
    if field == "recompute_granularity":
        config.recompute_modules = ["core_attn"]
    with pytest.raises(DSv4OptionError, match=rule) as error:
        config.vime_dsv4.validate(config)
    assert f"vime_models.dsv4: {flag} is " in str(error.value)


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v3"])
def test_other_models_are_refused(model_type):
    with pytest.raises(ConfigError, match=model_type):
        read_config(FLASH | {"model_type": model_type})
    with pytest.raises(ConfigError, match=model_type):
        launch_flags(FLASH | {"model_type": model_type})


def test_a_base_that_no_flag_can_carry_is_refused():
    with pytest.raises(DSv4OptionError, match=r"--rotary-base is 10000\.5: must be a whole number"):
        launch_flags(FLASH | {"rope_theta": 10000.5})
