# SPDX-License-Identifier: Apache-2.0
"""Triton indexer loss against the torch reference in float64 on the same values: teacher, loss, gradient."""

import pytest
import torch

from vime_kernels import dsa
from vime_kernels._backend import has_gluon
from vime_kernels.ops.indexer_loss import config, triton_target
from vime_kernels.testing import rel_rms

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(autouse=True)
def small_tiles(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(config, "target_tile", lambda heads, dim: config.TargetTile(16, 4, 2))
        monkeypatch.setattr(config, "LOSS_SLOTS", 128)
        monkeypatch.setattr(config, "LOSS_ROWS", 4)


def picks(S, N, K, device):
    indices = torch.randint(-1, N + 2, (S, K), dtype=torch.int32)
    indices[1], indices[2, 3:] = -1, -1
    return indices.to(device)


@pytest.mark.parametrize("with_lse", [True, False], ids=["lse", "own-lse"])
@pytest.mark.parametrize(
    "H, D, K",
    [(3, 20, 37), (16, 32, 16), *(pytest.param(*c, marks=pytest.mark.gpu) for c in [(64, 512, 600), (128, 576, 2048)])],
    ids=["odd", "even", "V4", "V3.2"],
)  # fmt: skip
def test_target(device, H, D, K, with_lse):
    if device == "cpu" and D > 64:
        pytest.skip("too large for the interpreter")
    torch.manual_seed(H)
    S, N = 5, 50 if device == "cpu" else 3000
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k = torch.randn(S, H, D).to(device, dtype), torch.randn(N, D).to(device, dtype)
    indices = picks(S, N, K, device)
    lse = torch.randn(S, H, device=device) + 3 if with_lse else None
    got = dsa.indexer_kl_target(q, k, indices, D**-0.5, lse=lse, backend="triton")
    expected = dsa.indexer_kl_target(
        q.double(), k.double(), indices, D**-0.5, lse=None if lse is None else lse.double(), backend="torch"
    )
    assert got.dtype == torch.float32
    assert rel_rms(got, expected) < 2e-6
    assert not got[(indices < 0) | (indices >= N)].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "H, D, K, dtype",
    [
        (3, 512, 37, torch.bfloat16), (64, 576, 600, torch.bfloat16), (65, 576, 130, torch.float16),
        (128, 512, 1, torch.bfloat16),
    ],
    ids=["few-heads", "one-block", "block-and-a-head", "one-pick"],
)  # fmt: skip
def test_target_on_hopper(H, D, K, dtype, monkeypatch):
    """The kernel written for Hopper: more rows than programs; lists with holes, cut short, and empty ones."""
    torch.manual_seed(H)
    S, N = 300, 900
    q, lse = torch.randn(S, H, D, device="cuda").to(dtype), torch.randn(S, H, device="cuda") + 3
    room = torch.randn(N + 2, D + 64, device="cuda").to(dtype)
    room[0], room[-1] = float("nan"), float("nan")  # what indices of -1 and N would find
    k = room[1:-1, :D]
    indices = torch.randint(-1, N, (S, K), dtype=torch.int32, device="cuda")
    indices[::7, K // 2 :], indices[100:180], indices[5, : K // 2], indices[6, 0] = -1, -1, -1, N
    if torch.cuda.get_device_capability() != (9, 0) or not has_gluon():  # other devices take the plain kernel
        pytest.skip("needs a Hopper GPU and the Triton version whose Gluon the kernel was written for")
    assert triton_target.hopper(q, k, d_v=512), "the premise: the gate lets this call through"
    got = dsa.indexer_kl_target(q, k, indices, D**-0.5, lse=lse, backend="triton")
    expected = dsa.indexer_kl_target(
        q.double(), k.double(), indices, D**-0.5, lse=lse.double(), backend="torch"
    )
    assert rel_rms(got, expected) < 2e-6
    assert not got[(indices < 0) | (indices >= N)].any()
    for rows in (slice(None), slice(0, 1), slice(7, 200)):
        again = dsa.indexer_kl_target(q[rows], k, indices[rows], D**-0.5, lse=lse[rows], backend="triton")
        assert torch.equal(again, got[rows])
    with monkeypatch.context() as patch:
        patch.setattr(triton_target, "hopper", lambda *_, **__: False)
        plain = dsa.indexer_kl_target(q, k, indices, D**-0.5, lse=lse, backend="triton")
    assert rel_rms(got, plain) < 2e-6


@pytest.mark.parametrize("K", [5, 300])
@pytest.mark.parametrize("masked", [False, True], ids=["all-rows", "row-mask"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradient(device, K, reduction, masked):
    torch.manual_seed(K)
    S, N = 7, 400
    indices = picks(S, N, K, device)
    none = (indices < 0) | (indices >= N)
    scores = (3 * torch.randn(S, K, device=device)).masked_fill(none, float("-inf"))
    target = torch.rand(S, K, device=device).masked_fill(none, float("nan"))
    target[5] = target[5].masked_fill(~none[5], 0.0)  # picks, and no mass on them
    mask = torch.arange(S, device=device) != 3 if masked else None
    results = []
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        leaf = scores.to(dtype).requires_grad_()
        loss = dsa.indexer_kl_loss(
            leaf, target.to(dtype), indices, coeff=0.3, row_mask=mask, reduction=reduction, backend=backend
        )
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    (expected, expected_grad), (loss, grad) = results
    assert abs(loss - expected) < 1e-6 * expected
    assert rel_rms(grad, expected_grad) < 1e-6
    assert not grad[none].any()
    with torch.no_grad():
        again = dsa.indexer_kl_loss(
            scores, target, indices, coeff=0.3, row_mask=mask, reduction=reduction, backend="triton"
        )
    assert torch.equal(again, loss)
