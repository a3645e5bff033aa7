# SPDX-License-Identifier: Apache-2.0
"""How far a forward pass stays from its discrete decisions.

A model with top-k selections and clamps is discontinuous: two correct programs that differ by rounding can pick
different members at a tie, and everything after that differs by whole numbers. A comparison is meaningful only on
inputs that keep a distance from every such edge, so the verifier draws token ids until the reference does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TOPK = {torch.topk, torch.Tensor.topk}
CLAMP = {torch.clamp, torch.Tensor.clamp, torch.clip, torch.Tensor.clip}


class Margins(TorchFunctionMode):
    """Records the closest call at every top-k and clamp that runs inside.

    Attributes:
        topk: smallest difference between the last value taken and the first left out.
        clamp: smallest distance of a value from a bound of its clamp.
    """

    def __init__(self) -> None:
        super().__init__()
        self.topk = float("inf")
        self.clamp = float("inf")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Looks at the operands of top-k and clamp, then runs `func` unchanged."""
        kwargs = kwargs or {}
        if func in TOPK:
            k = args[1] if len(args) > 1 else kwargs["k"]
            self.topk = min(self.topk, _cut_gap(args[0], k, kwargs.get("dim", -1)))
        elif func in CLAMP and args[0].is_floating_point():
            for bound in (*args[1:], *kwargs.values()):
                if isinstance(bound, (int, float)) and args[0].numel():
                    self.clamp = min(self.clamp, (args[0].detach() - bound).abs().min().item())
        return func(*args, **kwargs)


class RowGaps(TorchFunctionMode):
    """Records how close every row of the top-k calls inside came to another selection.

    Attributes:
        calls: per call, the distance between the last value taken and the first left out, relative to the largest
            magnitude of the row; inf where nothing finite is left out. Flat, in row order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Looks at the operand of top-k, then runs `func` unchanged."""
        kwargs = kwargs or {}
        if func in TOPK:
            values, k = args[0].detach(), args[1] if len(args) > 1 else kwargs["k"]
            if values.shape[-1] > k:
                best = values.sort(dim=-1, descending=True).values
                cut = best[..., k]
                scale = values.masked_fill(~torch.isfinite(values), 0).abs().amax(-1).clamp_min(1e-30)
                gap = torch.where(torch.isfinite(cut), (best[..., k - 1] - cut) / scale, float("inf"))
                self.calls.append(gap.flatten())
        return func(*args, **kwargs)


def _cut_gap(values: torch.Tensor, k: int, dim: int) -> float:
    """Smallest gap at the cut over all rows; rows without a (k+1)-th finite value have no cut."""
    if values.shape[dim] <= k:
        return float("inf")
    best = values.detach().sort(dim=dim, descending=True).values
    last = best.select(dim, k - 1)
    gap = (last - best.select(dim, k))[torch.isfinite(best.select(dim, k))]
    return gap.min().item() if gap.numel() else float("inf")
