# SPDX-License-Identifier: Apache-2.0
"""Sums of listed rows in torch: values by hand, one rounding, messages."""

import pytest
import torch

from vime_kernels.moe import gather_sum


def test_equals_a_loop_and_skips_rows_outside():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.tensor([[0, 4], [2, 2], [-1, 3], [5, -7]])
    expected = torch.stack([x[0] + x[4], 2 * x[2], x[3], torch.zeros(3, dtype=torch.float64)])
    assert gather_sum(x, rows).equal(expected)
    assert gather_sum(x, rows.to(torch.int32)).equal(expected)


def test_one_rounding_in_bfloat16():
    x = torch.tensor([[1.0], [2.0**-8], [2.0**-8]]).bfloat16()
    assert gather_sum(x, torch.tensor([[0, 1, 2]])).item() == 1 + 2.0**-7, "each addition alone rounds to 1"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(3), torch.zeros(2, 2).int()), "x of shape \\[R, C\\], got \\[3\\]"),
        ((torch.zeros(3, 4), torch.zeros(2).int()), "rows of shape \\[T, K\\], got \\[2\\]"),
        ((torch.zeros(3, 4).int(), torch.zeros(2, 2).int()), "x in bfloat16"),
        ((torch.zeros(3, 4), torch.zeros(2, 2)), "rows in int32 or int64, got torch.float32"),
    ],
    ids=["vector", "list", "integers", "floats"],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gather_sum(*arguments)
