# SPDX-License-Identifier: Apache-2.0
"""Triton indexer against float64 on the same values: logits, scores of a selection, their gradients."""

import pytest
import torch

from vime_kernels import dsa
from vime_kernels.ops.indexer import config

FP8 = torch.float8_e4m3fn

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(autouse=True)
def small_tiles(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(config, "LOGITS_16BIT", config.LogitsTile(32, 16, 4, 2))
        monkeypatch.setattr(config, "KEYS_PER_PROGRAM", 32)
        monkeypatch.setattr(config, "PICKS", 16)


def problem(device, H, D, dtype=None):
    torch.manual_seed(H + D)
    S, N = (5, 70) if device == "cpu" else (130, 3003)
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    q, k, w = torch.randn(S, H, D).to(dtype), torch.randn(N, D).to(dtype), torch.randn(S, H)
    starts = torch.randint(0, N // 2, (S,), dtype=torch.int32)
    ends = starts + torch.randint(-2, N // 2, (S,), dtype=torch.int32)
    starts[0], ends[-1] = -3, N + 8
    return [t.to(device) for t in (q, k, w, starts, ends)]


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("use_relu", [True, False], ids=["relu", "linear"])
@pytest.mark.parametrize("H, D", [(4, 16), (3, 20), (16, 32)])
def test_logits(device, H, D, use_relu):
    q, k, w, starts, ends = problem(device, H, D)
    got = dsa.indexer_logits(q, k, w, starts, ends, use_relu=use_relu, backend="triton")
    expected = dsa.indexer_logits(
        q.double(), k.double(), w.double(), starts, ends, use_relu=use_relu, backend="torch"
    )
    outside = expected.isneginf()
    assert torch.equal(got.isneginf(), outside)
    assert relative(got[~outside], expected[~outside]) < 1e-6


def test_unclean_logits_and_no_weights(device):
    q, k, _, starts, ends = problem(device, 4, 16)
    got = dsa.indexer_logits(q, k, None, starts, ends, clean_logits=False, backend="triton")
    expected = dsa.indexer_logits(q.double(), k.double(), None, starts, ends, backend="torch")
    inside = ~expected.isneginf()
    assert relative(got[inside], expected[inside]) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("H", [1, 3, 8, 16, 32, 64, 128])
def test_logits_and_their_batch_invariance_at_size(device, H, dtype):
    q, k, w, starts, ends = problem(device, H, 128, dtype)
    scales = {}
    if dtype == FP8:
        scales = {
            "q_scale": torch.rand(len(q), H, device="cuda") + 0.1,
            "k_scale": torch.rand(len(k), device="cuda") + 0.1,
        }
    got = dsa.indexer_logits(q, k, w, starts, ends, **scales)
    as_double = {name: scale.double() for name, scale in scales.items()}
    expected = dsa.indexer_logits(
        q.double(), k.double(), w.double(), starts, ends, **as_double, backend="torch"
    )
    inside = ~expected.isneginf()
    # Hopper adds fp8 products with about 13 bits.
    assert relative(got[inside], expected[inside]) < (3e-4 if dtype == FP8 else 1e-6)
    for row in (0, 1, 2, 7, 50, 129):
        one = {name: scale[row : row + 1] if name == "q_scale" else scale for name, scale in scales.items()}
        alone = slice(row, row + 1)
        again = dsa.indexer_logits(q[alone], k, w[alone], starts[alone], ends[alone], **one)
        assert torch.equal(again[0], got[row]), f"row {row} depends on the rows beside it"


def test_a_nan_stays_in_its_row(device):
    q, k, w, starts, ends = problem(device, 4, 16)
    starts.zero_()
    ends.fill_(len(k))
    clean = dsa.indexer_logits(q, k, w, starts, ends, backend="triton")
    q[2, 1, 3] = float("nan")
    got = dsa.indexer_logits(q, k, w, starts, ends, backend="triton")
    assert got[2].isnan().all()
    others = [row for row in range(len(q)) if row != 2]
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("H, D, K", [(4, 16, 37), (3, 20, 5)])
@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "ones"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "repeatable"])
def test_scores_and_gradients(device, monkeypatch, H, D, K, weighted, deterministic):
    monkeypatch.setattr(config, "ORDERED_BYTES", 2 * K * D * 4)  # several chunks of rows
    q, k, w, _, _ = problem(device, H, D)
    S, N = len(q), len(k)
    indices = torch.randint(-1, N + 1, (S, K), dtype=torch.int32, device=device)
    indices[1], indices[2, 3:], indices[3, :4] = -1, -1, 3  # no pick, few picks, one key four times
    grad = torch.randn(S, K, device=device)
    results = []
    for dtype, backend in ((torch.float64, "torch"), (None, "triton")):
        inputs = [t.to(dtype or t.dtype).detach().clone().requires_grad_() for t in (q, k, w)]
        used = inputs[2] if weighted else None
        scores = dsa.indexer_scores(*inputs[:2], used, indices, deterministic=deterministic, backend=backend)
        scores.masked_fill(scores.isneginf(), 0.0).backward(grad.to(scores.dtype))
        results.append([scores, *(t.grad for t in inputs if t.grad is not None)])
    expected, got = results
    assert torch.equal(got[0].isneginf(), expected[0].isneginf())
    valid = ~expected[0].isneginf()
    assert relative(got[0][valid], expected[0][valid]) < 1e-6
    # bfloat16: one rounding of the result and one of the coefficients of its sum.
    tolerance = 1e-6 if device == "cpu" else 4e-3
    for mine, reference in zip(got[1:], expected[1:], strict=True):
        assert relative(mine, reference) < tolerance


@pytest.mark.parametrize(
    "deterministic, ordered", [(None, 1), (False, 0)], ids=["follows-torch", "overrides"]
)
def test_the_gradient_of_keys_follows_torchs_own_setting(device, monkeypatch, deterministic, ordered):
    from vime_kernels.ops.indexer import triton_scores

    sums = []
    add = triton_scores.add_segments
    monkeypatch.setattr(triton_scores, "add_segments", lambda *parts: sums.append(add(*parts)))
    q, k, w, _, _ = problem(device, 4, 16)
    indices = torch.zeros(len(q), 3, dtype=torch.int32, device=device)
    torch.use_deterministic_algorithms(True)
    try:
        k.requires_grad_()
        dsa.indexer_scores(q, k, w, indices, deterministic=deterministic, backend="triton").sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(sums) == ordered


def test_fused_selection_does_not_depend_on_the_chunk(device):
    q, k, w, starts, ends = problem(device, 4, 16)
    whole = dsa.indexer_topk(q, k, w, starts, ends, 6, backend="triton")
    by_row = dsa.indexer_topk(q, k, w, starts, ends, 6, max_logits_bytes=4 * len(k), backend="triton")
    if device == "cuda":  # numpy's matrix product, which the interpreter uses, is not batch invariant
        assert torch.equal(by_row, whole)
    assert (by_row >= 0).sum() == (whole >= 0).sum()


def test_two_rows_become_one_list(device):
    from vime_kernels.ops.indexer.triton_pairs import pair_lists

    torch.manual_seed(0)
    N, K = 60, 21
    shared = torch.rand(1, N) + 0.3 * torch.rand(9, N)
    indices = shared.topk(K, 1).indices.sort(1).values.to(torch.int32)
    indices[2, 11:], indices[3], indices[5, 1] = (
        -1,
        -1,
        N,
    )  # ascending, their empty slots last, except for row 5
    indices[6, 2] = indices[6, 3]  # a key twice
    grad = torch.randn(9, K).masked_fill((indices < 0) | (indices >= N), float("nan"))
    keys, grads, counts = (t.cpu() for t in pair_lists(grad.to(device), indices.to(device), N))
    valid = (indices >= 0) & (indices < N)
    for pair, rows in enumerate(((0, 1), (2, 3), (4, 5), (6, 7), (8,))):
        used = keys[pair, : counts[pair]].long()
        found, expected = torch.zeros(2, N), torch.zeros(2, N)
        for i, row in enumerate(rows):
            expected[i].index_add_(0, indices[row][valid[row]].long(), grad[row][valid[row]])
            found[i].index_add_(0, used[used >= 0], grads[pair, i, : counts[pair]][used >= 0])
        assert torch.allclose(found, expected)
        named = torch.cat([indices[row][valid[row]] for row in rows])
        once = pair not in (2, 3)
        assert counts[pair] == (len(named.unique()) if once else 2 * K)
        assert not once or torch.equal(used, used.sort().values)


@pytest.mark.parametrize("n", [40, 2**15 - 1, 2**15], ids=["few-rows", "most-for-16-bits", "one-more"])
def test_slots_are_ordered_by_row_and_then_as_they_came(device, n):
    from vime_kernels._ordered_sum import order

    torch.manual_seed(0)
    rows = torch.randint(n - 30, n, (9, 20), dtype=torch.int32)
    valid = torch.rand(9, 20) < 0.8
    place, offsets = (t.cpu() for t in order(valid.to(device), rows.to(device), n))
    keys = [
        row if ok else n for row, ok in zip(rows.flatten().tolist(), valid.flatten().tolist(), strict=True)
    ]
    expected = sorted((slot for slot in range(len(keys)) if keys[slot] < n), key=lambda slot: keys[slot])
    assert place.argsort().tolist()[keys.count(n) :] == expected
    assert (place < 0).tolist() == [key == n for key in keys]
    assert offsets[: n - 29].tolist() == [0] * (n - 29)
    assert offsets.diff()[n - 30 :].tolist() == [keys.count(row) for row in range(n - 30, n)]
