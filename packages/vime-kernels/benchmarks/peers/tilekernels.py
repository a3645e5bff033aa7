# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's TileKernels 1.0.0 on TileLang 0.1.9: hyper-connections and quantisation."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from problem import Case, Problem

from peers import Rival, compare

OPS = (
    "mhc_mixes", "mhc_pre", "mhc_post", "mhc_head", "sinkhorn", "act_quant", "fake_quant_fp8", "fake_quant_fp4",
)  # fmt: skip
STATIC = False

_ops: Any = None
_quant: Any = None


def load(paths: list[str]) -> None:
    """Imports the autograd wrappers of the hyper-connections, and the casts."""
    global _ops, _quant
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ.setdefault("TILELANG_TARGET", "cuda -arch=sm_90a")
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    import tile_kernels.modeling.mhc.ops
    import tile_kernels.quant

    _ops, _quant = tile_kernels.modeling.mhc.ops, tile_kernels.quant


def rivals(case: Case, problem: Problem, direction: str) -> Iterator[Rival]:
    """Each operation as the composition of its kernels that gives the same result."""
    if case.op in COMPOSED:
        yield composed(COMPOSED[case.op], problem, direction)
    elif case.op in ("act_quant", "fake_quant_fp8", "fake_quant_fp4"):
        (x,), block = problem.leaves, problem.facts["block"]
        form = "e2m1" if case.op == "fake_quant_fp4" else "e4m3"

        def coded() -> Any:
            return _quant.per_token_cast(x, form, block, round_sf=True)

        def decoded() -> torch.Tensor:
            return _quant.per_token_cast_back(coded(), "bf16", block)

        if case.op == "act_quant":
            yield Rival("TileKernels", {"": coded}, compare(list))
        else:
            yield Rival("TileKernels", {"": decoded}, compare(lambda r: [r]))


def composed(function: Callable[..., list[torch.Tensor]], problem: Problem, direction: str) -> Rival:
    """Forward, or the backward pass through its autograd functions."""
    leaves = [leaf.detach().requires_grad_() for leaf in problem.leaves]
    if direction == "fwd":
        return Rival(
            "TileKernels", {"": lambda: function(*leaves)}, compare(lambda r: [o.detach() for o in r])
        )
    outputs = function(*leaves)
    grads = problem.output_grads(tuple(outputs))

    def launch() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    return Rival("TileKernels", {"": launch}, compare(list))


def mixes(X: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> list[torch.Tensor]:
    """The weightings of a sub-layer; the product in TF32."""
    m = _ops.mhc_pre_norm_fn(X[None], fn, None, 1e-6, fuse_grad_acc=False)
    pre, post, comb = _ops.mhc_pre_split_mixes(m, scale, base, X.shape[1], 2.0, 1e-6)
    comb = _ops.sinkhorn_normalize(comb, repeat=20, eps=1e-6)
    return [pre[0, ..., 0], post[0, ..., 0], comb[0]]


def pre(X: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """The input of a sub-layer."""
    return [_ops.mhc_pre_apply_mix(X[None], weights[None, ..., None])[0]]


def post(
    y: torch.Tensor, X: torch.Tensor, to_streams: torch.Tensor, between: torch.Tensor
) -> list[torch.Tensor]:
    """The streams after a sub-layer."""
    return [_ops.mhc_post(y[None], X[None], to_streams[None, ..., None], between[None])[0]]


def head(X: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> list[torch.Tensor]:
    """The collapsed streams; its projection has one width, so the rows of fn are filled up."""
    n = X.shape[1]
    wide = torch.nn.functional.pad(fn, (0, 0, 0, (1 + n) * n))
    m = _ops.mhc_pre_norm_fn(X[None], wide, None, 1e-6, fuse_grad_acc=False)[..., :n].contiguous()
    mix = _ops.mhc_head_compute_mix(m, scale, base, 1e-6)
    return [_ops.mhc_pre_apply_mix(X[None], mix.unsqueeze(-1))[0]]


def balanced(logits: torch.Tensor) -> list[torch.Tensor]:
    """Sinkhorn alone."""
    return [_ops.sinkhorn_normalize(logits, repeat=20, eps=1e-6)]


COMPOSED = {"mhc_mixes": mixes, "mhc_pre": pre, "mhc_post": post, "mhc_head": head, "sinkhorn": balanced}
