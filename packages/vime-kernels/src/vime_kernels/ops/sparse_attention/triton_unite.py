# SPDX-License-Identifier: Apache-2.0
"""Unites the key lists of neighbouring query rows: what lets a program serve several rows of few heads (`gluon_few`).

Neighbours see most of the same window and pick mostly the same rows. A group's list names each key once, as a word:
its row in the two buffers laid end to end, and in the eight bits above it which rows of the group have the key. A
query row that names a key twice gets two words for it. Picks are merged where every list of the group ascends, as
`indexer_topk` returns them; other lists are put one behind the other, which is right too, and as slow as before.
"""

import torch
import triton
import triton.language as tl

from vime_kernels.ops.sparse_attention.sources import Sources

ROW_BITS = tl.constexpr(23)
NO_KEY = tl.constexpr(2147483647)
BLOCK = tl.constexpr(128)


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
    for at in range(0, count, BLOCK):
        slot = at + tl.arange(0, BLOCK)
        key = tl.where(apart, start[None, :] + slot[:, None] - behind[None, :], low + slot[:, None])
        has = (key >= start[None, :]) & (key < end[None, :])
        bits = tl.sum(has.to(tl.int32) << g[None, :], 1)
        row = tl.max(tl.where(has, key, 0), 1) + shift
        tl.store(words + slot, tl.where(bits != 0, row | bits << ROW_BITS, -1), mask=slot < count)
    return count


@triton.jit
def bit(i, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """0 and 1 along the axis of bit i of a cube of n bits."""
    return tl.reshape(tl.arange(0, 2), [1] * (n - 1 - i) + [2] + [1] * i)


@triton.jit
def exchange(cube, n: tl.constexpr, i: tl.constexpr, run: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of a bitonic merge: neighbours by bit i change places if they are out of order."""
    other = cube ^ tl.xor_sum(cube, n - 1 - i, keep_dims=True)
    upper = bit(i, n)
    if run < n:
        upper = upper ^ bit(run, n)  # every other run descends
    return tl.where((cube > other) != (upper != 0), other, cube)


@triton.jit
def merge(key, LOG_G: tl.constexpr, LOG_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^LOG_G rows of 2^LOG_K keys, by turns ascending and descending, as one ascending row."""
    n: tl.constexpr = LOG_G + LOG_K
    cube = tl.reshape(key, [2] * n)
    for run in tl.static_range(LOG_K + 1, n + 1):
        for step in tl.static_range(run):
            cube = exchange(cube, n, run - 1 - step, run)
    return tl.reshape(cube, key.shape)


@triton.jit
def run_so_far(head, bits, runs, next_head, next_bits, next_runs):  # type: ignore[no-untyped-def]
    """Scan over sorted entries: bits since the last head, and the number of heads."""
    return head | next_head, tl.where(next_head != 0, next_bits, bits | next_bits), runs + next_runs


@triton.jit
def load_keys(row_picks, slot, used, g, n, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Picked row and number in the group as one sortable value."""
    pick = tl.load(row_picks + slot, mask=slot < used, other=-1)
    return tl.where((pick >= 0) & (pick < n), pick * G + g, NO_KEY)


@triton.jit
def write_picks(  # type: ignore[no-untyped-def]
    words, indices, lengths, first, S, n, K, stride_is, shift,
    LOG_G: tl.constexpr, LOG_K: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Words of G lists of picks; returns how many."""
    G: tl.constexpr = 1 << LOG_G
    KP: tl.constexpr = 1 << LOG_K
    e = tl.arange(0, G * KP)
    g = e // KP
    # Every other row is taken backwards, as the merge wants it.
    slot = tl.where(g % 2 == 1, KP - 1 - e % KP, e % KP)
    live = first + g < S
    used = tl.where(live, K, 0)
    if HAS_LENGTHS:
        used = tl.minimum(tl.load(lengths + first + g, mask=live, other=0), K)
    row_picks = indices + (first + g) * stride_is
    key = load_keys(row_picks, slot, used, g, n, G)
    ascending = tl.max((key > load_keys(row_picks, slot + 1, used, g, n, G)).to(tl.int32), 0) == 0
    if ascending:
        key = merge(key, LOG_G, LOG_K)
    before = tl.gather(key, tl.maximum(e - 1, 0), 0)
    # A run is one pick of several rows; the same row again begins another.
    head = ((key // G != before // G) | (key == before)).to(tl.int32)
    counted = head & (key != NO_KEY).to(tl.int32)
    _, bits, runs = tl.associative_scan((head, 1 << key % G, counted), 0, run_so_far)
    last = (tl.gather(head, tl.minimum(e + 1, G * KP - 1), 0) != 0) | (e == G * KP - 1)
    word = key // G + shift | bits << ROW_BITS
    tl.store(words + runs - 1, word, mask=last & (key != NO_KEY))
    return tl.max(runs, 0)


@triton.jit(do_not_specialize=["S", "n_a", "n_b"])
def unite_kernel(  # type: ignore[no-untyped-def]
    starts_a, ends_a, starts_b, ends_b, indices, lengths, words, counts,
    S, n_a, n_b, K, stride_is, slots,
    LOG_G: tl.constexpr, LOG_K: tl.constexpr,
    HAS_A: tl.constexpr, KIND_B: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """The united list of one group of query rows."""
    G: tl.constexpr = 1 << LOG_G
    group = tl.program_id(0).to(tl.int64)
    words += group * slots
    count = 0
    if HAS_A:
        count = write_ranges(words, starts_a, ends_a, group * G, S, n_a, 0, G)
    if KIND_B == "range":
        count += write_ranges(words + count, starts_b, ends_b, group * G, S, n_b, n_a, G)
    elif KIND_B == "picks":
        count += write_picks(
            words + count, indices, lengths, group * G, S, n_b, K, stride_is, n_a, LOG_G, LOG_K, HAS_LENGTHS
        )
    tl.store(counts + group, count)


def unite(sources: Sources, S: int, H: int, group: int) -> Sources:
    """The lists of every `group` rows of `sources` as one: `indices` holds words, `lengths` their number."""
    some = sources.kv_a if sources.kv_a is not None else sources.kv_b
    assert some is not None
    args = sources.kernel_arguments(some)
    _, _, starts_a, ends_a, starts_b, ends_b, indices, lengths = args.tensors
    slots_b = {"none": 0, "picks": group * args.K, "range": group * args.n_b}[args.kind_b]
    words = some.new_empty(
        (-(-S // group), group * sources.width_a * args.has_a + slots_b), dtype=torch.int32
    )
    counts = some.new_empty(len(words), dtype=torch.int32)
    log_g, log_k = group.bit_length() - 1, max(4, (args.K - 1).bit_length())
    if len(words):
        unite_kernel[(len(words),)](
            starts_a, ends_a, starts_b, ends_b, indices, lengths, words, counts,
            S, args.n_a, args.n_b, args.K, args.stride_is, words.shape[1],
            LOG_G=log_g, LOG_K=log_k, HAS_A=args.has_a, KIND_B=args.kind_b, HAS_LENGTHS=args.has_lengths,
            num_warps=min(16, max(4, (1 << log_g + log_k) // 256)),
        )  # fmt: skip
    return Sources(sources.kv_a, kv_b=sources.kv_b, indices=words, lengths=counts, heads=H)
