# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of Miles (radixark/miles at 0e52424c and 631e64a4): indexer, canonical top-k, pools,
hyper-connections, quantisation.

Its canonical top-k verifies a proposal that another kernel makes. That kernel is published for SGLang's 2048 picks
only; other widths get the exact answer as a proposal for nothing, so that its time here is a lower bound.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from problem import Case, Problem

from peers import Rival, ascending, compare, equal, find
from peers.deepgemm import visible_only

OPS = (
    "indexer_logits", "topk", "kpool_select", "gated_pool", "mhc_pre", "mhc_post", "fake_quant_fp8", "fake_quant_fp4",
)  # fmt: skip
STATIC = False

# Its choice for capability 9.0, by index heads.
INDEXER = {32: {"num_warps": 8, "num_stages": 2}, 64: {"num_warps": 4, "num_stages": 3}}
OTHER = {"num_warps": 4, "num_stages": 2}

_proposes = False


def load(paths: list[str]) -> None:
    """Finds the kernels; SGLang's library is optional."""
    global _proposes
    module("hyper_connection.mhc")
    try:
        torch.ops.load_library(find(paths, "common_ops.abi3.so"))
        _proposes = True
    except FileNotFoundError:
        print("miles: no common_ops.abi3.so, proposals are free", flush=True)


def module(name: str) -> Any:
    """A module of its kernel package."""
    return importlib.import_module(f"miles.kernels.{name}")


def rivals(case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
    """What has a Triton kernel there."""
    facts, leaves = problem.facts, problem.leaves
    if case.op == "indexer_logits" and "q_scale" not in facts:
        launch = lambda: logits(*leaves, facts["starts"], facts["ends"])  # noqa: E731
        yield Rival("Miles", {"": launch}, compare(lambda r: [visible_only(r, problem)]))
    elif case.op == "topk":
        yield selection(problem)
    elif case.op == "kpool_select":
        yield Rival("Miles", {"": lambda: pools(problem)}, equal(ascending))
    elif case.op == "gated_pool" and facts["ratio"] == 4 and not facts["overlap"] and direction == "fwd":
        run = module("attention.dsa.kpool").build_pooled_keys
        launch = lambda: run(*leaves, facts["cu_seqlens"], facts["ratio"])  # noqa: E731
        yield Rival("Miles", {"": launch}, compare(lambda r: [r]))
    elif case.op in ("mhc_pre", "mhc_post"):
        yield streams(case, problem, direction)
    elif case.op in ("fake_quant_fp8", "fake_quant_fp4"):
        run = getattr(module("quant.fake_quant"), f"{case.op}_forward")
        yield Rival("Miles", {"": lambda: run(leaves[0], facts["block"])}, compare(lambda r: [r]))


def logits(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Cleaned logits."""
    out = torch.empty(len(q), len(k), device=q.device)
    run = module("attention.dsa.triton.indexer_fwd").indexer_fwd
    config = INDEXER.get(q.shape[1], OTHER)
    return run(q, k, weights, starts, ends, out, clean_logits=True, block_rows=256, block_n=64, **config)


def selection(problem: Problem) -> Rival:
    """Proposal and verification."""
    values, facts = problem.leaves[0], problem.facts
    k, starts, ends = facts["k"], facts["starts"], facts["ends"]
    run = module("attention.dsa.topk").select_topk
    sizes = ends - starts
    if _proposes and k == 2048:

        def launch() -> torch.Tensor:
            proposal = torch.empty(len(values), k, dtype=torch.int32, device=values.device)
            torch.ops.sgl_kernel.fast_topk(values, proposal, sizes, starts)
            return run(values, k, starts, ends, proposal)

        return Rival("Miles", {"": launch}, equal(lambda r: r))
    proposal = problem.call("torch", values)[0]
    return Rival(
        "Miles, free proposal", {"": lambda: run(values, k, starts, ends, proposal)}, equal(lambda r: r)
    )


def pools(problem: Problem) -> torch.Tensor:
    """Logits over pools, torch.topk and one kernel that expands, with the bookkeeping of every row."""
    kpool_module = module("attention.dsa.kpool")
    q, k, weights = problem.leaves
    facts = problem.facts
    cu_seqlens, kpool = facts["cu_seqlens"], facts["kpool"]
    starts_of_pools = kpool_module.pool_boundaries(cu_seqlens, kpool)
    token = torch.arange(len(q), device=q.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    token_base = cu_seqlens[sequence].to(torch.int32)
    pool_base = starts_of_pools[sequence].to(torch.int32)
    local = (token - token_base).to(torch.int32)
    ends = (pool_base + torch.div(local + 1, kpool, rounding_mode="floor")).to(torch.int32)
    scores = logits(q, k, weights, pool_base, ends)
    return kpool_module.select_expand_tail(scores, token_base, pool_base, local, facts["budget"], kpool)


def streams(case: Case, problem: Problem, direction: str) -> Rival:
    """The two mixes of the residual streams, forward or through autograd."""
    mhc = module("hyper_connection.mhc")
    leaves = [leaf.detach().requires_grad_() for leaf in problem.leaves]
    n = leaves[-1].shape[1]

    def call() -> torch.Tensor:
        if case.op == "mhc_pre":
            X, weights = leaves
            return mhc.mhc_aggregate(X.flatten(1)[None], weights[None], n)[0]
        y, X, to_streams, between = leaves
        mixed = mhc.mhc_mix(y[None], X.flatten(1)[None], between[None], to_streams[None], n)
        return mixed.view(X.shape)

    if direction == "fwd":
        return Rival("Miles", {"": call}, compare(lambda r: [r.detach()]))
    output = call()
    grads = problem.output_grads((output,))
    launch = lambda: torch.autograd.grad(output, leaves, grads, retain_graph=True)  # noqa: E731
    return Rival("Miles", {"": launch}, compare(list))
