# SPDX-License-Identifier: Apache-2.0
"""Where each slot's row of dKV stands among all of them, sorted by key: what the repeatable Hopper backward stores by.

A rank is a slot's place in that order. Slots are those of the backward's tiles: the band's first, filled up to whole
tiles, then those of the other source.
"""

import torch
import triton
import triton.language as tl

from vime_kernels._ordered_sum import key_dtype, order_keys
from vime_kernels.ops.sparse_attention.sources import Sources

TILE = 64  # slots; `gluon_tiles.BK`


@triton.jit(do_not_specialize=["n_a", "n_b"])
def keys_kernel(  # type: ignore[no-untyped-def]
    starts_a, ends_a, starts_b, ends_b, indices, lengths, keys, n_a, n_b, K, stride_is, slots,
    HAS_A: tl.constexpr, KIND_B: tl.constexpr, HAS_LENGTHS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key of every slot of one query row, among both buffers laid end to end; n_a + n_b is none."""
    row = tl.program_id(0).to(tl.int64)
    start_a, count_a, start_b, count_b = 0, 0, 0, 0
    if HAS_A:
        start_a = tl.minimum(tl.maximum(tl.load(starts_a + row), 0), n_a)
        count_a = tl.maximum(tl.minimum(tl.load(ends_a + row), n_a) - start_a, 0)
    if KIND_B == "range":
        start_b = tl.minimum(tl.maximum(tl.load(starts_b + row), 0), n_b)
        count_b = tl.maximum(tl.minimum(tl.load(ends_b + row), n_b) - start_b, 0)
    elif KIND_B == "picks":
        count_b = K
        if HAS_LENGTHS:
            count_b = tl.minimum(tl.load(lengths + row), K)
    first_b = tl.cdiv(count_a, TILE) * TILE
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        valid = (slot >= first_b) & (slot < first_b + count_b)
        key = start_b + slot - first_b
        if KIND_B == "picks":
            key = tl.load(indices + row * stride_is + slot - first_b, mask=valid, other=-1)
            valid = (key >= 0) & (key < n_b)
        in_a = slot < count_a
        key = tl.where(in_a, start_a + slot, tl.where(valid, n_a + key, n_a + n_b))
        tl.store(keys + row * slots + slot, key.to(keys.dtype.element_ty), mask=slot < slots)


def ranks(sources: Sources, S: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank of every slot, int32 [S, slots], -1 for no key; and of each key's first, int32 [n_a + n_b + 1]."""
    some = sources.kv_a if sources.kv_a is not None else sources.kv_b
    assert some is not None
    args = sources.kernel_arguments(some)
    _, _, starts_a, ends_a, starts_b, ends_b, indices, lengths = args.tensors
    n = args.n_a + args.n_b
    slots = sum(triton.cdiv(width, TILE) * TILE for width in (sources.width_a, sources.slots_b))
    keys = some.new_empty((S, slots), dtype=key_dtype(n))
    if keys.numel():
        keys_kernel[(S,)](
            starts_a, ends_a, starts_b, ends_b, indices, lengths, keys,
            args.n_a, args.n_b, args.K, args.stride_is, slots,
            HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths, TILE=TILE, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    rank, offsets = order_keys(keys.flatten(), n)
    return rank.view(S, slots), offsets
