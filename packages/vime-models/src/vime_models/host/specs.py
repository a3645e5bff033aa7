# SPDX-License-Identifier: Apache-2.0
"""Edits of Megatron layer specs, and which layers a pipeline stage builds."""

from argparse import Namespace
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


def replace_submodules(spec: Any, **new: Any) -> Any:
    """A copy of a spec whose submodules have the given fields replaced; the argument is not changed.

    Megatron shares one spec object among all layers of a block, so editing in place would change them all.

    Args:
        spec: a `ModuleSpec`, or a `functools.partial` with a `submodules` keyword (MLP and MoE in 0.19.2).
        **new: field name and new value.

    Raises:
        ValueError: the spec has no dataclass of submodules, or a field does not exist.
    """
    submodules = get_submodules(spec)
    if not is_dataclass(submodules) or isinstance(submodules, type):
        raise ValueError(
            f"vime_models.host.specs: expected a spec with a dataclass of submodules, got {submodules!r}"
        )
    known = [field.name for field in fields(submodules)]
    if unknown := sorted(set(new) - set(known)):
        raise ValueError(
            f"vime_models.host.specs: {type(submodules).__name__} has no field {', '.join(unknown)}; "
            f"it has {', '.join(known)}"
        )
    changed = replace(submodules, **new)
    if isinstance(spec, partial):
        return partial(spec.func, *spec.args, **{**spec.keywords, "submodules": changed})
    return ModuleSpec(
        module=spec.module, params=dict(spec.params), submodules=changed, metainfo=dict(spec.metainfo)
    )


def stage_layer_ids(config: TransformerConfig, vp_stage: int | None = None) -> list[int]:
    """Global 0-based indices of the decoder layers of this pipeline stage, in order.

    Args:
        config: with its pipeline sizes or `pipeline_model_parallel_layout`.
        vp_stage: virtual stage, None without interleaving.
    """
    if config.pipeline_model_parallel_layout is not None:
        return list(
            config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage)
        )
    offset = get_transformer_layer_offset(config, vp_stage)
    return list(range(offset, offset + get_num_layers_to_build(config, vp_stage)))


def stage_problem(config: TransformerConfig) -> str:
    """Empty when the layers fill the pipeline stages, otherwise the rule and the nearest setting that holds it.

    Of an even split only: Megatron checks ends and layouts that are given when it makes the config, but an even
    split not before it builds the stages.
    """
    pipeline, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    ends = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    if pipeline == 1 or ends != (None, None) or config.pipeline_model_parallel_layout is not None:
        return ""
    layers = config.num_layers
    extra = config.account_for_embedding_in_pipeline_split + config.account_for_loss_in_pipeline_split
    if (layers + extra) % (pipeline * chunks) == 0:
        return ""
    problem = f"must be a multiple of the number of stages ({pipeline * chunks}) that share the layers evenly"
    more, fewer = -(-layers // pipeline), layers // pipeline
    if chunks > 1 or fewer == 0:
        return f"{problem}; otherwise give --pipeline-model-parallel-layout, or fewer stages"
    if (rest := layers - (pipeline - 1) * more) > 0:
        return f"{problem}; nearest: --decoder-last-pipeline-num-layers {rest}, {more} on each other stage"
    rest = layers - (pipeline - 1) * fewer
    return f"{problem}; nearest: --decoder-first-pipeline-num-layers {rest}, {fewer} on each other stage"


def args_and_config(first: Any, config: TransformerConfig | None) -> tuple[Any, TransformerConfig]:
    """What a spec function was called with, whoever called it.

    vime calls `fn(args, config, vp_stage)`. `megatron.training` 0.19.2 calls
    `fn(model_config, vp_stage=...)`, where `model_config.transformer` is the config and the parsed arguments
    are global.

    Args:
        first: the first argument of the spec function.
        config: its second argument, None in Megatron's convention.

    Returns:
        (args, config); args is an empty namespace when Megatron's global arguments are not set.
    """
    if config is not None:
        return first, config
    transformer = getattr(first, "transformer", None)
    if not isinstance(transformer, TransformerConfig):
        raise TypeError(
            "vime_models: a spec function expects (args, config, vp_stage) or "
            f"(GPTModelConfig, vp_stage=...), got {type(first).__name__} without a config"
        )
    from megatron.training import get_args

    try:
        return get_args(), transformer
    except AssertionError:  # Megatron's way of saying that the arguments were never set.
        return Namespace(), transformer
