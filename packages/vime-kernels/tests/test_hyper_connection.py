# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections against scalar loops, transformers' module (test_transformers.py) and numeric derivatives."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from vime_kernels import mhc
from vime_kernels.ops.hyper_connection import config
from vime_kernels.testing import assert_bitwise, randn, rel_rms

# Large and different on purpose: a misplaced or mixed-up eps hides at 1e-6.
EPS, NORM_EPS = 2e-2, 3e-3


def inputs(T=3, n=4, C=5, dtype=torch.float64, grad=False):
    width = (2 + n) * n
    X = randn(T, n, C, seed=0, dtype=dtype, grad=grad)
    parameters = (randn(width, n * C, seed=1), randn(3, seed=2), randn(width, seed=3))
    return X, *(p.to(torch.float64).requires_grad_(grad) for p in parameters)


def mixes_by_hand(X, fn, scale, base, iters):
    """One token, plain Python numbers."""
    n = len(X)
    v = [c for stream in X for c in stream]
    norm = 1 / math.sqrt(sum(c * c for c in v) / len(v) + NORM_EPS)
    m = [norm * sum(f * c for f, c in zip(row, v, strict=True)) for row in fn]
    sigmoid = lambda t: 1 / (1 + math.exp(-t))  # noqa: E731
    pre = [sigmoid(m[i] * scale[0] + base[i]) + EPS for i in range(n)]
    post = [2 * sigmoid(m[n + i] * scale[1] + base[n + i]) for i in range(n)]
    comb = []
    for i in range(n):
        logits = [m[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j] for j in range(n)]
        total = sum(math.exp(t) for t in logits)
        comb.append([math.exp(t) / total + EPS for t in logits])
    for step in range(2 * iters - 1):
        if step % 2 == 0:
            sums = [sum(comb[i][j] for i in range(n)) + EPS for j in range(n)]
            comb = [[comb[i][j] / sums[j] for j in range(n)] for i in range(n)]
        else:
            comb = [[c / (sum(row) + EPS) for c in row] for row in comb]
    return pre, post, comb


@pytest.mark.parametrize("n, iters", [(1, 1), (2, 3), (4, 20)], ids=["n1-it1", "n2-it3", "n4-it20"])
def test_mixes_equal_the_scalar_formulas(n, iters):
    X, fn, scale, base = inputs(n=n)
    pre, post, comb = mhc.mhc_mixes(X, fn, scale, base, eps=EPS, iters=iters, norm_eps=NORM_EPS)
    for t in range(len(X)):
        expected = mixes_by_hand(X[t].tolist(), fn.tolist(), scale.tolist(), base.tolist(), iters)
        for actual, by_hand in zip((pre[t], post[t], comb[t]), expected, strict=True):
            torch.testing.assert_close(
                actual, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-12, atol=1e-13
            )


def test_post_reads_the_row_of_comb_as_the_source():
    X, y = randn(1, 3, 2, seed=0, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    comb = torch.zeros(1, 3, 3, dtype=torch.float64)
    comb[0, 0, 2] = 1.0  # stream 0 flows into stream 2
    out = mhc.mhc_post(y, X, torch.ones(1, 3, dtype=torch.float64), comb)
    assert_bitwise(out[0, 2], X[0, 0])
    assert out[0, :2].abs().sum() == 0


def test_pre_and_post_equal_loops():
    X, y = randn(2, 3, 4, seed=0, dtype=torch.float64), randn(2, 4, seed=1, dtype=torch.float64)
    pre, post, comb = (randn(2, *s, seed=2, dtype=torch.float64) for s in ((3,), (3,), (3, 3)))
    for t in range(2):
        torch.testing.assert_close(mhc.mhc_pre(X, pre)[t], sum(pre[t, i] * X[t, i] for i in range(3)))
        for j in range(3):
            expected = post[t, j] * y[t] + sum(comb[t, i, j] * X[t, i] for i in range(3))
            torch.testing.assert_close(mhc.mhc_post(y, X, post, comb)[t, j], expected)


def test_head_is_a_pre_of_its_own():
    X, fn, scale, base = inputs()
    n = X.shape[1]
    pre, _, _ = mhc.mhc_mixes(X, fn, scale, base, eps=EPS, iters=1, norm_eps=NORM_EPS)
    out = mhc.mhc_head(X, fn[:n], scale[:1], base[:n], eps=EPS, norm_eps=NORM_EPS)
    torch.testing.assert_close(out, mhc.mhc_pre(X, pre))


def test_columns_of_sinkhorn_sum_to_one_and_rows_nearly():
    M = mhc.sinkhorn(3 * randn(50, 4, 4, seed=0), iters=20, eps=1e-6)
    assert (M.sum(-2) - 1).abs().max() < 1e-5
    assert (M.sum(-1) - 1).abs().max() < 5e-2
    assert (M > 0).all()


def test_gradients():
    X, fn, scale, base = inputs(T=2, C=3, grad=True)
    n = 4
    assert gradcheck(
        lambda *a: mhc.mhc_mixes(*a, eps=EPS, iters=20, norm_eps=NORM_EPS),
        (X, fn, scale, base),
        fast_mode=True,
    )
    assert gradcheck(
        lambda X, f, s, b: mhc.mhc_head(X, f[:n], s[:1], b[:n], eps=EPS, norm_eps=NORM_EPS),
        (X, fn, scale, base),
    )
    logits = randn(2, 4, 4, seed=5, dtype=torch.float64, grad=True)
    assert gradcheck(lambda x: mhc.sinkhorn(x, iters=20, eps=1e-6), (logits,))
    pre = randn(2, 4, seed=6, dtype=torch.float64, grad=True)
    y = randn(2, 3, seed=7, dtype=torch.float64, grad=True)
    assert gradcheck(mhc.mhc_pre, (X, pre))
    assert gradcheck(mhc.mhc_post, (y, X, pre, logits))


def test_bfloat16_streams_are_mixed_in_float32_and_rounded_once():
    X, y = randn(8, 4, 32, seed=0, dtype=torch.bfloat16), randn(8, 32, seed=1, dtype=torch.bfloat16)
    fn, scale, base = (p.float() for p in inputs(C=32)[1:])
    pre, post, comb = mhc.mhc_mixes(X, fn, scale, base, eps=EPS, iters=20, norm_eps=NORM_EPS)
    assert {t.dtype for t in (pre, post, comb)} == {torch.float32}
    exact = mhc.mhc_post(y.double(), X.double(), post, comb)
    assert_bitwise(mhc.mhc_post(y, X, post, comb), exact.to(torch.bfloat16))
    assert mhc.mhc_pre(X, pre).dtype == torch.bfloat16
    assert rel_rms(mhc.mhc_pre(X, pre), mhc.mhc_pre(X.double(), pre.double())) < 3e-3


def test_no_tokens():
    X, fn, scale, base = inputs(T=0)
    assert mhc.mhc_mixes(X, fn, scale, base, eps=EPS, iters=2, norm_eps=NORM_EPS)[2].shape == (0, 4, 4)
    assert mhc.mhc_head(X, fn[:4], scale[:1], base[:4], eps=EPS, norm_eps=NORM_EPS).shape == (0, 5)


def test_streams_too_far_apart_are_left_to_torch():
    """Their distances would overflow 32 bits in the kernels."""
    near, far = (torch.empty(4, T, 4096, device="meta").transpose(0, 1) for T in (2**17 - 1, 2**17))
    assert config.unsupported(near) is None
    assert "2**31 elements apart" in config.unsupported(far)
