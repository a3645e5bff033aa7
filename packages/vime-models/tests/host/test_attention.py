# SPDX-License-Identifier: Apache-2.0
"""Core attention against torch's, Megatron's own and transformers' attention with sinks."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from transformers.models.gpt_oss import modeling_gpt_oss

from vime_models.host.attention import EagerCoreAttention, eager_attention, zigzag_rows

S, B, H, G, D, DV = 70, 2, 4, 2, 12, 9


def _qkv(dtype: torch.dtype = torch.float64, dv: int = DV) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((S, B, H, D), (S, B, G, D), (S, B, G, dv))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def _module(config: Any, **options: Any) -> EagerCoreAttention:
    return EagerCoreAttention(
        config, 1, AttnMaskType.causal, "self", k_channels=D, v_channels=DV, cp_comm_type="p2p", **options
    )


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )
    return out.permute(2, 0, 1, 3).flatten(-2)


def test_equals_torch_with_grouped_heads_and_narrow_values(make_config: Callable[..., Any]) -> None:
    ours = [t.requires_grad_() for t in _qkv()]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    out, expected = _module(make_config())(*ours), _torch_attention(*theirs, D**-0.5)
    assert out.shape == (S, B, H * DV)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12)


def test_equals_megatrons_local_attention(make_config: Callable[..., Any]) -> None:
    # The stock module computes [s, b, h] with equal widths only, and needs the mask that ours does without.
    config = make_config(params_dtype=torch.float32, kv_channels=D, num_query_groups=G)
    q, k, v = _qkv(torch.float32, dv=D)
    stock = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    torch.testing.assert_close(_module(config)(q, k, v, mask), stock(q, k, v, mask), rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_once(make_config: Callable[..., Any]) -> None:
    q, k, v = _qkv(torch.bfloat16)
    out = _module(make_config(params_dtype=torch.bfloat16), softmax_scale=0.2)(q, k, v)
    exact = _torch_attention(q.double(), k.double(), v.double(), 0.2)
    assert out.dtype is torch.bfloat16
    # Half a unit in the last place of eight bits, plus float32's own error near a tie.
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize(
    "cu, padded",
    [([0, 70], None), ([0, 1, 33, 70], None), ([0, 10, 31], [0, 16, 70])],
    ids=["one", "three", "padded"],
)
def test_packed_sequences_do_not_see_each_other(
    make_config: Callable[..., Any], cu: list[int], padded: list[int] | None
) -> None:
    q, k, v = (t[:, 0] for t in _qkv())
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(cu, dtype=torch.int32))
    if padded is not None:
        packed.cu_seqlens_q_padded = torch.tensor(padded, dtype=torch.int32)
    out = _module(make_config())(q, k, v, packed_seq_params=packed)
    assert out.shape == (S, H * DV)
    bounds = padded or cu
    for start, end in pairwise(bounds):
        part = (t[start:end, None] for t in (q, k, v))
        torch.testing.assert_close(
            out[start:end], _torch_attention(*part, D**-0.5).squeeze(1), rtol=1e-12, atol=1e-13
        )


def test_learnable_sink_equals_gpt_oss(make_config: Callable[..., Any]) -> None:
    core = _module(make_config(softmax_type="learnable"))
    assert core.softmax_offset.tensor_model_parallel
    assert core.softmax_offset.partition_dim == 0
    q, k, v = _qkv()
    peer = SimpleNamespace(sinks=core.softmax_offset, num_key_value_groups=H // G, training=False)
    mask = torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected, _ = modeling_gpt_oss.eager_attention_forward(
        peer, *(t.permute(1, 2, 0, 3) for t in (q, k, v)), mask, scaling=D**-0.5
    )
    out = core(q, k, v)
    torch.testing.assert_close(out, expected.transpose(0, 1).flatten(-2), rtol=1e-12, atol=1e-13)
    assert not torch.allclose(out, _torch_attention(q, k, v, D**-0.5))
    assert list(core.sharded_state_dict("a.")) == ["a.softmax_offset"]
    assert _module(make_config()).sharded_state_dict("a.") == {}


def test_off_by_one_is_a_sink_at_zero(make_config: Callable[..., Any]) -> None:
    q, k, v = _qkv()
    visible = torch.ones(S, S, dtype=torch.bool).tril()
    expected = eager_attention(q, k, v, visible, D**-0.5, sink=torch.zeros(H, dtype=torch.float64))
    assert torch.equal(_module(make_config(softmax_type="off-by-one"))(q, k, v), expected.flatten(-2))


def test_zigzag_rows_cover_every_sequence_once() -> None:
    cu_seqlens = torch.tensor([0, 8, 20])
    rows = [zigzag_rows(cu_seqlens, 2, rank).tolist() for rank in range(2)]
    assert rows == [[0, 1, 6, 7, 8, 9, 10, 17, 18, 19], [2, 3, 4, 5, 11, 12, 13, 14, 15, 16]]
    assert zigzag_rows(cu_seqlens, 1, 0).tolist() == list(range(20))


def test_refusals(make_config: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="multiples of 2"):
        zigzag_rows(torch.tensor([0, 6]), 2, 0)
    with pytest.raises(ValueError, match=r"layer 1: expected attention_dropout=0\.0, got 0\.1"):
        _module(make_config(attention_dropout=0.1))
    with pytest.raises(ValueError, match="window_size=None"):
        _module(make_config(window_size=(4, 0)))
    with pytest.raises(ValueError, match="causal mask type, got no_mask"):
        EagerCoreAttention(make_config(), 1, AttnMaskType.no_mask, "self")
    core, (q, k, v) = _module(make_config()), _qkv()
    with pytest.raises(ValueError, match="attention_bias=None"):
        core(q, k, v, attention_bias=torch.zeros(1))
    short = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, S - 1]))
    with pytest.raises(ValueError, match=f"expected {S - 1} query rows"):
        core(q[:, 0], k[:, 0], v[:, 0], packed_seq_params=short)
