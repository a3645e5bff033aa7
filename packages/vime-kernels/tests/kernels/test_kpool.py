# SPDX-License-Identifier: Apache-2.0
"""Pool selection in Triton equals the torch reference exactly, on integers, where no score is rounded."""

import pytest
import torch

from vime_kernels.dsa import get_topk_fn, kpool_select
from vime_kernels.testing import assert_bitwise, cu_seqlens_of

# Triton 3.6 reads loop bounds from one-element arrays in its interpreter, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.mark.parametrize("rule", [None, "torch"], ids=["canonical", "by-score"])
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "pools-only"])
@pytest.mark.parametrize("r", [1, 4])
def test_equals_the_reference(device, r, tail, rule):
    torch.manual_seed(r)
    lengths = [5, 0, 23, 2] if device == "cpu" else [900, 0, 5000, 3, 1, 700]
    cu = cu_seqlens_of(lengths)
    positions = torch.arange(-1, sum(lengths) + 2, dtype=torch.int32)[:: 1 if device == "cuda" else 3]
    S, pools, budget = len(positions), sum(n // r for n in lengths), 8 if device == "cpu" else 512
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k = (torch.randint(-2, 3, s).to(device, dtype) for s in [(S, 2, 16), (pools, 16)])
    k[pools // 2] = float("nan")
    weights = torch.randint(1, 3, (S, 2)).to(device, torch.float32)
    args = (q, k, weights, cu.to(device), budget, r)
    results = [
        kpool_select(
            *args,
            always_tail=tail,
            topk_fn=rule and get_topk_fn(rule, backend=backend),
            pad_to=16,
            q_positions=positions.to(device),
            backend=backend,
        )
        for backend in ("triton", "torch")
    ]
    assert_bitwise(*results)
