# SPDX-License-Identifier: Apache-2.0
"""The shipped test helpers notice what they should notice."""

import pytest
import torch

from vime_kernels.testing import assert_bitwise, causal_picks, cu_seqlens_of, randn, rel_rms


def test_bitwise_names_the_first_coordinate():
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    a[1, 2], a[1, 0] = 5.0, -0.0
    with pytest.raises(
        AssertionError, match=r"x: 2 of 6 elements differ, first at \(1, 0\): expected 0.0, got -0.0"
    ):
        assert_bitwise(a, b, "x")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(float("nan")),
        torch.zeros(0, 3),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.arange(6).view(2, 3).T,
    ],
    ids=["scalar-nan", "empty", "bf16", "strided-int64"],
)
def test_bitwise_accepts_a_copy(tensor):
    assert_bitwise(tensor.clone(), tensor)


def test_bitwise_notices_dtype_and_shape():
    with pytest.raises(AssertionError, match="expected dtype"):
        assert_bitwise(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="expected shape"):
        assert_bitwise(torch.zeros(2), torch.zeros(3))
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ, first at \(\)"):
        assert_bitwise(torch.tensor(1), torch.tensor(2))


def test_rel_rms():
    assert rel_rms(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])) == 1.0
    assert rel_rms(torch.zeros(2), torch.zeros(2)) == 0.0
    assert rel_rms(torch.ones(2), torch.zeros(2)) == float("inf")
    with pytest.raises(ValueError, match=r"expected shape \[3\], got \[2\]"):
        rel_rms(torch.zeros(2), torch.zeros(3))


def test_inputs_repeat_and_respect_causality():
    assert_bitwise(randn(3, 2, seed=1), randn(3, 2, seed=1))
    assert cu_seqlens_of([3, 0, 2]).tolist() == [0, 3, 3, 5]
    picks = causal_picks(9, 2, 3, seed=0, ratio=4)
    assert picks.dtype == torch.int32
    assert picks[2].tolist() == [-1, -1, -1]
    assert picks[3].tolist() == [0, -1, -1]
    assert picks[8].tolist() == [0, 1, -1]
