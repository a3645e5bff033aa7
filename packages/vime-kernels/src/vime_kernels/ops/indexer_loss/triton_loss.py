# SPDX-License-Identifier: Apache-2.0
"""The loss of the indexer's scores in Triton: one launch over the rows gives losses and gradients, one adds up.

The gradient is exact and as large as the scores, so it is what the backward pass keeps, in their place. It is written
before the number of counted rows is known; the backward pass multiplies by the weight that follows from that.
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
    inside = (slot < K) & counts
    # Three loads that do not wait for each other; what stands in a slot without a pick is not looked at.
    index = tl.load(indices + slot, mask=inside, other=-1)
    score = tl.load(scores + slot, mask=inside, other=float("-inf"))
    teacher = tl.load(target + slot, mask=inside, other=0.0)
    picked = (index >= 0) & (score != float("-inf"))
    return tl.where(picked, score, float("-inf")), tl.where(picked, teacher, 0.0), picked, slot


@triton.jit
def _add(score, teacher, picked, top, total, mass, picks):  # type: ignore[no-untyped-def]
    """Running maximum and sum of exp of the scores, sum of the target, and whether there is a pick."""
    higher = tl.maximum(top, tl.max(score))
    total = total * tl.exp(top - higher) + tl.sum(tl.exp(score - higher))
    return higher, total, mass + tl.sum(teacher), tl.maximum(picks, tl.max(picked.to(tl.int32)))


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    score, teacher, picked, slot, log_total, mass, gradient_row, K, WITH_GRADIENT: tl.constexpr
):
    """What these slots add to the loss of the row; their gradient is stored."""
    norm = 1.0 / tl.maximum(mass, FLOOR)
    teacher = teacher * norm
    log_student = tl.where(picked, score - log_total, 0.0)
    if WITH_GRADIENT:
        g = tl.where(picked, tl.exp(log_student) * (mass * norm) - teacher, 0.0)
        tl.store(gradient_row + slot, g, mask=slot < K)
    return tl.sum(teacher * (tl.log(tl.maximum(teacher, FLOOR)) - log_student))


@triton.jit(do_not_specialize=["K"])
def _rows_kernel(  # type: ignore[no-untyped-def]
    scores, target, indices, row_mask, losses, counted, gradient, K, scores_row, target_row, indices_row,
    HAS_MASK: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * scores_row
    target += row * target_row
    indices += row * indices_row
    gradient += row * K
    counts = True
    if HAS_MASK:
        counts = tl.load(row_mask + row) != 0
    # The first block stays in registers; of most rows it is the only one.
    score, teacher, picked, slot = _load(scores, target, indices, 0, counts, K, BLOCK)
    top, total, mass, picks = _add(score, teacher, picked, -3.0e38, 0.0, 0.0, 0)
    for first in range(BLOCK, K, BLOCK):
        s, t, p, _ = _load(scores, target, indices, first, counts, K, BLOCK)
        top, total, mass, picks = _add(s, t, p, top, total, mass, picks)
    log_total = top + tl.log(tl.where(picks > 0, total, 1.0))
    loss = _finish(score, teacher, picked, slot, log_total, mass, gradient, K, WITH_GRADIENT)
    for first in range(BLOCK, K, BLOCK):
        s, t, p, at = _load(scores, target, indices, first, counts, K, BLOCK)
        loss += _finish(s, t, p, at, log_total, mass, gradient, K, WITH_GRADIENT)
    tl.store(losses + row, loss)
    tl.store(counted + row, picks)


@triton.jit(do_not_specialize=["S"])
def _total_kernel(losses, counted, loss, weight, S, coeff, MEAN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    rows = tl.zeros([BLOCK], tl.int32)
    for first in range(0, S, BLOCK):
        row = first + tl.arange(0, BLOCK)
        total += tl.load(losses + row, mask=row < S, other=0.0)
        rows += tl.load(counted + row, mask=row < S, other=0)
    scale = coeff
    if MEAN:
        scale = coeff / tl.maximum(tl.sum(rows), 1)
    tl.store(loss, tl.sum(total) * scale)
    tl.store(weight, scale)


@triton.jit(do_not_specialize=["size"])
def _scale_kernel(gradient, weight, grad, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(weight) * tl.load(grad)
    tl.store(out + at, tl.load(gradient + at, mask=at < size) * factor, mask=at < size)


@torch.library.custom_op("vime_kernels::indexer_kl_loss", mutates_args=())
def indexer_kl_loss(
    scores: torch.Tensor,
    target: torch.Tensor,
    indices: torch.Tensor,
    row_mask: torch.Tensor | None,
    coeff: float,
    mean: bool,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, the weight in it of a row's own loss, gradient of each row's own loss [S, K] or nothing)."""
    S, K = scores.shape
    loss, weight = scores.new_empty(()), scores.new_empty(())
    gradient = scores.new_empty((S, K) if with_gradient else (0, K))
    if not S or not K:
        return loss.zero_(), weight.zero_(), gradient
    losses, counted = scores.new_empty(S), indices.new_empty(S)
    block = min(config.LOSS_SLOTS, max(128, triton.next_power_of_2(K)))
    _rows_kernel[(S,)](
        scores, target, indices, row_mask, losses, counted, gradient, K,
        scores.stride(0), target.stride(0), indices.stride(0),
        HAS_MASK=row_mask is not None, WITH_GRADIENT=with_gradient, BLOCK=block,
        num_warps=max(1, block // config.LOSS_SLOTS_PER_WARP),
    )  # fmt: skip
    _total_kernel[(1,)](
        losses, counted, loss, weight, S, coeff, MEAN=mean, BLOCK=config.LOSS_ROWS, num_warps=16
    )
    return loss, weight, gradient


@indexer_kl_loss.register_fake
def _(
    scores: torch.Tensor,
    target: torch.Tensor,
    indices: torch.Tensor,
    row_mask: torch.Tensor | None,
    coeff: float,
    mean: bool,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    S, K = scores.shape
    return scores.new_empty(()), scores.new_empty(()), scores.new_empty((S, K) if with_gradient else (0, K))


@torch.library.custom_op("vime_kernels::indexer_kl_loss_bwd", mutates_args=())
def indexer_kl_loss_bwd(gradient: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient of the scores [S, K], from what the forward pass kept and the gradient of the loss."""
    out = torch.empty_like(gradient)
    if size := gradient.numel():
        _scale_kernel[(triton.cdiv(size, 2048),)](gradient, weight, grad, out, size, BLOCK=2048, num_warps=4)
    return out


@indexer_kl_loss_bwd.register_fake
def _(gradient: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    # The kept gradient depends on the scores, so a second derivative is refused there and not taken to be zero.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    weight, gradient = ctx.saved_tensors
    d_scores = None if grad is None else indexer_kl_loss_bwd(gradient, weight, grad)
    return d_scores, None, None, None, None, None, None


indexer_kl_loss.register_autograd(_backward, setup_context=_save)
