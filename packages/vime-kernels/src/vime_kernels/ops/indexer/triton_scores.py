# SPDX-License-Identifier: Apache-2.0
"""Indexer scores at given picks in Triton, forward and backward.

One program per query row: it gathers a tile of keys, multiplies it with all heads and, in the backward pass, uses the
same tile for all three gradients:

    A[j, h] = g[j] w[h] 1[x[j, h] > 0],   dq = Aᵀ k,   dw[h] = Σ_j g[j] relu(x[j, h]),   dk[index j] += A q

A is rounded to the dtype of q before its two products. By default the sum into dk is atomic and, alone of all
results, not bitwise repeatable; in deterministic mode every slot's row A q is rounded to the dtype of q, put in the
order of a stable sort by key, and each key's rows are added up in that order. Slots that name no key are never
dereferenced. Where `gluon_bwd` can form the gradients, it does.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels._ordered_sum import add_segments, order
from vime_kernels._slots import fill_slots, used_slots
from vime_kernels.ops.indexer import config


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    q, weights, row, H, D, q_row, q_head, weights_row,
    HAS_WEIGHTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Queries [heads, channels] and head weights of a row; zeros behind them."""
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    at = q + row * q_row + h[:, None].to(tl.int64) * q_head + d[None, :]
    q_HD = tl.load(at, mask=(h < H)[:, None] & (d < D)[None, :], other=0.0)
    weights_H = (h < H).to(tl.float32)
    if HAS_WEIGHTS:
        weights_H = tl.load(weights + row * weights_row + h, mask=h < H, other=0.0).to(tl.float32)
    return q_HD, weights_H


@triton.jit
def _products(q_HD, k, indices, first, N, K, D, k_row, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of a tile of keys with all heads; the tile, its slots, their rows, and which of them name a key.

    A slot that names none holds zeros.
    """
    slot = first + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    index = tl.load(indices + slot, mask=slot < K, other=-1)
    valid = (index >= 0) & (index < N)
    index = tl.where(valid, index, 0).to(tl.int64)
    at = k + index[:, None] * k_row + d[None, :]
    keys_KD = tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    return tl.dot(keys_KD, tl.trans(q_HD), input_precision="ieee"), keys_KD, slot, index, valid


@triton.jit(do_not_specialize=["N"])
def _scores_kernel(  # type: ignore[no-untyped-def]
    q, k, weights, indices, out, N, H, D, K, q_row, q_head, k_row, weights_row, indices_row,
    HAS_WEIGHTS: tl.constexpr, RELU: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    q_HD, weights_H = _row(q, weights, row, H, D, q_row, q_head, weights_row, HAS_WEIGHTS, BLOCK_H, BLOCK_D)
    indices += row * indices_row
    out += row * K
    used = used_slots(indices, N, K)
    for first in range(0, used, BLOCK_K):
        x_KH, _, slot, _, valid_K = _products(q_HD, k, indices, first, N, K, D, k_row, BLOCK_K, BLOCK_D)
        if RELU:
            x_KH = tl.maximum(x_KH, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score_K = tl.where(valid_K, tl.sum(x_KH * weights_H[None, :], 1), float("-inf"))
        tl.store(out + slot, score_K, mask=slot < K)
    fill_slots(out, tl.cdiv(used, BLOCK_K) * BLOCK_K, K, float("-inf"))


@triton.jit(do_not_specialize=["N"])
def _scores_bwd_kernel(  # type: ignore[no-untyped-def]
    grad, q, k, weights, indices, place, dq, dk, dweights,
    N, H, D, K, q_row, q_head, k_row, weights_row, indices_row,
    HAS_WEIGHTS: tl.constexpr, RELU: tl.constexpr, ORDERED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk is the gradient to add to, or with ORDERED one row for every slot, at the slot's place."""
    row = tl.program_id(0).to(tl.int64)
    q_HD, weights_H = _row(q, weights, row, H, D, q_row, q_head, weights_row, HAS_WEIGHTS, BLOCK_H, BLOCK_D)
    indices += row * indices_row
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    dq_HD = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    dweights_H = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, used_slots(indices, N, K), BLOCK_K):
        x_KH, keys_KD, slot, index_K, valid_K = _products(
            q_HD, k, indices, first, N, K, D, k_row, BLOCK_K, BLOCK_D
        )
        g_K = tl.load(grad + row * K + slot, mask=valid_K, other=0.0)
        a_KH = g_K[:, None] * weights_H[None, :]
        if RELU:
            a_KH = tl.where(x_KH > 0, a_KH, 0.0)
            x_KH = tl.maximum(x_KH, 0.0)
        dweights_H += tl.sum(x_KH * g_K[:, None], 0)
        a_KH = a_KH.to(q_HD.dtype)
        dq_HD = tl.dot(tl.trans(a_KH), keys_KD, dq_HD, input_precision="ieee")
        dk_KD = tl.dot(a_KH, q_HD, input_precision="ieee")
        live_KD = valid_K[:, None] & (d < D)[None, :]
        if ORDERED:
            place_K = tl.load(place + row * K + slot, mask=valid_K, other=0).to(tl.int64)
            tl.store(dk + place_K[:, None] * D + d[None, :], dk_KD.to(dk.dtype.element_ty), mask=live_KD)
        else:
            tl.atomic_add(dk + index_K[:, None] * D + d[None, :], dk_KD, mask=live_KD, sem="relaxed")
    live_HD = (h < H)[:, None] & (d < D)[None, :]
    tl.store(dq + (row * H + h[:, None]) * D + d[None, :], dq_HD.to(dq.dtype.element_ty), mask=live_HD)
    tl.store(dweights + row * H + h, dweights_H, mask=h < H)


def _launch_options(q: torch.Tensor) -> dict[str, int]:
    block_h = max(16, triton.next_power_of_2(q.shape[1]))
    return {
        "BLOCK_H": block_h,
        "BLOCK_K": config.PICKS,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
        "num_warps": 8 if block_h > 64 else 4,
    }


@torch.library.custom_op("vime_kernels::indexer_scores", mutates_args=())
def indexer_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    use_relu: bool,
    deterministic: bool,
) -> torch.Tensor:
    """float32 [S, K]. Arguments as in `interface.indexer_scores`, already checked; last dimensions contiguous."""
    (S, H, D), (N, _), K = q.shape, k.shape, indices.shape[1]
    out = torch.empty(S, K, dtype=torch.float32, device=q.device)
    if not S or not K or not N:
        return out.fill_(float("-inf"))
    _scores_kernel[(S,)](
        q, k, weights, indices, out, N, H, D, K,
        q.stride(0), q.stride(1), k.stride(0), 0 if weights is None else weights.stride(0), indices.stride(0),
        HAS_WEIGHTS=weights is not None, RELU=use_relu, num_stages=3, **_launch_options(q),
    )  # fmt: skip
    return out


@indexer_scores.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    use_relu: bool,
    deterministic: bool,
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
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and weights (of weights of one where there are none)."""
    (S, H, D), (N, _), K = q.shape, k.shape, indices.shape[1]
    dq = q.new_empty(S, H, D)
    dk = torch.zeros(N, D, dtype=torch.float32, device=k.device)
    dweights = torch.empty(S, H, dtype=torch.float32, device=q.device)
    if not S or not K or not N:
        return dq.zero_(), dk.to(k.dtype), dweights.zero_()
    if config.hopper_scores(q, k):
        from vime_kernels.ops.indexer import gluon_bwd

        gluon_bwd.scores_bwd(grad, q, k, weights, indices, use_relu, deterministic, dq, dk, dweights)
        return dq, dk.to(k.dtype), dweights if weights is None else dweights.to(weights.dtype)
    step = max(1, config.ORDERED_BYTES // (K * D * q.element_size())) if deterministic else S
    for first in range(0, S, step):
        rows = slice(first, min(first + step, S))
        picks = indices[rows]
        place, target = None, dk
        if deterministic:
            place, offsets = order((picks >= 0) & (picks < N), picks, N)
            target = torch.empty(picks.numel(), D, dtype=q.dtype, device=q.device)
        _scores_bwd_kernel[(len(picks),)](
            grad[rows], q[rows], k, None if weights is None else weights[rows], picks, place,
            dq[rows], target, dweights[rows], N, H, D, K,
            q.stride(0), q.stride(1), k.stride(0), 0 if weights is None else weights.stride(0), indices.stride(0),
            HAS_WEIGHTS=weights is not None, RELU=use_relu, ORDERED=deterministic,
            num_stages=config.SCORES_BWD_STAGES, **_launch_options(q),
        )  # fmt: skip
        if deterministic:
            add_segments(target, offsets, dk)
    return dq, dk.to(k.dtype), dweights if weights is None else dweights.to(weights.dtype)


@indexer_scores_bwd.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    use_relu: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dweights = q.new_empty(q.shape[:2], dtype=torch.float32 if weights is None else weights.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), dweights


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, k, weights, indices, ctx.use_relu, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, weights, indices)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, weights, indices = ctx.saved_tensors
    dq, dk, dweights = indexer_scores_bwd(
        grad.contiguous(), q, k, weights, indices, ctx.use_relu, ctx.deterministic
    )
    return dq, dk, None if weights is None else dweights, None, None, None


indexer_scores.register_autograd(_backward, setup_context=_save)
