# SPDX-License-Identifier: Apache-2.0
"""Public quantisation: real codes, quantise-dequantise with a straight-through gradient, and the Hadamard rotation."""

from typing import Any

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels.ops.fake_quant import config, reference

SCALES = ("ue8m0", "fp32")


class _StraightThrough(torch.autograd.Function):
    """Forward: the second argument. Backward: the gradient goes to the first one as it is, clamped values included."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Nothing to keep; written apart from `forward`, as the transforms of torch.func ask."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def act_quant(
    x: torch.Tensor,
    block: int = 128,
    scale: str = "ue8m0",
    *,
    rotate: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes and their scales: (float8_e4m3fn [..., D], float32 [..., D / block]), no gradient.

    Args:
        x: [..., D], floating; D a multiple of block.
        block: values that share a scale, along the last dimension.
        scale: "ue8m0" for powers of two, "fp32" for amax / 448.
        rotate: quantise `hadamard(x)` instead, in one pass; D a power of two.
        backend: see `vime_kernels.set_backend`.

    Codes times scale: a NaN or inf makes its whole block NaN, a block of zeros gives zeros.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "act_quant"
    _check(op, x, block, scale, rotate, None)
    if resolve(op, backend, (x,), config.unsupported(x, block, rotate)) == "triton":
        from vime_kernels.ops.fake_quant import triton_fwd

        with torch.no_grad():
            return triton_fwd.act_quant(x, block, scale == "ue8m0", rotate)
    with torch.no_grad():
        blocks = reference.blocks_of(hadamard(x, backend="torch") if rotate else x, block)
        s = reference.block_scale(blocks, config.FP8, scale)
        return reference.to_fp8(blocks, s).flatten(-2), s.squeeze(-1)


def fake_quant_fp8(
    x: torch.Tensor,
    block: int = 128,
    scale: str = "ue8m0",
    *,
    channels: int | None = None,
    rotate: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """x after a round trip through FP8 (E4M3) blocks, in the dtype of x; the gradient passes straight through.

    DeepSeek-V4 uses block 64 for the channels of the latent that do not turn, and 128 for the rotated indexer.

    Args:
        x: [..., D], floating; D a multiple of block, or `channels` one.
        block: values that share a scale, along the last dimension.
        scale: "ue8m0" for powers of two, "fp32" for amax / 448.
        channels: only so many leading channels are quantised, the others are copied; None for all.
        rotate: quantise `hadamard(x)` instead, in one pass; D a power of two. The gradient is rotated back.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    return _fake_quant("fake_quant_fp8", x, block, scale, channels, rotate, backend)


def fake_quant_fp4(
    x: torch.Tensor,
    block: int = 32,
    *,
    channels: int | None = None,
    rotate: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """x after a round trip through FP4 (E2M1) blocks with UE8M0 scales; the gradient passes straight through.

    Args: as for `fake_quant_fp8`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    return _fake_quant("fake_quant_fp4", x, block, "ue8m0", channels, rotate, backend)


def _fake_quant(
    op: str,
    x: torch.Tensor,
    block: int,
    scale: str,
    channels: int | None,
    rotate: bool,
    backend: str | None,
) -> torch.Tensor:
    _check(op, x, block, scale, rotate, channels)
    fp4 = op == "fake_quant_fp4"
    if resolve(op, backend, (x,), config.unsupported(x, block, rotate)) == "triton":
        from vime_kernels.ops.fake_quant import triton_fwd

        kept = x.shape[-1] if channels is None else channels
        return triton_fwd.fake_quant(x, fp4, block, scale == "ue8m0", rotate, kept)
    if rotate:
        x = hadamard(x, backend="torch")
    with torch.no_grad():
        blocks = reference.blocks_of(x[..., :channels], block)
        s = reference.block_scale(blocks, config.FP4 if fp4 else config.FP8, scale)
        codes = reference.round_fp4(blocks, s) if fp4 else reference.to_fp8(blocks, s).to(torch.float32)
        y = (codes * s).flatten(-2).to(x.dtype)
        if channels is not None:
            y = torch.cat([y, x[..., channels:]], -1)
    return _StraightThrough.apply(x, y)


def hadamard(x: torch.Tensor, scale: float | None = None, *, backend: str | None = None) -> torch.Tensor:
    """scale · x · H over the last dimension, H the Sylvester-ordered Hadamard matrix, in the dtype of x.

    Symmetric, and with the default scale orthogonal: applying it twice gives x back, and rotating queries and keys
    alike leaves their products unchanged. It matters only before quantisation.

    Args:
        x: [..., n], floating; n a power of two.
        scale: factor; None for n^-1/2.
        backend: see `vime_kernels.set_backend`.

    Sums are in float32 (float64 for float64 inputs) and rounded once.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "hadamard"
    _checks.tensor(op, x=x)
    _checks.floating(op, x=x)
    _checks.rows_contiguous(op, x=x)
    n = _power_of_two(op, x)
    factor = n**-0.5 if scale is None else scale
    _checks.python_float(op, scale=factor)
    if resolve(op, backend, (x,), config.unsupported_rotation(x)) == "triton":
        from vime_kernels.ops.fake_quant import triton_fwd

        return triton_fwd.hadamard(x, factor)
    return (reference.hadamard(x.to(_checks.accum_dtype(x))) * factor).to(x.dtype)


def _check(op: str, x: torch.Tensor, block: int, scale: str, rotate: bool, channels: int | None) -> None:
    _checks.tensor(op, x=x)
    _checks.floating(op, x=x)
    _checks.rows_contiguous(op, x=x)
    _checks.positive(op, block=block)
    _checks.choice(op, "scale", scale, SCALES)
    if channels is not None:
        if (
            not isinstance(channels, int)
            or x.ndim < 1
            or not 0 <= channels <= x.shape[-1]
            or channels % block
        ):
            expected = f"channels to be a multiple of block ({block}) and at most x.shape[-1]"
            _checks.fail(op, expected, f"{channels!r} for {list(x.shape)}")
        if rotate:
            _checks.fail(op, "channels=None with rotate=True (the rotation mixes all channels)", channels)
    elif x.ndim < 1 or x.shape[-1] % block:
        _checks.fail(op, f"x.shape[-1] to be a multiple of block ({block})", list(x.shape), "pad or slice x")
    if rotate:
        _power_of_two(op, x)


def _power_of_two(op: str, x: torch.Tensor) -> int:
    n = x.shape[-1] if x.ndim else 0
    if n < 1 or n & (n - 1):
        _checks.fail(op, "x.shape[-1] to be a power of two", n)
    return n
