# SPDX-License-Identifier: Apache-2.0
"""Every operation once, on small inputs: the table that `test_proofs.py` and `test_proofs_torch.py` go through."""

from collections.abc import Callable

import torch
from proof_case import Case
from proof_inputs import (
    CU,
    DEVICE,
    EDGE,
    LONG,
    TAIL,
    WIDE,
    D,
    H,
    K,
    N,
    S,
    Tensors,
    edges_of,
    f32,
    int32,
    picks,
    randn,
    ranges,
    tail_of,
)

from vime_kernels import dsa, mhc, moe, quant


def attention(deterministic: bool, d_v: int) -> Callable[..., Tensors]:
    def call(q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, indices: torch.Tensor) -> Tensors:
        return dsa.sparse_attention(
            q, kv, indices, 0.1, d_v=d_v, attn_sink=sinks, return_lse=True, deterministic=deterministic
        )

    return call


def attention_v4(deterministic: bool, by: str) -> Callable[..., Tensors]:
    def call(
        q: torch.Tensor, kv: torch.Tensor, pooled: torch.Tensor, sink: torch.Tensor, *rest: torch.Tensor
    ) -> Tensors:
        chosen = {"indices": rest[0]} if by == "picks" else {"cmp_ranges": rest[:2]}
        return dsa.sparse_attention_v4(
            q, kv, pooled, 0.1, sink, **chosen, window=EDGE, cu_seqlens=rest[-1],
            q_positions=torch.arange(0, N, N // S, device=q.device, dtype=torch.int32)[:S],
            return_lse=True, deterministic=deterministic,
        )  # fmt: skip

    return call


CASES: dict[str, Case] = {
    "indexer_logits": Case(
        lambda *t: dsa.indexer_logits(*t),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), *ranges()),
        unread=edges_of(1),
    ),
    "indexer_logits-many-rows": Case(  # enough of them for the kernel written for Hopper
        lambda *t: dsa.indexer_logits(*t),
        lambda: (randn(30 * S, 2 * H, 2 * D), randn(N, 2 * D), f32(30 * S, 2 * H), *ranges(30 * S)),
        unread=edges_of(1),
    ),
    "indexer_logits-fp8": Case(
        lambda q, k, w, lo, hi, qs, ks: dsa.indexer_logits(q, k, w, lo, hi, q_scale=qs, k_scale=ks),
        lambda: (
            *(randn(*shape).to(torch.float8_e4m3fn) for shape in ((S, H, D), (N, D))),
            *(f32(S, H), *ranges(), f32(S, H).abs(), f32(N).abs()),
        ),
        unread=edges_of(6),
    ),
    "indexer_topk": Case(
        lambda *t: dsa.indexer_topk(*t, 24),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), *ranges()),
        unread=edges_of(1),
    ),
    "lightning_indexer": Case(
        lambda *t: dsa.lightning_indexer(*t, 24, deterministic=True),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), *ranges()),
        leaves=3,
        unread=edges_of(1),
    ),
    "topk": Case(
        lambda *t: dsa.topk(t[0], 24, *t[1:]),
        lambda: (f32(S, N), int32([EDGE] * S), int32([N - EDGE] * S)),
        unread=lambda: {0: (slice(None), [*range(EDGE), *range(N - EDGE, N)])},
    ),
    "topk-long": Case(
        lambda *t: dsa.topk(t[0], 50 * S, *t[1:]),
        lambda: (f32(3, 540 * S), int32([9] * 3), int32([539 * S] * 3)),
        unread=lambda: {0: (slice(None), slice(0, 9))},
    ),
    "indexer_scores": Case(
        lambda *t: dsa.indexer_scores(*t),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), picks()),
        leaves=3,
        unread=edges_of(1),
        atomic=True,
    ),
    "indexer_scores-repeatable": Case(
        lambda *t: dsa.indexer_scores(*t, deterministic=True),
        lambda: (randn(S, H, D), randn(N, D), f32(S, H), picks()),
        leaves=3,
        unread=edges_of(1),
    ),
    "indexer_scores-many-rows": Case(  # enough of them for the kernel written for Hopper
        lambda *t: dsa.indexer_scores(*t),
        lambda: (randn(15 * S, 2 * H, 2 * D), randn(N, 2 * D), f32(15 * S, 2 * H), picks(15 * S)),
        leaves=3,
        unread=edges_of(1),
        atomic=True,
    ),
    "indexer_scores-many-rows-repeatable": Case(
        lambda *t: dsa.indexer_scores(*t, deterministic=True),
        lambda: (
            *(randn(15 * S, 4 * H, 2 * D), randn(N, 2 * D), f32(15 * S, 4 * H)),
            picks(15 * S, slice(K - 3, None)),
        ),
        leaves=3,
        unread=edges_of(1),
    ),
    "indexer_kl_target": Case(
        lambda q, k, i, lse: dsa.indexer_kl_target(q, k, i, 0.1, lse=lse),
        lambda: (randn(S, H, D + 16), randn(N, D + 16), picks(), f32(S, H) + 5),
        unread=edges_of(1),
    ),
    "indexer_kl_target-tail": Case(
        lambda q, k, i, lse: dsa.indexer_kl_target(q, k, i, 0.1, lse=lse),
        lambda: (randn(S, 4 * H, WIDE + TAIL), randn(N, WIDE + TAIL), picks(), f32(S, 4 * H) + 5),
        unread=edges_of(1),
    ),
    "indexer_kl_target-own-lse": Case(
        lambda q, k, i: dsa.indexer_kl_target(q, k, i, 0.1),
        lambda: (randn(S, H, D), randn(N, D), picks()),
        unread=edges_of(1),
    ),
    "indexer_kl_loss": Case(
        lambda s, t, i, m: dsa.indexer_kl_loss(s, t, i, coeff=0.5, row_mask=m),
        lambda: (f32(S, K), f32(S, K).abs(), picks(), torch.arange(S, device=DEVICE) % 5 > 0),
        leaves=1,
        unread=lambda: {0: slice(0, S, 5), 1: slice(0, S, 5)},
    ),
    "gated_pool": Case(
        lambda x, s, a, c: dsa.gated_pool(x, s, a, c, 4),
        lambda: (randn(N, D), randn(N, D), f32(4, D), int32(CU)),
        leaves=3,
        unread=tail_of(0, 1),
    ),
    "gated_pool-overlap": Case(
        lambda x, s, a, hx, hs, c: dsa.gated_pool(x, s, a, c, 4, overlap=True, halo=(hx, hs)),
        lambda: (randn(N, 2 * D), randn(N, 2 * D), f32(4, 2 * D), randn(4, 2 * D), randn(4, 2 * D), int32(CU)),
        leaves=5,
        unread=tail_of(0, 1),
    ),
    "gated_pool-long": Case(
        lambda x, s, a, c: dsa.gated_pool(x, s, a, c, LONG),
        lambda: (randn(N, D), randn(N, D), f32(LONG, D), int32(CU)),
        leaves=3,
        unread=tail_of(0, 1),
    ),
    "kpool_select": Case(
        lambda q, k, w, c, at: dsa.kpool_select(q, k, w, c, 4 * EDGE, 4, q_positions=at),
        lambda: (randn(N, H, D), randn(N // 4, D), f32(N, H), int32(CU), int32(range(N))),
    ),
    "sparse_attention": Case(
        attention(False, WIDE),
        lambda: (randn(S, 4 * H, WIDE), randn(N, WIDE), f32(4 * H), picks()),
        leaves=3,
        unread=edges_of(1),
        atomic=True,
    ),
    "sparse_attention-tail-repeatable": Case(
        attention(True, WIDE),
        lambda: (randn(S, 4 * H, WIDE + TAIL), randn(N, WIDE + TAIL), f32(4 * H), picks()),
        leaves=3,
        unread=edges_of(1),
    ),
    "sparse_attention-narrow-repeatable": Case(
        attention(True, D),
        lambda: (randn(S, 5, D), randn(N, D), f32(5), picks()),
        leaves=3,
        unread=edges_of(1),
    ),
    "sparse_attention_v4-picks": Case(
        attention_v4(False, "picks"),
        lambda: (randn(S, 4 * H, WIDE), randn(N, WIDE), randn(N, WIDE), f32(4 * H), picks(), int32(CU)),
        leaves=4,
        unread=edges_of(2),
        atomic=True,
    ),
    "sparse_attention_v4-few-heads": Case(  # neighbouring rows share a program on Hopper
        attention_v4(False, "picks"),
        lambda: (
            *(randn(S, H, WIDE), randn(N, WIDE), randn(N, WIDE), f32(H)),
            *(picks(holes=slice(K - 3, None)), int32(CU)),
        ),
        leaves=4,
        unread=edges_of(2),
        atomic=True,
    ),
    "sparse_attention_v4-ranges": Case(
        attention_v4(True, "ranges"),
        lambda: (randn(S, 4 * H, WIDE), randn(N, WIDE), randn(N, WIDE), f32(4 * H), *ranges(), int32(CU)),
        leaves=4,
        unread=edges_of(2),
    ),
    "act_quant": Case(lambda x: quant.act_quant(x, 16), lambda: (randn(S, 2, 32),)),
    "act_quant-rotated": Case(lambda x: quant.act_quant(x, 16, rotate=True), lambda: (randn(S, 2, 32),)),
    "fake_quant_fp8": Case(
        lambda x: quant.fake_quant_fp8(x, 16, channels=16),
        lambda: (randn(S, 2, 32),),
        leaves=1,
        linear=True,
    ),
    "fake_quant_fp4": Case(
        lambda x: quant.fake_quant_fp4(x, 16, rotate=True),
        lambda: (randn(S, 2, 32),),
        leaves=1,
        linear=True,
    ),
    "hadamard": Case(lambda x: quant.hadamard(x), lambda: (randn(S, 2, 32),), leaves=1, linear=True),
    "mhc_mixes": Case(
        lambda *t: mhc.mhc_mixes(*t, eps=1e-6, iters=3, norm_eps=1e-6),
        lambda: (randn(S, 4, D), f32(24, 4 * D) / 16, f32(3), f32(24)),
        leaves=4,
    ),
    "sinkhorn": Case(lambda x: mhc.sinkhorn(x, iters=4), lambda: (f32(S, 4, 4),), leaves=1),
    "mhc_pre": Case(lambda *t: mhc.mhc_pre(*t), lambda: (randn(S, 4, 40), f32(S, 4)), leaves=2),
    "mhc_post": Case(
        lambda *t: mhc.mhc_post(*t),
        lambda: (randn(S, 40), randn(S, 4, 40), f32(S, 4), f32(S, 4, 4)),
        leaves=4,
    ),
    "mhc_head": Case(
        lambda *t: mhc.mhc_head(*t, eps=1e-6, norm_eps=1e-6),
        lambda: (randn(S, 4, D), f32(4, 4 * D) / 16, f32(1), f32(4)),
        leaves=4,
    ),
    "rotate": Case(
        lambda x, a: dsa.rotate(x, a.cos(), a.sin(), inverse=True),
        lambda: (randn(S, 4, 24), f32(S, 8)),
        leaves=1,
        linear=True,
    ),
    "rotate-norm": Case(
        lambda x, a: dsa.rotate(x, a.cos(), a.sin(), norm_eps=1e-6),
        lambda: (randn(S, 4, 24), f32(S, 8)),
        leaves=1,
    ),
    "swiglu": Case(
        lambda x, w: moe.swiglu(x, w, limit=1.0), lambda: (randn(S, 40), f32(S)), leaves=2
    ),
    "gather_sum": Case(
        lambda x, rows: moe.gather_sum(x, rows),
        lambda: (randn(S, D), int32([[0, -1], [S, S - 1]] * S)),
    ),
}  # fmt: skip
