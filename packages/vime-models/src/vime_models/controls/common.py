# SPDX-License-Identifier: Apache-2.0
"""What the control models share: building a stock Megatron model, running it, random weights."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_models.host.backend import Backend
from vime_models.host.bringup import init_world
from vime_models.host.cpu import cpu_overrides
from vime_models.host.provider import make_provider
from vime_models.host.specs import args_and_config, replace_submodules, stage_layer_ids

PARALLEL_SIZES = ("tp", "pp", "ep", "etp", "cp")


class ControlConfigError(ValueError):
    """A config.json with a feature that the control model does not map."""


def expect(cfg: Mapping[str, Any], key: str, default: Any, expected: Any) -> None:
    """Raise `ControlConfigError` unless the field (or its default) has the one supported value."""
    if cfg.get(key, default) != expected:
        raise ControlConfigError(
            f"vime_models.controls: {cfg['model_type']}: expected {key}={expected!r}, got {cfg[key]!r}; "
            "control models cover the plain variant only"
        )


def rope_theta(cfg: Mapping[str, Any]) -> int:
    """Base of the rotary embedding, from either spelling of the config; scaled rotary embeddings are refused."""
    rope = cfg.get("rope_parameters") or {"rope_theta": cfg.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default" or cfg.get("rope_scaling"):
        raise ControlConfigError(
            f"vime_models.controls: {cfg['model_type']}: expected plain rotary embeddings, got {rope}"
        )
    return int(rope["rope_theta"])


def get_control_spec(
    args: Any, config: TransformerConfig | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Stock layers of this stage, with our norm and core attention; for `--spec` as well as for the plugins."""
    args, config = args_and_config(args, config)
    backend = Backend.from_config(config)
    norm = partial(backend.norm, rounding="before_weight")  # as the Llama family does in transformers

    def layer(num_experts: int | None) -> Any:
        spec = get_gpt_layer_local_spec(
            num_experts=num_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization="RMSNorm",
        )
        second = "kv_layernorm" if config.multi_latent_attention else "k_layernorm"
        attention = replace_submodules(
            spec.submodules.self_attention,
            core_attention=backend.core_attention,
            **{"q_layernorm": norm, second: norm} if config.qk_layernorm else {},
        )
        return replace_submodules(
            spec, self_attention=attention, input_layernorm=norm, pre_mlp_layernorm=norm
        )

    moe = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [0] * config.num_layers
    layers = [layer(config.num_moe_experts if moe[i] else None) for i in stage_layer_ids(config, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def setup(device: str) -> None:
    """One process, ready to build; keeps a parallel state that exists."""
    if not parallel_state.model_parallel_is_initialized():
        init_world(device=device)  # type: ignore[arg-type]


def shared_fields(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """TransformerConfig keywords that both control models derive alike."""
    expect(cfg, "attention_bias", False, False)
    expect(cfg, "hidden_act", "silu", "silu")
    expect(cfg, "tie_word_embeddings", False, False)
    return {
        "num_layers": cfg["num_hidden_layers"],
        "hidden_size": cfg["hidden_size"],
        "num_attention_heads": cfg["num_attention_heads"],
        "ffn_hidden_size": cfg["intermediate_size"],
        "layernorm_epsilon": cfg.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def build(
    hf_config: Mapping[str, Any],
    *,
    config_class: type[TransformerConfig],
    fields: Callable[[Mapping[str, Any]], dict[str, Any]],
    dtype: torch.dtype,
    device: str,
    **parallel: int,
) -> list[torch.nn.Module]:
    """The model chunk of this rank, in evaluation mode; `ModelPlugin.build` once the first two are bound."""
    sizes = {size: parallel.get(size, 1) for size in PARALLEL_SIZES}
    init_world(device=device, **sizes)  # type: ignore[arg-type]
    keywords = fields(hf_config) | {
        "transformer_impl": "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": sizes["tp"],
        "pipeline_model_parallel_size": sizes["pp"],
        "expert_model_parallel_size": sizes["ep"],
        "expert_tensor_parallel_size": sizes["etp"],
        "context_parallel_size": sizes["cp"],
        "sequence_parallel": sizes["tp"] > 1,
    }
    if dtype is torch.float64 and "moe_router_dtype" in keywords:
        keywords["moe_router_dtype"] = "fp64"
    config = config_class(**(cpu_overrides(keywords) if device == "cpu" else keywords))
    args = Namespace(
        spec=[__name__, get_control_spec.__name__],
        padded_vocab_size=-(-hf_config["vocab_size"] // sizes["tp"]) * sizes["tp"],
        max_position_embeddings=hf_config["max_position_embeddings"],
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=rope_theta(hf_config),
        use_rope_scaling=False,
    )
    model = make_provider(args)(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        config=config,
    )
    return [model.to(device).eval()]


def forward(chunks: list[torch.nn.Module], input_ids_BS: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of one full forward pass, with vocabulary padding where the size needs it."""
    (model,) = chunks
    positions = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device).expand_as(input_ids_BS)
    logits: torch.Tensor = model(input_ids_BS, positions, None)
    return logits


def layer_states(
    chunks: list[torch.nn.Module], hook: Callable[[int, torch.Tensor], torch.Tensor | None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Calls `hook(layer_index, state [b, s, h])` after every decoder layer; returns the removable handles.

    What the hook returns, if not None, replaces the state.
    """

    def watch(layer: Any, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any] | None:
        replaced = hook(layer.layer_number - 1, output[0].transpose(0, 1))
        return None if replaced is None else (replaced.transpose(0, 1), output[1])

    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]  # type: ignore[union-attr]
    return [layer.register_forward_hook(watch) for layer in layers]


def init_tiny(hf_name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The value of one tensor of a tiny checkpoint: float32, nothing near zero or one.

    Args:
        hf_name: name in the checkpoint.
        shape: of the tensor.
        generator: on the CPU.
    """
    noise = torch.randn(shape, generator=generator)
    if hf_name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if hf_name.endswith("e_score_correction_bias"):
        return 0.3 * noise
    if hf_name.endswith("embed_tokens.weight"):
        return noise
    # What is left multiplies vectors of unit size; the logits should spread more than that.
    gain = 2.0 if hf_name in ("lm_head.weight",) or hf_name.endswith("down_proj.weight") else 1.0
    return gain * noise * shape[-1] ** -0.5
