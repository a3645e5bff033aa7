# SPDX-License-Identifier: Apache-2.0
"""The picks of two neighbouring query rows as one list, so that a key that both picked is gathered and added once.

Two lists that ascend, their empty slots last, are merged; other lists, which may name a key twice, are written one
behind the other. Either way every slot that names a key is in the result exactly once.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _keys(indices, first, N, K, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of the slots from `first` on; N for a slot that names none."""
    slot = first + tl.arange(0, BLOCK)
    key = tl.load(indices + slot, mask=(slot >= 0) & (slot < K), other=-1)
    return tl.where((key >= 0) & (key < N), key, N)


@triton.jit
def _ascends(indices, N, K, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(whether every key is above the one before, number of keys)."""
    wrong = 0
    count = 0
    for first in range(0, K, BLOCK):
        key = _keys(indices, first, N, K, BLOCK)
        before = _keys(indices, first - 1, N, K, BLOCK)
        before = tl.where(first + tl.arange(0, BLOCK) == 0, -1, before)
        wrong += tl.sum(tl.where((key <= before) & (key < N), 1, 0))
        count += tl.sum(tl.where(key < N, 1, 0))
    return wrong == 0, count


@triton.jit
def _place(key, first, indices, common, count, N, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a block of keys of one list goes: (places in the merged list, slots of the same keys in the other list,
    which of them exist, number of keys in both lists so far)."""
    low = tl.zeros([BLOCK], tl.int32)
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        less = tl.load(indices + middle, mask=open_, other=0) < key
        low = tl.where(open_ & less, middle + 1, low)
        high = tl.where(open_ & ~less, middle, high)
    same = (key < N) & (low < count)
    same = same & (tl.load(indices + low, mask=same, other=-1) == key)
    shared = same.to(tl.int32)
    place = first + tl.arange(0, BLOCK) + low - (common + tl.cumsum(shared) - shared)
    return place, low, same, common + tl.sum(shared)


@triton.jit(do_not_specialize=["S", "N"])
def _pairs_kernel(  # type: ignore[no-untyped-def]
    grad, indices, keys, grads, counts, S, N, K, indices_row,
    BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    indices_a = indices + 2 * pair * indices_row
    indices_b = indices_a + indices_row
    grad_a = grad + 2 * pair * K
    grad_b = grad_a + K
    keys += pair * 2 * K
    grads_a = grads + pair * 4 * K
    grads_b = grads_a + 2 * K
    K_b = tl.where(2 * pair + 1 < S, K, 0)
    ascends_a, count_a = _ascends(indices_a, N, K, BLOCK)
    ascends_b, count_b = _ascends(indices_b, N, K_b, BLOCK)
    merge = ascends_a & ascends_b
    common = 0
    for first in range(0, K, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        key = _keys(indices_a, first, N, K, BLOCK)
        place, other, same, common = _place(
            key, first, indices_b, common, tl.where(merge, count_b, 0), N, BLOCK, STEPS
        )
        live = (slot < K) & ((key < N) | ~merge)
        tl.store(keys + place, tl.where(key < N, key, -1), mask=live)
        tl.store(grads_a + place, tl.load(grad_a + slot, mask=live & (key < N), other=0.0), mask=live)
        tl.store(grads_b + place, tl.load(grad_b + other, mask=same, other=0.0), mask=live)
    total = common
    common = 0
    for first in range(0, K_b, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        key = _keys(indices_b, first, N, K_b, BLOCK)
        place, _, same, common = _place(
            key, first, indices_a, common, tl.where(merge, count_a, 0), N, BLOCK, STEPS
        )
        place += tl.where(merge, 0, K)
        live = (slot < K_b) & ((key < N) | ~merge) & ~same
        tl.store(keys + place, tl.where(key < N, key, -1), mask=live)
        tl.store(grads_a + place, tl.zeros([BLOCK], tl.float32), mask=live)
        tl.store(grads_b + place, tl.load(grad_b + slot, mask=live & (key < N), other=0.0), mask=live)
    tl.store(counts + pair, tl.where(merge, count_a + count_b - total, K + K_b))


def pair_lists(
    grad: torch.Tensor, indices: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lists of rows 2 p and 2 p + 1: keys int32 [P, 2 K] (below 0: none), grads float32 [P, 2, 2 K], counts int32 [P].

    Nothing is written behind a pair's count.

    Args:
        grad: float32 [S, K], contiguous; of a slot without a key it is not read.
        indices: int32 [S, K]; last dimension contiguous.
        n: number of keys.
    """
    S, K = indices.shape
    pairs = -(-S // 2)
    keys = torch.empty(pairs, 2 * K, dtype=torch.int32, device=indices.device)
    grads = torch.empty(pairs, 2, 2 * K, dtype=torch.float32, device=indices.device)
    counts = torch.empty(pairs, dtype=torch.int32, device=indices.device)
    block = min(1024, max(16, triton.next_power_of_2(K)))
    _pairs_kernel[(pairs,)](
        grad, indices, keys, grads, counts, S, n, K, indices.stride(0),
        BLOCK=block, STEPS=K.bit_length(), num_warps=max(4, block // 128),
    )  # fmt: skip
    return keys, grads, counts
