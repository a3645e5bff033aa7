# SPDX-License-Identifier: Apache-2.0
"""How a model announces itself to the converter and the verifier.

`vime_convert` imports no model code. A model package publishes one `ModelPlugin` under the entry-point group
`vime_convert.models`, keyed by the `model_type` of its Hugging Face config; command lines also take
`--plugin MODULE:ATTRIBUTE`. Everything that only the model knows (device set-up, how to build it, its names)
is reached through this object.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch

from vime_convert.refused import refuse_known
from vime_convert.rules import RuleTable

GROUP = "vime_convert.models"


class PluginError(LookupError):
    """No usable plugin for the requested model type."""


@dataclass(frozen=True)
class TinyCase:
    """One seeded random model that the verifier builds when no checkpoint is given.

    Attributes:
        name: short case name, shown in the report.
        config: the complete Hugging Face `config.json` as a dict.
        seq_len: tokens of the test sequence.
        covers: the layer kinds the case exercises, in words.
    """

    name: str
    config: Mapping[str, Any]
    seq_len: int
    covers: str


@dataclass(frozen=True)
class ModelPlugin:
    """What the converter and the verifier need to know about one model.

    Attributes:
        model_type: `model_type` in the Hugging Face config.
        setup: `setup(device)`; prepares the process ("cpu" or "cuda"): CPU shim, process group, parallel state.
            Idempotent.
        build: `build(hf_config, *, dtype, device, **parallel) -> chunks`; the Megatron model chunks of this
            rank, freshly initialised, parameters in `dtype` except those that stay fp32. `parallel` takes
            tp, pp, ep, etp, cp (default 1).
        rules: `rules(hf_config) -> RuleTable`; names and layouts, both directions.
        forward: `forward(chunks, input_ids_BS) -> logits_BSV`; one full forward pass, causal, no loss. Chunks hold one
            pipeline stage (world size 1).
        layer_states: `layer_states(chunks, hook)`; registers `hook(layer_index, state)` for every decoder
            layer, with `state` reshaped to what transformers returns ([b, s, h], or [b, s, n, h] for models
            with residual streams). What a hook returns, if not None, replaces the state. Returns the removable handles.
        tiny_cases: the seeded random models of `verify --tiny`.
        init_tiny: `init_tiny(hf_name, shape, generator) -> tensor` in float32: the value of one floating tensor
            (release name) of a tiny checkpoint, so that norms, sinks and biases are never trivial. Tables of expert
            ids are made by `vime_convert.tiny`, which knows the number of experts.
    """

    model_type: str
    setup: Callable[[str], None]
    build: Callable[..., list[torch.nn.Module]]
    rules: Callable[[Mapping[str, Any]], RuleTable]
    forward: Callable[[list[torch.nn.Module], torch.Tensor], torch.Tensor]
    layer_states: Callable[..., list[Any]]
    tiny_cases: Sequence[TinyCase]
    init_tiny: Callable[[str, tuple[int, ...], torch.Generator], torch.Tensor]


def installed() -> dict[str, str]:
    """Model types announced by installed packages, with the object reference of each."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def load_plugin(model_type: str, reference: str | None = None) -> ModelPlugin:
    """The plugin for a model type.

    Args:
        model_type: `model_type` of the Hugging Face config, e.g. "deepseek_v4".
        reference: optional "MODULE:ATTRIBUTE" that bypasses the entry points.

    Raises:
        ConfigError: the model type is refused on purpose.
        PluginError: nothing announces the type, or its package lacks an extra; the message names what to install.
    """
    if reference is None:
        known = installed()
        if model_type not in known:
            refuse_known(model_type)
            raise PluginError(
                f"vime_convert: no installed package announces model type {model_type!r} "
                f"(installed: {', '.join(sorted(known)) or 'none'}); "
                "install vime-models with the model's extra, or pass --plugin MODULE:ATTRIBUTE"
            )
        reference = known[model_type]
    module_name, _, attribute = reference.partition(":")
    if not attribute:
        raise PluginError(f"vime_convert: --plugin expects MODULE:ATTRIBUTE, got {reference!r}")
    try:
        plugin = getattr(import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise PluginError(
            f"vime_convert: plugin {reference} of model type {model_type!r} needs the module {error.name!r}, "
            "which is not installed; install vime-models with the model's extra, e.g. vime-models[dsv4]"
        ) from error
    except AttributeError as error:
        raise PluginError(
            f"vime_convert: plugin module {module_name} has no attribute {attribute!r}"
        ) from error
    if not isinstance(plugin, ModelPlugin):
        raise PluginError(f"vime_convert: {reference} is a {type(plugin).__name__}, expected a ModelPlugin")
    return plugin
