# SPDX-License-Identifier: Apache-2.0
"""Sparse attention, and the teacher of the indexer: problems at the shapes of the models."""

import torch
from models import Model, Scale, picks
from problem import Outputs, Problem

from vime_kernels import dsa

ALL = slice(None)


def attention(scale: Scale, model: Model, keys: str = "picks") -> Problem:
    """Sparse attention with its sink, if the model has one. Peers get buffers and lists joined."""
    model = scale.model(model)
    D, n = model.d_v + model.tail, scale.context // model.ratio
    at = scale.positions()
    q = scale.randn(scale.rows, model.heads, D)
    if not model.window:
        kv, indices = scale.randn(n, D), picks(scale, n, model.ratio, model.topk)
        return Problem(
            lambda backend, q, kv, repeatable=False, rows=ALL: _listed(
                backend, q, kv, indices[rows], model, repeatable
            ),
            [q, kv],
            rowwise=(True, False),
            with_grad=1,
            flops=_flops(model, indices),
            facts=_facts(q, kv, indices, D, None, lambda dq, dkv, dsink: [dq, dkv]),
        )
    kv, sink = scale.randn(scale.context, D), scale.randn(model.heads, dtype=torch.float32)
    indices = picks(scale, n, model.ratio, model.topk) if keys == "picks" else None
    compressed = [] if keys == "window" else [scale.randn(n, D)]
    ends = (at + 1) // model.ratio
    ranges = (torch.zeros_like(at), ends) if keys == "ranges" else None

    def windowed(backend: str, *leaves: torch.Tensor, repeatable: bool = False, rows: slice = ALL) -> Outputs:
        q, kv, sink, *compressed = leaves
        listed = None if indices is None else indices[rows]
        visible = None if ranges is None else (ranges[0][rows], ranges[1][rows])
        return _both(
            dsa.sparse_attention_v4(
                q, kv, compressed[0] if compressed else None, D**-0.5, sink, indices=listed, cmp_ranges=visible,
                window=model.window, q_positions=at[rows], return_lse=True, deterministic=repeatable, backend=backend,
            )
        )  # fmt: skip

    back = torch.arange(model.window - 1, -1, -1, device=scale.device, dtype=torch.int32)
    joined = [(at[:, None] - back).clamp(min=-1)]
    if keys == "ranges":
        column = torch.arange(n, device=scale.device, dtype=torch.int32).expand(scale.rows, n)
        indices_or_all = column.masked_fill(column >= ends[:, None], -1)
    else:
        indices_or_all = indices
    if indices_or_all is not None:
        joined.append(torch.where(indices_or_all < 0, -1, indices_or_all + scale.context))
    lists, context = torch.cat(joined, 1), scale.context

    def split(dq: torch.Tensor, dkv: torch.Tensor, dsink: torch.Tensor) -> list[torch.Tensor]:
        return [dq, dkv[:context], dsink] + ([dkv[context:]] if compressed else [])

    return Problem(
        windowed,
        [q, kv, sink, *compressed],
        rowwise=(True, False, False, *(False for _ in compressed)),
        with_grad=1,
        flops=_flops(model, lists),
        facts=_facts(q, torch.cat([kv, *compressed]), lists, D, sink, split),
    )


def teacher(scale: Scale, model: Model) -> Problem:
    """Attention mass of every pick, with the whole denominator known from the attention."""
    model = scale.model(model)
    D, n = model.d_v + model.tail, scale.context // model.ratio
    q, kv = scale.randn(scale.rows, model.heads, D), scale.randn(n, D)
    indices = picks(scale, n, model.ratio, model.topk)
    lse = _listed("torch" if scale.tiny else "triton", q, kv, indices, model, False)[1].float()

    def call(backend: str, q: torch.Tensor, kv: torch.Tensor, rows: slice = ALL) -> Outputs:
        return (dsa.indexer_kl_target(q, kv, indices[rows], D**-0.5, lse=lse[rows], backend=backend),)

    valid = int((indices >= 0).sum())
    facts = {"q": q, "kv": kv, "indices": indices, "lse": lse, "sm_scale": D**-0.5}
    return Problem(call, [q, kv], (True, False), flops={"fwd": 2.0 * model.heads * D * valid}, facts=facts)


def loss(scale: Scale, model: Model) -> Problem:
    """Kullback-Leibler loss of the scores at the picks."""
    model = scale.model(model)
    indices = picks(scale, scale.context // model.ratio, model.ratio, model.topk)
    scores = scale.randn(scale.rows, model.topk, dtype=torch.float32).masked_fill(indices < 0, float("-inf"))
    target = scale.randn(scale.rows, model.topk, dtype=torch.float32).exp()

    def call(backend: str, scores: torch.Tensor) -> Outputs:
        return (dsa.indexer_kl_loss(scores, target.to(scores.dtype), indices, coeff=1.0, backend=backend),)

    one = torch.ones((), device=scale.device)
    read = 3.0 * scores.numel() * 4
    moved = {"fwd": read, "bwd": 2.0 * scores.numel() * 4}
    facts = {"indices": indices, "target": target}
    return Problem(call, [scores], grads=[one], moved=moved, facts=facts)


def _listed(
    backend: str, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, model: Model, repeatable: bool
) -> Outputs:
    return _both(
        dsa.sparse_attention(
            q, kv, indices, (model.d_v + model.tail) ** -0.5, d_v=model.d_v, return_lse=True,
            deterministic=repeatable, backend=backend,
        )
    )  # fmt: skip


def _both(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Outputs:
    assert isinstance(result, tuple)
    return result


def _flops(model: Model, lists: torch.Tensor) -> dict[str, float]:
    """2 S H K (Dqk + Dv) and 2 S H K (3 Dqk + 2 Dv), over valid slots."""
    D, slots = model.d_v + model.tail, float((lists >= 0).sum())
    unit = 2.0 * model.heads * slots
    return {"fwd": unit * (D + model.d_v), "bwd": unit * (3 * D + 2 * model.d_v)}


def _facts(
    q: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor, D: int, sink: torch.Tensor | None, split: object
) -> dict[str, object]:
    return {"q": q, "kv": kv, "indices": lists, "sm_scale": D**-0.5, "sink": sink, "split": split}
