# SPDX-License-Identifier: Apache-2.0
"""The Triton sum of rows against float64 on the same values."""

import pytest
import torch

from vime_kernels.moe import gather_sum


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    "T, R, C, K", [(7, 20, 40, 3), (3, 5, 4100, 1), (9, 9, 16, 8), (0, 4, 8, 2)], ids=str
)
@pytest.mark.parametrize(
    "dtype",
    # The interpreter cuts a bfloat16 off instead of rounding it.
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=["float32", "bfloat16"],
)
def test_equals_float64(device, dtype, T, R, C, K, index):
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter does not round to bfloat16")
    generator = torch.Generator().manual_seed(R)
    x = torch.randn(R, C, generator=generator).to(device, dtype)
    rows = torch.randint(-2, R + 2, (T, K), generator=generator).to(device, index)
    exact = gather_sum(x.double(), rows, backend="torch")
    ours = gather_sum(x, rows, backend="triton")
    assert ours.dtype is dtype
    tolerance = 3e-7 if dtype is torch.float32 else 2**-8
    total = gather_sum(x.abs().double(), rows, backend="torch")
    assert ((ours.double() - exact).abs() <= tolerance * total).all()
