# SPDX-License-Identifier: Apache-2.0
"""Bad input: every message names the operation, the argument, what was expected and what came."""

import re

import pytest
import torch

from vime_kernels import BackendError, dsa, mhc, moe, quant

q, kv, w = torch.zeros(5, 3, 8), torch.zeros(7, 8), torch.zeros(5, 3)
idx = torch.zeros(5, 2, dtype=torch.int32)
lo, hi = torch.zeros(5, dtype=torch.int32), torch.full((5,), 7, dtype=torch.int32)
cu = torch.tensor([0, 5], dtype=torch.int32)
X, fn, scale, base = torch.zeros(2, 4, 6), torch.zeros(24, 24), torch.zeros(3), torch.zeros(24)
mixes = {"eps": 1e-6, "iters": 20, "norm_eps": 1e-6}
ape = torch.zeros(4, 8)
tall = torch.zeros(8, 7).T  # [7, 8] with stride 1 along the rows


def raises(op, expected, got, call, kind=ValueError):
    return pytest.param(
        call, kind, f"vime_kernels.{op}: expected {expected}, got {got}", id=f"{op}-{expected[:40]}"
    )


CASES = [
    raises("sparse_attention", "kv.shape[-1] == q.shape[-1] (8)", "6",
           lambda: dsa.sparse_attention(q, torch.zeros(7, 6), idx, 1.0)),
    raises("sparse_attention", "q of shape [S, H, D]", "[5, 8]", lambda: dsa.sparse_attention(q[:, 0], kv, idx, 1.0)),
    raises("sparse_attention", "indices.shape[0] == q.shape[0] (5)", "4",
           lambda: dsa.sparse_attention(q, kv, idx[:4], 1.0)),
    raises("sparse_attention", "attn_sink.shape[-1] == q.shape[1] (3)", "2",
           lambda: dsa.sparse_attention(q, kv, idx, 1.0, attn_sink=torch.zeros(2))),
    raises("sparse_attention", "attn_sink in float32 (or float64)", "torch.bfloat16",
           lambda: dsa.sparse_attention(q, kv, idx, 1.0, attn_sink=torch.zeros(3, dtype=torch.bfloat16)), TypeError),
    raises("sparse_attention", "indices in torch.int32", "torch.int64; pass indices.to(torch.int32)",
           lambda: dsa.sparse_attention(q, kv, idx.long(), 1.0), TypeError),
    raises("sparse_attention", "q in bfloat16, float16, float32 or float64", "torch.int32",
           lambda: dsa.sparse_attention(q.int(), kv, idx, 1.0), TypeError),
    raises("sparse_attention", "kv.stride(-1) == 1", "7; pass kv.contiguous()",
           lambda: dsa.sparse_attention(q, tall, idx, 1.0)),
    raises("sparse_attention", "kv on the device of q (cpu)", "meta",
           lambda: dsa.sparse_attention(q, torch.zeros(7, 8, device="meta"), idx, 1.0)),
    raises("sparse_attention", "d_v to be an int from 1 to q.shape[-1] (8)", "9",
           lambda: dsa.sparse_attention(q, kv, idx, 1.0, d_v=9)),
    raises("sparse_attention", "d_v to be an int from 1 to q.shape[-1] (8)", "4.0",
           lambda: dsa.sparse_attention(q, kv, idx, 1.0, d_v=4.0)),
    raises("sparse_attention", "q to be a tensor [S, H, D]", "NoneType",
           lambda: dsa.sparse_attention(None, kv, idx, 1.0), TypeError),
    raises("sparse_attention", "q to be dense (torch.strided)", "torch.sparse_coo; pass q.to_dense()",
           lambda: dsa.sparse_attention(q.to_sparse(), kv, idx, 1.0)),
    raises("sparse_attention_v4", "cmp_ranges to be a pair of tensors", "['Tensor', 'NoneType']",
           lambda: dsa.sparse_attention_v4(q, kv[:5], kv, 1.0, None, cmp_ranges=(lo, None)), TypeError),
    raises("sparse_attention_v4", "cmp_ranges to be a pair of tensors", "Tensor",
           lambda: dsa.sparse_attention_v4(q, kv[:5], kv, 1.0, None, cmp_ranges=lo), TypeError),
    raises("sparse_attention_v4", "cmp_ranges[0].shape[-1] == q.shape[0] (5)", "2",
           lambda: dsa.sparse_attention_v4(q, kv[:5], kv, 1.0, None, cmp_ranges=(lo[:2], hi))),
    raises("sparse_attention_v4", "cmp_ranges[1] in torch.int32", "torch.int64; pass cmp_ranges[1].to(torch.int32)",
           lambda: dsa.sparse_attention_v4(q, kv[:5], kv, 1.0, None, cmp_ranges=(lo, hi.long())), TypeError),
    raises("sparse_attention_v4", "indices or cmp_ranges with kv_compressed", "None; no query would see",
           lambda: dsa.sparse_attention_v4(q, kv[:5], kv, 1.0, None)),
    raises("sparse_attention", "sm_scale to be a Python float", "Tensor; pass float(sm_scale)",
           lambda: dsa.sparse_attention(q, kv, idx, torch.tensor(1.0)), TypeError),
    raises("sparse_attention", "kv to be a tensor [N, D]", "list",
           lambda: dsa.sparse_attention(q, [1.0], idx, 1.0), TypeError),
    raises("sparse_attention_v4", "q.shape[0] == kv_window.shape[0] (7)", "5; pass q_positions",
           lambda: dsa.sparse_attention_v4(q, kv, None, 1.0, None)),
    raises("sparse_attention_v4", "either indices or cmp_ranges", "both",
           lambda: dsa.sparse_attention_v4(q, kv, kv, 1.0, None, indices=idx, cmp_ranges=(lo, hi))),
    raises("sparse_attention_v4", "kv_compressed with indices or cmp_ranges", "None",
           lambda: dsa.sparse_attention_v4(q, kv, None, 1.0, None, indices=idx)),
    raises("sparse_attention_v4", "window to be an int >= 1", "0",
           lambda: dsa.sparse_attention_v4(q, kv[:5], None, 1.0, None, window=0)),
    raises("sparse_attention_v4", "cu_seqlens[-1] <= 5 (the packed rows)", "6",
           lambda: dsa.sparse_attention_v4(q, kv[:5], None, 1.0, None, cu_seqlens=cu + torch.tensor([0, 1]).int())),
    raises("topk", "k to be an int >= 1", "0", lambda: dsa.topk(w, 0, lo, hi)),
    raises("topk", "k to be an int >= 1", "-3", lambda: dsa.topk(w, -3, lo, hi)),
    raises("topk", "rule to be one of", "'best'", lambda: dsa.topk(w, 1, lo, hi, rule="best")),
    raises("topk", "ends in torch.int32", "torch.int64", lambda: dsa.topk(w, 1, lo, hi.long()), TypeError),
    raises("topk", "starts.shape[-1] == logits.shape[0] (5)", "2", lambda: dsa.topk(w, 1, lo[:2], hi)),
    raises("indexer_logits", "weights.shape[-1] == q.shape[1] (3)", "2",
           lambda: dsa.indexer_logits(q, kv, w[:, :2], lo, hi)),
    raises("indexer_logits", "out in torch.float32", "torch.float64",
           lambda: dsa.indexer_logits(q, kv, w, lo, hi, out=torch.zeros(5, 7).double()), TypeError),
    raises("indexer_logits", "k_scale.shape[-1] == k.shape[0] (7)", "6",
           lambda: dsa.indexer_logits(q, kv, w, lo, hi, k_scale=torch.zeros(6))),
    raises("indexer_logits", "out whose rows do not share memory", "strides (0, 1); pass out.contiguous()",
           lambda: dsa.indexer_logits(q, kv, w, lo, hi, out=torch.zeros(1, 7).expand(5, 7))),
    raises("indexer_logits", "q and k both in torch.float8_e4m3fn or neither", "torch.float8_e4m3fn and torch.float32",
           lambda: dsa.indexer_logits(q.to(torch.float8_e4m3fn), kv, w, lo, hi), TypeError),
    raises("indexer_topk", "q_scale to be a tensor [S, H]", "float",
           lambda: dsa.indexer_topk(q, kv, w, lo, hi, 2, q_scale=1.0), TypeError),
    raises("indexer_topk", "topk_fn to return torch.int32 [5, 2] on cpu", "torch.int64 [5, 2] on cpu",
           lambda: dsa.indexer_topk(q, kv, w, lo, hi, 2, topk_fn=lambda x, k, *_, row_offset: x.topk(k).indices)),
    raises("indexer_topk", "topk_fn to return torch.int32 [5, 2] on cpu", "torch.int32 [5, 2] on meta",
           lambda: dsa.indexer_topk(q, kv, w, lo, hi, 2, topk_fn=lambda *_, row_offset: idx.to("meta"))),
    raises("indexer_topk", "topk_fn to return torch.int32 [5, 2] on cpu", "NoneType",
           lambda: dsa.indexer_topk(q, kv, w, lo, hi, 2, topk_fn=lambda *_, row_offset: None)),
    raises("indexer_topk", "max_logits_bytes to be an int >= 1", "0",
           lambda: dsa.indexer_topk(q, kv, w, lo, hi, 2, max_logits_bytes=0)),
    raises("indexer_scores", "q in bfloat16, float16, float32 or float64", "torch.float8_e4m3fn",
           lambda: dsa.indexer_scores(q.to(torch.float8_e4m3fn), kv, w, idx), TypeError),
    raises("lightning_indexer", "indices.shape[-1] == 4", "2",
           lambda: dsa.lightning_indexer(q, kv, w, lo, hi, 4, indices=idx)),
    raises("lightning_indexer", "q in bfloat16, float16, float32 or float64", "torch.float8_e4m3fn",
           lambda: dsa.lightning_indexer(*(t.to(torch.float8_e4m3fn) for t in (q, kv)), w, lo, hi, 2), TypeError),
    raises("indexer_kl_target", "lse in float32 (or float64)", "torch.float16",
           lambda: dsa.indexer_kl_target(q, kv, idx, 1.0, lse=w.half()), TypeError),
    raises("indexer_kl_loss", "reduction to be one of ('mean', 'sum')", "'none'",
           lambda: dsa.indexer_kl_loss(w, w, idx[:, :1].expand(5, 3), coeff=1.0, reduction="none")),
    raises("indexer_kl_loss", "row_mask in torch.bool", "torch.int32",
           lambda: dsa.indexer_kl_loss(w[:, :2], w[:, :2], idx, coeff=1.0, row_mask=lo), TypeError),
    raises("causal_ranges", "cu_seqlens to start at 0 and never to decrease", "[0, 4, 2]",
           lambda: dsa.causal_ranges(torch.tensor([0, 4, 2], dtype=torch.int32))),
    raises("causal_ranges", "cu_seqlens to start at 0 and never to decrease", "[1, 4]",
           lambda: dsa.causal_ranges(torch.tensor([1, 4], dtype=torch.int32))),
    raises("causal_ranges", "cu_seqlens in torch.int32", "torch.int64",
           lambda: dsa.causal_ranges(cu.long()), TypeError),
    raises("causal_ranges", "cu_seqlens of at least one element", "0", lambda: dsa.causal_ranges(cu[:0])),
    raises("causal_ranges", "ratio to be an int >= 1", "0", lambda: dsa.causal_ranges(cu, ratio=0)),
    raises("causal_ranges", "q_positions with cu_seqlens that has no values to read", "Tensor on meta",
           lambda: dsa.causal_ranges(cu.to("meta"))),
    raises("kpool_select", "at least 2 pooled rows, one for every 2 tokens of a sequence", "1",
           lambda: dsa.kpool_select(q, kv[:1], w, cu, 4, 2)),
    raises("kpool_select", "pooled_k.shape[-1] == q.shape[-1] (8)", "4",
           lambda: dsa.kpool_select(q, kv[:, :4], w, cu, 4, 4)),
    raises("gated_pool", "halo to be a pair of tensors", "Tensor",
           lambda: dsa.gated_pool(kv, kv, ape, cu, 4, overlap=True, halo=ape), TypeError),
    raises("gated_pool", "ape.shape[0] == 4", "3", lambda: dsa.gated_pool(kv, kv, ape[:3], cu, 4)),
    raises("gated_pool", "ape in float32 (or float64)", "torch.bfloat16",
           lambda: dsa.gated_pool(kv, kv, ape.bfloat16(), cu, 4), TypeError),
    raises("gated_pool", "an even x_TC.shape[-1] with overlap=True (two halves)", "7",
           lambda: dsa.gated_pool(kv[:, :7], kv[:, :7], ape[:, :7], cu, 4, overlap=True)),
    raises("gated_pool", "halo=None without overlap", "a halo",
           lambda: dsa.gated_pool(kv, kv, ape, cu, 4, halo=(ape, ape))),
    raises("gated_pool", "rounding to be one of ('fp32', 'hf')", "'bf16'",
           lambda: dsa.gated_pool(kv, kv, ape, cu, 4, rounding="bf16")),
    raises("mhc_mixes", "fn.shape[0] == 24", "20", lambda: mhc.mhc_mixes(X, fn[:20], scale, base, **mixes)),
    raises("mhc_mixes", "base in float32 (or float64)", "torch.bfloat16; keep it out of .bfloat16()",
           lambda: mhc.mhc_mixes(X, fn, scale, base.bfloat16(), **mixes), TypeError),
    raises("mhc_mixes", "iters to be an int >= 1", "0",
           lambda: mhc.mhc_mixes(X, fn, scale, base, **(mixes | {"iters": 0}))),
    raises("mhc_mixes", "eps to be a Python float", "Tensor; pass float(eps)",
           lambda: mhc.mhc_mixes(X, fn, scale, base, **(mixes | {"eps": scale[0]})), TypeError),
    raises("mhc_pre", "X_TnC to be a tensor [T, n, C]", "NoneType", lambda: mhc.mhc_pre(None, w), TypeError),
    raises("sinkhorn", "logits_Tnn.shape[-1] == logits_Tnn.shape[1] (4)", "6", lambda: mhc.sinkhorn(X)),
    raises("mhc_pre", "pre_Tn.shape[-1] == X_TnC.shape[1] (4)", "3", lambda: mhc.mhc_pre(X, torch.zeros(2, 3))),
    raises("mhc_post", "y_TC.shape[-1] == X_TnC.shape[-1] (6)", "5",
           lambda: mhc.mhc_post(torch.zeros(2, 5), X, torch.zeros(2, 4), torch.zeros(2, 4, 4))),
    raises("mhc_head", "scale.shape[-1] == 1", "3",
           lambda: mhc.mhc_head(X, fn[:4], scale, base[:4], eps=1e-6, norm_eps=1e-6)),
    raises("fake_quant_fp8", "x.shape[-1] to be a multiple of block (128)", "[2, 100]; pad or slice x",
           lambda: quant.fake_quant_fp8(torch.zeros(2, 100))),
    raises("fake_quant_fp4", "block to be an int >= 1", "0", lambda: quant.fake_quant_fp4(X, 0)),
    raises("act_quant", "scale to be one of ('ue8m0', 'fp32')", "'e8m0'", lambda: quant.act_quant(X, 2, "e8m0")),
    raises("act_quant", "x in bfloat16, float16, float32 or float64", "torch.int64",
           lambda: quant.act_quant(torch.zeros(128, dtype=torch.int64)), TypeError),
    raises("hadamard", "x.shape[-1] to be a power of two", "6", lambda: quant.hadamard(X)),
    raises("hadamard", "x.stride(-1) == 1", "4; pass x.contiguous()",
           lambda: quant.hadamard(torch.zeros(4, 4).T)),
    raises("fake_quant_fp8", "channels to be a multiple of block (2) and at most x.shape[-1]", "8 for [2, 4, 6]",
           lambda: quant.fake_quant_fp8(X, 2, channels=8)),
    raises("fake_quant_fp4", "channels=None with rotate=True (the rotation mixes all channels)", "2",
           lambda: quant.fake_quant_fp4(X, 2, channels=2, rotate=True)),
    raises("act_quant", "x.shape[-1] to be a power of two", "6", lambda: quant.act_quant(X, 2, rotate=True)),
    raises("hadamard", "x.shape[-1] to be a power of two", "0", lambda: quant.hadamard(torch.tensor(1.0))),
    raises("fake_quant_fp8", "x.shape[-1] to be a multiple of block (128)", "[]",
           lambda: quant.fake_quant_fp8(torch.tensor(1.0))),
    raises("fake_quant_fp8", "channels to be a multiple of block (2) and at most x.shape[-1]", "4.0 for [2, 4, 6]",
           lambda: quant.fake_quant_fp8(X, 2, channels=4.0)),
    raises("swiglu", "weight to be a tensor", "float", lambda: moe.swiglu(torch.zeros(4), 2.0), TypeError),
    raises("swiglu", "weight on the device of x (cpu)", "meta",
           lambda: moe.swiglu(torch.zeros(3, 4), torch.zeros(3, device="meta"))),
    raises("swiglu", "limit to be a Python float", "NoneType", lambda: moe.swiglu(X, limit=None), TypeError),
    raises("rotate", "norm_eps >= 0, or None for no norm", "-1e-06",
           lambda: dsa.rotate(q, w[:, :2], w[:, :2], norm_eps=-1e-6)),
    raises("hadamard", "x to be a tensor", "float", lambda: quant.hadamard(1.0), TypeError),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, message", CASES)
def test_message(call, kind, message):
    # "one of (…)" lists are cut short in the table.
    pattern = re.escape(message).replace(re.escape("one of, got"), r"one of \(.*\), got")
    with pytest.raises(kind, match=pattern):
        call()


TOO_LARGE = torch.tensor([[0, -1], [1, 3]], dtype=torch.int32)
PICK_CALLS = {
    "sparse_attention": lambda: dsa.sparse_attention(torch.ones(2, 1, 4), torch.ones(3, 4), TOO_LARGE, 1.0),
    "sparse_attention_v4": lambda: dsa.sparse_attention_v4(
        torch.ones(2, 1, 4), torch.ones(2, 4), torch.ones(3, 4), 1.0, None, indices=TOO_LARGE
    ),
    "indexer_scores": lambda: dsa.indexer_scores(torch.ones(2, 1, 4), torch.ones(3, 4), None, TOO_LARGE),
    "indexer_kl_target": lambda: dsa.indexer_kl_target(torch.ones(2, 1, 4), torch.ones(3, 4), TOO_LARGE, 1.0),
}


@pytest.mark.parametrize("op", PICK_CALLS)
def test_picks_of_rows_that_do_not_exist_are_found_under_the_debug_flag(monkeypatch, op):
    monkeypatch.delenv("VIME_KERNELS_DEBUG", raising=False)
    PICK_CALLS[op]()  # means no row
    monkeypatch.setenv("VIME_KERNELS_DEBUG", "1")
    message = rf"vime_kernels.{op}: expected indices below 3 .*, or -1 for none, got indices\[1, 1\] == 3"
    with pytest.raises(ValueError, match=message):
        PICK_CALLS[op]()


def test_recorded_picks_outside_of_their_range_are_found_under_the_debug_flag(monkeypatch):
    picks, starts = torch.tensor([[0, -1], [1, 2]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def call(ends):
        return dsa.lightning_indexer(
            torch.ones(2, 1, 4), torch.ones(3, 4), None, starts, ends, 2, indices=picks
        )

    causal = torch.tensor([1, 2], dtype=torch.int32)
    call(causal)  # scored as they are
    monkeypatch.setenv("VIME_KERNELS_DEBUG", "1")
    call(causal + 1)
    message = r"lightning_indexer: expected indices inside the range .*, got indices\[1, 1\] == 2"
    with pytest.raises(ValueError, match=message):
        call(causal)


def test_the_debug_flag_does_not_break_compilation(monkeypatch):
    monkeypatch.setenv("VIME_KERNELS_DEBUG", "1")
    compiled = torch.compile(dsa.sparse_attention, fullgraph=True, backend="eager")
    assert compiled(q, kv, idx, 1.0).shape == q.shape


def test_results_of_float64_do_not_depend_on_the_backend(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # then the machine is no reason to refuse
    wide = {"attn_sink": torch.zeros(3, dtype=torch.float64)}
    calls = [
        lambda **b: dsa.sparse_attention(q.half(), kv.half(), idx, 1.0, d_v=8, **wide, return_lse=True, **b)[
            1
        ],
        lambda **b: dsa.indexer_scores(q, kv, w.double(), idx, **b),
    ]
    for call in calls:
        assert call().dtype == torch.float64
        with pytest.raises(BackendError, match=r"does not support (attn_sink|weights) in float64"):
            call(backend="triton")
