# SPDX-License-Identifier: Apache-2.0
"""One call of one operation: how to make it, what its exact results are, and how much work it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Scale

from vime_kernels.testing import rel_rms

Outputs = tuple[torch.Tensor, ...]

# Every how manyth query row is compared, where an exact result of all would take longer than everything else.
SAMPLE = 16


@dataclass
class Problem:
    """`call(backend, *leaves)` gives the outputs; leaves in float64 give the exact ones."""

    call: Callable[..., Outputs]
    leaves: list[torch.Tensor]
    rowwise: tuple[
        bool, ...
    ] = ()  # which leaves have the query rows; `call` takes `rows` then. Empty: compared whole
    exact: bool = False  # the outputs are integers, and have to be equal
    grads: list[torch.Tensor] | None = None  # of the outputs; None: random
    with_grad: int | None = None  # how many of the outputs the loss depends on; None: all
    sampled: bool = False  # the loss depends on the sampled rows only
    flops: dict[str, float] = field(default_factory=dict)  # by direction; useful work, valid slots only
    moved: dict[str, float] = field(
        default_factory=dict
    )  # bytes by direction; empty: leaves and outputs once
    facts: dict[str, Any] = field(default_factory=dict)  # what the peers need, in their terms

    def results(self, direction: str) -> list[torch.Tensor]:
        """Our outputs, or for backward directions our gradients of the leaves."""
        if direction == "fwd":
            return list(self.call("triton", *self.leaves))
        outputs, leaves = self._graph("triton", self.leaves, direction)
        return list(torch.autograd.grad(outputs, leaves, self.output_grads(outputs)))

    def exact_results(self, direction: str) -> list[torch.Tensor]:
        """The same in float64 torch, of the sampled rows where the problem has any. After `results`."""
        leaves = [leaf.detach().to(torch.float64) for leaf in self.leaves]
        extra = {}
        if self.rowwise:
            extra = {"rows": slice(None, None, SAMPLE)}
            leaves = [x[::SAMPLE] if rows else x for x, rows in zip(leaves, self.rowwise, strict=True)]
        if direction == "fwd":
            return list(self.call("torch", *leaves, **extra))
        leaves = [leaf.requires_grad_() for leaf in leaves]
        outputs = self.call("torch", *leaves, **extra)[: self.with_grad]
        grads = self.output_grads(outputs)
        if self.rowwise:
            grads = [grad[::SAMPLE] for grad in grads]
        return list(torch.autograd.grad(outputs, leaves, grads))

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
            if self.sampled and self.rowwise:
                for grad in self.grads:
                    left_out = torch.ones(len(grad), dtype=torch.bool, device=grad.device)
                    left_out[::SAMPLE] = False
                    grad[left_out] = 0
        return [grad.to(output.dtype) for grad, output in zip(self.grads, outputs, strict=True)]

    def kept(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results, with -inf where uncleaned logits hold nothing in particular."""
        if self.facts.get("clean", True):
            return results
        visible = self.facts["visible"]
        visible = visible if len(visible) == len(results[0]) else visible[::SAMPLE]
        return [results[0].masked_fill(~visible, float("-inf"))]

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
    """Largest relative error of the pairs; with `whole`, the share of rows that are not equal.

    Exact results of sampled rows are compared with those rows of what was found.
    """
    errors = []
    for f, e in zip(found, exact, strict=True):
        if f.shape != e.shape:
            f = f[::SAMPLE]
        if whole:
            errors.append((f != e).any(-1).float().mean().item())
        else:
            errors.append(rel_rms(*(torch.nan_to_num(x.to(torch.float64), neginf=0.0) for x in (f, e))))
    return max(errors)


@dataclass(frozen=True)
class Case:
    """One line of the benchmark."""

    op: str
    shape: str
    make: Callable[[Scale], Problem]
    directions: tuple[str, ...] = ("fwd", "bwd")
    large: bool = False  # too large to compare: ours is compared on few rows

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.op} {self.shape}"
