# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's fp8 logits (sgl-deep-gemm 0.1.5). Compiles with nvcc on first use."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from problem import Case, Problem

from peers import Rival, compare

OPS = ("indexer_logits",)
STATIC = False

_library: Any = None


def load(paths: list[str]) -> None:
    """Imports deep_gemm."""
    global _library
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    import deep_gemm

    _library = deep_gemm


def rivals(case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
    """fp8 logits, cleaned or not as the case is. The product of weights and query scales is not charged."""
    facts = problem.facts
    if case.op != "indexer_logits" or "q_scale" not in facts:
        return
    q, k, weights = problem.leaves
    keys, scaled = (k, facts["k_scale"].float()), weights * facts["q_scale"]

    def launch() -> torch.Tensor:
        return _library.fp8_mqa_logits(
            q, keys, scaled, facts["starts"], facts["ends"], clean_logits=facts["clean"]
        )

    yield Rival("DeepGEMM", {"": launch}, compare(lambda r: [visible_only(r, problem)]))


def visible_only(logits: torch.Tensor, problem: Problem) -> torch.Tensor:
    """The logits with -inf outside the ranges, whatever was there."""
    visible = problem.facts["visible"]
    return logits[..., : visible.shape[1]].reshape(visible.shape).masked_fill(~visible, float("-inf"))
