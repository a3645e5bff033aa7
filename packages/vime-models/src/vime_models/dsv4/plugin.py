# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 as the converter and the verifier see it; announced under the entry-point group vime_convert.models."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from megatron.core import parallel_state

from vime_convert.dsv4.hf_config import read_config
from vime_convert.dsv4.names import rule_table
from vime_convert.plugin import ModelPlugin
from vime_models.dsv4.config import transformer_config
from vime_models.dsv4.tiny import TINY_CASES, init_tiny
from vime_models.host.bringup import init_world
from vime_models.host.provider import make_provider


def setup(device: str) -> None:
    """One process, ready to build; does nothing where a parallel state exists."""
    if not parallel_state.model_parallel_is_initialized():
        init_world(device=device)  # type: ignore[arg-type]


def build(
    hf_config: Mapping[str, Any], *, dtype: torch.dtype, device: str, **options: Any
) -> list[torch.nn.Module]:
    """The model chunks of this rank, in evaluation mode, with parameters that a checkpoint must fill.

    Args:
        hf_config: the parsed `config.json`.
        dtype: of the parameters, except those that stay float32.
        device: "cpu" or "cuda".
        **options: sizes tp, pp, ep, etp, cp, chunks of an interleaved stage vpp, and further TransformerConfig
            fields.
    """
    hf = read_config(hf_config)
    vpp: int | None = options.pop("vpp", None)
    init_world(
        device=device,  # type: ignore[arg-type]
        vpp=vpp,
        **{size: options.get(size, 1) for size in ("tp", "pp", "ep", "etp", "cp")},
    )
    if vpp is not None:
        options["virtual_pipeline_model_parallel_size"] = vpp
        # As Megatron's argument parser sets them for interleaved stages.
        options = {"overlap_p2p_comm": True, "batch_p2p_comm": False} | options
    config = transformer_config(hf, dtype=dtype, device=device, **options)
    tp = config.tensor_model_parallel_size
    args = Namespace(
        spec=["vime_models.dsv4", "get_dsv4_spec"],
        padded_vocab_size=-(-hf.vocab_size // tp) * tp,
        max_position_embeddings=hf.max_position_embeddings,
        untie_embeddings_and_output_weights=True,
        position_embedding_type="none",
        rotary_percent=1.0,
        rotary_base=int(hf.rope_theta),
        use_rope_scaling=False,
    )
    provider = make_provider(args)
    chunks = []
    for chunk in [None] if vpp is None else range(vpp):
        model = provider(
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            vp_stage=chunk,
            config=config,
        )
        chunks.append(model.to(device).eval())
    return chunks


def forward(chunks: list[torch.nn.Module], input_ids_BS: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of one full forward pass, without vocabulary padding.

    Args:
        chunks: the one chunk of a single pipeline stage.
        input_ids_BS: int64 [B, S].
    """
    (model,) = chunks
    logits: torch.Tensor = model(input_ids_BS, None, None)
    return logits[..., : cast(Any, model).config.vime_dsv4.vocab_size]


def layer_states(
    chunks: list[torch.nn.Module], hook: Callable[[int, torch.Tensor], torch.Tensor | None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Calls `hook(layer_index, streams [b, s, n, h])` after every decoder layer; returns the removable handles.

    What the hook returns, if not None, replaces the streams.
    """

    def watch(layer: Any, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any] | None:
        streams = output[0].unflatten(-1, (layer.config.vime_dsv4.hc_mult, -1))
        replaced = hook(layer.layer_number - 1, streams.transpose(0, 1))
        return None if replaced is None else (replaced.transpose(0, 1).flatten(-2), output[1])

    return [
        layer.register_forward_hook(watch) for chunk in cast(Any, chunks) for layer in chunk.decoder.layers
    ]


PLUGIN = ModelPlugin(
    model_type="deepseek_v4",
    setup=setup,
    build=build,
    rules=rule_table,
    forward=forward,
    layer_states=layer_states,
    tiny_cases=TINY_CASES,
    init_tiny=init_tiny,
)
