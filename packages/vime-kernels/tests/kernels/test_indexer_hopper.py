# SPDX-License-Identifier: Apache-2.0
"""The indexer kernel for Hopper gives the bits of the plain Triton kernel, which `test_indexer` holds to float64."""

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
    [(torch.bfloat16, 32), (torch.bfloat16, 64), (torch.float16, 128), (FP8, 64), (FP8, 128)],
    ids=["bf16-32", "bf16-64", "fp16-128", "fp8-64", "fp8-128"],
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
