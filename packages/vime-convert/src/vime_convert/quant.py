# SPDX-License-Identifier: Apache-2.0
"""Block-scaled weights to float32: FP8 (e4m3 with two-dimensional blocks) and MXFP4 (packed e2m1).

The format follows from dtype and shapes alone, never from config fields, because one checkpoint may hold both and
configs are not reliable about it. Quantising is not here. Source of the layouts: the released inference code of
DeepSeek-V4 and the OCP microscaling specification; tests compare with transformers' `Fp8Dequantize`.
"""

import torch

FP8_DTYPES = (torch.float8_e4m3fn,)
PACKED_DTYPES = (torch.int8, torch.uint8)
SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8, torch.float32, torch.bfloat16)

FP8_BLOCK = 128
FP4_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a weight stored in that dtype needs block scales."""
    return dtype in FP8_DTYPES or dtype in PACKED_DTYPES


def logical_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Shape after dequantisation: packed FP4 holds two columns in one byte."""
    return (*shape[:-1], 2 * shape[-1]) if dtype in PACKED_DTYPES else shape


def block_sizes(
    shape: tuple[int, ...], dtype: torch.dtype, scale_shape: tuple[int, ...], scale_dtype: torch.dtype
) -> tuple[int, int] | str:
    """Rows and columns that share one scale, or a sentence about what does not fit.

    Args:
        shape: stored shape of the weight, [rows, columns] (packed FP4: half the columns).
        dtype: stored dtype of the weight.
        scale_shape, scale_dtype: of its scales.
    """
    if len(shape) != 2 or len(scale_shape) != 2:
        return f"expected two dimensions, got weight {list(shape)} and scales {list(scale_shape)}"
    if scale_dtype not in SCALE_DTYPES:
        return f"expected scales in one of {[str(d) for d in SCALE_DTYPES]}, got {scale_dtype}"
    rows, columns = logical_shape(shape, dtype)
    if dtype in PACKED_DTYPES:
        expected = (rows, columns // FP4_BLOCK)
        if columns % FP4_BLOCK or scale_shape != expected:
            return f"expected FP4 scales {list(expected)} (blocks of {FP4_BLOCK}), got {list(scale_shape)}"
        return 1, FP4_BLOCK
    blocks = [_block(size, count) for size, count in zip((rows, columns), scale_shape, strict=True)]
    if 0 in blocks:
        expected = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return f"expected FP8 scales {list(expected)} for {[rows, columns]}, got {list(scale_shape)}"
    return blocks[0], blocks[1]


def _block(size: int, count: int) -> int:
    if count == -(-size // FP8_BLOCK):
        return FP8_BLOCK  # the last block may be partial
    return size // count if count and size % count == 0 else 0


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight as float32 [rows, columns]: `value · scale of its block`, one rounding at most.

    With e8m0 scales (powers of two) the product is exact, and so is a later cast to bfloat16.

    Args:
        weight: float8_e4m3fn [rows, columns], or int8/uint8 [rows, columns/2] with the even column in the low half.
        scale: e8m0 (as float8_e8m0fnu or its raw uint8 exponent bytes), float32 or bfloat16, one per block.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    blocks = block_sizes(tuple(weight.shape), weight.dtype, tuple(scale.shape), scale.dtype)
    if isinstance(blocks, str):
        raise ValueError(f"vime_convert.quant: {blocks}")
    values = _unpack_fp4(weight) if weight.dtype in PACKED_DTYPES else weight.float()
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    rows, columns = values.shape
    scales = scale.float().repeat_interleave(blocks[0], 0)[:rows].repeat_interleave(blocks[1], 1)[:, :columns]
    return values * scales


def _unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    codes = packed.view(torch.uint8).long()
    table = torch.tensor(_E2M1)
    return torch.stack((table[codes & 0xF], table[codes >> 4]), dim=-1).flatten(-2)
