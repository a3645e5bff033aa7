# SPDX-License-Identifier: Apache-2.0
"""bfloat16, layer by layer: each layer starts from the float32 reference's streams and must reproduce the next ones.

Over a whole model a comparison in bfloat16 means little: rounding flips selections, and all later tokens and layers see
it. Here our model computes one layer at a time from what transformers computed in float32, so a flip stays in its own
row, and rows are left out in which the reference itself was close to a tie. What remains is rounding. Gradients are not
compared: they sum over rows, flipped ones included. The measure is 1 − cosine of a row of all streams.
"""

import torch

from vime_convert.verify.compare import Check, LayerError
from vime_convert.verify.precision import Precision
from vime_convert.verify.runs import Candidate, Reference

# Distance to the first value left out, relative to the largest; bfloat16 moved a selection by 2.3e-2 at most.
ROW_MARGIN = 0.03
# Of the rows, how many must be far enough from ties for the comparison to mean anything.
LEAST_ROWS = 0.25


def compare_pinned(
    reference: Reference, candidate: Candidate, ids: torch.Tensor, precision: Precision
) -> tuple[list[Check], list[LayerError]]:
    """Checks on the streams after every layer and on the logits, and the error of each layer.

    Args:
        reference: transformers in float32.
        candidate: our model in `precision`.
        ids: token ids [1, S].
        precision: with the largest allowed 1 − cosine.
    """
    expected, gaps = reference.run(ids, gradients=False), reference.row_gaps(ids)
    ours = candidate.run_pinned(ids, expected.states)
    errors, kept = [], []
    for layer, (found, wanted, gap) in enumerate(zip(ours.states, expected.states, gaps, strict=True)):
        rows = gap >= ROW_MARGIN
        kept.append(rows.double().mean().item())
        found, wanted = (state.flatten(2).flatten(0, 1)[rows] for state in (found, wanted))
        largest = (found.double() - wanted.double()).abs().max().item() if rows.any() else float("inf")
        errors.append(LayerError(layer, largest, _angle(found, wanted)))
    worst = max(errors, key=lambda e: e.relative)
    name = precision.name
    checks = [
        Check(
            f"streams[{name}]",
            worst.relative if min(kept) >= LEAST_ROWS else float("inf"),
            precision.states,
            f"1 - cosine, largest at layer {worst.layer}; rows compared per layer: at least {min(kept):.0%}",
        ),
        Check(
            f"logits[{name}]",
            _angle(ours.logits.flatten(0, 1), expected.logits.flatten(0, 1)),
            precision.logits,
            "1 - cosine, from the reference's last streams",
        ),
    ]
    return checks, errors


def _angle(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest 1 − cosine of a row; inf without rows, for another shape or any NaN."""
    if ours.shape != reference.shape or not len(ours):
        return float("inf")
    a, b = ours.double(), reference.double()
    value = (1 - (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).max().item()
    return value if value == value else float("inf")
