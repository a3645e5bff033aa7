# SPDX-License-Identifier: Apache-2.0
"""Triton top-k equals the reference exactly, on scores chosen to be awkward."""

import pytest
import torch

from vime_kernels import dsa
from vime_kernels.ops.topk import config

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


def awkward(S, N, kind, device):
    torch.manual_seed(N)
    x = torch.randn(S, N)
    if kind == "ties":
        x = torch.randint(-3, 3, (S, N)).float()
    elif kind == "equal":
        x = torch.zeros(S, N)
    elif kind == "special":
        values = [float("nan"), float("-inf"), float("inf"), -0.0, 0.0, 1e-42, -1e-42, 1e30, -1e30]
        for value in values:
            x[torch.rand(S, N) < 0.08] = value
    elif kind == "bfloat16":
        x = x.to(torch.bfloat16)
    elif kind == "ascending":
        x = x.sort(-1).values
    elif kind == "wide":  # every power of two
        x = x.sign() * torch.exp2(300 * torch.rand(S, N) - 149)
    elif kind == "crowded":  # one value nearly everywhere, a few better ones between
        x = torch.where(torch.rand(S, N) < 0.01, x, 0.25)
    starts = torch.randint(0, max(1, N // 3), (S,), dtype=torch.int32)
    ends = torch.randint(0, N + 3, (S,), dtype=torch.int32)
    starts[0], ends[0] = -5, N + 9
    return x.to(device), starts.to(device), ends.to(device)


KINDS = ["normal", "ties", "equal", "special", "bfloat16", "ascending", "wide", "crowded"]


@pytest.mark.parametrize(
    "N, k, kind",
    [(7, 12, "special"), (200, 60, "wide"), (1500, 9, "special"), (1500, 9, "ties"), (1500, 9, "crowded")],
)
def test_equals_the_reference(device, monkeypatch, N, k, kind):
    if device == "cpu":  # small enough for the interpreter, and still thinned out in several blocks
        monkeypatch.setattr(config, "EXACT_WIDTH", 256)
        monkeypatch.setattr(config, "MIN_KEPT", 32)
        monkeypatch.setattr(config, "MAX_SAMPLE", 128)
        monkeypatch.setattr(config, "GATHER_GROUPS", 1)
    x, starts, ends = awkward(2, N, kind, device)
    expected = dsa.topk(x, k, starts, ends, backend="torch")
    assert torch.equal(dsa.topk(x, k, starts, ends, backend="triton"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launches", ["one", "three"])
@pytest.mark.parametrize(
    "N, k",
    [
        (7, 12),
        (4096, 512),
        (4100, 700),
        (16384, 512),
        (16385, 2048),
        (40001, 2048),
        (131072, 512),
        (131072, 4096),
    ],
)
def test_equals_the_reference_at_size(monkeypatch, N, k, launches, kind):
    if launches == "three":
        monkeypatch.setattr(config, "hopper", lambda logits: False)
    x, starts, ends = awkward(16, N, kind, "cuda")
    expected = dsa.topk(x, k, starts, ends, backend="torch")
    assert torch.equal(dsa.topk(x, k, starts, ends), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "special", "crowded"])
@pytest.mark.parametrize("N, k", [(4096, 512), (16384, 512), (16384, 1024), (14000, 2048), (40000, 512)])
def test_many_rows(N, k, kind):
    """Programs take several rows, a row has as few warps as it may; also where rows begin on odd addresses."""
    x, starts, ends = awkward(64, N, kind, "cuda")
    for first in (0, 1):
        few = x[:, first:]
        expected = dsa.topk(few, k, starts, ends, backend="torch")
        picks = dsa.topk(x.repeat(70, 1)[:, first:], k, starts.repeat(70), ends.repeat(70))
        assert torch.equal(picks, expected.repeat(70, 1))


def test_torch_rule_orders_by_score(device):
    x, starts, ends = awkward(3, 40, "special", device)
    expected = dsa.topk(x, 11, starts, ends, rule="torch", backend="torch")
    assert torch.equal(dsa.topk(x, 11, starts, ends, rule="torch", backend="triton"), expected)
