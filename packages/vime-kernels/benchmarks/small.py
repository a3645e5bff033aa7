# SPDX-License-Identifier: Apache-2.0
"""Operations bound by memory: pooling, quantisation, rotation, hyper-connections."""

from collections.abc import Callable

import torch
from models import Model, Scale
from problem import Outputs, Problem

from vime_kernels import dsa, mhc, moe, quant

STREAMS = 4


def pool(scale: Scale, dim: int, ratio: int, overlap: bool) -> Problem:
    """Gated pooling of one packed sequence."""
    tokens = scale.tokens
    width = (32 if scale.tiny else dim) * (2 if overlap else 1)
    leaves = [
        scale.randn(tokens, width),
        scale.randn(tokens, width),
        scale.randn(ratio, width, dtype=torch.float32),
    ]
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=scale.device)

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (dsa.gated_pool(*leaves, cu_seqlens, ratio, overlap=overlap, backend=backend)[0],)

    return Problem(call, leaves, facts={"cu_seqlens": cu_seqlens, "ratio": ratio, "overlap": overlap})


def quantise(scale: Scale, function: Callable[..., object], width: int, **settings: int) -> Problem:
    """One of the operations of `vime_kernels.quant` on rows of activations."""
    x = scale.randn(scale.tokens, 128 if scale.tiny else width)

    def call(backend: str, x: torch.Tensor) -> Outputs:
        result = function(x, **settings, backend=backend)
        return result if isinstance(result, tuple) else (result,)

    codes = function is quant.act_quant
    moved = {"fwd": x.numel() * 3.0 + 4 * x.numel() / settings["block"]} if codes else {}
    return Problem(call, [x], moved=moved, facts=settings)


def mixes(scale: Scale, model: Model) -> Problem:
    """Weightings of one sub-layer."""
    hidden, width = scale.model(model).hidden, (2 + STREAMS) * STREAMS
    fn = scale.randn(width, STREAMS * hidden, dtype=torch.float32) * (STREAMS * hidden) ** -0.5
    vectors = [scale.randn(size, dtype=torch.float32) for size in (3, width)]

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return mhc.mhc_mixes(*leaves, eps=1e-6, iters=20, norm_eps=1e-6, backend=backend)

    return Problem(call, [scale.randn(scale.tokens // 4, STREAMS, hidden), fn, *vectors])


def sinkhorn(scale: Scale) -> Problem:
    """Twenty column passes over one 4 x 4 matrix per token."""

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (mhc.sinkhorn(*leaves, eps=1e-6, iters=20, backend=backend),)

    return Problem(call, [scale.randn(scale.tokens, STREAMS, STREAMS, dtype=torch.float32)])


def pre(scale: Scale, model: Model) -> Problem:
    """Input of a sub-layer."""
    T, hidden = scale.tokens // 4, scale.model(model).hidden

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (mhc.mhc_pre(*leaves, backend=backend),)

    return Problem(call, [scale.randn(T, STREAMS, hidden), scale.randn(T, STREAMS, dtype=torch.float32)])


def post(scale: Scale, model: Model) -> Problem:
    """Streams after a sub-layer."""
    T, hidden = scale.tokens // 4, scale.model(model).hidden
    mixing = [
        scale.randn(T, STREAMS, dtype=torch.float32),
        scale.randn(T, STREAMS, STREAMS, dtype=torch.float32),
    ]

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (mhc.mhc_post(*leaves, backend=backend),)

    return Problem(call, [scale.randn(T, hidden), scale.randn(T, STREAMS, hidden), *mixing])


def head(scale: Scale, model: Model) -> Problem:
    """Streams collapsed after the last layer."""
    T, hidden = scale.tokens // 4, scale.model(model).hidden
    fn = scale.randn(STREAMS, STREAMS * hidden, dtype=torch.float32) * (STREAMS * hidden) ** -0.5
    vectors = [scale.randn(size, dtype=torch.float32) for size in (1, STREAMS)]

    def call(backend: str, *leaves: torch.Tensor) -> Outputs:
        return (mhc.mhc_head(*leaves, eps=1e-6, norm_eps=1e-6, backend=backend),)

    return Problem(call, [scale.randn(T, STREAMS, hidden), fn, *vectors])


def rotation(scale: Scale, model: Model) -> Problem:
    """Norm and rotation of the query heads."""
    T, heads = scale.tokens // 4, scale.model(model).heads
    angles = scale.randn(T, 4 if scale.tiny else 32, dtype=torch.float32)
    rounded = (angles.cos(), angles.sin())
    exact = tuple(table.double() for table in rounded)

    def call(backend: str, x: torch.Tensor) -> Outputs:
        tables = exact if x.dtype == torch.float64 else rounded
        return (dsa.rotate(x, *tables, norm_eps=1e-6, backend=backend),)

    return Problem(call, [scale.randn(T, heads, 16 if scale.tiny else 512)])


def gate(scale: Scale, hidden: int) -> Problem:
    """Clamped SwiGLU of the experts' inner width, weighted by the router."""
    weight = scale.randn(scale.tokens, dtype=torch.float32)

    def call(backend: str, x: torch.Tensor, weight: torch.Tensor) -> Outputs:
        return (moe.swiglu(x, weight, limit=10.0, backend=backend),)

    return Problem(call, [scale.randn(scale.tokens, 64 if scale.tiny else 2 * hidden), weight])


def combine(scale: Scale, hidden: int, topk: int) -> Problem:
    """What the experts of a token return, added up; rows lie sorted by expert."""
    T = scale.tokens // 4
    rows_TK = torch.randperm(T * topk, device=scale.device).view(T, topk)

    def call(backend: str, x: torch.Tensor) -> Outputs:
        return (moe.gather_sum(x, rows_TK, backend=backend),)

    return Problem(call, [scale.randn(T * topk, 64 if scale.tiny else hidden)])
