# SPDX-License-Identifier: Apache-2.0
"""Plain torch: this package's torch backend in the same dtype, and torch.topk."""

from collections.abc import Iterator

import torch
from problem import Case, Problem

from peers import Rival, compare, equal, same_values

OPS = None  # every operation
STATIC = False


def load(paths: list[str]) -> None:
    """Nothing to load."""


def rivals(case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
    """The torch backend for every case that fits in memory, and torch.topk for selections."""
    if case.large or direction.endswith("repeatable"):
        return
    check = equal(lambda r: r[0]) if problem.exact else compare(lambda r: problem.kept(list(r)))
    yield Rival("torch", {"": problem.launch("torch", direction)}, check)
    if case.op == "topk":
        values, k = problem.leaves[0], problem.facts["k"]
        visible = torch.arange(values.shape[1], device=values.device) < problem.facts["ends"][:, None]
        cleaned = values.masked_fill(~visible, float("-inf"))

        def picks(returned: torch.return_types.topk) -> torch.Tensor:
            return returned.indices.masked_fill(returned.values.isneginf(), -1)

        k = min(k, values.shape[1])
        yield Rival("torch.topk", {"": lambda: cleaned.topk(k, 1)}, same_values(values, picks))
