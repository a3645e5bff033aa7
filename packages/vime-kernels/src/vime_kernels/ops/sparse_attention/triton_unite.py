# SPDX-License-Identifier: Apache-2.0
"""Unites the key lists of neighbouring query rows: what lets a program serve several rows of few heads (`gluon_few`).

Neighbours see most of the same window and pick mostly the same rows. A group's list names each key once, as a word:
its row in the two buffers laid end to end, and in the eight bits above it which rows of the group have the key; -1 is
no key. Picks are united where every list of the group ascends and names a key once, as `indexer_topk` returns them;
other lists are put one behind the other, which is right too, and as slow as before.
"""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.sparse_attention.sources import Sources

ROW_BITS = tl.constexpr(23)
NO_KEY = tl.constexpr(2147483647)
BLOCK = tl.constexpr(512)  # slots of a list at a time
SPAN = tl.constexpr(128)  # the same of a range


@triton.jit
def write_ranges(words, starts, ends, first, S, n, shift, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of G ranges of rows; returns how many. Ranges that lie far apart follow each other."""
    g = tl.arange(0, G)
    live = first + g < S
    start = tl.minimum(tl.maximum(tl.load(starts + first + g, mask=live, other=0), 0), n)
    end = tl.minimum(tl.load(ends + first + g, mask=live, other=0), n)
    length = tl.maximum(end - start, 0)
    total = tl.sum(length, 0)
    low = tl.min(tl.where(length > 0, start, n), 0)
    span = tl.maximum(tl.max(tl.where(length > 0, end, 0), 0) - low, 0)
    apart = span > total
    behind = tl.cumsum(length, 0) - length
    count = tl.where(apart, total, span)
    for at in range(0, count, SPAN):
        slot = at + tl.arange(0, SPAN)
        key = tl.where(apart, start[None, :] + slot[:, None] - behind[None, :], low + slot[:, None])
        has = (key >= start[None, :]) & (key < end[None, :])
        bits = tl.sum(has.to(tl.int32) << g[None, :], 1)
        row = tl.max(tl.where(has, key, 0), 1) + shift
        tl.store(words + slot, tl.where(bits != 0, row | bits << ROW_BITS, -1), mask=slot < count)
    return count


@triton.jit
def used_of(lengths, row, S, K, HAS_LENGTHS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Slots of a query row's list; none of a row behind the last."""
    used = K
    if HAS_LENGTHS:
        used = tl.minimum(tl.load(lengths + row, mask=row < S, other=0), K)
    return tl.where(row < S, used, 0)


@triton.jit
def load_picks(picks, slot, used, n):  # type: ignore[no-untyped-def]
    """Picked rows of some slots; an empty slot is above all of them."""
    pick = tl.load(picks + slot, mask=slot < used, other=-1)
    return tl.where((pick >= 0) & (pick < n), pick, NO_KEY)


@triton.jit
def names(picks, used, key, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which keys an ascending list names. As unsigned numbers empty slots are above every key without a test."""
    at = tl.zeros_like(key)
    for step in tl.static_range(STEPS):
        beyond = at + (1 << (STEPS - 1 - step))
        pick = tl.load(picks + beyond - 1, mask=beyond <= used, other=-1)
        at = tl.where(pick.to(tl.uint32, bitcast=True) < key.to(tl.uint32, bitcast=True), beyond, at)
    return tl.load(picks + at, mask=at < used, other=-1) == key


@triton.jit
def write_picks(  # type: ignore[no-untyped-def]
    words, indices, lengths, first, S, n, K, stride_is, shift,
    G: tl.constexpr, STEPS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Words of G lists of picks, each key where the first row names it; returns how many."""
    lane = tl.arange(0, BLOCK)
    unordered = 0
    for g in range(G):
        used = used_of(lengths, first + g, S, K, HAS_LENGTHS)
        picks = indices + (first + g) * stride_is
        for at in range(0, used, BLOCK):
            key = load_picks(picks, at + lane, used, n)
            after = load_picks(picks, at + lane + 1, used, n)
            unordered |= tl.max(((key >= after) & (after != NO_KEY)).to(tl.int32), 0)
    count = 0
    for g in range(G):
        used = used_of(lengths, first + g, S, K, HAS_LENGTHS)
        picks = indices + (first + g) * stride_is
        for at in range(0, used, BLOCK):
            key = load_picks(picks, at + lane, used, n)
            bits = tl.full([BLOCK], 1, tl.int32) << g
            if unordered == 0:
                for bit in tl.static_range(1, G):
                    other = g ^ bit
                    others = used_of(lengths, first + other, S, K, HAS_LENGTHS)
                    found = names(indices + (first + other) * stride_is, others, key, STEPS)
                    bits |= found.to(tl.int32) << other
            head = ((key != NO_KEY) & ((bits & ((1 << g) - 1)) == 0)).to(tl.int32)
            place = count + tl.cumsum(head, 0) - 1
            tl.store(words + place, key + shift | bits << ROW_BITS, mask=head != 0)
            count += tl.sum(head, 0)
    return count


@triton.jit(do_not_specialize=["S", "n_a", "n_b"])
def unite_kernel(  # type: ignore[no-untyped-def]
    starts_a, ends_a, starts_b, ends_b, indices, lengths, words, counts,
    S, n_a, n_b, K, stride_is, slots,
    G: tl.constexpr, STEPS: tl.constexpr,
    HAS_A: tl.constexpr, KIND_B: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """The united list of one group of query rows."""
    group = tl.program_id(0).to(tl.int64)
    words += group * slots
    count = 0
    if HAS_A:
        count = write_ranges(words, starts_a, ends_a, group * G, S, n_a, 0, G)
    if KIND_B == "range":
        count += write_ranges(words + count, starts_b, ends_b, group * G, S, n_b, n_a, G)
    elif KIND_B == "picks":
        count += write_picks(
            words + count, indices, lengths, group * G, S, n_b, K, stride_is, n_a, G, STEPS, HAS_LENGTHS
        )
    tl.store(counts + group, count)


def words_of(sources: Sources, group: int) -> int:
    """Upper bound of a united list's length."""
    n_a, n_b = (0 if kv is None else len(kv) for kv in (sources.kv_a, sources.kv_b))
    # Ranges follow each other only where that is shorter than what they span together.
    slots_b = n_b if sources.indices is None else group * sources.indices.shape[1]
    return min(group * sources.width_a, n_a) + slots_b


def unite(sources: Sources, S: int, H: int, group: int) -> Sources:
    """The lists of every `group` rows of `sources` as one: `indices` holds words, `lengths` their number."""
    some = sources.kv_a if sources.kv_a is not None else sources.kv_b
    assert some is not None
    args = sources.kernel_arguments(some)
    _, _, starts_a, ends_a, starts_b, ends_b, indices, lengths = args.tensors
    words = some.new_empty((-(-S // group), words_of(sources, group)), dtype=torch.int32)
    counts = some.new_empty(len(words), dtype=torch.int32)
    if len(words):
        unite_kernel[(len(words),)](
            starts_a, ends_a, starts_b, ends_b, indices, lengths, words, counts,
            S, args.n_a, args.n_b, args.K, args.stride_is, words.shape[1],
            G=group, STEPS=args.K.bit_length(), HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths,
            num_warps=4,
        )  # fmt: skip
    return Sources(sources.kv_a, kv_b=sources.kv_b, indices=words, lengths=counts, heads=H)
