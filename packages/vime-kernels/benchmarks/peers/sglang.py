# SPDX-License-Identifier: Apache-2.0
"""SGLang's radix top-k, from the operator library in the wheel of sglang-kernel 0.4.4. 2048 picks only, in no order."""

from collections.abc import Iterator

import torch
from problem import Case, Problem

from peers import Rival, find, same_values

OPS = ("topk",)
STATIC = False


def load(paths: list[str]) -> None:
    """Loads common_ops.abi3.so."""
    torch.ops.load_library(find(paths, "common_ops.abi3.so"))


def rivals(case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
    """`fast_topk` where it takes the number of picks."""
    if case.op != "topk" or problem.facts["k"] != 2048:
        return
    values, facts = problem.leaves[0], problem.facts
    sizes = facts["ends"] - facts["starts"]

    def launch() -> torch.Tensor:
        out = torch.empty(len(values), 2048, dtype=torch.int32, device=values.device)
        torch.ops.sgl_kernel.fast_topk(values, out, sizes, facts["starts"])
        return out

    yield Rival("SGLang", {"": launch}, same_values(values, lambda out: out))
