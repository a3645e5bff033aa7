# SPDX-License-Identifier: Apache-2.0
"""Triton hyper-connections, forward and backward, against float64 autograd on the same values."""

import pytest
import torch

from vime_kernels import mhc
from vime_kernels.ops.hyper_connection import config

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    monkeypatch.setattr(config, "SPLIT_K", 64)
    monkeypatch.setattr(config, "TOKENS_PER_PARTIAL", 64)
    monkeypatch.setattr(config, "PROGRAMS", 1)  # or a program would have one tile
    monkeypatch.setattr(config, "GATE_TOKENS", 2)
    monkeypatch.setattr(config, "PROJECT_EXACT", (16, 16, 4, 2))
    monkeypatch.setattr(config, "PROJECT_BWD_EXACT", (16, 16, 4, 2))


def compare(function, leaves, device, dtype, tolerances):
    """Results and gradients of `function(backend, *inputs)` in float64 torch and in Triton."""
    results = []
    for double, backend in ((True, "torch"), (False, "triton")):
        inputs = [(t.double() if double else t.clone()).requires_grad_() for t in leaves]
        outputs = function(backend, *inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        # Rounded as the results are, so that both sides get the same gradient.
        grads = [torch.randn(o.shape).to(device, dtype).to(o.dtype) for o in outputs]
        torch.autograd.backward(outputs, grads)
        results.append([*outputs, *(t.grad for t in inputs)])
    for mine, reference in zip(results[1], results[0], strict=True):
        tolerance = tolerances[mine.dtype]
        assert (mine.double() - reference).norm() <= tolerance * reference.norm()


# tf32-free float32, and bfloat16 rounded once; float32 gradients of bfloat16 streams come from two-term products.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.5e-3}


@pytest.fixture(params=["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def dtype(request, device):
    if request.param == "bfloat16" and device == "cpu":
        pytest.skip("the interpreter has no bfloat16 products")
    return getattr(torch, request.param)


@pytest.mark.parametrize("T, n, C", [(5, 4, 40), (70, 2, 33)])
def test_mixes(device, dtype, T, n, C):
    torch.manual_seed(T)
    width = (2 + n) * n
    leaves = [
        torch.randn(T, n, C).to(device, dtype),
        torch.randn(width, n * C, device=device) / (n * C) ** 0.5,
        torch.rand(3, device=device) + 0.5,
        torch.randn(width, device=device),
    ]

    def mixes(backend, *inputs):
        return mhc.mhc_mixes(*inputs, eps=1e-3, iters=4, norm_eps=1e-5, backend=backend)

    compare(mixes, leaves, device, torch.float32, TOLERANCES)


@pytest.mark.parametrize("T, n, iters", [(40, 4, 20), (3, 2, 1)])
def test_sinkhorn(device, T, n, iters):
    torch.manual_seed(T)
    logits = 3 * torch.randn(T, n, n, device=device)
    compare(
        lambda b, x: mhc.sinkhorn(x, iters=iters, eps=1e-4, backend=b),
        [logits],
        device,
        torch.float32,
        TOLERANCES,
    )


@pytest.mark.parametrize("T, n, C", [(21, 4, 40), (3, 2, 33)])
def test_pre_post_head(device, dtype, T, n, C):
    torch.manual_seed(T)
    X, y = torch.randn(T, n, C).to(device, dtype), torch.randn(T, C).to(device, dtype)
    pre, comb = torch.rand(T, n, device=device), torch.rand(T, n, n, device=device)
    compare(lambda b, *i: mhc.mhc_pre(*i, backend=b), [X, pre], device, dtype, TOLERANCES)
    compare(lambda b, *i: mhc.mhc_post(*i, backend=b), [y, X, pre, comb], device, dtype, TOLERANCES)
    head = [
        X,
        torch.randn(n, n * C, device=device) / 10,
        torch.rand(1, device=device),
        torch.randn(n, device=device),
    ]
    tolerances = {**TOLERANCES, torch.bfloat16: 4e-3}  # two gradients of X meet and are rounded again
    compare(
        lambda b, *i: mhc.mhc_head(*i, eps=1e-3, norm_eps=1e-5, backend=b), head, device, dtype, tolerances
    )


@pytest.mark.gpu
def test_mixes_do_not_depend_on_the_batch():
    torch.manual_seed(0)
    X = torch.randn(300, 4, 512, device="cuda").bfloat16()
    fn, scale, base = (
        torch.randn(24, 2048, device="cuda") / 45,
        torch.ones(3, device="cuda"),
        torch.randn(24, device="cuda"),
    )
    whole = mhc.mhc_mixes(X, fn, scale, base, eps=1e-6, iters=20, norm_eps=1e-6)
    alone = mhc.mhc_mixes(X[131:132], fn, scale, base, eps=1e-6, iters=20, norm_eps=1e-6)
    for a, b in zip(alone, whole, strict=True):
        assert torch.equal(a[0], b[131])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "T, C", [(1500, 2064), (130, 7168), (3, 1024)], ids=["ends of tiles", "wide", "one tile"]
)
def test_head_in_one_pass(T, C):
    """Programs that share a token, each with many tiles; streams that are a slice of something wider."""
    torch.manual_seed(T)
    wide = torch.randn(T, 5, C, device="cuda").bfloat16()
    leaves = [
        torch.randn(4, 4 * C, device="cuda") / C**0.5,
        torch.ones(1, device="cuda"),
        torch.randn(4, device="cuda"),
    ]
    assert config.one_pass(wide[:, 1:])

    def head(backend, wide, *inputs):
        return mhc.mhc_head(wide[:, 1:], *inputs, eps=1e-3, norm_eps=1e-5, backend=backend)

    compare(head, [wide, *leaves], "cuda", torch.bfloat16, {torch.float32: 1e-5, torch.bfloat16: 4e-3})
    whole, alone = head("triton", wide, *leaves), head("triton", wide[T // 2 : T // 2 + 1], *leaves)
    assert torch.equal(whole[T // 2], alone[0])
    assert torch.equal(whole, head("triton", wide, *leaves))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "T, n, C", [(300, 4, 416), (20000, 4, 64), (1, 2, 64)], ids=["pieces", "blocks in turn", "one row"]
)
def test_projection_for_hopper(monkeypatch, T, n, C):
    """Its sums hold all bits of fn: 1e-6 is out of reach for two terms of bfloat16."""
    from vime_kernels.ops.hyper_connection import triton_project

    monkeypatch.setattr(config, "SPLIT_K", 512)
    torch.manual_seed(T)
    X = torch.randn(T, n * C, device="cuda").bfloat16()
    fn = torch.randn((2 + n) * n, n * C, device="cuda")
    assert config.hopper(X, len(fn))
    m, inverse_rms = triton_project.mhc_project(X, fn, 1e-5, n)
    scale = (X.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    reference = X.double() @ fn.double().T * scale
    assert (m - reference).norm() <= 1e-6 * reference.norm()
    assert (inverse_rms[:, None] - scale).norm() <= 1e-6 * scale.norm()
    assert torch.equal(triton_project.mhc_project(X[T // 2 : T // 2 + 1], fn, 1e-5, n)[0][0], m[T // 2])
