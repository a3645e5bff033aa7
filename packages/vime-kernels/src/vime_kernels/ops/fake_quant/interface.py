# SPDX-License-Identifier: Apache-2.0
"""Public quantisation: real codes, quantise-dequantise with a straight-through gradient, and the Hadamard rotation."""

from typing import Any

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels.ops.fake_quant import reference

SCALES = ("ue8m0", "fp32")


class _StraightThrough(torch.autograd.Function):
    """Forward: the second argument. Backward: the gradient goes to the first one as it is, clamped values included."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def act_quant(
    x: torch.Tensor, block: int = 128, scale: str = "ue8m0", *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes and their scales: (float8_e4m3fn [..., D], float32 [..., D / block]), no gradient.

    Args:
        x: [..., D], floating; D a multiple of block.
        block: values that share a scale, along the last dimension.
        scale: "ue8m0" for powers of two, "fp32" for amax / 448.
        backend: see `vime_kernels.set_backend`.

    Codes times scale: a NaN or inf makes its whole block NaN, a block of zeros gives zeros.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "act_quant"
    _check(op, x, block, scale)
    resolve(op, backend)
    with torch.no_grad():
        blocks = reference.blocks_of(x, block)
        s = reference.block_scale(blocks, reference.FP8_MAX, reference.FP8_FLOOR, scale)
        return reference.to_fp8(blocks, s).flatten(-2), s.squeeze(-1)


def fake_quant_fp8(
    x: torch.Tensor, block: int = 128, scale: str = "ue8m0", *, backend: str | None = None
) -> torch.Tensor:
    """x after a round trip through FP8 (E4M3) blocks, in the dtype of x; the gradient passes straight through.

    Args: as for `act_quant`. DeepSeek-V4 uses block 64 for the latent and 128 for the indexer.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "fake_quant_fp8"
    _check(op, x, block, scale)
    resolve(op, backend)
    with torch.no_grad():
        codes, s = act_quant(x, block, scale, backend=backend)
        y = (reference.blocks_of(codes, block) * s.unsqueeze(-1)).flatten(-2).to(x.dtype)
    return _StraightThrough.apply(x, y)


def fake_quant_fp4(x: torch.Tensor, block: int = 32, *, backend: str | None = None) -> torch.Tensor:
    """x after a round trip through FP4 (E2M1) blocks with UE8M0 scales; the gradient passes straight through.

    Args:
        x: [..., D], floating; D a multiple of block.
        block: values that share a scale, along the last dimension.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "fake_quant_fp4"
    _check(op, x, block, "ue8m0")
    resolve(op, backend)
    with torch.no_grad():
        blocks = reference.blocks_of(x, block)
        s = reference.block_scale(blocks, reference.FP4_MAX, reference.FP4_FLOOR, "ue8m0")
        y = (reference.round_fp4(blocks, s) * s).flatten(-2).to(x.dtype)
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
    n = x.shape[-1] if x.ndim else 0
    if n < 1 or n & (n - 1):
        _checks.fail(op, "x.shape[-1] to be a power of two", n)
    resolve(op, backend)
    return (reference.hadamard(x.to(_checks.accum_dtype(x))) * (n**-0.5 if scale is None else scale)).to(
        x.dtype
    )


def _check(op: str, x: torch.Tensor, block: int, scale: str) -> None:
    _checks.tensor(op, x=x)
    _checks.floating(op, x=x)
    _checks.positive(op, block=block)
    _checks.choice(op, "scale", scale, SCALES)
    if x.ndim < 1 or x.shape[-1] % block:
        _checks.fail(op, f"x.shape[-1] to be a multiple of block ({block})", list(x.shape), "pad or slice x")
