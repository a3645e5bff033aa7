# SPDX-License-Identifier: Apache-2.0
"""Comparison of two results."""

import torch


def rel_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖₂ / ‖expected‖₂ in float64; 0 when both are empty or zero, inf when only `expected` is zero.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"rel_rms: expected shape {list(expected.shape)}, got {list(actual.shape)}")
    a, b = actual.detach().double(), expected.detach().double()
    error, norm = (a - b).norm().item(), b.norm().item()
    if norm == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / norm


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, name: str = "result") -> None:
    """Both tensors hold the same bits: -0 differs from +0, and a NaN equals the same NaN.

    Raises:
        AssertionError: with the first coordinate that differs, both values and how many differ in all.
    """
    for what, a, b in (("shape", actual.shape, expected.shape), ("dtype", actual.dtype, expected.dtype)):
        if a != b:
            raise AssertionError(f"{name}: expected {what} {b}, got {a}")
    if actual.numel() == 0:
        return
    raw = (actual.detach().contiguous(), expected.detach().contiguous())
    a_bytes, b_bytes = (t.reshape(-1, 1).view(torch.uint8).reshape(t.numel(), -1).cpu() for t in raw)
    different = (a_bytes != b_bytes).any(1)
    if not different.any():
        return
    flat = int(different.nonzero()[0])
    coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape))
    raise AssertionError(
        f"{name}: {int(different.sum())} of {different.numel()} elements differ, first at {coordinate}: "
        f"expected {expected[coordinate].item()!r}, got {actual[coordinate].item()!r}"
    )
