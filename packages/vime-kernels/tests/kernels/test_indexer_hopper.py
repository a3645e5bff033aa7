# SPDX-License-Identifier: Apache-2.0
"""The indexer kernels for Hopper.

Logits have the bits of the plain Triton kernel, which `test_indexer` holds to float64; gradients are held to it here.
"""

import pytest
import torch

from vime_kernels import dsa
from vime_kernels._backend import has_gluon
from vime_kernels.ops.indexer import config

FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not has_gluon():
        # Elsewhere the plain kernels run, which have tests of their own.
        pytest.skip("needs a Hopper GPU and the Triton version whose Gluon the kernel was written for")


def problem(H, dtype):
    torch.manual_seed(H)
    # Blocks that fill the device, a last one that is cut, and an N that is no multiple of a tile.
    S, N = 256 * 140 // H + 1, 3003
    q, k = torch.randn(S, H, 128, device="cuda").to(dtype), torch.randn(N, 128, device="cuda").to(dtype)
    weights = torch.randn(S, H, device="cuda")
    starts = torch.randint(-3, N, (S,), dtype=torch.int32, device="cuda")
    ends = starts + torch.randint(-2, N // 2, (S,), dtype=torch.int32, device="cuda")
    # Blocks in which no query sees anything, and one row that sees everything.
    starts[32:80] = ends[32:80] = 0
    starts[90], ends[90] = 0, N + 5
    scales = {}
    if dtype == FP8:
        scales = {"q_scale": torch.rand(S, H, device="cuda"), "k_scale": torch.rand(N, device="cuda")}
    return q, k, weights, starts, ends, scales


def both(monkeypatch, q, k, *arguments, **options):
    """(Hopper kernel, plain kernel)."""
    assert config.hopper(q, k, torch.empty(1, len(k)))
    fast = dsa.indexer_logits(q, k, *arguments, **options, backend="triton")
    with monkeypatch.context() as patch:
        patch.setattr(config, "hopper", lambda *_: False)
        return fast, dsa.indexer_logits(q, k, *arguments, **options, backend="triton")


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
@pytest.mark.parametrize(
    "dtype, H",
    [(torch.bfloat16, 32), (torch.bfloat16, 64), (torch.float16, 128), (FP8, 32), (FP8, 64), (FP8, 128)],
    ids=["bf16-32", "bf16-64", "fp16-128", "fp8-32", "fp8-64", "fp8-128"],
)
def test_bits(monkeypatch, dtype, H, clean):
    q, k, weights, starts, ends, scales = problem(H, dtype)
    fast, plain = both(monkeypatch, q, k, weights, starts, ends, **scales, clean_logits=clean)
    column = torch.arange(len(k), device="cuda")
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    assert torch.equal(fast[inside], plain[inside])
    if clean:
        assert fast[~inside].isneginf().all()


def test_no_weights_and_no_relu(monkeypatch):
    q, k, _, starts, ends, _ = problem(64, torch.bfloat16)
    fast, plain = both(monkeypatch, q, k, None, starts, ends, use_relu=False)
    assert torch.equal(fast, plain)


def test_a_nan_stays_in_its_row(monkeypatch):
    q, k, weights, starts, ends, _ = problem(64, torch.bfloat16)
    q[90, 5, 7] = float("nan")
    fast, plain = both(monkeypatch, q, k, weights, starts, ends)
    assert fast[90].isnan().all()
    others = torch.arange(len(q), device="cuda") != 90
    assert torch.equal(fast[others], plain[others])


@pytest.mark.parametrize("use_relu, weighted", [(True, True), (False, False)], ids=["relu", "linear-ones"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("H", [32, 64], ids=["32", "64"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "repeatable"])
def test_gradients_of_scores(monkeypatch, H, dtype, use_relu, weighted, deterministic):
    torch.manual_seed(H)
    S, N, K = 331, 3003, 210
    # Three chunks, the last one with a row alone.
    monkeypatch.setattr(config, "PAIRS_BYTES", 130 * K * 12)
    monkeypatch.setattr(config, "ORDERED_BYTES", 130 * K * (12 + 256))
    q, k = torch.randn(S, H, 128, device="cuda").to(dtype), torch.randn(N, 128, device="cuda").to(dtype)
    weights = torch.randn(S, H, device="cuda")
    likes = torch.rand(S // 16 + 1, N, device="cuda").repeat_interleave(16, 0)[:S]
    indices = (
        (likes + 0.4 * torch.rand(S, N, device="cuda")).topk(K, 1).indices.sort(1).values.to(torch.int32)
    )
    # Few picks, no picks in both rows of a pair, disorder, a key twice, holes, a key that there is not.
    indices[8, 70:], indices[10:12] = -1, -1
    indices[12], indices[17, 4] = indices[12].flip(0), indices[17, 5]
    indices[20, 7], indices[22, 8] = -1, N
    grad = torch.randn(S, K, device="cuda")
    assert config.hopper_scores(q, k)

    def gradients(cast, backend):
        leaves = [t.to(cast or t.dtype).detach().requires_grad_() for t in (q, k, weights)]
        scores = dsa.indexer_scores(
            *leaves[:2], leaves[2] if weighted else None, indices,
            use_relu=use_relu, deterministic=deterministic, backend=backend,
        )  # fmt: skip
        found = scores.masked_fill(scores.isneginf(), 0.0)
        return torch.autograd.grad(found, leaves[: 2 + weighted], grad.to(found.dtype))

    exact, found = gradients(torch.float64, "torch"), gradients(None, "triton")
    for mine, reference in zip(found, exact, strict=True):
        error = (mine.double() - reference).norm() / reference.norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 6e-4)
    assert not found[0][10:12].any()
    if deterministic:
        for _ in range(3):
            assert all(map(torch.equal, gradients(None, "triton"), found))


@pytest.mark.parametrize(
    "N, K", [(1, 1), (3, 64), (70, 65)], ids=["one-key", "more-picks-than-keys", "a-tile-and-one"]
)
def test_gradients_of_few_keys(N, K):
    torch.manual_seed(N)
    S, H = 270, 64
    q, k = torch.randn(S, H, 128, device="cuda").bfloat16(), torch.randn(N, 128, device="cuda").bfloat16()
    assert config.hopper_scores(q, k)
    assert_gradients(q, k, K)


@pytest.mark.parametrize("pad, fast", [(8, False), (16, True)])
def test_gradients_of_padded_rows(pad, fast):
    torch.manual_seed(pad)
    S, H, N = 270, 32, 70
    q = torch.randn(S, H * 128 + pad, device="cuda").bfloat16()[:, : H * 128].view(S, H, 128)
    k = torch.randn(N, 128 + pad, device="cuda").bfloat16()[:, :128]
    assert config.hopper_scores(q, k) == fast
    assert_gradients(q, k, 24)


def assert_gradients(q, k, K):
    """Every row picks the first K keys; from len(k) on there are none."""
    S = len(q)
    indices = torch.arange(K, device="cuda", dtype=torch.int32).expand(S, K).contiguous()
    grad = torch.randn(S, K, device="cuda")
    operands, results = (q, k), []
    for cast, backend in ((torch.float64, "torch"), (torch.bfloat16, "triton")):
        q, k = (t.to(cast).detach().requires_grad_() for t in operands)
        found = dsa.indexer_scores(q, k, None, indices, backend=backend)
        found = found.masked_fill(found.isneginf(), 0.0)
        results.append(torch.autograd.grad(found, (q, k), grad.to(found.dtype)))
    for mine, exact in zip(results[1], results[0], strict=True):
        assert (mine.double() - exact).norm() / exact.norm() < 4e-3
