# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention in plain torch, for use where TransformerEngine is absent.

The local `DotProductAttention` of megatron-core refuses value heads of another width (so MLA cannot be
built with it), packed sequences and context parallelism. This one takes all three. It materialises the
scores, in float32 (float64 for float64 inputs), and rounds once at the end: it is a reference, not a fast
kernel. Dropout, attention bias, sliding windows and non-causal masks are refused.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def zigzag_rows(cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Global row of each local row of a context-parallel rank, int64 [T / cp_size].

    Every sequence is cut into 2 · cp_size chunks of equal length; rank r holds chunk r and chunk
    2 · cp_size − 1 − r, so that causal work is balanced.

    Args:
        cu_seqlens: [B+1] int, cumulative lengths of the whole (padded) sequences.
        cp_size: ranks of the context-parallel group.
        cp_rank: this rank.

    Raises:
        ValueError: a sequence length is not a multiple of 2 · cp_size.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    if cp_size == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    if bool((lengths % (2 * cp_size)).any()):
        raise ValueError(
            f"vime_models.host.attention: expected sequence lengths that are multiples of 2*cp "
            f"({2 * cp_size}), got {lengths.tolist()}; pad each sequence"
        )
    chunks: list[torch.Tensor] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        chunk = length // (2 * cp_size)
        chunks.extend(
            torch.arange(start + index * chunk, start + (index + 1) * chunk)
            for index in (cp_rank, 2 * cp_size - 1 - cp_rank)
        )
    return torch.cat(chunks).to(cu_seqlens.device)


def eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention with grouped key heads, one rounding at the end.

    Args:
        q: [S, b, H, D].
        k: [N, b, G, D]; G divides H, and query head h reads key head h // (H / G).
        v: [N, b, G, Dv].
        visible: [S, N] bool, True where the query may read the key; every row needs one True or a sink.
        scale: multiplies the scores.
        sink: [H] or None; a logit per head that takes probability and adds no value.

    Returns:
        [S, b, H, Dv] in the dtype of q.
    """
    accumulate = torch.promote_types(q.dtype, torch.float32)
    s, b, heads, width = q.shape
    groups = k.shape[2]
    wide_q = q.to(accumulate).view(s, b, groups, heads // groups, width)
    scores = torch.einsum("sbgrd,nbgd->bgrsn", wide_q, k.to(accumulate)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink is not None:
        column = sink.to(accumulate).view(1, groups, heads // groups, 1, 1).expand(*scores.shape[:-1], 1)
        probs = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs = scores.softmax(dim=-1)
    return torch.einsum("bgrsn,nbgd->sbgrd", probs, v.to(accumulate)).reshape(s, b, heads, -1).to(q.dtype)


class EagerCoreAttention(MegatronModule):
    """Core attention module with the constructor that Megatron's attention layers expect.

    Args:
        config: `softmax_type` "vanilla", "off-by-one" or "learnable" decides the sink, as in Megatron; the
            learnable one is the parameter `softmax_offset`.
        layer_number: 1-based, used in messages only.
        attn_mask_type: causal or padding_causal.
        attention_type: unused.
        softmax_scale: default 1/sqrt(head width).
        k_channels, v_channels: unused; widths are read from the tensors.
        cp_comm_type: unused; keys and values are all-gathered.
        pg_collection: with `tp` and `cp` groups; default: Megatron's parallel state.
        **ignored: options of other core attentions.

    Raises:
        ValueError: an option that this attention does not compute.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        _check_causal(attn_mask_type)
        for option, expected in (("attention_dropout", 0.0), ("window_size", None)):
            if getattr(config, option) != expected:
                raise ValueError(
                    f"vime_models.host.attention: layer {layer_number}: expected {option}={expected}, "
                    f"got {getattr(config, option)}; use --transformer-impl transformer_engine for it"
                )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.softmax_scale = softmax_scale
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
            offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            if config.perform_initialization:
                with torch.no_grad():
                    config.init_method(offset)
            set_tensor_model_parallel_attributes(offset, True, 0, 1)
            self.softmax_offset = offset

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **ignored: Any,
    ) -> torch.Tensor:
        """Causal attention of this rank's queries over the keys of all context-parallel ranks.

        Args:
            query: [s, b, H, D], or [T, H, D] when packed_seq_params.qkv_format is "thd".
            key: [s, b, G, D] or [T, G, D].
            value: [s, b, G, Dv] or [T, G, Dv].
            attention_mask: not read: the mask type says causal (TransformerEngine does the same).
            attn_mask_type: overrides the one given at construction.
            attention_bias: must be None.
            packed_seq_params: sequence boundaries (padded ones if given), of the whole sequences.

        Returns:
            [s, b, H * Dv] or [T, H * Dv].
        """
        if attn_mask_type is not None:
            _check_causal(attn_mask_type)
        if attention_bias is not None:
            raise ValueError("vime_models.host.attention: expected attention_bias=None, got a tensor")
        thd = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if thd:
            assert packed_seq_params is not None
            padded = packed_seq_params.cu_seqlens_q_padded
            cu_seqlens = padded if padded is not None else packed_seq_params.cu_seqlens_q
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        else:
            length = query.shape[0] * self.cp_group.size()
            cu_seqlens = torch.tensor([0, length], device=query.device)
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        rows_q = zigzag_rows(cu_seqlens, ranks, rank)
        if rows_q.numel() != query.shape[0]:
            raise ValueError(
                f"vime_models.host.attention: expected {rows_q.numel()} query rows from cu_seqlens "
                f"(cp={ranks}), got {query.shape[0]}; cu_seqlens must cover all rows, padding included"
            )
        rows_k = rows_q
        if ranks > 1:
            rows_k = torch.cat([zigzag_rows(cu_seqlens, ranks, other) for other in range(ranks)])
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        visible = rows_k[None, :] <= rows_q[:, None]
        if thd:
            boundaries = cu_seqlens[1:].long()
            sequence_q, sequence_k = (
                torch.bucketize(rows, boundaries, right=True) for rows in (rows_q, rows_k)
            )
            visible &= sequence_q[:, None] == sequence_k[None, :]
        scale = self.softmax_scale if self.softmax_scale is not None else query.shape[-1] ** -0.5
        context = eager_attention(query, key, value, visible, scale, self._sink(query))
        return context.squeeze(1).flatten(-2) if thd else context.flatten(-2)

    def _sink(self, query: torch.Tensor) -> torch.Tensor | None:
        if self.config.softmax_type == "off-by-one":
            return query.new_zeros(query.shape[-2])
        return self.softmax_offset

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The sink, sharded over heads; nothing else is stored."""
        if self.softmax_offset is None:
            return {}
        return dict(
            make_sharded_tensors_for_checkpoint(
                self.state_dict(prefix="", keep_vars=True),
                prefix,
                {"softmax_offset": 0},
                sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
        )


def _check_causal(mask_type: AttnMaskType) -> None:
    if mask_type not in _CAUSAL:
        raise ValueError(
            f"vime_models.host.attention: expected a causal mask type, got {mask_type.name}; "
            "only decoder attention is computed here"
        )
