# SPDX-License-Identifier: Apache-2.0
"""Block quantisation in plain torch: the specification, bit by bit.

    amax  = max(max |x| over the block, floor)
    scale = 2^⌈log2(amax / largest code)⌉               UE8M0, by integer arithmetic on the float32 bits
    y     = round to nearest even(clamp(x / scale)) · scale

Defined on float32 values, and on their bits: other dtypes are converted first, and code that runs everything in float64
has to leave quantisation off. Leaves out the packing of codes into bytes.

Source: DeepSeek-V3.2 and V4 inference kernels (`act_quant`, `fp4_act_quant`); OCP Microscaling for E2M1 and E8M0.
"""

import torch

from vime_kernels.ops.fake_quant.config import FP4, FP8, Format


def blocks_of(x: torch.Tensor, block: int) -> torch.Tensor:
    """The last dimension in float32 blocks: [..., D / block, block]."""
    return x.to(torch.float32).unflatten(-1, (-1, block))


def ceil_to_power_of_two(v: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= v, for positive normal float32. exp2(ceil(log2(v))) is off right above powers."""
    power = ((v.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(v.isnan(), v, power)


def block_scale(x: torch.Tensor, form: Format, scale: str) -> torch.Tensor:
    """[..., blocks, 1]: what the largest value of each block is divided by to become the largest code."""
    # amax, unlike a comparison, hands a NaN on to its block. The product with the rounded constant is what the
    # inference kernel computes.
    v = x.abs().amax(-1, keepdim=True).clamp_min(form.floor) * (1.0 / form.largest)
    return ceil_to_power_of_two(v) if scale == "ue8m0" else v


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 codes. The clamp comes before the cast, which does not saturate everywhere."""
    return (x / scale).clamp(-FP8.largest, FP8.largest).to(torch.float8_e4m3fn)


def round_fp4(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E2M1 values (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) in float32, ties to the even code."""
    v = (x / scale).clamp(-FP4.largest, FP4.largest)
    step = torch.where(v.abs() < 2, 0.5, torch.where(v.abs() < 4, 1.0, 2.0))
    return (v / step).round() * step


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x times the Sylvester-ordered matrix of ±1, by log2(n) butterflies over the last dimension."""
    n, half = x.shape[-1], 1
    while half < n:
        pairs = x.unflatten(-1, (n // (2 * half), 2, half))
        low, high = pairs.unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
        half *= 2
    return x
