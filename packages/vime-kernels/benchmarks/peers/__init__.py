# SPDX-License-Identifier: Apache-2.0
"""Other people's kernels as columns of the benchmark.

One module per peer. It has `load(paths)`, which imports the peer and raises ImportError or OSError where it is not
installed, and `rivals(case, problem, direction)`. Nothing of a peer is in this repository; `run.py --peer NAME=PATHS`
says where it lies. Each peer runs in a process of its own, because their versions of shared libraries clash.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from problem import SAMPLE, Case, Problem, difference

Check = Callable[[Any, list[torch.Tensor]], float]

NAMES = ("eager", "flashmla", "sglang", "deepgemm", "tilelang", "miles", "cudnn", "tilekernels")


@dataclass
class Rival:
    """What a peer does for one direction of a problem: launches to time, of which the fastest counts."""

    name: str
    variants: dict[str, Callable[[], object]]
    check: Check  # error of what a variant returned, given the exact results


class Peer(Protocol):
    """What a module in this folder offers."""

    OPS: tuple[str, ...] | None  # operations of which it has something; None: all
    STATIC: bool  # it compiles for a number of rows

    def load(self, paths: list[str]) -> None:
        """Import the peer."""

    def rivals(self, case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
        """What it can do for this direction."""


def compare(results: Callable[[Any], list[torch.Tensor]]) -> Check:
    """The largest relative error of the tensors that `results` makes of the returned value."""
    return lambda returned, exact: difference(results(returned), exact, whole=False)


def equal(results: Callable[[Any], torch.Tensor]) -> Check:
    """The share of rows that are not the exact integers."""
    return lambda returned, exact: difference([results(returned).to(exact[0].dtype)], exact, whole=True)


def same_values(values: torch.Tensor, results: Callable[[Any], torch.Tensor]) -> Check:
    """The share of rows whose picks have other scores than the exact picks, in whatever order."""

    def scores_of(picks: torch.Tensor) -> torch.Tensor:
        rows = values if len(picks) == len(values) else values[::SAMPLE]
        found = rows.gather(1, picks.long().clamp(min=0)).masked_fill(picks < 0, float("-inf"))
        return found.sort(1).values

    return lambda returned, exact: difference(
        [scores_of(results(returned))], [scores_of(exact[0])], whole=True
    )


def find(paths: list[str], name: str) -> str:
    """The file of that name, given itself or in one of the folders.

    Raises:
        FileNotFoundError: it is in none of them.
    """
    for path in map(Path, paths):
        for candidate in (path, path / name):
            if candidate.name == name and candidate.is_file():
                return str(candidate)
    raise FileNotFoundError(f"{name}: not in {paths or 'any path given'}")


def padded(x: torch.Tensor, multiple: int, value: float = -1) -> torch.Tensor:
    """The last dimension filled up to a multiple."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple), value=value).contiguous()


def lengths(indices: torch.Tensor) -> torch.Tensor:
    """int32 [S]: one past the last slot of a row that names something."""
    slot = torch.arange(1, indices.shape[1] + 1, device=indices.device, dtype=torch.int32)
    return torch.where(indices >= 0, slot, 0).amax(1).to(torch.int32)


def ascending(picks: torch.Tensor) -> torch.Tensor:
    """The picks of each row in ascending order, -1 last."""
    beyond = torch.iinfo(picks.dtype).max
    ordered = picks.masked_fill(picks < 0, beyond).sort(1).values
    return ordered.masked_fill(ordered == beyond, -1)
