# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs."""

from collections.abc import Sequence

import torch


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Standard normal values from a generator of their own, so that a test does not depend on its neighbours."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_(grad)


def cu_seqlens_of(lengths: Sequence[int]) -> torch.Tensor:
    """int32 [B + 1], cumulative lengths. Zero lengths are legal."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def causal_picks(rows: int, keys: int, k: int, *, seed: int, ratio: int = 1) -> torch.Tensor:
    """int32 [rows, k]: distinct random keys below (row + 1) // ratio, ascending, -1 last; as a selection looks."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.full((rows, k), -1, dtype=torch.int32)
    for row in range(rows):
        visible = min((row + 1) // ratio, keys)
        chosen = torch.randperm(visible, generator=generator)[:k].sort().values
        picks[row, : len(chosen)] = chosen.to(torch.int32)
    return picks
