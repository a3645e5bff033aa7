# SPDX-License-Identifier: Apache-2.0
"""Indexer scores at given picks in Triton, forward and backward.

One program per query row: it gathers a tile of keys, multiplies it with all heads and, in the backward pass, uses the
same tile for all three gradients:

    A[j, h] = g[j] w[h] 1[x[j, h] > 0],   dq = Aᵀ k,   dw[h] = Σ_j g[j] relu(x[j, h]),   dk[index j] += A q

A is rounded to the dtype of q before its two products. The sum into dk is atomic: everything else is bitwise
repeatable, dk is not. Slots that name no key are never dereferenced.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.indexer import config


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    q,
    weights,
    indices,
    N,
    H,
    D,
    K,
    q_row,
    q_head,
    weights_row,
    indices_row,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    """Queries and weights of this program's row, and the end of its last slot that names a key."""
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    q_HD = tl.load(
        q + row * q_row + h[:, None] * q_head + d[None, :],
        mask=(h < H)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    weights_H = (h < H).to(tl.float32)
    if HAS_WEIGHTS:
        weights_H = tl.load(weights + row * weights_row + h, mask=h < H, other=0.0).to(tl.float32)
    slot = tl.arange(0, BLOCK_ROW)
    index = tl.load(indices + row * indices_row + slot, mask=slot < K, other=-1)
    return q_HD, weights_H, tl.max(tl.where((index >= 0) & (index < N), slot + 1, 0))


@triton.jit
def _gather(k, indices, first, N, K, D, k_row, indices_row, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of keys [slots, D], their rows, and which slots name a key; the others hold zeros."""
    slot = first + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    index = tl.load(indices + tl.program_id(0).to(tl.int64) * indices_row + slot, mask=slot < K, other=-1)
    valid = (index >= 0) & (index < N)
    index = tl.where(valid, index, 0).to(tl.int64)
    keys = tl.load(k + index[:, None] * k_row + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    return keys, index, valid


@triton.jit(do_not_specialize=["N"])
def _scores_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    weights,
    indices,
    out,
    N,
    H,
    D,
    K,
    q_row,
    q_head,
    k_row,
    weights_row,
    indices_row,
    HAS_WEIGHTS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    q_HD, weights_H, used = _row(
        q,
        weights,
        indices,
        N,
        H,
        D,
        K,
        q_row,
        q_head,
        weights_row,
        indices_row,
        HAS_WEIGHTS,
        BLOCK_H,
        BLOCK_D,
        BLOCK_ROW,
    )
    out += tl.program_id(0).to(tl.int64) * K
    for first in range(0, used, BLOCK_K):
        keys_KD, _, valid_K = _gather(k, indices, first, N, K, D, k_row, indices_row, BLOCK_K, BLOCK_D)
        x_KH = tl.dot(keys_KD, tl.trans(q_HD), input_precision="ieee")
        if RELU:
            x_KH = tl.maximum(x_KH, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score_K = tl.where(valid_K, tl.sum(x_KH * weights_H[None, :], 1), float("-inf"))
        slot = first + tl.arange(0, BLOCK_K)
        tl.store(out + slot, score_K, mask=slot < K)
    slot = tl.arange(0, BLOCK_ROW)
    tl.store(out + slot, float("-inf"), mask=(slot >= tl.cdiv(used, BLOCK_K) * BLOCK_K) & (slot < K))


@triton.jit(do_not_specialize=["N"])
def _scores_bwd_kernel(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    weights,
    indices,
    dq,
    dk,
    dweights,
    N,
    H,
    D,
    K,
    q_row,
    q_head,
    k_row,
    weights_row,
    indices_row,
    HAS_WEIGHTS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    q_HD, weights_H, used = _row(
        q,
        weights,
        indices,
        N,
        H,
        D,
        K,
        q_row,
        q_head,
        weights_row,
        indices_row,
        HAS_WEIGHTS,
        BLOCK_H,
        BLOCK_D,
        BLOCK_ROW,
    )
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    dq_HD = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    dweights_H = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, used, BLOCK_K):
        keys_KD, index_K, valid_K = _gather(k, indices, first, N, K, D, k_row, indices_row, BLOCK_K, BLOCK_D)
        slot = first + tl.arange(0, BLOCK_K)
        g_K = tl.load(grad + row * K + slot, mask=valid_K, other=0.0)
        x_KH = tl.dot(keys_KD, tl.trans(q_HD), input_precision="ieee")
        if RELU:
            dweights_H += tl.sum(tl.maximum(x_KH, 0.0) * g_K[:, None], 0)
            a_KH = tl.where(x_KH > 0, g_K[:, None] * weights_H[None, :], 0.0)
        else:
            dweights_H += tl.sum(x_KH * g_K[:, None], 0)
            a_KH = g_K[:, None] * weights_H[None, :]
        a_KH = a_KH.to(q_HD.dtype)
        dq_HD = tl.dot(tl.trans(a_KH), keys_KD, dq_HD, input_precision="ieee")
        dk_KD = tl.dot(a_KH, q_HD, input_precision="ieee")
        tl.atomic_add(
            dk + index_K[:, None] * D + d[None, :],
            dk_KD,
            mask=valid_K[:, None] & (d < D)[None, :],
            sem="relaxed",
        )
    live_HD = (h < H)[:, None] & (d < D)[None, :]
    tl.store(dq + (row * H + h[:, None]) * D + d[None, :], dq_HD.to(dq.dtype.element_ty), mask=live_HD)
    tl.store(dweights + row * H + h, dweights_H, mask=h < H)


def _launch_options(q: torch.Tensor, K: int) -> dict[str, int]:
    block_h = max(16, triton.next_power_of_2(q.shape[1]))
    return {
        "BLOCK_H": block_h,
        "BLOCK_K": config.PICKS,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
        "BLOCK_ROW": triton.next_power_of_2(K),
        "num_warps": 8 if block_h > 64 else 4,
    }


@torch.library.custom_op("vime_kernels::indexer_scores", mutates_args=())
def indexer_scores(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None, indices: torch.Tensor, use_relu: bool
) -> torch.Tensor:
    """float32 [S, K]. Arguments as in `interface.indexer_scores`, already checked; last dimensions contiguous."""
    (S, H, D), (N, _), K = q.shape, k.shape, indices.shape[1]
    out = torch.empty(S, K, dtype=torch.float32, device=q.device)
    if not S or not K or not N:
        return out.fill_(float("-inf"))
    _scores_kernel[(S,)](
        q,
        k,
        weights,
        indices,
        out,
        N,
        H,
        D,
        K,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        0 if weights is None else weights.stride(0),
        indices.stride(0),
        HAS_WEIGHTS=weights is not None,
        RELU=use_relu,
        num_stages=3,
        **_launch_options(q, K),
    )
    return out


@indexer_scores.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None, indices: torch.Tensor, use_relu: bool
) -> torch.Tensor:
    return q.new_empty(indices.shape, dtype=torch.float32)


@torch.library.custom_op("vime_kernels::indexer_scores_bwd", mutates_args=())
def indexer_scores_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and weights (of weights of one where there are none)."""
    (S, H, D), (N, _), K = q.shape, k.shape, indices.shape[1]
    dq = q.new_empty(S, H, D)
    dk = torch.zeros(N, D, dtype=torch.float32, device=k.device)
    dweights = torch.empty(S, H, dtype=torch.float32, device=q.device)
    if not S or not K or not N:
        return dq.zero_(), dk.to(k.dtype), dweights.zero_()
    _scores_bwd_kernel[(S,)](
        grad,
        q,
        k,
        weights,
        indices,
        dq,
        dk,
        dweights,
        N,
        H,
        D,
        K,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        0 if weights is None else weights.stride(0),
        indices.stride(0),
        HAS_WEIGHTS=weights is not None,
        RELU=use_relu,
        num_stages=config.SCORES_BWD_STAGES,
        **_launch_options(q, K),
    )
    return dq, dk.to(k.dtype), dweights if weights is None else dweights.to(weights.dtype)


@indexer_scores_bwd.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    use_relu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dweights = q.new_empty(q.shape[:2], dtype=torch.float32 if weights is None else weights.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), dweights


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, k, weights, indices, ctx.use_relu = inputs
    ctx.save_for_backward(q, k, weights, indices)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, weights, indices = ctx.saved_tensors
    dq, dk, dweights = indexer_scores_bwd(grad.contiguous(), q, k, weights, indices, ctx.use_relu)
    return dq, dk, None if weights is None else dweights, None, None


indexer_scores.register_autograd(_backward, setup_context=_save)
