# SPDX-License-Identifier: Apache-2.0
"""Quantisation and the Hadamard rotation in Triton, bit for bit as in `reference`.

One pass over memory: a program holds whole blocks, and whole rows where they are rotated. Nothing is divided by a
power of two, and nothing is cast to an 8-bit type to be rounded: adding and subtracting a number whose last bit is
the step of the format rounds to nearest even in float32, the same way on every device and in the interpreter. No
clamp is needed, because the scale is at least amax / largest code, up to less than half a step.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.fake_quant import config

EXPONENT, MAGNITUDE = tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)


@triton.jit
def _bits(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rotate(x, ROWS: tl.constexpr, n: tl.constexpr, LOG_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [ROWS, n] times the Sylvester matrix of ±1, sums in the order of `reference.hadamard`."""
    for i in tl.static_range(LOG_N):
        pairs = tl.permute(tl.reshape(x, [ROWS, n // (2 << i), 2, 1 << i]), [0, 1, 3, 2])
        low, high = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 1, 3, 2]), [ROWS, n])
    return x


@triton.jit
def _scale_of(x, largest_inverse, floor, UE8M0: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale of every row of x [blocks, BLOCK], [blocks, 1]."""
    # The bits of magnitudes are ordered as integers, with a NaN above everything else.
    amax = _float(tl.max(_bits(x) & MAGNITUDE, 1, keep_dims=True))
    v = tl.maximum(amax, floor, propagate_nan=tl.PropagateNan.ALL) * largest_inverse
    # A NaN that the sum turned into an infinity is put back.
    return tl.where(v == v, _float((_bits(v) + 0x7FFFFF) & EXPONENT), v) if UE8M0 else v


@triton.jit
def _codes(x, scale, UE8M0: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Magnitudes of x / scale, rounded to the format."""
    magnitude = _float(_bits(x) & MAGNITUDE)
    if UE8M0:
        # 1 / scale by its exponent; 0 where the scale is inf or NaN, which makes the block NaN whatever its codes.
        v = magnitude * _float(tl.maximum(0x7F000000 - _bits(scale), 0))
    else:
        v = tl.div_rn(magnitude, tl.broadcast_to(scale, magnitude.shape))
    power = tl.maximum(_float(_bits(v) & EXPONENT), NORMAL)
    anchor = power * (1.5 * (1 << (23 - MANTISSA)))
    return (v + anchor) - anchor


@triton.jit
def _signed(magnitude, x):  # type: ignore[no-untyped-def]
    return _float(_bits(magnitude) | (_bits(x) & ~MAGNITUDE))


@triton.jit(do_not_specialize=["rows"])
def _quant_kernel(  # type: ignore[no-untyped-def]
    x,
    y,
    scales,
    rows,
    D,
    blocks_per_row,
    channels,
    stride,
    largest_inverse,
    floor,
    rotation_scale,
    ROTATE: tl.constexpr,
    CODES: tl.constexpr,
    UE8M0: tl.constexpr,
    MANTISSA: tl.constexpr,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOG_D: tl.constexpr,
):
    """BLOCKS blocks: codes and scales, or the values after the round trip. Blocks from `channels` on are copied."""
    b = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, BLOCK)[None, :]
    if ROTATE:
        ROWS: tl.constexpr = BLOCKS * BLOCK >> LOG_D
        r, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, 1 << LOG_D)
        given = tl.load(x + r[:, None] * stride + d[None, :], mask=(r < rows)[:, None], other=0.0)
        rotated = _rotate(given.to(tl.float32), ROWS, 1 << LOG_D, LOG_D) * rotation_scale
        # The rotation rounds to the dtype of x, as it does on its own.
        value = tl.reshape(rotated.to(x.dtype.element_ty).to(tl.float32), [BLOCKS, BLOCK])
        exists = b < rows * blocks_per_row
        live = exists[:, None]
        target = y + b.to(tl.int64)[:, None] * BLOCK + lane
    else:
        row = (b // blocks_per_row).to(tl.int64)
        exists = row < rows
        channel = (b % blocks_per_row)[:, None] * BLOCK + lane
        live = exists[:, None] & (channel < D)
        value = tl.load(x + row[:, None] * stride + channel, mask=live, other=0.0).to(tl.float32)
        target = y + row[:, None] * D + channel
    scale = _scale_of(value, largest_inverse, floor, UE8M0)
    code = _codes(value, scale, UE8M0, MANTISSA, NORMAL)
    if CODES:
        tl.store(target, _signed(code, value).to(y.dtype.element_ty), mask=live)
        tl.store(scales + b[:, None], scale, mask=exists[:, None])
    else:
        result = _signed(code * scale, value)
        if not ROTATE:
            result = tl.where(channel < channels, result, value)
        tl.store(target, result.to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _hadamard_kernel(x, y, rows, stride, scale, ROWS: tl.constexpr, n: tl.constexpr, LOG_N: tl.constexpr):  # type: ignore[no-untyped-def]
    r, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, n)
    given = tl.load(x + r[:, None] * stride + d[None, :], mask=(r < rows)[:, None], other=0.0)
    rotated = _rotate(given.to(tl.float32), ROWS, n, LOG_N) * scale
    tl.store(y + r[:, None] * n + d[None, :], rotated.to(y.dtype.element_ty), mask=(r < rows)[:, None])


def _quantise(
    x: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor | None,
    form: config.Format,
    block: int,
    ue8m0: bool,
    rotate: bool,
    channels: int,
) -> None:
    D = x.shape[-1]
    rows_x = x.reshape(-1, D)
    if rows_x.is_contiguous() and channels == D and not rotate:
        rows_x, D, channels = rows_x.view(-1, block), block, block  # spares the kernel a division
    values = max(config.TILE, D if rotate else block)
    blocks_per_row = triton.cdiv(D, block)
    _quant_kernel[(triton.cdiv(len(rows_x) * blocks_per_row, values // block),)](
        rows_x,
        y,
        scales,
        len(rows_x),
        D,
        blocks_per_row,
        channels,
        rows_x.stride(0),
        1.0 / form.largest,
        form.floor,
        D**-0.5,
        ROTATE=rotate,
        CODES=scales is not None,
        UE8M0=ue8m0,
        MANTISSA=form.mantissa,
        NORMAL=form.normal,
        BLOCK=block,
        BLOCKS=values // block,
        LOG_D=D.bit_length() - 1,
        num_warps=config.num_warps(values),
    )


@torch.library.custom_op("vime_kernels::act_quant", mutates_args=())
def act_quant(x: torch.Tensor, block: int, ue8m0: bool, rotate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn codes, float32 scales). Arguments as in `interface.act_quant`, already checked."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // block, dtype=torch.float32, device=x.device)
    if x.numel():
        _quantise(x, codes, scales, config.FP8, block, ue8m0, rotate, x.shape[-1])
    return codes, scales


@act_quant.register_fake
def _(x: torch.Tensor, block: int, ue8m0: bool, rotate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.new_empty(*x.shape[:-1], x.shape[-1] // block, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


@torch.library.custom_op("vime_kernels::fake_quant", mutates_args=())
def fake_quant(
    x: torch.Tensor, fp4: bool, block: int, ue8m0: bool, rotate: bool, channels: int
) -> torch.Tensor:
    """x after the round trip; arguments as in `interface.fake_quant_fp8`, already checked."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _quantise(x, y, None, config.FP4 if fp4 else config.FP8, block, ue8m0, rotate, channels)
    return y


@fake_quant.register_fake
def _(x: torch.Tensor, fp4: bool, block: int, ue8m0: bool, rotate: bool, channels: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("vime_kernels::hadamard", mutates_args=())
def hadamard(x: torch.Tensor, scale: float) -> torch.Tensor:
    """scale · x · H; arguments as in `interface.hadamard`, already checked."""
    n = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows_x, values = x.reshape(-1, n), max(config.TILE, n)
        rows = values // n
        _hadamard_kernel[(triton.cdiv(len(rows_x), rows),)](
            rows_x,
            y,
            len(rows_x),
            rows_x.stride(0),
            scale,
            ROWS=rows,
            n=n,
            LOG_N=n.bit_length() - 1,
            num_warps=config.num_warps(values),
        )
    return y


@hadamard.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *_, ctx.rotate, _ = inputs


def _straight_through(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx = hadamard(grad.contiguous(), grad.shape[-1] ** -0.5) if ctx.rotate else grad
    return dx, None, None, None, None, None


def _save_scale(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.scale = inputs[1]


def _rotate_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return hadamard(grad.contiguous(), ctx.scale), None


fake_quant.register_autograd(_straight_through, setup_context=_save_rotation)
hadamard.register_autograd(_rotate_back, setup_context=_save_scale)
