# SPDX-License-Identifier: Apache-2.0
"""Sizes at which 32 bits do not count the elements, and the bound of the selection's memory. On a device."""

import fcntl
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vime_kernels import dsa, mhc, quant
from vime_kernels.testing import assert_bitwise

pytestmark = pytest.mark.gpu

Tensors = tuple[torch.Tensor, ...]
S, N, H, D, K = 37, 300, 16, 64, 40


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def f32(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.float32)


def below(limit: int, *shape: int) -> torch.Tensor:
    """Random int32."""
    return torch.randint(0, limit, shape, device="cuda", dtype=torch.int32)


def ranges(rows: int) -> Tensors:
    starts = below(N // 2, rows)
    return starts, starts + below(N // 2, rows)


@pytest.fixture
def much_memory():
    """Only one of several test processes at a time, and none where the device is too small."""
    with open(Path(tempfile.gettempdir()) / "vime-kernels-much-memory", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < 32:
            pytest.skip(f"needs 32 GiB of device memory, {free:.0f} are free")
        yield
        torch.cuda.empty_cache()


def far_apart(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Few rows, 2**30 elements from one to the next."""
    room = torch.empty(2**30 * (shape[0] - 1) + 2**20, dtype=dtype, device="cuda")
    tensor = room.as_strided(shape, (2**30, *torch.empty(shape, device="meta").stride()[1:]))
    return tensor.copy_(torch.randn(shape, device="cuda"))


def far_heads(rows: int, heads: int, dim: int) -> torch.Tensor:
    """Head-major [rows, heads, dim], as a product by head leaves it: the last head begins behind 2**31 elements."""
    apart = 2**32 // heads
    room = torch.empty(apart * (heads - 1) + rows * dim, dtype=torch.bfloat16, device="cuda")
    return room.as_strided((rows, heads, dim), (dim, apart, 1)).copy_(randn(rows, heads, dim))


def gradients(call: Callable[..., torch.Tensor], *operands: torch.Tensor) -> Tensors:
    """Of the sum of `call`, for its operands."""
    leaves = [each.detach().requires_grad_() for each in operands]
    return torch.autograd.grad(call(*leaves).sum(), leaves)


# The first tensor has four rows that lie far apart, or heads that do.
FAR: dict[str, tuple[Callable[..., torch.Tensor | Tensors], Callable[[], Tensors]]] = {
    "indexer_logits": (
        lambda q, k, w, lo, hi: dsa.indexer_logits(q, k, w, lo, hi),
        lambda: (far_apart(4, H, D), randn(N, D), f32(4, H), *ranges(4)),
    ),
    "indexer_logits-keys": (
        lambda k, q, w, lo, hi: dsa.indexer_logits(q, k, w, lo, hi),
        lambda: (far_apart(4, D), randn(S, H, D), f32(S, H), *(r % 5 for r in ranges(S))),
    ),
    "topk": (
        lambda x, lo, hi: dsa.topk(x, 24, lo, hi),
        lambda: (far_apart(4, N, dtype=torch.float32), *ranges(4)),
    ),
    "indexer_scores": (
        lambda q, k, i: dsa.indexer_scores(q, k, None, i),
        lambda: (far_apart(4, H, D), randn(N, D), below(N, 4, K)),
    ),
    "indexer_scores-keys": (
        lambda k, q, i: dsa.indexer_scores(q, k, None, i),
        lambda: (far_apart(4, D), randn(S, H, D), below(4, S, K)),
    ),
    "indexer_kl_target": (
        lambda k, q, i: dsa.indexer_kl_target(q, k, i, 0.1),
        lambda: (far_apart(4, D), randn(S, H, D), below(4, S, K)),
    ),
    "indexer_kl_target-512": (
        lambda k, q, i: dsa.indexer_kl_target(q, k, i, 0.1, lse=torch.ones(S, 64, device="cuda")),
        lambda: (far_apart(4, 512), randn(S, 64, 512), below(4, S, K)),
    ),
    "gated_pool": (
        lambda x, s: dsa.gated_pool(x, s, torch.zeros(2, D, device="cuda"), x.new_tensor([0, 4]).int(), 2),
        lambda: (far_apart(4, D), randn(4, D)),
    ),
    "sparse_attention-512": (
        lambda kv, q, i: dsa.sparse_attention(q, kv, i, 0.1),
        lambda: (far_apart(4, 512), randn(S, 64, 512), below(4, S, K)),
    ),
    "sparse_attention-plain": (
        lambda q, kv, i: dsa.sparse_attention(q, kv, i, 0.1),
        lambda: (far_apart(4, 5, D), randn(N, D), below(N, 4, K)),
    ),
    "indexer_logits-heads": (
        lambda q, k, w, lo, hi: dsa.indexer_logits(q, k, w, lo, hi),
        lambda: (far_heads(S, H, D), randn(N, D), f32(S, H), *ranges(S)),
    ),
    "indexer_scores-heads": (
        lambda q, k, i: gradients(lambda q, k: dsa.indexer_scores(q, k, None, i, deterministic=True), q, k),
        lambda: (far_heads(S, H, D), randn(N, D), below(N, S, K)),
    ),
    "indexer_scores-heads-128": (  # as many rows as fill the device
        lambda q, k, i: gradients(lambda q, k: dsa.indexer_scores(q, k, None, i, deterministic=True), q, k),
        lambda: (far_heads(512, 64, 128), randn(N, 128), below(N, 512, K)),
    ),
    "indexer_kl_target-heads": (
        lambda q, k, i: dsa.indexer_kl_target(q, k, i, 0.1),
        lambda: (far_heads(S, H, D), randn(N, D), below(N, S, K)),
    ),
    "indexer_kl_target-heads-512": (
        lambda q, k, i: dsa.indexer_kl_target(q, k, i, 0.1, lse=torch.ones(S, 128, device="cuda")),
        lambda: (far_heads(S, 128, 512), randn(N, 512), below(N, S, K)),
    ),
    "sparse_attention-heads": (
        lambda q, kv, i: dsa.sparse_attention(q, kv, i, 0.1),
        lambda: (far_heads(S, H, D), randn(N, D), below(N, S, K)),
    ),
    "sparse_attention-heads-512": (  # forward, and the gradient of the queries alone
        lambda q, kv, i: gradients(lambda q: dsa.sparse_attention(q, kv, i, 0.1).square(), q),
        lambda: (far_heads(S, 64, 512), randn(N, 512), below(N, S, K)),
    ),
    "fake_quant_fp8": (lambda x: quant.fake_quant_fp8(x, 32), lambda: (far_apart(4, D),)),
    "hadamard": (lambda x: quant.hadamard(x), lambda: (far_apart(4, D),)),
    "mhc_pre": (lambda X, w: mhc.mhc_pre(X, w), lambda: (far_apart(4, 4, 200), f32(4, 4))),
    "mhc_post": (
        lambda X, y, p, c: mhc.mhc_post(y, X, p, c),
        lambda: (far_apart(4, 4, 200), randn(4, 200), f32(4, 4), f32(4, 4, 4)),
    ),
}


@pytest.mark.parametrize("name", FAR)
def test_rows_beyond_two_to_the_31(much_memory, name):
    torch.manual_seed(0)
    call, make = FAR[name]
    far, *rest = make()
    got, expected = call(far, *rest), call(far.contiguous(), *rest)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, expected)), strict=True):
        assert_bitwise(a, b)


def test_results_beyond_two_to_the_31(much_memory):
    rows = 2**31 // 512 + 64
    x = torch.randn(rows // 64, 512, device="cuda").bfloat16().repeat(64, 1)
    assert x.numel() > 2**31
    y = quant.fake_quant_fp8(x, 64)
    assert_bitwise(y[-64:], quant.fake_quant_fp8(x[-64:].clone(), 64))
    del y
    weights = torch.ones(len(x) // 4, 4, device="cuda")
    streams = x[: len(weights) * 4].view(-1, 4, 512).requires_grad_()
    (gradient,) = torch.autograd.grad(mhc.mhc_pre(streams, weights), streams, x[: len(weights)])
    assert_bitwise(gradient[-1, 3], x[len(weights) - 1])


def test_a_selection_among_a_million_keys_stays_below_one_gibibyte(much_memory):
    rows, keys = 700, 2**20
    q, k, weights = randn(rows, H, D), randn(keys, D), f32(rows, H)
    starts, ends = below(1, rows), below(1, rows) + keys
    whole = dsa.indexer_topk(q, k, weights, starts, ends, 512)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    again = dsa.indexer_topk(q, k, weights, starts, ends, 512)
    torch.cuda.synchronize()
    assert (
        torch.cuda.max_memory_allocated() - before < 2**30 + 2**25
    )  # the scores, and the candidates of a chunk
    assert_bitwise(again, whole)
    by_few = dsa.indexer_topk(q, k, weights, starts, ends, 512, max_logits_bytes=2**26)
    assert_bitwise(by_few, whole)
