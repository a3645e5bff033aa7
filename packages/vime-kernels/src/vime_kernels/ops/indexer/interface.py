# SPDX-License-Identifier: Apache-2.0
"""Public indexer operations: scores, selection, and the scores of a selection with gradients."""

import torch

from vime_kernels import _checks
from vime_kernels._backend import resolve
from vime_kernels._rows import chunks, map_rows
from vime_kernels.ops.indexer import config, reference
from vime_kernels.ops.topk.interface import TopKFn, get_topk_fn

FP8 = (torch.float8_e4m3fn,)


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    use_relu: bool = True,
    clean_logits: bool = True,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Indexer scores of all rows against all keys: float32 [S, N] (float64 for float64 inputs), no gradient.

        I[t, n] = k_scale[n] · Σ_h weights[t, h] · q_scale[t, h] · ReLU(<q[t, h], k[n]>)     starts[t] <= n < ends[t]

    Args:
        q: queries [S, H, D]; floating, or float8_e4m3fn.
        k: keys [N, D], same choice.
        weights: head weights [S, H] with every constant factor already in them, or None for weights of one.
        starts: int32 [S], first visible key of each row.
        ends: int32 [S], one past the last.
        q_scale: [S, H], positive dequantisation scale of q, or None.
        k_scale: [N], positive dequantisation scale of k, or None; applied after the head sum.
        use_relu: False leaves the ReLU out.
        clean_logits: True writes -inf outside the range; False leaves whatever was computed there, and only readers
            that know the range may look.
        out: where to write, [S, N] in the result's dtype, or None.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: DeepSeek-V3.2 (arXiv 2512.02556); scale contract of DeepGEMM's fp8 logits.
    """
    op = "indexer_logits"
    sizes = _check_ranged(op, q, k, weights, starts, ends, q_scale, k_scale, out=(out, "? S N"))
    S, N, H = sizes["S"], sizes["N"], sizes["H"]
    acc = _checks.accum_dtype(q, k, weights, q_scale, k_scale)
    if out is None:
        # Rows start at multiples of 64 bytes, for wide stores and loads.
        out = torch.empty(S, -(-N // 16) * 16, dtype=acc, device=q.device)[:, :N]
    elif out.dtype != acc:
        _checks.fail(op, f"out in {acc}", out.dtype, kind=TypeError)
    elif S > 1 and N and out.stride(0) < N and out.stride(1) < S:
        _checks.fail(
            op, "out whose rows do not share memory", f"strides {out.stride()}", "pass out.contiguous()"
        )
    reason = config.unsupported(q, k) or config.unsupported_out(out)
    if resolve(op, backend, (q, k, weights, starts, ends, q_scale, k_scale, out), reason) == "triton":
        from vime_kernels.ops.indexer import triton_fwd

        with torch.no_grad():
            small = [None if t is None else t.contiguous() for t in (weights, q_scale, k_scale, starts, ends)]
            triton_fwd.indexer_logits(q, k, *small, out, use_relu, clean_logits)
        return out
    with torch.no_grad():
        w = None if weights is None else weights.to(acc)
        if q_scale is not None:
            w = q_scale.to(acc) if w is None else w * q_scale.to(acc)
        keys, column = k.to(acc), torch.arange(N, device=q.device, dtype=torch.int32)
        for rows in chunks(S, 2 * N * H * acc.itemsize):
            scores = reference.logits(
                q[rows].to(acc), keys, None if w is None else w[rows], use_relu=use_relu
            )
            if k_scale is not None:
                scores = scores * k_scale.to(acc)
            if clean_logits:
                outside = (column < starts[rows, None]) | (column >= ends[rows, None])
                scores = scores.masked_fill(outside, float("-inf"))
            out[rows] = scores
    return out


def indexer_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    topk: int,
    *,
    topk_fn: TopKFn | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    use_relu: bool = True,
    max_logits_bytes: int = 2**30,
    backend: str | None = None,
) -> torch.Tensor:
    """The keys that the indexer picks for every row: int32 [S, topk], -1 for nothing.

    The scores exist for a chunk of rows at a time; the picks do not depend on the chunk.

    Args:
        q, k, weights, starts, ends, q_scale, k_scale, use_relu: as for `indexer_logits`.
        topk: picks per row, at least 1.
        topk_fn: what selects, called once per chunk with `row_offset`; None for the canonical rule.
        max_logits_bytes: bound of one chunk's score buffer (one row is always allowed).
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit, or `topk_fn` returned something else than int32 [rows, topk].
    """
    op = "indexer_topk"
    _checks.positive(op, topk=topk, max_logits_bytes=max_logits_bytes)
    sizes = _check_ranged(op, q, k, weights, starts, ends, q_scale, k_scale)
    select = topk_fn or get_topk_fn("canonical", backend=backend)
    picks = torch.empty(sizes["S"], topk, dtype=torch.int32, device=q.device)
    row_bytes = sizes["N"] * _checks.accum_dtype(q, k, weights).itemsize
    for rows in chunks(sizes["S"], row_bytes, max_logits_bytes):
        logits = indexer_logits(
            q[rows],
            k,
            None if weights is None else weights[rows],
            starts[rows],
            ends[rows],
            q_scale=None if q_scale is None else q_scale[rows],
            k_scale=k_scale,
            use_relu=use_relu,
            clean_logits=False,
            backend=backend,
        )
        chosen = select(logits, topk, starts[rows], ends[rows], row_offset=rows.start)
        _check_chosen(op, chosen, [rows.stop - rows.start, topk], q.device)
        picks[rows] = chosen
        del logits  # or the scores of two chunks would be held
    return picks


def indexer_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    *,
    use_relu: bool = True,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Indexer scores at given picks: float32 [S, K] (float64 for float64 inputs), gradients to q, k and weights.

    Args:
        q: queries [S, H, D], floating.
        k: keys [N, D], floating.
        weights: head weights [S, H], or None for weights of one.
        indices: int32 [S, K] rows of k; below 0 or from N on means no pick: score -inf, no gradient. A row listed twice
            counts twice.
        use_relu: False leaves the ReLU out. The gradient of the ReLU at exactly 0 is 0.
        deterministic: True makes the gradient of k bitwise repeatable, for more time and up to 2 GiB; everything else
            always is. None follows `torch.use_deterministic_algorithms`. In either mode Hopper forms the gradients of
            neighbouring rows in pairs: a NaN or an infinity in the operands of one row can reach those of the other.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "indexer_scores"
    sizes = _check_qk(op, q, k, weights, indices=(indices, "S K"))
    _checks.floating(op, q=q, k=k)
    _checks.int32(op, indices=indices)
    _checks.picks(op, sizes["N"], indices)
    reason = config.unsupported(q, k)
    if weights is not None and weights.dtype == torch.float64:
        reason = reason or "weights in float64"
    if resolve(op, backend, (q, k, weights, indices), reason) == "triton":
        from vime_kernels.ops.indexer import triton_scores

        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        w = None if weights is None else weights.contiguous()
        return triton_scores.indexer_scores(q, k, w, indices.contiguous(), use_relu, deterministic)
    acc = _checks.accum_dtype(q, k, weights)
    # Cast before the gather: the scatter of the backward pass then accumulates in float32 and rounds once.
    queries, keys, w = q.to(acc), k.to(acc), None if weights is None else weights.to(acc)

    def rows_at(rows: slice) -> tuple[torch.Tensor]:
        w_rows = None if w is None else w[rows]
        return (reference.logits_at(queries[rows], keys, w_rows, indices[rows], use_relu=use_relu),)

    row_bytes = sizes["K"] * (2 * sizes["D"] + 3 * sizes["H"]) * acc.itemsize
    return map_rows(rows_at, sizes["S"], row_bytes)[0]


def lightning_indexer(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    topk: int,
    *,
    topk_fn: TopKFn | None = None,
    indices: torch.Tensor | None = None,
    use_relu: bool = True,
    deterministic: bool | None = None,
    max_logits_bytes: int = 2**30,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select and score: (scores float32 [S, topk] with gradients, indices int32 [S, topk]).

    Args:
        q, k, weights, starts, ends, topk, topk_fn, use_relu, max_logits_bytes: as for `indexer_topk`.
        indices: int32 [S, topk], picks made elsewhere (a recorded rollout). Nothing is selected then; they are scored
            as they are and returned. VIME_KERNELS_DEBUG=1 refuses picks outside of their row's range.
        deterministic: as for `indexer_scores`.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    op = "lightning_indexer"
    _checks.positive(op, topk=topk)
    _check_qk(op, q, k, weights, starts=(starts, "S"), ends=(ends, "S"), indices=(indices, f"? S {topk}"))
    _checks.floating(op, q=q, k=k)  # fp8 has no gradient
    _checks.int32(op, starts=starts, ends=ends, indices=indices)
    _checks.picks(op, len(k), indices, (starts, ends))
    if indices is None:
        indices = indexer_topk(
            q,
            k,
            weights,
            starts,
            ends,
            topk,
            topk_fn=topk_fn,
            use_relu=use_relu,
            max_logits_bytes=max_logits_bytes,
            backend=backend,
        )
    scores = indexer_scores(
        q, k, weights, indices, use_relu=use_relu, deterministic=deterministic, backend=backend
    )
    return scores, indices


def _check_qk(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    **others: tuple[torch.Tensor | None, str],
) -> dict[str, int]:
    sizes = _checks.sizes(op, q=(q, "S H D"), k=(k, "N D"), weights=(weights, "? S H"), **others)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dtype not in FP8:
            _checks.floating(op, **{name: tensor})
    _checks.floating(op, weights=weights)
    _checks.rows_contiguous(op, q=q, k=k)
    return sizes


def _check_ranged(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    **others: tuple[torch.Tensor | None, str],
) -> dict[str, int]:
    scales = {"q_scale": (q_scale, "? S H"), "k_scale": (k_scale, "? N")}
    sizes = _check_qk(op, q, k, weights, starts=(starts, "S"), ends=(ends, "S"), **scales, **others)
    if (q.dtype in FP8) != (k.dtype in FP8):
        _checks.fail(op, f"q and k both in {FP8[0]} or neither", f"{q.dtype} and {k.dtype}", kind=TypeError)
    _checks.floating(op, q_scale=q_scale, k_scale=k_scale)
    _checks.int32(op, starts=starts, ends=ends)
    return sizes


def _check_chosen(op: str, chosen: torch.Tensor, shape: list[int], device: torch.device) -> None:
    """What a `topk_fn` returned."""
    got = type(chosen).__name__
    if isinstance(chosen, torch.Tensor):
        if chosen.dtype == torch.int32 and list(chosen.shape) == shape and chosen.device == device:
            return
        got = f"{chosen.dtype} {list(chosen.shape)} on {chosen.device}"
    _checks.fail(op, f"topk_fn to return torch.int32 {shape} on {device}", got)
