# SPDX-License-Identifier: Apache-2.0
"""The loss of the indexer's scores in Triton: one pass over a row gives its loss and its gradient.

The gradient is exact and as large as the scores, so it is what the backward pass keeps, in their place.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vime_kernels.ops.indexer_loss import config
from vime_kernels.ops.indexer_loss.reference import FLOOR as _FLOOR

FLOOR = tl.constexpr(_FLOOR)


@triton.jit
def _load(scores, target, indices, first, counts, K, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores (-inf without a pick) and target (0 without) of the slots from `first` on, and which have a pick."""
    slot = first + tl.arange(0, BLOCK)
    picked = (tl.load(indices + slot, mask=slot < K, other=-1) >= 0) & counts
    score = tl.load(scores + slot, mask=picked, other=float("-inf"))
    picked = picked & (score != float("-inf"))
    return score, tl.load(target + slot, mask=picked, other=0.0), picked, slot


@triton.jit(do_not_specialize=["K"])
def _loss_kernel(  # type: ignore[no-untyped-def]
    scores, target, indices, row_mask, losses, counted, gradient, K, scores_row, target_row, indices_row,
    HAS_MASK: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * scores_row
    target += row * target_row
    indices += row * indices_row
    counts = True
    if HAS_MASK:
        counts = tl.load(row_mask + row) != 0
    top = tl.full([], -3.0e38, tl.float32)
    total = 0.0
    mass = 0.0
    picks = 0
    for first in range(0, K, BLOCK):
        score, teacher, picked, _ = _load(scores, target, indices, first, counts, K, BLOCK)
        higher = tl.maximum(top, tl.max(score))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(score - higher))
        top = higher
        mass += tl.sum(teacher)
        picks = tl.maximum(picks, tl.max(picked.to(tl.int32)))
    norm = 1.0 / tl.maximum(mass, FLOOR)
    log_total = top + tl.log(tl.where(picks > 0, total, 1.0))
    loss = 0.0
    for first in range(0, K, BLOCK):
        score, teacher, picked, slot = _load(scores, target, indices, first, counts, K, BLOCK)
        teacher = teacher * norm
        log_student = tl.where(picked, score - log_total, 0.0)
        loss += tl.sum(teacher * (tl.log(tl.maximum(teacher, FLOOR)) - log_student))
        if WITH_GRADIENT:
            g = tl.where(picked, tl.exp(log_student) * (mass * norm) - teacher, 0.0)
            tl.store(gradient + row * K + slot, g, mask=slot < K)
    tl.store(losses + row, loss)
    tl.store(counted + row, picks)


@torch.library.custom_op("vime_kernels::indexer_kl_rows", mutates_args=())
def indexer_kl_rows(
    scores: torch.Tensor,
    target: torch.Tensor,
    indices: torch.Tensor,
    row_mask: torch.Tensor | None,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss of every row [S], 1 for rows that count else 0, int32 [S], gradient of a row's loss [S, K] or nothing)."""
    S, K = scores.shape
    losses, counted = scores.new_empty(S), indices.new_empty(S)
    gradient = scores.new_empty((S, K) if with_gradient else (0, K))
    if not S or not K:
        return losses.zero_(), counted.zero_(), gradient
    block = min(config.LOSS_SLOTS, max(128, triton.next_power_of_2(K)))
    _loss_kernel[(S,)](
        scores, target, indices, row_mask, losses, counted, gradient, K,
        scores.stride(0), target.stride(0), indices.stride(0),
        HAS_MASK=row_mask is not None, WITH_GRADIENT=with_gradient, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return losses, counted, gradient


@indexer_kl_rows.register_fake
def _(
    scores: torch.Tensor,
    target: torch.Tensor,
    indices: torch.Tensor,
    row_mask: torch.Tensor | None,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    S, K = scores.shape
    return scores.new_empty(S), indices.new_empty(S), scores.new_empty((S, K) if with_gradient else (0, K))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[2])


def _backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return gradient * grad[:, None], None, None, None, None


indexer_kl_rows.register_autograd(_backward, setup_context=_save)
