# SPDX-License-Identifier: Apache-2.0
"""Public gated pooling: argument checks and choice of backend around the reference."""

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels.ops.gated_pool import config, reference


def gated_pool(
    x_TC: torch.Tensor,
    score_TC: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ratio: int,
    *,
    overlap: bool = False,
    rounding: str = "fp32",
    halo: reference.Halo | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every `ratio` consecutive tokens of a sequence as one row: (pooled [P, D], cu_pools int32 [B + 1]).

        a[m, d] = score[p·ratio + m, d] + ape[m, d]
        pooled[p, d] = Σ_m softmax_m(a)[m, d] · x[p·ratio + m, d]

    Groups restart with every sequence; the last len mod ratio tokens of a sequence form no pool. P = T // ratio is a
    capacity that needs no look at the device: rows from cu_pools[-1] on are zero and get no gradient.

    Args:
        x_TC: values [T, C], packed sequences. C = D, or 2 D with `overlap`.
        score_TC: gate scores [T, C].
        ape: position bias inside a group [ratio, C], float32 (or float64).
        cu_seqlens: int32 [B + 1]; rows from cu_seqlens[-1] on belong to no sequence.
        ratio: tokens per pool.
        overlap: pool over 2·ratio slots: channels [:D] of the group before, then channels [D:] of the own group. The
            first pool of a sequence has no group before it.
        rounding: "fp32" keeps the weights in float32 and rounds the sum once; "hf" rounds the weights to the dtype of
            x first, as transformers does. They differ only for bfloat16 and float16.
        halo: (x [ratio, C], score [ratio, C]), the group before the first pool when the first sequence was cut there
            (context parallelism). Only with `overlap`.
        backend: see `vime_kernels.set_backend`.

    Returns:
        The pooled rows in the dtype of x, and their cumulative counts: pools of sequence b are the rows
        cu_pools[b] up to cu_pools[b + 1].

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: compressor of the DeepSeek-V4 release; key pooling of the GLM-5.3-Flash indexer.
    """
    op = "gated_pool"
    _checks.positive(op, ratio=ratio)
    halo_x, halo_score = _checks.pair(op, "halo", halo)
    halos = {"halo[0]": halo_x, "halo[1]": halo_score}  # named as the caller knows them
    sizes = _checks.sizes(
        op,
        x_TC=(x_TC, "T C"),
        score_TC=(score_TC, "T C"),
        ape=(ape, f"{ratio} C"),
        cu_seqlens=(cu_seqlens, "B+1"),
        **{name: (each, f"? {ratio} C") for name, each in halos.items()},
    )
    _checks.floating(op, x_TC=x_TC, score_TC=score_TC, **halos)
    _checks.rows_contiguous(op, x_TC=x_TC, score_TC=score_TC)
    _checks.full_precision(op, ape=ape)
    _checks.cu_seqlens(op, cu_seqlens, sizes["T"])
    _checks.choice(op, "rounding", rounding, ("fp32", "hf"))
    if overlap and sizes["C"] % 2:
        _checks.fail(op, "an even x_TC.shape[-1] with overlap=True (two halves)", sizes["C"])
    if halo is not None and not overlap:
        _checks.fail(op, "halo=None without overlap", "a halo", "a group without overlap needs no neighbour")
    reason = config.unsupported(x_TC, score_TC, ape, ratio, overlap)
    tensors = (x_TC, score_TC, ape, cu_seqlens, halo_x, halo_score)
    if resolve(op, backend, tensors, reason) == "triton":
        from vime_kernels.ops.gated_pool import triton_fwd

        small = [None if t is None else t.contiguous() for t in (ape, halo_x, halo_score, cu_seqlens)]
        return triton_fwd.gated_pool(x_TC, score_TC, *small, ratio, overlap, rounding == "hf")[:2]
    acc = _checks.accum_dtype(x_TC, score_TC, ape)
    return reference.gated_pool(
        x_TC, score_TC, ape, cu_seqlens, ratio, overlap=overlap, rounding=rounding, halo=halo, acc=acc
    )
