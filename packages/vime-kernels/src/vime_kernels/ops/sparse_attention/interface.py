# SPDX-License-Identifier: Apache-2.0
"""Public sparse attention: checks, dtype rule, chunking and choice of backend around the reference."""

import torch

from vime_kernels import _checks
from vime_kernels._backend import interpreting, resolve
from vime_kernels._rows import map_rows
from vime_kernels.ops.indexer.ranges import sequence_of
from vime_kernels.ops.sparse_attention import config, reference
from vime_kernels.ops.sparse_attention.sources import Sources

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    *,
    d_v: int | None = None,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Output:
    """Attention of every query over its own list of rows: [S, H, d_v] in the dtype of q, or (out, lse).

        s[h, j] = sm_scale · <q[h], kv[indices[j]]>
        out[h]  = Σ_j e^{s[h, j]} kv[indices[j], :d_v] / (Σ_j e^{s[h, j]} + e^{attn_sink[h]})

    One latent row is key and value at once, shared by all heads. A row listed twice counts twice. A query without a
    valid slot gives 0, lse -inf and no gradient. Sums are in float32 (float64 for float64 inputs).

    Args:
        q: queries [S, H, D].
        kv: latent rows [N, D].
        indices: int32 [S, K]; below 0 or from N on means no row, anywhere in the list. Such slots are never read.
        sm_scale: Python float, multiplies the scores and not the sink.
        d_v: width of the value, the first d_v channels of kv; None for all of them.
        attn_sink: float32 [H], a score without a value, already scaled; None or -inf for no sink.
        topk_length: int32 [S]; slots from there on are ignored. None for all K.
        return_lse: also return float32 [S, H] (float64 for float64 inputs) log Σ_j e^{s[h, j]}: natural logarithm,
            without the sink.
        deterministic: True asks for a bitwise repeatable gradient of kv and for rows whose bits do not depend on
            their neighbours, False allows atomics and shared programs, None follows
            `torch.are_deterministic_algorithms_enabled`. A program that rows share, up to eight neighbours with at most
            32 heads on Hopper, also carries a NaN or an infinity in the operands of one of them to the others. The
            torch backend has nothing to choose: on the CPU it always repeats bitwise, on CUDA torch's own setting
            decides.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: DeepSeek-V3.2 (arXiv 2512.02556); the list contract of FlashMLA; the lse contract of cuDNN.
    """
    op = "sparse_attention"
    sizes = _checks.sizes(
        op,
        q=(q, "S H D"),
        kv=(kv, "N D"),
        indices=(indices, "S K"),
        attn_sink=(attn_sink, "? H"),
        topk_length=(topk_length, "? S"),
    )
    _checks.floating(op, q=q, kv=kv)
    _checks.rows_contiguous(op, q=q, kv=kv)
    _checks.int32(op, indices=indices, topk_length=topk_length)
    _checks.picks(op, sizes["N"], indices)
    _checks.python_float(op, sm_scale=sm_scale)
    _checks.full_precision(op, attn_sink=attn_sink)
    if d_v is None:
        d_v = sizes["D"]
    elif not isinstance(d_v, int) or not 0 < d_v <= sizes["D"]:
        _checks.fail(op, f"d_v to be an int from 1 to q.shape[-1] ({sizes['D']})", repr(d_v))
    reason = _unsupported(sizes, d_v, q.dtype, kv.dtype, attn_sink)
    if resolve(op, backend, (q, kv, indices, attn_sink, topk_length), reason) == "triton":
        sources = Sources(kv_b=kv, indices=_packed(indices), lengths=_packed(topk_length))
        return _fast(q, sources, attn_sink, sm_scale, d_v, deterministic, return_lse)
    return _attend(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, return_lse)


def sparse_attention_v4(
    q: torch.Tensor,
    kv_window: torch.Tensor,
    kv_compressed: torch.Tensor | None,
    sm_scale: float,
    attn_sink: torch.Tensor | None,
    *,
    indices: torch.Tensor | None = None,
    cmp_ranges: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int = 128,
    cu_seqlens: torch.Tensor | None = None,
    q_positions: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Output:
    """DeepSeek-V4 attention, one softmax over a causal window and compressed rows: [S, H, D], or (out, lse).

    A query at packed row t of a sequence that starts at c sees the raw rows max(c, t - window + 1) … t, and of the
    compressed rows those in `indices` (compressed sparse attention), those in `cmp_ranges` (heavily compressed
    attention), or none. Equal to `sparse_attention` on the concatenation of both buffers with the united list.

    Args:
        q: queries [S, H, D].
        kv_window: raw latent rows [N, D], key and value at once.
        kv_compressed: compressed latent rows [M, D]; None exactly when neither indices nor cmp_ranges is given.
        sm_scale: Python float, multiplies the scores and not the sink.
        attn_sink: float32 [H], a score without a value, already scaled; None for no sink.
        indices: int32 [S, K] rows of kv_compressed, without offset; below 0 or from M on means none.
        cmp_ranges: (starts, ends), int32 [S] each: all compressed rows in [starts, ends). Not together with indices.
        window: raw rows that a query sees, its own included; any large number for all of them.
        cu_seqlens: int32 [B + 1] over the rows of kv_window; None for one sequence. Rows from cu_seqlens[-1] on
            belong to no sequence and see no window.
        q_positions: int32 [S], row of kv_window that each query stands on; None when S == N and they are in order.
        return_lse: also return [S, H], natural logarithm, without the sink, as `sparse_attention` does.
        deterministic: as for `sparse_attention`, for the gradients of both buffers.
        backend: see `vime_kernels.set_backend`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Source: DeepSeek-V4 release.
    """
    op = "sparse_attention_v4"
    starts, ends = _checks.pair(op, "cmp_ranges", cmp_ranges)
    ranges = {"cmp_ranges[0]": starts, "cmp_ranges[1]": ends}  # named as the caller knows them
    sizes = _checks.sizes(
        op,
        q=(q, "S H D"),
        kv_window=(kv_window, "N D"),
        kv_compressed=(kv_compressed, "? M D"),
        attn_sink=(attn_sink, "? H"),
        indices=(indices, "? S K"),
        cu_seqlens=(cu_seqlens, "? B+1"),
        q_positions=(q_positions, "? S"),
        **{name: (each, "? S") for name, each in ranges.items()},
    )
    S, N, M = sizes["S"], sizes["N"], sizes.get("M", 0)
    _checks.floating(op, q=q, kv_window=kv_window, kv_compressed=kv_compressed)
    _checks.rows_contiguous(op, q=q, kv_window=kv_window, kv_compressed=kv_compressed)
    _checks.int32(op, indices=indices, q_positions=q_positions, **ranges)
    _checks.python_float(op, sm_scale=sm_scale)
    _checks.full_precision(op, attn_sink=attn_sink)
    _checks.positive(op, window=window)
    if cu_seqlens is not None:
        _checks.cu_seqlens(op, cu_seqlens, N)
    if indices is not None and cmp_ranges is not None:
        _checks.fail(op, "either indices or cmp_ranges", "both")
    if kv_compressed is None and (indices is not None or cmp_ranges is not None):
        _checks.fail(op, "kv_compressed with indices or cmp_ranges", None)
    if kv_compressed is not None and indices is None and cmp_ranges is None:
        _checks.fail(
            op, "indices or cmp_ranges with kv_compressed", None, "no query would see a compressed row"
        )
    _checks.picks(op, M, indices)
    if q_positions is None and S != N:
        _checks.fail(
            op,
            f"q.shape[0] == kv_window.shape[0] ({N})",
            S,
            "pass q_positions, the row that each query stands on",
        )
    kv_dtype = (
        kv_window.dtype
        if kv_compressed is None
        else torch.promote_types(kv_window.dtype, kv_compressed.dtype)
    )
    reason = _unsupported(sizes, sizes["D"], q.dtype, kv_dtype, attn_sink)
    tensors = (q, kv_window, kv_compressed, attn_sink, indices, starts, ends, cu_seqlens, q_positions)
    fast = resolve(op, backend, tensors, reason) == "triton"
    window = min(window, max(1, N))  # "no window" may be any large number

    if cu_seqlens is None:
        # Filled on the device: a copy from the host would wait for everything before it.
        cu_seqlens = torch.full((2,), N, dtype=torch.int32, device=q.device)
        cu_seqlens[:1].zero_()
    if q_positions is None:
        q_positions = torch.arange(N, dtype=torch.int32, device=q.device)
    first_S, _, inside_S = sequence_of(cu_seqlens, q_positions)
    if fast:
        lows = torch.maximum(first_S, q_positions - (window - 1)).to(torch.int32)
        sources = Sources(
            kv_window,
            lows,
            torch.where(inside_S, q_positions + 1, lows),
            window,
            kv_compressed,
            indices=_packed(indices),
            starts_b=_packed(starts),
            ends_b=_packed(ends),
        )
        return _fast(q, sources, attn_sink, sm_scale, sizes["D"], deterministic, return_lse)
    slots = reference.window_indices(first_S, q_positions.masked_fill(~inside_S, -1), window)
    compressed = indices
    if starts is not None and ends is not None:
        compressed = reference.range_indices(starts.clamp(0, M), ends.clamp(0, M), M)
    if compressed is not None and kv_compressed is not None:
        valid = (compressed >= 0) & (compressed < M)
        slots = torch.cat([slots, torch.where(valid, compressed + N, -1)], 1)
        kv_window = torch.cat([kv_window, kv_compressed])
    return _attend(q, kv_window, slots, sm_scale, sizes["D"], attn_sink, None, return_lse)


def _unsupported(
    sizes: dict[str, int], d_v: int, q: torch.dtype, kv: torch.dtype, attn_sink: torch.Tensor | None
) -> str | None:
    """Why the Triton kernels cannot do this call, in words; None when they can."""
    if attn_sink is not None and attn_sink.dtype == torch.float64:
        return "attn_sink in float64"
    return config.unsupported(sizes["H"], sizes["D"], d_v, q, kv, interpreting())


def _packed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _fast(
    q: torch.Tensor,
    sources: Sources,
    attn_sink: torch.Tensor | None,
    sm_scale: float,
    d_v: int,
    deterministic: bool | None,
    return_lse: bool,
) -> Output:
    """The Triton backend, imported by the first call that uses it."""
    from vime_kernels.ops.sparse_attention import triton_op

    out, lse = triton_op.attend(q, sources, attn_sink, sm_scale, d_v, deterministic)
    return (out, lse) if return_lse else out


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    return_lse: bool,
) -> Output:
    """`reference.attend` over chunks of rows, in the accumulation dtype."""
    (S, H, D), N, K = q.shape, len(kv), indices.shape[1]
    acc = _checks.accum_dtype(q, kv, attn_sink)
    valid = (indices >= 0) & (indices < N)
    if topk_length is not None:
        valid &= torch.arange(K, device=q.device, dtype=torch.int32) < topk_length[:, None]
    # Cast before the gather: the scatter of the backward pass then accumulates in float32 and rounds once.
    queries, latents, sink = q.to(acc), kv.to(acc), None if attn_sink is None else attn_sink.to(acc)

    def rows_of(rows: slice) -> tuple[torch.Tensor, ...]:
        out, lse = reference.attend(queries[rows], latents, indices[rows], valid[rows], sm_scale, d_v, sink)
        return out.to(q.dtype), lse

    out, lse = map_rows(rows_of, S, K * (2 * D + 5 * H) * acc.itemsize)
    return (out, lse) if return_lse else out
