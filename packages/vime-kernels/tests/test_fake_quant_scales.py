# SPDX-License-Identifier: Apache-2.0
"""Power-of-two scales of a million blocks, bit by bit, against numpy's exact exponents."""

import numpy as np
import torch

from vime_kernels.quant import act_quant, fake_quant_fp4

BLOCKS = 1_000_000
FP8_FLOOR, FP4_FLOOR = np.float32(1e-4), np.float32(6 * 2.0**-126)


def exact_scale(amax: np.ndarray, largest: float, floor: np.float32) -> np.ndarray:
    """The smallest power of two that is at least max(amax, floor) / largest, without rounding on the way.

    largest = c · 2^e with an odd integer c, so amax <= c · 2^(e + k) is decided by comparing mantissas.
    """
    mantissa, exponent = np.frexp(np.maximum(amax, floor).astype(np.float64))
    top, shift = np.frexp(largest)
    return np.ldexp(1.0, exponent - shift + (mantissa > top))


def maxima(largest: float) -> np.ndarray:
    """Largest magnitudes of the blocks: any exponent, and the neighbours of every value at which the scale steps."""
    rng = np.random.default_rng(0)
    anywhere = rng.uniform(1, 2, BLOCKS) * 2.0 ** rng.integers(-120, 120, BLOCKS)
    steps = np.ldexp(np.float32(largest), rng.integers(-110, 110, BLOCKS // 2)).astype(np.float32)
    powers = np.ldexp(np.float32(1), rng.integers(-118, 118, BLOCKS // 4)).astype(np.float32)
    near = np.concatenate([steps, powers]).view(np.int32) + rng.integers(-2, 3, BLOCKS // 4 * 3)
    # The neighbours take the place of three quarters of the values.
    return np.concatenate([near.astype(np.int32).view(np.float32), anywhere.astype(np.float32)])[:BLOCKS]


def blocks_with(amax: np.ndarray, block: int) -> torch.Tensor:
    """Blocks whose largest magnitude, at a random place and with a random sign, is the given one."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (len(amax), block)).astype(np.float32) * amax[:, None]
    x[np.arange(len(amax)), rng.integers(0, block, len(amax))] = amax * rng.choice([-1, 1], len(amax))
    return torch.from_numpy(x)


def test_fp8_scales_of_a_million_blocks():
    amax = maxima(448.0)
    codes, scale = act_quant(blocks_with(amax, 4), 4)
    expected = exact_scale(amax, 448.0, FP8_FLOOR)
    assert np.array_equal(scale.squeeze(-1).numpy().astype(np.float64), expected)
    assert (codes.float().abs().amax(-1) <= 448).all()


def test_fp4_scales_of_a_million_blocks():
    amax = maxima(6.0)
    x = blocks_with(amax, 4)
    expected = exact_scale(amax, 6.0, FP4_FLOOR)
    # The scale is not returned; the codes of the values show it.
    code = fake_quant_fp4(x, 4).double() / torch.from_numpy(expected)[:, None]
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    distance = (code.abs()[..., None] - grid).abs()
    assert (distance.amin(-1) == 0).all()
    # The largest value lies in the upper half of the grid and nothing is a whole step away from its code.
    assert (code.abs().amax(-1) >= 3).all()
    error = (code - x.double() / torch.from_numpy(expected)[:, None]).abs()
    step = torch.where(code.abs() < 2, 0.25, torch.where(code.abs() < 4, 0.5, 1.0))
    assert (error <= step).all()
