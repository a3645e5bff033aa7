# SPDX-License-Identifier: Apache-2.0
"""Public indexer loss: the teacher from the main attention, and the loss of the indexer's scores against it."""

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels._rows import map_rows
from vime_kernels.ops.indexer_loss import config, reference


def indexer_kl_target(
    query: torch.Tensor,
    key: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    *,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention mass of every pick, summed over heads: float32 [S, K] (float64 for float64 inputs), no gradient.

        T[t, j] = Σ_h exp(sm_scale · <query[t, h], key[indices[t, j]]> - lse[t, h])

    Not normalised, because with tensor parallelism the ranks' heads are added first; `indexer_kl_loss` normalises.

    Args:
        query: main attention queries [S, H, D].
        key: main attention keys [N, D].
        indices: int32 [S, K] rows of key; below 0 or from N on means none, mass 0.
        sm_scale: Python float.
        lse: float32 [S, H], natural logarithm of the whole denominator. DeepSeek-V4 needs it: its denominator also
            holds the window and the sink, logaddexp(lse of `sparse_attention_v4`, attn_sink). None: the listed keys
            are the denominator.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: DeepSeek-V3.2 (arXiv 2512.02556); the V4 denominator as corrected in Megatron-LM.
    """
    op = "indexer_kl_target"
    sizes = _checks.sizes(
        op, query=(query, "S H D"), key=(key, "N D"), indices=(indices, "S K"), lse=(lse, "? S H")
    )
    _checks.floating(op, query=query, key=key)
    _checks.rows_contiguous(op, query=query, key=key)
    _checks.int32(op, indices=indices)
    _checks.picks(op, sizes["N"], indices)
    _checks.python_float(op, sm_scale=sm_scale)
    _checks.full_precision(op, lse=lse)
    reason = config.unsupported_target(query, key, lse)
    if resolve(op, backend, (query, key, indices, lse), reason) == "triton":
        from vime_kernels.ops.indexer_loss import triton_target

        with torch.no_grad():
            small = (indices.contiguous(), None if lse is None else lse.contiguous())
            return triton_target.indexer_kl_target(query, key, *small, sm_scale)
    acc = _checks.accum_dtype(query, key, lse)
    valid = (indices >= 0) & (indices < sizes["N"])
    queries, keys = query.to(acc), key.to(acc)

    def rows_of(rows: slice) -> tuple[torch.Tensor]:
        lse_rows = None if lse is None else lse[rows].to(acc)
        return (reference.target(queries[rows], keys, indices[rows], valid[rows], sm_scale, lse_rows),)

    with torch.no_grad():
        return map_rows(rows_of, sizes["S"], sizes["K"] * (2 * sizes["D"] + 4 * sizes["H"]) * acc.itemsize)[0]


def indexer_kl_loss(
    scores: torch.Tensor,
    target: torch.Tensor,
    indices: torch.Tensor,
    *,
    coeff: float,
    row_mask: torch.Tensor | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> torch.Tensor:
    """coeff times the KL divergence of softmax(scores) from the normalised target: a scalar, gradient to scores.

    The gradient of one row is coeff · (softmax(scores) - target / Σ target), divided by the number of counted rows
    for "mean". Rows without a pick, and rows outside row_mask, give neither loss nor gradient and are not counted.

    Args:
        scores: indexer scores at the picks [S, K], float32 (or float64), from `indexer_scores`.
        target: [S, K] from `indexer_kl_target`, summed over tensor parallel ranks. Taken as a constant.
        indices: int32 [S, K]; below 0 means no pick, and so does a score of -inf.
        coeff: weight of the loss.
        row_mask: bool [S], False for padding rows; None counts every row.
        reduction: "mean" over the counted rows, or "sum".
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: Megatron-LM's DSA indexer loss.
    """
    op = "indexer_kl_loss"
    _checks.sizes(
        op,
        scores=(scores, "S K"),
        target=(target, "S K"),
        indices=(indices, "S K"),
        row_mask=(row_mask, "? S"),
    )
    _checks.full_precision(op, scores=scores, target=target)
    _checks.int32(op, indices=indices)
    _checks.python_float(op, coeff=coeff)
    _checks.choice(op, "reduction", reduction, ("mean", "sum"))
    if row_mask is not None and row_mask.dtype != torch.bool:
        _checks.fail(op, "row_mask in torch.bool", row_mask.dtype, kind=TypeError)
    _checks.rows_contiguous(op, scores=scores, target=target, indices=indices)
    reason = config.unsupported_loss(scores, target)
    if resolve(op, backend, (scores, target, indices, row_mask), reason) == "triton":
        from vime_kernels.ops.indexer_loss import triton_loss

        with_gradient = scores.requires_grad and torch.is_grad_enabled()
        mask = None if row_mask is None else row_mask.contiguous()
        return triton_loss.indexer_kl_loss(
            scores, target.detach(), indices, mask, coeff, reduction == "mean", with_gradient
        )[0]
    valid = (indices >= 0) & ~scores.isneginf()
    if row_mask is not None:
        valid = valid & row_mask[:, None]
    acc = _checks.accum_dtype(scores, target)
    loss = coeff * reference.row_losses(scores.to(acc), target.detach().to(acc), valid).sum()
    return loss / valid.any(-1).sum().clamp_min(1) if reduction == "mean" else loss
