# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse prefill, from the operator library in the wheel of sglang-kernel 0.4.4. Forward only."""

import math
from collections.abc import Iterator

import torch
from problem import Case, Problem

from peers import Rival, compare, find, lengths, padded

OPS = ("sparse_attention", "sparse_attention_v4")
STATIC = False


def load(paths: list[str]) -> None:
    """Loads flashmla_ops.abi3.so."""
    torch.ops.load_library(find(paths, "flashmla_ops.abi3.so"))


def rivals(case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
    """With and without the lengths of the rows. Fewer than 64 heads are padded, as its users do, and paid for."""
    if not case.op.startswith("sparse_attention") or direction != "fwd":
        return
    facts = problem.facts
    q, heads, sink = facts["q"], facts["q"].shape[1], facts["sink"]
    kv, wide = facts["kv"][:, None], padded(facts["indices"], 128)[:, None]
    used = lengths(facts["indices"])
    extra = -heads % 64
    if sink is not None:
        sink = torch.nn.functional.pad(sink, (0, extra))
    run = torch.ops.sgl_kernel.sparse_prefill_fwd.default

    def launch(length: torch.Tensor | None) -> list[torch.Tensor]:
        full = torch.nn.functional.pad(q, (0, 0, 0, extra)) if extra else q
        return run(full, kv, wide, facts["sm_scale"], 512, sink, length)

    check = compare(lambda r: [r[0][:, :heads], r[2][:, :heads] * math.log(2.0)])
    variants = {"": lambda: launch(None), "topk_length": lambda: launch(used)}
    yield Rival("FlashMLA", variants, check)
