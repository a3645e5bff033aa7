# SPDX-License-Identifier: Apache-2.0
"""Partial interleaved RoPE of DeepSeek-V4: two tables, one per kind of layer.

The last `dim` channels of a head rotate in adjacent pairs and stay interleaved. A layer uses one table for
everything in it: queries, raw and compressed keys, the indexer, and the inverse rotation of the output (a value
is its own key, so it carries the key's rotation). YaRN changes frequencies only; cos and sin are never scaled.
Sources: Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from vime_convert.dsv4.hf_config import Yarn
from vime_kernels import dsa


@dataclass(frozen=True)
class RotaryTable:
    """Frequencies of one rotation.

    Attributes:
        dim: rotated channels per head, even.
        theta: base of the frequencies.
        yarn: frequency scaling, None for plain RoPE.
    """

    dim: int
    theta: float
    yarn: Yarn | None = None

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, dim/2] at integer positions [T], float32 (float64 when `dtype` is float64).

        Args:
            positions: [T] integers, restarting at every sequence.
            dtype: dtype of the activations that will be rotated.
        """
        wide = torch.promote_types(dtype, torch.float32)
        angles = positions.to(wide)[:, None] * _inv_freq(self, wide, positions.device)
        return angles.cos(), angles.sin()


def yarn_range(dim: int, theta: float, yarn: Yarn) -> tuple[int, int]:
    """First and last pair index of YaRN's ramp: below it frequencies are kept, above it divided by the factor.

    Args:
        dim: rotated channels.
        theta: base of the frequencies.
        yarn: a pair that turns `beta_fast` times within the original length starts the ramp, one that turns
            `beta_slow` times ends it.
    """

    def pair_with(turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    return max(math.floor(pair_with(yarn.beta_fast)), 0), min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)


@lru_cache(maxsize=64)
def _inv_freq(table: RotaryTable, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Computed on the CPU on every device, so that trainer ranks and tests share the same bits.
    pairs = torch.arange(0, table.dim, 2, dtype=dtype, device="cpu")
    inv_freq = 1.0 / table.theta ** (pairs / table.dim)
    if table.yarn is not None:
        low, high = yarn_range(table.dim, table.theta, table.yarn)
        width = high - low if high != low else 1e-3
        kept = 1 - ((torch.arange(table.dim // 2, dtype=dtype, device="cpu") - low) / width).clamp(0, 1)
        inv_freq = inv_freq / table.yarn.factor * (1 - kept) + inv_freq * kept
    return inv_freq.to(device)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool = False,
    norm_eps: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """x with its trailing channel pairs rotated by the tabulated angles, float32 inside and rounded once.

    Args:
        x: heads [T, H, D], or one head [T, D].
        cos: [T, P].
        sin: [T, P].
        inverse: turn back.
        norm_eps: divide a head by its root mean square first, with this epsilon and no weight.
        backend: see `vime_kernels.dsa.rotate`.
    """
    heads = x if x.ndim == 3 else x[:, None]
    return dsa.rotate(heads, cos, sin, inverse=inverse, norm_eps=norm_eps, backend=backend).view(x.shape)
