# SPDX-License-Identifier: Apache-2.0
"""Gradients of the indexer's scores for Hopper: two query rows at a time, and dk in a warpgroup of its own.

    A[c, j] = g[j] w[c] 1[x[c, j] > 0],   dq = A k,   dw[c] = Σ_j g[j] relu(x[c, j]),   dk[index j] += Aᵀ q

with c over the heads of both rows, and j over the keys that either of them picked (`triton_pairs`). Neighbouring rows
pick many keys in common; such a key is gathered once and its gradient is added once. Programs are persistent and have
three roles. A producer gathers tiles of keys, and their lists well before them: loads queue behind atomics. Consumers
form x, A, dq and dw of 64 heads each: one of the two rows, or both where they have 32 heads. The last warpgroup forms
Aᵀ q and adds it with float32 atomics, whole lines of 128 bytes at a time. Their order is not fixed; in deterministic
mode rows of q's dtype go to places of their own instead, and are added up in order as in `triton_scores`. A NaN in one
row's operands reaches the row paired with it. Takes what `config.hopper_scores` admits.

Sources: warp roles as in FlashAttention-3 (arXiv 2407.08608); pairs of rows as in cuDNN's sparse attention.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vime_kernels._ordered_sum import add_segments, order
from vime_kernels.ops.indexer import config
from vime_kernels.ops.indexer.gluon_bwd_roles import DIM, RING, STAGES, TILE, UNIT, add_keys, consume, produce
from vime_kernels.ops.indexer.triton_pairs import pair_lists

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit(do_not_specialize=["S", "pairs"])
def scores_bwd_kernel(  # type: ignore[no-untyped-def]
    q, k, weights, keys, grads, place, counts, dq, dk, dweights, S, K, pairs, q_row, q_head, k_row, weights_row,
    HAS_WEIGHTS: gl.constexpr, RELU: gl.constexpr, ORDERED: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers of one program, then its roles. dk as in `triton_scores`."""
    dtype: gl.constexpr = q.dtype.element_ty
    COLS: gl.constexpr = 2 * HEADS
    CONSUMERS: gl.constexpr = COLS // UNIT
    q_s = gl.allocate_shared_memory(dtype, [2, COLS, DIM], SHARED)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], SHARED)
    a_s = gl.allocate_shared_memory(dtype, [2, COLS, TILE], SHARED)
    g_s = gl.allocate_shared_memory(gl.float32, [2 * RING, TILE], FLAT)
    key_s = gl.allocate_shared_memory(gl.int32, [RING, TILE], FLAT)
    place_s = key_s
    if ORDERED:
        place_s = gl.allocate_shared_memory(gl.int32, [RING, TILE], FLAT)
    w_s = gl.allocate_shared_memory(gl.float32, [2, COLS], FLAT)
    count_s = gl.allocate_shared_memory(gl.int32, [2, COLS], FLAT)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    a_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    a_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    list_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], barrier)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=129)  # one of each thread's copies, one of its stores
        mbarrier.init(q_empty.index(i), count=CONSUMERS + 1)
        mbarrier.init(a_full.index(i), count=CONSUMERS)
        mbarrier.init(a_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(RING):
        mbarrier.init(list_empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    bufs = (q_s, k_s, a_s, w_s, count_s, (key_s, g_s, place_s))
    bars = (q_full, q_empty, full, empty, a_full, a_empty, list_empty)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (dq, dweights, S, pairs, bufs, bars, 0, RELU, HEADS)),
                (consume, (dq, dweights, S, pairs, bufs, bars, 1, RELU, HEADS)),
                (add_keys, (dk, pairs, bufs, bars, ORDERED)),
                (produce, (
                    q, k, weights, keys, grads, place, counts, S, K, pairs, q_row, q_head, k_row, weights_row,
                    bufs, bars, HAS_WEIGHTS, ORDERED, HEADS,
                )),
            ],
            [4, 4, 4], [160, 112, 72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (dq, dweights, S, pairs, bufs, bars, 0, RELU, HEADS)),
                (add_keys, (dk, pairs, bufs, bars, ORDERED)),
                (produce, (
                    q, k, weights, keys, grads, place, counts, S, K, pairs, q_row, q_head, k_row, weights_row,
                    bufs, bars, HAS_WEIGHTS, ORDERED, HEADS,
                )),
            ],
            [4, 4], [144, 88],
        )  # fmt: skip


def scores_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    use_relu: bool,
    deterministic: bool,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dweights: torch.Tensor,
) -> None:
    """Writes dq and float32 dweights, and adds to float32 dk. Arguments as in `triton_scores.indexer_scores_bwd`."""
    (S, H, D), K = q.shape, indices.shape[1]
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    per_row, bound = K * 12, config.PAIRS_BYTES
    if deterministic:
        per_row, bound = per_row + K * D * q.element_size(), config.ORDERED_BYTES
    # Chunks of an even number of rows, equally long but for the last, so that none leaves the device idle for long.
    step = 2 * -(-S // (2 * -(-S * per_row // bound)))
    for first in range(0, S, step):
        rows = slice(first, min(first + step, S))
        keys, grads, counts = pair_lists(grad[rows], indices[rows], len(k))
        place, target = keys, dk
        if deterministic:
            slot = torch.arange(2 * K, dtype=torch.int32, device=keys.device)
            place, offsets = order((slot < counts[:, None]) & (keys >= 0), keys, len(k))
            target = torch.empty(keys.numel(), D, dtype=q.dtype, device=q.device)
        scores_bwd_kernel[(min(len(counts), programs),)](
            q[rows], k, q if weights is None else weights[rows], keys, grads, place, counts,
            dq[rows], target, dweights[rows], rows.stop - first, K, len(counts),
            q.stride(0), q.stride(1), k.stride(0), 0 if weights is None else weights.stride(0),
            HAS_WEIGHTS=weights is not None, RELU=use_relu, ORDERED=deterministic, HEADS=H, num_warps=4,
        )  # fmt: skip
        if deterministic:
            add_segments(target, offsets, dk)
