# SPDX-License-Identifier: Apache-2.0
"""The indexer's teacher and loss against scalar loops, torch's own KL divergence and numeric derivatives."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from vime_kernels import _rows
from vime_kernels.dsa import indexer_kl_loss, indexer_kl_target, sparse_attention
from vime_kernels.testing import assert_bitwise, randn

INDICES = torch.tensor(
    [[0, 2, 4, -1], [1, -1, -1, -1], [-1, -1, -1, -1], [3, 0, 1, 6], [5, 4, 3, 2]], dtype=torch.int32
)
VALID = (INDICES >= 0) & (INDICES < 6)


def inputs(S=5, H=3, D=4, N=6):
    return randn(S, H, D, seed=0, dtype=torch.float64), randn(N, D, seed=1, dtype=torch.float64)


def target_by_loops(query, key, scale, log_denominator=None):
    out = torch.zeros(INDICES.shape, dtype=torch.float64)
    for t, row in enumerate(INDICES.tolist()):
        for h in range(query.shape[1]):
            s = {j: scale * float(query[t, h] @ key[i]) for j, i in enumerate(row) if VALID[t, j]}
            if s:
                lse = math.log(sum(map(math.exp, s.values())))
                lse = lse if log_denominator is None else float(log_denominator[t, h])
                for j, value in s.items():
                    out[t, j] += math.exp(value - lse)
    return out


@pytest.mark.parametrize("chunk_bytes", [2**28, 1], ids=["one-chunk", "row-chunks"])
def test_target_equals_loops(monkeypatch, chunk_bytes):
    monkeypatch.setattr(_rows, "CHUNK_BYTES", chunk_bytes)
    query, key = inputs()
    actual = indexer_kl_target(query, key, INDICES, 0.5)
    torch.testing.assert_close(actual, target_by_loops(query, key, 0.5), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(actual.sum(1), 3.0 * VALID.any(1).double())
    lse = randn(5, 3, seed=2, dtype=torch.float64) + 3
    with_lse = indexer_kl_target(query, key, INDICES, 0.5, lse=lse)
    torch.testing.assert_close(with_lse, target_by_loops(query, key, 0.5, lse), rtol=1e-12, atol=1e-14)


def test_target_with_window_and_sink_is_the_attention_that_the_model_computes():
    """The denominator of DeepSeek-V4: probing with one-hot values reads the attention weights themselves."""
    query, key = inputs(D=6)
    key = torch.cat([key, randn(3, 6, seed=3, dtype=torch.float64)])  # rows 6..8 are the window
    sink = randn(3, seed=4, dtype=torch.float64)
    window = torch.tensor([6, 7, 8], dtype=torch.int32).expand(5, 3)
    every = torch.cat([torch.where(VALID, INDICES, -1), window], 1)
    _, lse = sparse_attention(query, key, every, 0.5, return_lse=True)
    actual = indexer_kl_target(query, key[:6], INDICES, 0.5, lse=torch.logaddexp(lse, sink))
    one_hot = torch.eye(9, dtype=torch.float64)
    for h in range(3):
        # Same scores, values one-hot: width 6 for the product and 9 for the reading.
        kv = torch.cat([one_hot, key], 1)
        q = torch.cat([torch.zeros(5, 1, 9, dtype=torch.float64), query[:, h : h + 1]], 2)
        weights = sparse_attention(q, kv, every, 0.5, d_v=9, attn_sink=sink[h : h + 1])[:, 0]
        actual = actual - weights.gather(1, INDICES.clamp(0, 8).long()).masked_fill(~VALID, 0.0)
    assert actual.abs().max() < 1e-14


def rows_with_torch(scores, target):
    """Row losses by torch.nn.functional.kl_div on the valid slots alone."""
    losses = []
    for t in range(len(scores)):
        keep = INDICES[t] >= 0
        if keep.any():
            T = target[t, keep] / target[t, keep].sum()
            losses.append(torch.nn.functional.kl_div(scores[t, keep].log_softmax(0), T, reduction="sum"))
        else:
            losses.append(scores.new_zeros(()))
    return torch.stack(losses)


@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "row-mask"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradient(reduction, masked):
    scores = randn(5, 4, seed=5, dtype=torch.float64)
    scores = scores.masked_fill(INDICES < 0, float("-inf")).requires_grad_()
    target = randn(5, 4, seed=6, dtype=torch.float64).exp()
    mask = torch.tensor([True, True, True, False, True]) if masked else None
    loss = indexer_kl_loss(scores, target, INDICES, coeff=0.3, row_mask=mask, reduction=reduction)
    counted = (INDICES >= 0).any(1) if mask is None else (INDICES >= 0).any(1) & mask
    scale = 0.3 / (int(counted.sum()) if reduction == "mean" else 1)
    torch.testing.assert_close(loss, scale * rows_with_torch(scores, target)[counted].sum())
    (gradient,) = torch.autograd.grad(loss, scores)
    T = target.masked_fill(INDICES < 0, 0.0)
    expected = scale * (scores.softmax(1) - T / T.sum(1, keepdim=True))
    expected = torch.where(counted[:, None], expected, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    assert (gradient[2] == 0).all()


def test_gradcheck():
    scores = randn(5, 4, seed=5, dtype=torch.float64, grad=True)
    target = randn(5, 4, seed=6, dtype=torch.float64).exp()
    assert gradcheck(lambda s: indexer_kl_loss(s, target, INDICES, coeff=0.3), (scores,))


def test_the_target_is_a_constant_and_padding_content_does_not_matter():
    scores, target = randn(5, 4, seed=5, grad=True), randn(5, 4, seed=6).exp().requires_grad_()
    loss = indexer_kl_loss(scores, target, INDICES, coeff=1.0)
    loss.backward()
    assert target.grad is None
    poison = torch.where(INDICES < 0, torch.tensor(float("nan")), target)
    assert_bitwise(indexer_kl_loss(scores, poison, INDICES, coeff=1.0), loss)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_row_counts(reduction):
    scores = randn(2, 3, seed=0, grad=True)
    nothing = torch.full((2, 3), -1, dtype=torch.int32)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        loss = indexer_kl_loss(scores, torch.zeros(2, 3), nothing, coeff=1.0, reduction=reduction)
        loss.backward()
    assert loss == 0
    assert (scores.grad == 0).all()


def test_a_score_of_minus_infinity_is_no_pick():
    scores, target = randn(5, 4, seed=5), randn(5, 4, seed=6).exp()
    absent = torch.where(INDICES < 6, INDICES, -1)
    expected = indexer_kl_loss(scores, target, absent, coeff=1.0)
    beyond = scores.masked_fill(
        ~VALID, float("-inf")
    ).requires_grad_()  # as `indexer_scores` gives for row 6 of 6
    loss = indexer_kl_loss(beyond, target, INDICES, coeff=1.0)
    assert_bitwise(loss, expected)
    assert (torch.autograd.grad(loss, beyond)[0][~VALID] == 0).all()


def test_a_perfect_student_has_no_loss():
    scores = randn(5, 4, seed=5, dtype=torch.float64)
    target = 7 * scores.masked_fill(INDICES < 0, float("-inf")).softmax(1).nan_to_num(0.0)
    assert indexer_kl_loss(scores, target, INDICES, coeff=1.0).abs() < 1e-15
