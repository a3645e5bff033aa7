# SPDX-License-Identifier: Apache-2.0
"""Quantisation against exact rational arithmetic: nearest code by search, scale by integer exponents."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_kernels.ops.fake_quant.reference import ceil_to_power_of_two
from vime_kernels.quant import act_quant, fake_quant_fp4, fake_quant_fp8, hadamard
from vime_kernels.testing import assert_bitwise, randn

NAN = float("nan")
FP4_CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# E4M3: exponent bias 7, three bits of mantissa, subnormals, 448 the largest; in code order, so the index is the code.
FP8_CODES = [m * 2.0**-9 for m in range(8)] + [
    (8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest(value, codes):
    """The code nearest to |value|, ties to the even one, with the sign of value."""
    magnitude = abs(Fraction(value))
    best = min(range(len(codes)), key=lambda i: (abs(Fraction(codes[i]) - magnitude), i % 2))
    return math.copysign(codes[best], value)


def by_search(block, codes, floor):
    largest = Fraction(codes[-1])
    amax, scale = max(Fraction(floor), *(abs(Fraction(v)) for v in block)), Fraction(1, 2**140)
    while scale * largest < amax:
        scale *= 2
    return [nearest(Fraction(v) / scale, codes) * float(scale) if v else v for v in block]


finite = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from(
    [0.0, -0.0, 448.0, 1e-4, 1e-45, -6.0, 5.0, 3.5]
)


@given(st.lists(finite, min_size=8, max_size=8))
@settings(max_examples=100, deadline=None)
def test_fp8_equals_search_over_all_codes(block):
    expected = torch.tensor(by_search(block, FP8_CODES, torch.tensor(1e-4).item()))
    assert torch.equal(fake_quant_fp8(torch.tensor(block), 8), expected)


@given(st.lists(finite, min_size=8, max_size=8))
@settings(max_examples=100, deadline=None)
def test_fp4_equals_search_over_all_codes(block):
    expected = torch.tensor(by_search(block, FP4_CODES, 6 * 2.0**-126))
    assert torch.equal(fake_quant_fp4(torch.tensor(block), 8), expected)


def test_the_examples_of_the_specification():
    x = torch.tensor([0.013, -1.7, 3.3, 448, 0, -1e-5, 7, 100])
    expected = torch.tensor([0.013671875, -1.75, 3.25, 448, 0, -0.0, 7, 96])
    assert_bitwise(fake_quant_fp8(x, 8), expected)
    assert act_quant(x, 8)[1].tolist() == [1.0]
    larger = x * 1.01
    assert fake_quant_fp8(larger, 8)[[3, 7]].tolist() == [448, 104]
    assert act_quant(larger, 8)[1].tolist() == [2.0]
    codes, scale = act_quant(torch.zeros(8), 8)
    assert scale.tolist() == [2.0**-22]
    assert (codes.float() == 0).all()


@pytest.mark.parametrize("exponent", [-13, -1, 0, 5, 100])
def test_the_scale_steps_one_ulp_above_the_largest_code(exponent):
    amax = torch.tensor(448.0 * 2.0**exponent)
    for value, expected in (
        (amax, 2.0**exponent),
        (torch.nextafter(amax, torch.tensor(3e38)), 2.0 ** (exponent + 1)),
    ):
        assert act_quant(value.repeat(4), 4)[1].item() == expected
    amax = torch.tensor(6.0 * 2.0**exponent)
    above = torch.nextafter(amax, torch.tensor(3e38))
    assert fake_quant_fp4(amax.repeat(4), 4)[0] == amax
    assert fake_quant_fp4(torch.stack([above, above * 0.75]), 2).tolist() == [amax.item(), 2.0**exponent * 4]


def test_powers_of_two_by_bits_over_all_exponents():
    for exponent in range(-126, 127):
        power = torch.tensor(2.0**exponent)
        below, above = (torch.nextafter(power, torch.tensor(limit)) for limit in (0.0, 3e38))
        expected = [2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1)]
        values = torch.stack([below, power, above])
        # The value below the smallest normal is subnormal; a scale never is.
        assert ceil_to_power_of_two(values).tolist()[exponent == -126 :] == expected[exponent == -126 :]


def test_every_bfloat16_value_survives_its_own_block():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[bits.isfinite() & (bits.abs() < 1e38)]
    for y in (fake_quant_fp8(x[:, None], 1)[:, 0], fake_quant_fp4(x[:, None], 1)[:, 0]):
        assert y.dtype == torch.bfloat16
        assert torch.equal(torch.signbit(y), torch.signbit(x))
        big = x.abs() > 1e-2
        assert ((y - x).double().abs()[big] <= x.double().abs()[big] * 0.34).all()


def test_nan_and_inf_take_their_block_and_no_other():
    for bad in (NAN, float("inf"), -float("inf")):
        x = torch.ones(3, 8)
        x[1, 5] = bad
        for y in (fake_quant_fp8(x, 4), fake_quant_fp4(x, 4)):
            assert y[1, 4:].isnan().all()
            assert y[1, :4].isfinite().all()
            assert y[[0, 2]].isfinite().all()
        codes, scale = act_quant(x, 4)
        assert (codes.float() * scale.repeat_interleave(4, 1))[1, 4:].isnan().all()


def test_zeros_keep_their_sign():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    assert_bitwise(fake_quant_fp8(x, 4), x)
    assert_bitwise(fake_quant_fp4(x, 4), x)


def test_ties_of_fp4_go_to_the_even_code():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    assert fake_quant_fp4(torch.cat([x, -x]), 16).tolist() == [
        *(0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0),
        *(-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0),
    ]


@pytest.mark.parametrize("quant", [fake_quant_fp8, fake_quant_fp4], ids=["fp8", "fp4"])
def test_twice_is_once_and_codes_reproduce(quant):
    x = randn(16, 64, seed=0) * torch.logspace(-6, 6, 16)[:, None]
    y = quant(x, 32)
    assert_bitwise(quant(y, 32), y)


def test_codes_times_scale_is_the_fake_quantisation():
    x = randn(5, 256, seed=0, dtype=torch.bfloat16)
    for kind in ("ue8m0", "fp32"):
        codes, scale = act_quant(x, 128, kind)
        assert codes.dtype == torch.float8_e4m3fn
        assert scale.shape == (5, 2)
        rebuilt = (codes.float().view(5, 2, 128) * scale[..., None]).view(5, 256).to(x.dtype)
        assert_bitwise(fake_quant_fp8(x, 128, kind), rebuilt)
    assert (codes.float().abs().view(5, 2, 128).amax(-1) == 448).all()  # an exact scale reaches the last code


@pytest.mark.parametrize("quant", [fake_quant_fp8, fake_quant_fp4], ids=["fp8", "fp4"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"]
)
def test_the_gradient_passes_straight_through(quant, dtype):
    x = randn(3, 32, seed=0, dtype=dtype, grad=True)
    y, upstream = quant(x, 32), randn(3, 32, seed=1, dtype=dtype)
    assert y.dtype == dtype
    assert not torch.equal(y, x)
    y.backward(upstream)
    assert_bitwise(x.grad, upstream)


@pytest.mark.parametrize("quant", [fake_quant_fp8, fake_quant_fp4], ids=["fp8", "fp4"])
def test_channels_behind_the_quantised_ones_are_copied(quant):
    x = randn(4, 3, 72, seed=0, grad=True)
    y, upstream = quant(x, 32, channels=64), randn(4, 3, 72, seed=1)
    assert_bitwise(y[..., :64], quant(x[..., :64], 32))
    assert_bitwise(y[..., 64:], x[..., 64:])
    assert_bitwise(torch.autograd.grad(y, x, upstream)[0], upstream)
    assert_bitwise(quant(x, 32, channels=0), x)


@pytest.mark.parametrize("quant", [fake_quant_fp8, fake_quant_fp4], ids=["fp8", "fp4"])
def test_rotation_before_quantisation(quant):
    x, upstream = (
        randn(4, 64, seed=0, dtype=torch.bfloat16, grad=True),
        randn(4, 64, seed=1, dtype=torch.bfloat16),
    )
    y = quant(x, 32, rotate=True)
    assert_bitwise(y, quant(hadamard(x), 32))
    assert_bitwise(torch.autograd.grad(y, x, upstream)[0], hadamard(upstream))
    for rotated, expected in zip(act_quant(x, 32, rotate=True), act_quant(hadamard(x), 32), strict=True):
        assert_bitwise(rotated, expected)


def test_strided_and_empty_inputs():
    x = randn(4, 6, 64, seed=0)
    assert_bitwise(fake_quant_fp8(x[:, ::2, 32:], 32), fake_quant_fp8(x[:, ::2, 32:].contiguous(), 32))
    assert fake_quant_fp4(torch.zeros(0, 32)).shape == (0, 32)


def sylvester(n):
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


@pytest.mark.parametrize("n", [1, 2, 8, 128])
def test_hadamard_equals_the_matrix(n):
    x = randn(5, n, seed=0, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ sylvester(n) * n**-0.5, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard(x, 1.0), x @ sylvester(n), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-12, atol=1e-12)


def test_hadamard_gradient_and_rounding():
    x = randn(2, 8, seed=0, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(hadamard, (x,))
    half = randn(9, 128, seed=0, dtype=torch.bfloat16)
    assert_bitwise(hadamard(half), hadamard(half.float()).to(torch.bfloat16))


def test_rotation_leaves_products_unchanged():
    q, k = randn(6, 128, seed=0, dtype=torch.float64), randn(6, 128, seed=1, dtype=torch.float64)
    torch.testing.assert_close(hadamard(q) @ hadamard(k).T, q @ k.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("quant", [fake_quant_fp8, fake_quant_fp4], ids=["fp8", "fp4"])
def test_torch_func_sees_the_straight_gradient(quant):
    x, weight = randn(3, 32, seed=0), randn(3, 32, seed=1)
    gradient = torch.func.grad(lambda v: (quant(v, 32) * weight).sum())(x)
    assert_bitwise(gradient, weight)
