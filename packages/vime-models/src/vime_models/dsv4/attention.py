# SPDX-License-Identifier: Apache-2.0
"""Attention of DeepSeek-V4: many query heads over one key-value head, a sliding window plus compressed entries.

    q   = rope(unit_rms(wq_b · q_norm(wq_a · x)))       per head
    kv  = rope(kv_norm(wkv · x))                        key and value at once
    o   = softmax over {window} ∪ {compressed entries}, with a sink logit per head
    out = wo_b · concat over groups g of (wo_a[g] · unrope(o[g]))

Ratio 0 has no compressed entries, ratio 4 takes those that the indexer selects, ratio 128 takes all visible ones.
Tensor parallelism shards heads and output groups; everything that feeds the one key-value head is replicated and
sees all rows of the rank; context parallelism is in `context_parallel`. Left out: inference.
Source: DeepSeek-V4 technical report, sections 2.3.1 and 2.3.2, eqs. 26 and 27.
"""

import copy
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)

from vime_kernels.dsa import sparse_attention_v4
from vime_models.dsv4.compressor import Compressor
from vime_models.dsv4.context_parallel import ContextParallel
from vime_models.dsv4.hyper_connection import fp32_parameter
from vime_models.dsv4.indexer import Indexer
from vime_models.dsv4.qat import quantise_latent
from vime_models.dsv4.rope import RotaryTable, rotate
from vime_models.dsv4.thd import TokenLayout
from vime_models.dsv4.train_indexer import with_indexer_loss
from vime_models.host.backend import Backend


class GroupedLinear(ColumnParallelLinear):
    """Block-diagonal projection: [T, G, in] to [T, G, out/G], groups sharded over tensor parallelism."""

    def forward(self, x_TGI: torch.Tensor) -> torch.Tensor:
        """[T, G/tp, in] to [T, G/tp, out/G]; the input is this rank's groups already."""
        weight_GRI = self.weight.view(x_TGI.shape[1], -1, self.weight.shape[1])
        return cast(torch.Tensor, _GroupedProduct.apply(x_TGI, weight_GRI))


class _GroupedProduct(torch.autograd.Function):
    """einsum("tgi,gri->tgr"), which would copy its output and the gradient of x: both are the widest of a layer."""

    @staticmethod
    def forward(ctx: Any, x_TGI: torch.Tensor, weight_GRI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TGI, weight_GRI)
        return _by_group(x_TGI, weight_GRI.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad_TGR: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_TGI, weight_GRI = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            _by_group(grad_TGR, weight_GRI) if needs_x else None,
            torch.bmm(grad_TGR.permute(1, 2, 0), x_TGI.transpose(0, 1)) if needs_weight else None,
        )


def _by_group(x_TGI: torch.Tensor, matrices_GIO: torch.Tensor) -> torch.Tensor:
    """[T, G, out], written where it belongs."""
    out_TGO = x_TGI.new_empty(*x_TGI.shape[:2], matrices_GIO.shape[2])
    torch.bmm(x_TGI.transpose(0, 1), matrices_GIO, out=out_TGO.transpose(0, 1))
    return out_TGO


class DSv4Attention(MegatronModule):
    """Self-attention of one layer.

    Args:
        config: with `vime_dsv4`.
        layer_number: 1-based, for messages.
        compress_ratio: 0, 4 or 128.
        pg_collection: process groups of the model.
        **ignored: options of Megatron's own attention classes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        compress_ratio: int,
        pg_collection: ProcessGroupCollection | None = None,
        **ignored: Any,
    ) -> None:
        # Inside, every module sees the whole sequence: linears must neither gather nor scatter, and gradients of
        # replicated weights are complete on every rank.
        inner = copy.copy(config)
        inner.sequence_parallel = False
        super().__init__(inner)
        self.sequence_parallel = config.sequence_parallel
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = groups.tp
        self.layer_number, self.compress_ratio = layer_number, compress_ratio

        options = config.vime_dsv4
        tp = self.tp_group.size()
        self.head_dim, self.window = options.head_dim, options.window
        self.heads = config.num_attention_heads // tp
        self.groups = options.o_groups // tp
        self.options = options
        self.cp = ContextParallel(groups.cp, options.cp_layout, options.cp_balance, self.window)
        self.trains_indexer = compress_ratio == 4 and options.train_indexer != "off"
        self.rope = RotaryTable(options.rope_dim, options.rope_theta)
        if compress_ratio:
            self.rope = RotaryTable(options.rope_dim, options.compress_rope_theta, options.yarn)

        backend = Backend.from_config(inner)
        heads_width = config.num_attention_heads * self.head_dim
        low_rank = options.o_groups * options.o_lora_rank

        def linear(kind: Any, inputs: int, outputs: int, **special: Any) -> Any:
            common = {"config": inner, "init_method": config.init_method, "tp_group": self.tp_group}
            return kind(
                inputs, outputs, bias=False, skip_bias_add=False, is_expert=False, **(common | special)
            )

        def norm(width: int) -> Any:
            return backend.norm(config=inner, hidden_size=width, eps=config.layernorm_epsilon)

        self.wq_a = linear(backend.replicated_linear, config.hidden_size, options.q_lora_rank)
        self.q_norm = norm(options.q_lora_rank)
        self.wq_b = linear(backend.column_linear, options.q_lora_rank, heads_width, gather_output=False)
        self.wkv = linear(backend.replicated_linear, config.hidden_size, self.head_dim)
        self.kv_norm = norm(self.head_dim)
        self.wo_a = linear(GroupedLinear, heads_width // options.o_groups, low_rank, gather_output=False)
        self.wo_b = linear(
            backend.row_linear,
            low_rank,
            config.hidden_size,
            input_is_parallel=True,
            init_method=config.output_layer_init_method,
        )
        self.attn_sink = fp32_parameter(inner, self.heads, sequence_shard=False)
        set_tensor_model_parallel_attributes(self.attn_sink, is_parallel=True, dim=0, stride=1)
        if compress_ratio:
            self.compressor = Compressor(inner, compress_ratio, self.head_dim)
        if compress_ratio == 4:
            self.indexer = Indexer(inner, self.cp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **ignored: Any,
    ) -> tuple[torch.Tensor, None]:
        """[s, b, h] (or its sequence shard) to the pair (same shape, no bias).

        Args:
            hidden_states: normalised input.
            attention_mask: not read; the model is causal. Pad on the right.
            packed_seq_params: packed sequences, if `qkv_format` is "thd".
            **ignored: rotary embeddings and inference options of Megatron's own attention.
        """
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        layout = self.cp.layout(hidden_states, packed_seq_params)
        attended = self._attend(self.cp.enter(hidden_states, packed_seq_params, layout), layout)
        output = self.cp.leave(attended, hidden_states, packed_seq_params, layout)
        if self.sequence_parallel:
            output = scatter_to_sequence_parallel_region(output, group=self.tp_group)
        return output, None

    def _attend(self, x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """[T, h] to [T, h]."""
        order, backend = self.cp.queries(layout), self.options.backend
        cos, sin = order.rotation(self.rope, x.dtype)
        q_lora = self.q_norm(self.wq_a(x)[0])
        # Balanced rows change ranks where they are narrow: here, and as outputs.
        q_SHD = self.wq_b(self.cp.balance(q_lora, layout))[0].view(-1, self.heads, self.head_dim)
        q_SHD = rotate(q_SHD, cos, sin, norm_eps=self.config.layernorm_epsilon, backend=backend)
        key_x = self.cp.with_halo(x, layout)
        key_rotation = layout.key_rotation(self.rope, x.dtype)
        kv_ND = rotate(self.kv_norm(self.wkv(key_x)[0]), *key_rotation, backend=backend)
        kv_ND = self._shared(quantise_latent(kv_ND, self.options))
        entries, chosen = self._compressed(key_x, q_lora, layout)
        attended, lse_SH = sparse_attention_v4(
            q_SHD,
            self.cp.balance_keys(kv_ND, layout),
            entries,
            self.head_dim**-0.5,
            self.attn_sink,
            window=self.window,
            return_lse=True,
            backend=backend,
            **order.window,
            **chosen,
        )
        if self.trains_indexer and torch.is_grad_enabled():
            attended = with_indexer_loss(
                self,
                attended,
                lse_SH,
                q_SHD,
                cast(torch.Tensor, entries),
                chosen.get("indices"),
                key_x,
                q_lora,
                layout,
            )
        # Values carry their key's rotation; turning back at the query leaves the relative position.
        o_SHD = rotate(attended, cos, sin, inverse=True, backend=backend)
        z_SGR = self.wo_a(o_SHD.reshape(len(x), self.groups, -1))
        return self.cp.restore(self.wo_b(z_SGR.flatten(1))[0], layout)

    def _compressed(
        self, key_x: torch.Tensor, q_lora: torch.Tensor, layout: TokenLayout
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """All compressed entries [M, D] and which of them each query sees, as keywords of `sparse_attention_v4`."""
        if not self.compress_ratio:
            return None, {}
        own = quantise_latent(self.compressor(key_x, layout, self.rope), self.options)
        entries = self.cp.gather_entries(self._shared(own), layout, self.compress_ratio)
        if self.compress_ratio == 4 and self.options.train_indexer != "warmup":
            return entries, {"indices": self.indexer.select(key_x, q_lora, layout, self.rope)}
        return entries, {"cmp_ranges": self.cp.queries(layout).visible(self.compress_ratio)}

    def _shared(self, keys: torch.Tensor) -> torch.Tensor:
        # Every rank's heads read the same keys: identity forward, sum of the ranks' gradients backward.
        return copy_to_tensor_model_parallel_region(keys, group=self.tp_group)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Megatron's default, with the sink sharded over heads."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        sharded |= make_sharded_tensors_for_checkpoint(
            {"attn_sink": self.attn_sink},
            prefix,
            {"attn_sink": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded
