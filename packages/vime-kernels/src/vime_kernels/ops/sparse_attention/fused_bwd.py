# SPDX-License-Identifier: Apache-2.0
"""Gradients of sparse attention from one Hopper kernel: chunks of query rows, and what becomes of dKV.

By default the kernel adds dKV with float32 atomics, in no fixed order. In deterministic mode it stores a row for every
slot and block of 64 heads, rounded to the dtype of q, at the slot's rank among all slots sorted by key
(`triton_ranks`), and `add_segments` sums each key's rows in that order. Leaves a backward without gradients of the
keys to `gluon_bwd`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from vime_kernels._ordered_sum import add_segments
from vime_kernels.ops.sparse_attention.sources import Sources
from vime_kernels.ops.sparse_attention.triton_places import in_order, used_lengths
from vime_kernels.ops.sparse_attention.triton_ranks import ranks

# Of the rows of slots in deterministic mode.
WORKSPACE_BYTES = 2**31


def backward(
    launch: Callable[..., None],
    q: torch.Tensor,
    sources: Sources,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    *,
    deterministic: bool = False,
    lists: Callable[[slice], Sources] | None = None,
    step: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """As `triton_bwd.backward`, with the gradients of kv in its dtype.

    Args:
        launch: of the kernel for the width of q.
        lists: the keys of a slice of the query rows; those of `sources` by default.
        step: query rows at a time; all by default, or what deterministic mode's workspace allows.
    """
    S, H, D = q.shape
    n_a, n_b = (0 if kv is None else len(kv) for kv in (sources.kv_a, sources.kv_b))
    lists = lists or sources.rows
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dsink_SH = torch.empty((S, H), dtype=torch.float32, device=q.device) if sink is not None else None
    rank, ordered, head_blocks = None, None, -(-H // 64)
    step = step or max(1, S)
    if deterministic and S and H:
        slot_rows = (sources.width_a + sources.slots_b) * head_blocks
        step = _whole_waves(
            S, head_blocks, WORKSPACE_BYTES // max(1, slot_rows * D * q.element_size()), q.device
        )
        ordered = torch.empty((step * slot_rows, D), dtype=q.dtype, device=q.device)
    # A tile's slots without a key have rows behind the last; behind those, 16 bytes for every chunk's counter.
    spare = 64 + -(-4 * -(-S // step) // D)
    dkv = torch.zeros((n_a + n_b + spare, D), dtype=torch.float32, device=q.device)
    counters = dkv[n_a + n_b + 64 :].view(torch.int32).view(-1, 4)
    for first in range(0, S if H else 0, step):
        rows = slice(first, min(first + step, S))
        part = lists(rows)
        if part.indices is not None and not part.heads:
            part = replace(part, lengths=used_lengths(part.indices, part.lengths, n_b))
        if deterministic:
            rank, offsets = ranks(part, rows.stop - first)
        launch(
            q[rows], part, sink, out[rows], lse[rows], do[rows], None if dlse is None else dlse[rows],
            dq[rows], None if dsink_SH is None else dsink_SH[rows],
            dkv if ordered is None else ordered, rank, counters[first // step], scale,
        )  # fmt: skip
        if ordered is not None:
            add_segments(ordered, offsets, dkv[: n_a + n_b], per_slot=head_blocks)
    run = 8 if deterministic else 4
    return (
        dq,
        in_order(dkv[:n_a], sources.kv_a, run),
        in_order(dkv[n_a : n_a + n_b], sources.kv_b, run),
        None if dsink_SH is None else dsink_SH.sum(0),
    )


def _whole_waves(S: int, head_blocks: int, most: int, device: torch.device) -> int:
    """Query rows a chunk: at most `most`, and where that is a choice, as many as keep every multiprocessor busy."""
    wave = -(-torch.cuda.get_device_properties(device).multi_processor_count // head_blocks)
    step = max(1, min(S, most))
    return step if step in (S, step % wave) else step - step % wave
