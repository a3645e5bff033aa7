# SPDX-License-Identifier: Apache-2.0
"""The operations against the DeepSeek-V4 and GLM-5.3 modules of transformers, which this project did not write.

transformers rounds to float32 inside, so float32 is the precision of every comparison here.
"""

import types

import pytest
import torch

from vime_kernels import dsa, mhc
from vime_kernels.testing import cu_seqlens_of, randn

hf = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
config_module = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


def config(**changes):
    values = {
        "vocab_size": 64,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 12,
        "index_n_heads": 7,
        "index_head_dim": 8,
        "index_topk": 3,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 2e-2,
        "rms_norm_eps": 3e-3,
    }
    return config_module.DeepseekV4Config(**(values | changes))


def seeded(module, seed=0):
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed + i))
    return module


def test_hyper_connection():
    module = seeded(hf.DeepseekV4HyperConnection(config()))
    X = randn(1, 9, 4, 24, seed=50)
    post, comb, collapsed = module(X)
    eps = {"eps": 2e-2, "norm_eps": 3e-3}
    ours = mhc.mhc_mixes(X[0], module.fn, module.scale, module.base, iters=20, **eps)
    close(ours[1], post[0])
    close(ours[2], comb[0])
    close(mhc.mhc_pre(X[0], ours[0]), collapsed[0])
    y = randn(9, 24, seed=51)
    new = post[0][..., None] * y[:, None] + torch.matmul(comb[0].transpose(-1, -2), X[0])
    close(mhc.mhc_post(y, X[0], ours[1], ours[2]), new)
    head = seeded(hf.DeepseekV4HyperHead(config()))
    close(mhc.mhc_head(X[0], head.hc_fn, head.hc_scale, head.hc_base, **eps), head(X)[0])


@pytest.mark.parametrize("kind", ["csa", "hca", "indexer"])
@pytest.mark.parametrize("tokens", [300, 256, 5, 3])
def test_compressor(monkeypatch, kind, tokens):
    """The module up to its norm and rotation, which are replaced by nothing."""
    monkeypatch.setattr(hf, "apply_rotary_pos_emb", lambda x, cos, sin: x)
    h, positions = randn(1, tokens, 24, seed=50), torch.arange(tokens)[None]
    if kind == "hca":
        module, ratio = seeded(hf.DeepseekV4HCACompressor(config())), 128
    else:
        module, ratio = seeded(hf.DeepseekV4CSACompressor(config())), 4
        module.indexer.forward = lambda *a: torch.zeros(1, tokens, 1, dtype=torch.int64)
    if kind == "indexer":
        # The indexer's own compressor: catch the keys that its scorer receives.
        module, seen = seeded(hf.DeepseekV4Indexer(config())), []
        module.scorer.forward = lambda q, keys, hidden: (
            seen.append(keys),
            torch.zeros(1, tokens, keys.shape[1]),
        )[1]
    module.kv_norm = torch.nn.Identity()
    result = module(h, randn(1, tokens, 12, seed=51), positions, None, 0)
    expected = seen[0][0] if kind == "indexer" else result[0][0, 0]
    pooled, _ = dsa.gated_pool(
        module.kv_proj(h)[0],
        module.gate_proj(h)[0],
        module.position_bias,
        cu_seqlens_of([tokens]),
        ratio,
        overlap=ratio == 4,
    )
    assert pooled.shape == expected.shape
    close(pooled, expected)


def test_indexer_scorer():
    module = seeded(hf.DeepseekV4IndexerScorer(config()))
    q, k, h = randn(1, 9, 7, 8, seed=50), randn(1, 5, 8, seed=51), randn(1, 9, 24, seed=52)
    weights = module.weights_proj(h)[0] * 7**-0.5 * 8**-0.5
    every = torch.zeros(9, dtype=torch.int32), torch.full((9,), 5, dtype=torch.int32)
    close(dsa.indexer_logits(q[0], k[0], weights, *every), module(q, k, h)[0])


@pytest.mark.parametrize("kind", ["window-only", "indices", "ranges"])
def test_attention_with_sink(kind):
    """transformers' eager attention over [window keys | compressed keys] with additive masks; values and gradients."""
    T, M, H, D, window, ratio = 40, 10, 4, 16, 8, 4
    q, raw, compressed, sink = (
        randn(*shape, seed=i, grad=True) for i, shape in enumerate([(T, H, D), (T, D), (M, D), (H,)])
    )
    positions = torch.arange(T)
    band = (positions[None] <= positions[:, None]) & (positions[None] > positions[:, None] - window)
    starts, ends = dsa.causal_ranges(cu_seqlens_of([T]), ratio=ratio)
    visible = torch.arange(M) < ends[:, None]
    picks = dsa.topk(randn(T, M, seed=9), 3, starts, ends)
    listed = torch.zeros(T, M + 1, dtype=torch.bool).scatter_(
        1, torch.where(picks < 0, M, picks).long(), True
    )[:, :M]
    allowed, arguments = {
        "window-only": (torch.zeros(T, M, dtype=torch.bool), {}),
        "indices": (listed, {"indices": picks}),
        "ranges": (visible, {"cmp_ranges": (starts, ends)}),
    }[kind]
    mask = torch.zeros(T, T + M).masked_fill(~torch.cat([band, allowed], 1), float("-inf"))
    module = types.SimpleNamespace(num_key_value_groups=H, sinks=sink, training=False)
    kv = torch.cat([raw, compressed])[None, None]
    expected, _ = hf.eager_attention_forward(module, q.transpose(0, 1)[None], kv, kv, mask[None, None], 0.25)
    rows = compressed if arguments else None
    ours = dsa.sparse_attention_v4(q, raw, rows, 0.25, sink, window=window, **arguments)
    close(ours, expected[0])
    upstream = randn(T, H, D, seed=10)
    for a, b in zip(
        torch.autograd.grad(
            ours, (q, raw, compressed, sink), upstream, allow_unused=True, materialize_grads=True
        ),
        torch.autograd.grad(expected[0], (q, raw, compressed, sink), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
