# SPDX-License-Identifier: Apache-2.0
"""Gradients of sparse attention in two steps per chunk of query rows, which have no atomics except where asked for.

1. dQ, dsink and a workspace with P and dS: `triton_bwd_query`.
2. dKV from the workspace: `triton_bwd_keys`.

Both P and dS are rounded once, as the second products need them. Leaves out double backward.
"""

import torch

from vime_kernels.ops.sparse_attention import config
from vime_kernels.ops.sparse_attention.sources import Sources
from vime_kernels.ops.sparse_attention.triton_bwd_keys import picks_step, range_step
from vime_kernels.ops.sparse_attention.triton_bwd_query import query_step


def backward(
    q: torch.Tensor,
    sources: Sources,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    *,
    needs_kv: bool = True,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dq in the dtype of q; dkv_a and dkv_b in float32; dsink in float32; None for what is absent or not needed."""
    S, H, d_qk = q.shape
    d_v = out.shape[-1]
    dq = torch.empty((S, H, d_qk), dtype=q.dtype, device=q.device)
    dsink_SH = torch.zeros((S, H), dtype=torch.float32, device=q.device) if sink is not None else None
    dkv_a = _zeros(sources.kv_a) if needs_kv else None
    dkv_b = _zeros(sources.kv_b) if needs_kv else None
    if S and H:
        tiles = config.backward_tiles(H, d_v, d_qk - d_v)
        BK = tiles.query.BK
        slots_a = -(-sources.width_a // BK) * BK
        slots = slots_a + sources.slots_b
        step = _chunk_rows(S, H, slots, sources, q.element_size(), deterministic)
        step = step if needs_kv else S
        shape = (step, slots, H) if needs_kv else (1,)
        p_ws = torch.empty(shape, dtype=q.dtype, device=q.device)
        ds_ws = torch.empty(shape, dtype=q.dtype, device=q.device)
        for first in range(0, S, step):
            rows = slice(first, min(first + step, S))
            part = sources.rows(rows)
            query_step(
                q[rows], part, sink, out[rows], lse[rows], do[rows], None if dlse is None else dlse[rows],
                dq[rows], None if dsink_SH is None else dsink_SH[rows], p_ws, ds_ws, slots_a, slots, scale, needs_kv,
                tiles.query,
            )  # fmt: skip
            if dkv_a is not None and part.starts_a is not None and part.ends_a is not None:
                band = (part.starts_a, part.ends_a)
                range_step(q[rows], do[rows], band, p_ws, ds_ws, dkv_a, 0, slots, tiles.band)
            if dkv_b is not None and part.indices is not None:
                picks_step(
                    q[rows], do[rows], part, p_ws, ds_ws, dkv_b, slots_a, slots, d_v, deterministic, tiles
                )
            elif dkv_b is not None and part.starts_b is not None and part.ends_b is not None:
                band = (part.starts_b, part.ends_b)
                range_step(q[rows], do[rows], band, p_ws, ds_ws, dkv_b, slots_a, slots, tiles.band)
    return dq, dkv_a, dkv_b, None if dsink_SH is None else dsink_SH.sum(0)


def _chunk_rows(S: int, H: int, slots: int, sources: Sources, itemsize: int, deterministic: bool) -> int:
    """Query rows per chunk, so that P and dS, and the ordered rows of deterministic mode, stay within 2 GiB."""
    row = 2 * slots * H * itemsize
    if deterministic and sources.indices is not None and sources.kv_b is not None:
        row += sources.indices.shape[1] * sources.kv_b.shape[1] * itemsize
    return min(S, max(1, 2**31 // max(1, row)))


def _zeros(kv: torch.Tensor | None) -> torch.Tensor | None:
    return None if kv is None else torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
