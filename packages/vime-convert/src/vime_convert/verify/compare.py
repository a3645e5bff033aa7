# SPDX-License-Identifier: Apache-2.0
"""Differences between two runs of one model, as a list of named checks.

"Relative" is the 2-norm of the difference over the 2-norm of the reference, per tensor, with a floor of 1e-8 of the
norm of all tensors together, so that a gradient that vanishes analytically is not divided by its own rounding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from vime_convert.verify.precision import Precision


@dataclass
class Trace:
    """One forward and backward pass.

    Attributes:
        logits: [batch, sequence, vocabulary].
        states: per decoder layer, what leaves it: [b, s, h], or [b, s, n, h] with residual streams.
        grads: gradient of each trainable tensor under its release name.
    """

    logits: torch.Tensor
    states: list[torch.Tensor]
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One named comparison with its limit.

    Attributes:
        name: e.g. "logits[float64]".
        value: the measured difference; inf or nan never passes.
        limit: the largest allowed value.
        detail: where the largest difference is, for a person.
    """

    name: str
    value: float
    limit: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit


@dataclass
class LayerError:
    """Difference of one layer's output streams."""

    layer: int
    max_abs: float
    relative: float


def relative(ours: torch.Tensor, reference: torch.Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of the reference (at least `floor`); inf for a shape mismatch or any NaN."""
    if ours.shape != reference.shape:
        return float("inf")
    ours, reference = ours.detach().double(), reference.detach().double()
    denominator = max(reference.norm().item(), floor)
    difference = (ours - reference).norm().item()
    if not math.isfinite(difference) or not math.isfinite(denominator):
        return float("inf")  # as a number that compares: NaN would vanish in a maximum
    return difference / denominator if denominator else (0.0 if difference == 0 else float("inf"))


def max_abs(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference; inf for a shape mismatch or any NaN."""
    if ours.shape != reference.shape:
        return float("inf")
    value = (ours.detach().double() - reference.detach().double()).abs().max().item()
    return value if value == value else float("inf")


def layer_errors(ours: Trace, reference: Trace) -> list[LayerError]:
    """Per-layer differences of the streams."""
    pairs = zip(ours.states, reference.states, strict=True)
    return [LayerError(i, max_abs(a, b), relative(a, b)) for i, (a, b) in enumerate(pairs)]


def first_bad_layer(errors: list[LayerError], precision: Precision) -> int | None:
    """Index of the first layer whose streams differ by more than the precision allows."""
    return next((e.layer for e in errors if not e.relative <= precision.states), None)


def compare_forward(
    ours: Trace, reference: Trace, precision: Precision
) -> tuple[list[Check], list[LayerError]]:
    """Checks on the streams after every layer and on the logits."""
    errors = layer_errors(ours, reference)
    worst = max(errors, key=lambda e: e.relative)
    bad = first_bad_layer(errors, precision)
    where = f"first layer that differs: {bad}" if bad is not None else f"largest at layer {worst.layer}"
    agree = (ours.logits.argmax(-1) == reference.logits.argmax(-1)).double().mean().item()
    checks = [
        Check(f"streams[{precision.name}]", worst.relative, precision.states, where),
        Check(
            f"logits[{precision.name}]",
            max_abs(ours.logits, reference.logits),
            precision.logits,
            f"std {reference.logits.std().item():.2f}, argmax agrees on {agree:.1%}",
        ),
    ]
    return checks, errors


def gradient_errors(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Relative difference of every gradient, by release name."""
    total = sum(g.double().norm().item() ** 2 for g in reference.values()) ** 0.5
    return {
        name: relative(ours[name], grad, floor=1e-8 * total)
        for name, grad in reference.items()
        if name in ours
    }


def compare_gradients(ours: Trace, reference: Trace, precision: Precision) -> list[Check]:
    """Checks that the same tensors receive gradients and that these agree.

    A tensor that our side freezes on purpose (the indexer picks discrete entries, so no gradient reaches it on
    either side) must have no gradient, or an exactly zero one, in the reference.
    """
    missing = sorted(n for n in reference.grads if n not in ours.grads and reference.grads[n].any())
    extra = sorted(n for n in ours.grads if n not in reference.grads and ours.grads[n].any())
    errors = gradient_errors(ours.grads, reference.grads)
    worst = max(errors, key=lambda name: errors[name]) if errors else ""
    name = f"gradients[{precision.name}]"
    checks = [
        Check(name, errors.get(worst, float("inf")), precision.grads, f"{len(errors)} tensors, worst {worst}")
    ]
    if missing or extra:
        detail = f"only in the reference: {missing[:3]}; only ours: {extra[:3]}"
        checks.append(Check(f"gradient-names[{precision.name}]", len(missing) + len(extra), 0, detail))
    return checks
