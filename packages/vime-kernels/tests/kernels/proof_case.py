# SPDX-License-Identifier: Apache-2.0
"""One operation as the proofs see it: the call, its inputs, and which results may differ in the last bits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from proof_inputs import Tensors

from vime_kernels.testing import assert_bitwise, rel_rms


@dataclass(frozen=True)
class Case:
    """One operation: `call(*tensors)` gives a tensor or several; gradients go to the first `leaves` tensors.

    `unread` tells what no result depends on, as {number of the tensor: index}.
    """

    call: Callable[..., torch.Tensor | Tensors]
    make: Callable[[], Tensors]
    leaves: int = 0
    unread: Callable[[], dict[int, object]] = dict
    atomic: bool = False  # some gradient is a sum in no fixed order
    linear: bool = False  # the gradient does not depend on the inputs

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        """Outputs, and the gradients of a fixed weighting of them."""
        inputs = [t.detach().requires_grad_(i < self.leaves) for i, t in enumerate(tensors)]
        with torch.set_grad_enabled(self.leaves > 0):
            outputs = self.call(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = [o.detach() for o in outputs]
        differentiable = [o for o in outputs if o.requires_grad]
        if differentiable:
            weights = [
                torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape) for o in differentiable
            ]
            grads = [w.to(o.dtype) for w, o in zip(weights, differentiable, strict=True)]
            results += torch.autograd.grad(differentiable, inputs[: self.leaves], grads)
        return results


def same(case: Case, got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if case.atomic:
            a, b = (torch.nan_to_num(t.double(), neginf=0.0) for t in (a, b))
            error = rel_rms(a, b)
            assert error < 4e-3, f"result {number}: {error:.1e}"
        else:
            assert_bitwise(a, b, f"result {number}")
