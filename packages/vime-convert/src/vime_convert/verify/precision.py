# SPDX-License-Identifier: Apache-2.0
"""Precisions of a comparison: what runs in which dtype, and how close two correct programs must be.

float64 is the strict gate. Model code on both sides upcasts to float32 in many places, which would cap a float64
run at about 6e-6, so the run happens inside `Float64Mode`, which turns every request for float32 into float64.
Limits are those of two independent correct programs plus a margin (measured: 7e-14 on logits and 1e-12 on
gradients in float64; 3e-5 and 2e-4 in float32; in bfloat16 both programs are within 9e-5 of float32, where Megatron's
own tests of this model allow 1.5e-3).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Precision:
    """One dtype with its limits.

    Attributes:
        name: the word on the command line and in reports.
        dtype: dtype of parameters and activations.
        logits: largest allowed |difference| of any logit.
        states: largest allowed relative difference of a layer's streams.
        grads: largest allowed relative difference of a parameter's gradient.
    """

    name: str
    dtype: torch.dtype
    logits: float
    states: float
    grads: float


PRECISIONS = {
    p.name: p
    for p in (
        Precision("float64", torch.float64, logits=1e-10, states=1e-11, grads=1e-9),
        Precision("float32", torch.float32, logits=5e-5, states=1e-5, grads=1e-3),
        # 1 - cosine, layer by layer: see `verify.pinned`.
        Precision("bfloat16", torch.bfloat16, logits=3e-4, states=3e-4, grads=float("inf")),
    )
}


class Float64Mode(TorchFunctionMode):
    """Turns every torch call that names float32 into the same call with float64.

    Covers dtype arguments (positional and keyword) and `Tensor.float()`; modules that keep some parameters in
    float32 therefore keep them in float64.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs `func` with float32 replaced."""
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def running_in(precision: Precision) -> Iterator[None]:
    """Everything built and run inside uses the precision, including explicit float32 upcasts for float64."""
    previous = torch.get_default_dtype()
    if precision.dtype is not torch.float64:
        yield
        return
    try:
        torch.set_default_dtype(torch.float64)
        with Float64Mode():
            yield
    finally:
        torch.set_default_dtype(previous)
