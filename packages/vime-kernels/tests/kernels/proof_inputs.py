# SPDX-License-Identifier: Apache-2.0
"""Small tensors for the proofs: keys with rows that nothing may read, ranges and picks with every kind of hole."""

import os
from collections.abc import Callable

import torch

Tensors = tuple[torch.Tensor, ...]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETING:
    DEVICE, SHORT = "cpu", torch.float32
    S, N, H, D, K, EDGE, WIDE, TAIL, LONG = 3, 20, 2, 16, 8, 2, 16, 16, 8
    CU = (0, 3, 3, 12, 18)
else:
    DEVICE, SHORT = "cuda", torch.bfloat16
    S, N, H, D, K, EDGE, WIDE, TAIL, LONG = 37, 300, 16, 64, 40, 8, 512, 64, 128
    CU = (0, 3, 3, 150, 290)  # a short sequence, an empty one, and rows of no sequence at the end


def randn(*shape: int, dtype: torch.dtype = SHORT) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def f32(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.float32)


def int32(values: object) -> torch.Tensor:
    return torch.as_tensor(values, device=DEVICE).to(torch.int32).contiguous()


def ranges(rows: int = S) -> Tensors:
    """Ranges that leave out the first and the last EDGE rows of the keys."""
    starts = torch.randint(EDGE, N // 2, (rows,), device=DEVICE)
    return int32(starts), int32(starts + torch.randint(0, N // 2 - EDGE, (rows,), device=DEVICE))


def picks(rows: int = S, holes: slice = slice(None, None, 9)) -> torch.Tensor:
    """Distinct rows from EDGE on, ascending, a few slots empty, a row without any."""
    best = torch.rand(rows, N - 2 * EDGE, device=DEVICE).topk(K, 1).indices.sort(1).values + EDGE
    best[:, holes], best[rows // 2] = -1, -1
    return int32(best)


def edges_of(number: int) -> Callable[[], dict[int, object]]:
    """The first and last EDGE rows of a tensor of N keys."""
    return lambda: {number: [*range(EDGE), *range(N - EDGE, N)]}


def tail_of(*numbers: int) -> Callable[[], dict[int, object]]:
    """Rows behind the last sequence."""
    return lambda: {number: slice(CU[-1], N) for number in numbers}
