# SPDX-License-Identifier: Apache-2.0
"""`--dsv4-impl megatron`: the host's own `dsv4_hybrid` attention variant, where the installed Megatron has it.

Development branches report the version of a release, so the variant is found by import, never by version. Nothing
falls back: its parameters are named otherwise and its mHC norm differs from the reference.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from vime_models.dsv4.config import DSv4Options

_MODULES = (
    "megatron.core.transformer.experimental_attention_variant.deepseek_v4_hybrid_attention",
    "megatron.core.transformer.hyper_connection",
    "transformer_engine",
)
_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"


def missing(config: TransformerConfig) -> list[str]:
    """Every requirement of the native variant that does not hold, in words; empty when it is usable."""
    reasons = []
    for name in _MODULES:
        try:
            import_module(name)
        except ImportError as error:
            reasons.append(f"cannot import {name} ({error})")
    if config.tensor_model_parallel_size != 1:
        reasons.append(f"it runs without tensor parallelism only (here {config.tensor_model_parallel_size})")
    if not isinstance(config, MLATransformerConfig):
        reasons.append("it needs an MLA config (--multi-latent-attention)")
    return reasons


def block_spec(options: DSv4Options, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The host's spec, after setting the config fields that it reads.

    Raises:
        RuntimeError: lists every requirement that does not hold.
    """
    if reasons := missing(config):
        try:
            installed = version("megatron-core")
        except PackageNotFoundError:
            installed = "of unknown version"
        raise RuntimeError(
            f"vime_models.dsv4: --dsv4-impl megatron is not usable with megatron-core {installed}: "
            f"{'; '.join(reasons)}; use --dsv4-impl vime"
        )
    fields = {
        "experimental_attention_variant": "dsv4_hybrid",
        "csa_compress_ratios": list(options.compress_ratios),
        "csa_window_size": options.window,
        "csa_compress_rotary_base": options.compress_rope_theta,
        "o_groups": options.o_groups,
        "o_lora_rank": options.o_lora_rank,
        "moe_n_hash_layers": options.num_hash_layers,
        "actual_vocab_size": options.vocab_size,
        "enable_hyper_connections": True,
        "num_residual_streams": options.hc_mult,
        "mhc_sinkhorn_iterations": options.hc_sinkhorn_iters,
    }
    for field, value in fields.items():
        setattr(config, field, value)
    # Imported here: the module pulls in every linear-attention library that is installed.
    specs = import_module(_SPECS)
    return specs.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
