# SPDX-License-Identifier: Apache-2.0
"""Indexer scores and selection: problems at the shapes of the models."""

from dataclasses import replace

import torch
from models import Model, Scale, index_inputs, picks
from problem import Outputs, Problem

from vime_kernels import dsa

ALL = slice(None)


def logits(scale: Scale, model: Model, precision: str, clean: bool = True) -> Problem:
    """Scores of every visible key."""
    model = scale.model(model)
    (q, k, weights), starts, ends = index_inputs(scale, model)
    scales = {}
    if precision == "fp8" and not scale.tiny:  # the interpreter has no such products
        q, k = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
        scales = {
            "q_scale": torch.rand(q.shape[:2], device=scale.device) + 0.1,
            "k_scale": torch.rand(len(k), device=scale.device) + 0.1,
        }
    column = torch.arange(len(k), device=scale.device, dtype=torch.int32)
    visible = (column >= starts[:, None]) & (column < ends[:, None])

    def call(
        backend: str, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, rows: slice = ALL
    ) -> Outputs:
        cast = {key: value.to(weights.dtype) for key, value in scales.items()}
        if scales:
            cast["q_scale"] = cast["q_scale"][rows]
        ranges = starts[rows], ends[rows]
        return (dsa.indexer_logits(q, k, weights, *ranges, clean_logits=clean, backend=backend, **cast),)

    pairs = float((ends - starts).sum())
    facts = {
        "starts": starts,
        "ends": ends,
        "ratio": model.ratio,
        "clean": clean,
        "visible": visible,
        **scales,
    }
    flops = {"fwd": 2.0 * model.index_heads * q.shape[-1] * pairs}
    return Problem(call, [q, k, weights], (True, False, True), flops=flops, facts=facts)


def scores(scale: Scale, model: Model) -> Problem:
    """Scores at given picks. The gradient is that of the Kullback-Leibler loss, which cuDNN takes as two densities."""
    model = scale.model(model)
    leaves, _, _ = index_inputs(scale, model)
    indices = picks(scale, len(leaves[1]), model.ratio, model.topk)
    empty = indices < 0
    raw = (scale.randn(scale.rows, model.topk, dtype=torch.float32) for _ in range(2))
    target, student = (x.masked_fill(empty, float("-inf")).softmax(-1).nan_to_num(0.0) for x in raw)

    def call(backend: str, *leaves: torch.Tensor, repeatable: bool = False) -> Outputs:
        return (dsa.indexer_scores(*leaves, indices, deterministic=repeatable, backend=backend),)

    unit = 2.0 * model.index_heads * leaves[0].shape[-1] * float((~empty).sum())
    facts = {"indices": indices, "target": target, "student": student}
    return Problem(call, leaves, grads=[student - target], flops={"fwd": unit, "bwd": 3 * unit}, facts=facts)


def selection(scale: Scale, model: Model) -> Problem:
    """Canonical top-k of given scores."""
    model = scale.model(model)
    at = scale.positions()
    values = scale.randn(scale.rows, scale.context // model.ratio, dtype=torch.float32)
    starts, ends = torch.zeros_like(at), (at + 1) // model.ratio

    def call(backend: str, values: torch.Tensor, rows: slice = ALL) -> Outputs:
        return (dsa.topk(values, model.topk, starts[rows], ends[rows], backend=backend),)

    moved = 4.0 * (float((ends - starts).sum()) + scale.rows * model.topk)
    facts = {"starts": starts, "ends": ends, "k": model.topk}
    return Problem(call, [values], (True,), exact=True, moved={"fwd": moved}, facts=facts)


def pick(scale: Scale, model: Model) -> Problem:
    """Scores and selection in one call, without the whole score matrix. Compared on integers: no rounding, no ties."""
    model = scale.model(model)
    leaves, starts, ends = index_inputs(scale, model)
    leaves = [leaf.float().mul(2).round().clamp(-4, 4).to(leaf.dtype) for leaf in leaves]

    def call(backend: str, *leaves: torch.Tensor, rows: slice = ALL) -> Outputs:
        return (dsa.indexer_topk(*leaves, starts[rows], ends[rows], model.topk, backend=backend),)

    unit = 2.0 * model.index_heads * leaves[0].shape[-1]
    facts = {"starts": starts, "ends": ends, "k": model.topk, "ratio": model.ratio}
    return Problem(
        call,
        leaves,
        rowwise=(True, False, True),
        exact=True,
        flops={"fwd": unit * float((ends - starts).sum())},
        facts=facts,
    )


def pools(scale: Scale, model: Model) -> Problem:
    """Whole pools picked by the indexer and given back as tokens, one packed sequence."""
    kpool = 4
    model = scale.model(model)
    scale = replace(scale, rows=scale.context)
    budget = model.topk // kpool * kpool if scale.tiny else 2048
    dim = 16 if scale.tiny else 128
    leaves = [
        scale.randn(scale.rows, model.index_heads, dim),
        scale.randn(scale.rows // kpool, dim),
        scale.randn(scale.rows, model.index_heads, dtype=torch.float32),
    ]
    leaves = [leaf.float().mul(2).round().clamp(-4, 4).to(leaf.dtype) for leaf in leaves]
    cu_seqlens = torch.tensor([0, scale.rows], dtype=torch.int32, device=scale.device)

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (dsa.kpool_select(*leaves, cu_seqlens, budget, kpool, backend=backend),)

    at = scale.positions()
    pairs = float(((at + 1) // kpool).sum())
    flops = {"fwd": 2.0 * model.index_heads * dim * pairs}
    facts = {"cu_seqlens": cu_seqlens, "budget": budget, "kpool": kpool}
    return Problem(call, leaves, exact=True, flops=flops, facts=facts)
