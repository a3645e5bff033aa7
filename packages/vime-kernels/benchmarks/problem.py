# SPDX-License-Identifier: Apache-2.0
"""One call of one operation: how to make it, what its exact results are, and how much work it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Scale

from vime_kernels.testing import rel_rms

Outputs = tuple[torch.Tensor, ...]


@dataclass
class Problem:
    """`call(backend, *leaves)` gives the outputs; leaves in float64 give the exact ones."""

    call: Callable[..., Outputs]
    leaves: list[torch.Tensor]
    exact: bool = False  # the outputs are integers, and have to be equal
    grads: list[torch.Tensor] | None = None  # of the outputs; None: random
    with_grad: int | None = None  # how many of the outputs the loss depends on; None: all
    flops: dict[str, float] = field(default_factory=dict)  # by direction; useful work, valid slots only
    moved: dict[str, float] = field(
        default_factory=dict
    )  # bytes by direction; empty: leaves and outputs once
    facts: dict[str, Any] = field(default_factory=dict)  # what the peers need, in their terms

    def results(self, backend: str, direction: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """The outputs, or for backward directions the gradients of the leaves."""
        leaves = [leaf.detach().to(dtype or leaf.dtype) for leaf in self.leaves]
        if direction == "fwd":
            return list(self.call(backend, *leaves))
        outputs, leaves = self._graph(backend, leaves, direction)
        return list(torch.autograd.grad(outputs, leaves, self.output_grads(outputs)))

    def launch(self, backend: str, direction: str) -> Callable[[], object]:
        """What is timed: the call, or the backward pass of a call made before."""
        if direction == "fwd":
            return lambda: self.call(backend, *self.leaves)
        outputs, leaves = self._graph(backend, self.leaves, direction)
        grads = self.output_grads(outputs)
        return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    def output_grads(self, outputs: Outputs) -> list[torch.Tensor]:
        """The gradients of the outputs in their dtypes: the same values for every dtype, bfloat16 where random."""
        if self.grads is None:
            generator = torch.Generator(outputs[0].device).manual_seed(1)
            self.grads = [
                torch.randn(o.shape, device=o.device, generator=generator).bfloat16() for o in outputs
            ]
        return [grad.to(output.dtype) for grad, output in zip(self.grads, outputs, strict=True)]

    def work(self, direction: str) -> dict[str, float]:
        """Useful floating-point operations, or the bytes that have to move at least, of one launch."""
        kind = direction[:3]
        if kind in self.flops:
            return {"flops": self.flops[kind]}
        if kind in self.moved:
            return {"bytes": self.moved[kind]}
        size = sum(leaf.numel() * leaf.element_size() for leaf in self.leaves)
        if kind == "fwd":
            outputs = self.call("triton", *self.leaves)
            return {"bytes": size + sum(o.numel() * o.element_size() for o in outputs)}
        return {"bytes": 2 * size + sum(g.numel() * 2 for g in self.grads or ())}

    def _graph(
        self, backend: str, leaves: list[torch.Tensor], direction: str
    ) -> tuple[Outputs, list[torch.Tensor]]:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        extra = {"repeatable": True} if direction.endswith("repeatable") else {}
        return self.call(backend, *leaves, **extra)[: self.with_grad], leaves


def difference(found: list[torch.Tensor], exact: list[torch.Tensor], whole: bool) -> float:
    """Largest relative error of the pairs; with `whole`, the share of rows that are not equal."""
    if whole:
        return max((f != e).any(-1).float().mean().item() for f, e in zip(found, exact, strict=True))
    pairs = (
        (torch.nan_to_num(x.to(torch.float64), neginf=0.0) for x in pair)
        for pair in zip(found, exact, strict=True)
    )
    return max(rel_rms(*pair) for pair in pairs)


@dataclass(frozen=True)
class Case:
    """One line of the benchmark."""

    op: str
    shape: str
    make: Callable[[Scale], Problem]
    directions: tuple[str, ...] = ("fwd", "bwd")
    large: bool = False  # too large for the exact results: compared on few rows

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.op} {self.shape}"
