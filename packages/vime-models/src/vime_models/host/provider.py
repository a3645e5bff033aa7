# SPDX-License-Identifier: Apache-2.0
"""Builds a GPTModel from parsed Megatron arguments and `--spec MODULE NAME`.

The scripts with which Megatron does this are not part of its wheel. Three callers exist for the object that
`--spec` names (vime, megatron.training, this module); `call_spec` accepts the conventions of all of them.
Draft layers (multi-token prediction) are those that the spec function leaves as `config.vime_mtp_block`.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from vime_models._compat import check_megatron
from vime_models.host import cpu, dtypes, gradient_fusion, packed_roll
from vime_models.host.linear import ReplicatedLinear
from vime_models.host.microbatch import attach_token_ids

Role = Literal["actor", "critic"]
Provider = Callable[..., torch.nn.Module]


class VimeGPTModel(GPTModel):
    """GPTModel whose layers can see the token ids of their microbatch.

    When `config.vime_needs_token_ids` is true (set by a spec whose layers read them), `forward` puts
    `input_ids` into the packing object that Megatron hands to every layer (see `host.microbatch`).

    Draft layers may hand more channels on to each other than the output layer reads; the rest is cut off behind them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_process:
            packed_roll.install()
            width = self.config.hidden_size
            # Contiguous, because the output layer gathers it from sequence shards, and nccl moves nothing else.
            self.mtp.register_forward_hook(lambda _block, _inputs, hidden: hidden[..., :width].contiguous())

    def _postprocess(
        self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
    ) -> Any:
        # Megatron moves draft labels as those of packed sequences whenever there is a packing object.
        packed = packed_seq_params if packed_seq_params and packed_seq_params.qkv_format == "thd" else None
        return super()._postprocess(*args, packed_seq_params=packed, **kwargs)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Logits [b, s, vocabulary / tp], or the loss per token [b, s] when labels are given."""
        if getattr(self.config, "vime_needs_token_ids", False):
            packed_seq_params = attach_token_ids(packed_seq_params, input_ids)
        output: torch.Tensor = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            labels,
            inference_context,
            packed_seq_params,
            *args,
            **kwargs,
        )
        return output


class ValueHead(ReplicatedLinear):
    """Output layer of a critic: one float32 value per token, on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, config=config, init_method=config.init_method, bias=True)
        self.gather_sequence = config.sequence_parallel

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """[s, b, hidden] to ([s, b, 1], None); the further arguments are those of a vocabulary projection."""
        values, _ = super().forward(x)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if self.gather_sequence:
            # Every rank computes the same loss from the gathered values: split the gradient, do not sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def resolve_spec(spec: Sequence[str]) -> Any:
    """The object that `--spec MODULE NAME` names.

    Megatron's own resolver logs an ImportError and returns None, which fails much later; this one raises.

    Raises:
        ValueError: not two words.
        ModuleNotFoundError: the module, or something it imports, is not installed.
        AttributeError: the module has no such name; the message lists the names it has.
    """
    if len(spec) != 2:
        raise ValueError(f"vime_models.host.provider: expected --spec MODULE NAME, got {list(spec)}")
    module_name, name = spec
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            reason = f"the module {error.name!r} does not exist"
        else:
            reason = f"it needs {error.name!r}, which is not installed; install the extra of that plugin"
        raise ModuleNotFoundError(
            f"vime_models.host.provider: --spec {module_name} {name}: {reason}", name=error.name
        ) from error
    found = vars(module).get(name)
    if found is None:
        public = sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise AttributeError(
            f"vime_models.host.provider: --spec {module_name} {name}: the module has no {name!r}; "
            f"it has {', '.join(public) or 'nothing callable'}"
        )
    return found


def call_spec(fn: Any, args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """The layer spec (or model provider) that the object of `--spec` stands for.

    A spec object is returned as it is. A function whose first parameter is called `config` is called
    `fn(config, vp_stage=...)`, with `vp_stage` only if it has that parameter; any other is called
    `fn(args, config, vp_stage)`, vime's convention.

    Raises:
        TypeError: neither a spec nor a function, or the function returns None.
    """
    if isinstance(fn, ModuleSpec | TransformerBlockSubmodules):
        return fn
    if not callable(fn):
        raise TypeError(
            f"vime_models.host.provider: --spec names a {type(fn).__name__}, expected a spec or a function"
        )
    parameters = list(inspect.signature(fn).parameters)
    if parameters[:1] == ["config"]:
        result = fn(config, vp_stage=vp_stage) if "vp_stage" in parameters else fn(config)
    else:
        result = fn(args, config, vp_stage)
    if result is None:
        raise TypeError(f"vime_models.host.provider: the spec function {fn!r} returned None, expected a spec")
    return result


def make_provider(args: Namespace, role: Role = "actor") -> Provider:
    """The model provider for parsed Megatron arguments.

    Args:
        args: validated arguments with `spec` and `padded_vocab_size` (see `host.training.parse`).
        role: "critic" replaces the vocabulary projection by a value head.

    Returns:
        `provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None)`, which
        returns the model of this pipeline stage.
    """
    check_megatron()
    if not args.spec:
        raise ValueError(
            "vime_models.host.provider: no --spec given; pass e.g. --spec vime_models.dsv4 get_dsv4_spec"
        )
    spec = resolve_spec(args.spec)

    def provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: Any = None,
    ) -> torch.nn.Module:
        if config is None:
            from megatron.training.arguments import core_transformer_config_from_args

            config = core_transformer_config_from_args(args)
        resolved = call_spec(spec, args, config, vp_stage)
        drafts = getattr(config, "vime_mtp_block", None)
        if config.mtp_num_layers and (drafts is None or role == "critic"):
            raise ValueError(
                f"vime_models.host.provider: expected mtp_num_layers=0, got {config.mtp_num_layers}; drop "
                f"--mtp-num-layers, {'a critic' if drafts else 'the model of --spec'} has no draft layers to train"
            )
        if not isinstance(resolved, ModuleSpec) and callable(resolved):
            delegate: Provider = resolved
            return delegate(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        if config.gradient_accumulation_fusion:
            gradient_fusion.install(deferred=config.defer_embedding_wgrad_compute)
        # Stages that hold copies of the embedding move them to the device by name.
        with cpu.cuda_literals_to_cpu():
            model = VimeGPTModel(
                config=config,
                transformer_layer_spec=resolved,
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                pre_process=pre_process,
                post_process=post_process,
                parallel_output=True,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                rotary_percent=args.rotary_percent,
                rotary_base=args.rotary_base,
                rope_scaling=args.use_rope_scaling,
                mtp_block_spec=drafts,
                vp_stage=vp_stage,
                pg_collection=pg_collection,
            )
        if role == "critic" and post_process:
            model.output_layer = ValueHead(config)
        dtypes.enforce(model)
        if after_build := getattr(config, "vime_after_build", None):
            after_build(model)
        return model

    return provider
