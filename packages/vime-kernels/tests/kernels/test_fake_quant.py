# SPDX-License-Identifier: Apache-2.0
"""Triton quantisation and rotation equal the torch reference bit by bit."""

import pytest
import torch

from vime_kernels.quant import act_quant, fake_quant_fp4, fake_quant_fp8, hadamard
from vime_kernels.testing import assert_bitwise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# NumPy, in which the interpreter computes, warns where a NaN or an infinity comes out.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture(params=["fp32", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("bf16", "fp16"))])
def dtype(request, device):
    if request.param != "fp32" and device == "cpu":
        pytest.skip("the interpreter does not round to 16 bits")
    return DTYPES[request.param]


def blocks(device, rows, D, dtype=torch.float32):
    """Rows of all magnitudes, with every kind of number that rounding treats in its own way."""
    generator = torch.Generator().manual_seed(rows + D)
    x = torch.randn(rows, D, generator=generator)
    x *= torch.logspace(-30, 30, rows)[torch.randperm(rows, generator=generator), None]
    x[0], x[1, ::3] = 0.0, -0.0
    x[2] = torch.linspace(-448, 448, D)  # every code, and values between
    x[3] = torch.linspace(-6, 6, D) * 2.0**-100
    x[4, 0], x[5, D // 2] = 448.0, torch.nextafter(torch.tensor(448.0), torch.tensor(500.0))
    x[6] = torch.arange(D) % 5 * 1e-41  # subnormal
    return x.to(device, dtype)


def same(mine, reference):
    assert torch.equal(mine.isnan(), reference.isnan())
    assert_bitwise(mine.nan_to_num(0.0), reference.nan_to_num(0.0))


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("block, D", [(32, 64), (128, 128), (4, 256), (64, 192)])
def test_round_trips(device, block, D, rotate, dtype):
    if rotate and D == 192:
        return  # a rotation needs a power of two
    x = blocks(device, 70, D, dtype)
    for scale in ("ue8m0", "fp32"):
        options = {"block": block, "scale": scale, "rotate": rotate}
        same(*(fake_quant_fp8(x, **options, backend=b) for b in ("triton", "torch")))
        (codes, s), (codes_reference, s_reference) = (
            act_quant(x, **options, backend=b) for b in ("triton", "torch")
        )
        same(codes.float(), codes_reference.float())
        assert_bitwise(s, s_reference)
    same(*(fake_quant_fp4(x, block, rotate=rotate, backend=b) for b in ("triton", "torch")))


@pytest.mark.parametrize("quant", [fake_quant_fp8, fake_quant_fp4], ids=["fp8", "fp4"])
def test_nan_and_inf_take_their_block(device, quant):
    x = blocks(device, 12, 64)
    x[7, 3], x[8, 40], x[9, 63] = float("nan"), float("inf"), -float("inf")
    mine, reference = (quant(x, 32, backend=b) for b in ("triton", "torch"))
    same(mine, reference)
    assert mine[7, :32].isnan().all()
    codes, scale = act_quant(x, 32, backend="triton")
    rebuilt = codes.float() * scale.repeat_interleave(32, 1)
    if device == "cpu":  # the interpreter casts a NaN to a finite code
        rebuilt = rebuilt.masked_fill(x.isinf(), float("nan"))
    same(rebuilt, fake_quant_fp8(x, 32, backend="torch"))


@pytest.mark.parametrize("quant", [fake_quant_fp8, fake_quant_fp4], ids=["fp8", "fp4"])
def test_leading_channels_of_a_strided_tensor(device, quant):
    x = blocks(device, 60, 448).view(20, 3, 448)[::2, :, :350]
    mine, reference = (quant(x, 64, channels=320, backend=b) for b in ("triton", "torch"))
    same(mine, reference)
    assert_bitwise(mine[..., 320:], x[..., 320:])
    same(quant(x[..., :320], 64, backend="triton"), reference[..., :320])


@pytest.mark.parametrize("n", [1, 2, 64, 128, 512])
def test_hadamard(device, dtype, n):
    x = torch.randn(2, 9, n, generator=torch.Generator().manual_seed(n)).to(device, dtype)
    assert_bitwise(*(hadamard(x, backend=b) for b in ("triton", "torch")))
    assert_bitwise(*(hadamard(x[:, ::2], 0.3, backend=b) for b in ("triton", "torch")))


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_gradients(device, rotate):
    x = torch.randn(5, 64, device=device, requires_grad=True)
    upstream = torch.randn(5, 64, device=device)
    for quant in (fake_quant_fp8, fake_quant_fp4):
        (dx,) = torch.autograd.grad(quant(x, 32, rotate=rotate, backend="triton"), x, upstream)
        assert_bitwise(dx, hadamard(upstream, backend="torch") if rotate else upstream)
    (dx,) = torch.autograd.grad(hadamard(x, backend="triton"), x, upstream.T.contiguous().T)
    assert_bitwise(dx, hadamard(upstream, backend="torch"))


@pytest.mark.parametrize("quant", [fake_quant_fp8, fake_quant_fp4], ids=["fp8", "fp4"])
def test_every_bfloat16_value_in_a_block_of_its_own(device, quant):
    bits = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)[:, None].to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    same(*(quant(x, 1, backend=b) for b in ("triton", "torch")))
