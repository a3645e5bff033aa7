# SPDX-License-Identifier: Apache-2.0
"""What packing must return, element by element and without the package's layout: the specification in slow Python."""

import numpy as np

from vime_replay.layout import balance_folds
from vime_replay.spec import ReplaySpec

PAD = None


def stream_of(lengths, *, mode, cp, pad_multiple, fmt="thd", max_seqlen=None):
    """Local rows of every rank as (sample, position), PAD for padding; and the rows that each sample takes up."""
    parts = 2 * cp if mode == "zigzag" and cp > 1 else cp
    if fmt == "bshd":
        extents = [max_seqlen] * len(lengths)
    elif mode == "zigzag" and cp > 1:
        extents = [parts * -(-n // parts) for n in lengths]
    else:
        extents = list(lengths)
    padded = [
        [(i, p) if p < n else PAD for p in range(extent)]
        for i, (n, extent) in enumerate(zip(lengths, extents, strict=True))
    ]
    ranks = [[] for _ in range(cp)]
    if fmt == "bshd" or (mode == "zigzag" and cp > 1):
        for sample in padded:
            size = len(sample) // parts
            chunks = [sample[c * size : (c + 1) * size] for c in range(parts)]
            for r in range(cp):
                ranks[r] += chunks[r] + chunks[parts - 1 - r] if parts == 2 * cp and cp > 1 else chunks[r]
        if fmt == "thd":
            for rows in ranks:
                rows += [PAD] * (-len(rows) % pad_multiple)
    else:
        whole = [row for sample in padded for row in sample]
        whole += [PAD] * (-len(whole) % (cp * pad_multiple))
        share = len(whole) // cp
        ranks = [whole[r * share : (r + 1) * share] for r in range(cp)]
    return ranks, extents


def balanced(stream, cp):
    """Rows of the whole stream, in order, to each rank's pairs of chunks."""
    folds = balance_folds(len(stream), cp)
    size = len(stream) // (2 * cp * folds)
    chunks = [stream[c * size : (c + 1) * size] for c in range(2 * cp * folds)]
    pair = [min(c % (2 * cp), 2 * cp - 1 - c % (2 * cp)) for c in range(len(chunks))]
    return [
        [row for chunk, owner in zip(chunks, pair, strict=True) if owner == r for row in chunk]
        for r in range(cp)
    ]


def packed(rows_of_rank, samples, lengths, extents, *, ratio, key_space):
    """[L, S, K] by a loop over every element."""
    streams, topk = samples[0].shape[1:]
    out = np.full((streams, len(rows_of_rank), topk), -1, np.int64)
    for local, owner in enumerate(rows_of_rank):
        if owner is PAD or owner[1] >= lengths[owner[0]] - 1:
            continue
        sample, position = owner
        keys = {"padded": extents, "compact": lengths, "sample": [0] * len(lengths)}[key_space]
        first = sum(n // ratio for n in keys[:sample])
        for stream in range(streams):
            for column in range(topk):
                entry = samples[sample][position, stream, column]
                out[stream, local, column] = entry if entry < 0 else entry + first
    return out


def spec_of(*, streams=1, topk=3, ratio=1):
    return ReplaySpec(
        "indexer", "rollout_indexer_topk", streams, topk, {2 * s + 1: s for s in range(streams)}, ratio
    )


def random_rows(rng, tokens, spec, *, full=False):
    """Legal rows of a sample, unordered, unused slots anywhere."""
    rows = np.full((max(tokens - 1, 0), spec.num_streams, spec.topk), -1, np.int32)
    for position in range(len(rows)):
        available = (position + 1) // spec.ratio
        for stream in range(spec.num_streams):
            count = min(available, spec.topk)
            if not full:
                count = int(rng.integers(min(count, 1), count + 1))
            picks = rng.permutation(available)[:count]
            rows[position, stream, rng.permutation(spec.topk)[:count]] = picks
    return rows


def newest_first(tokens, spec):
    """Rows of the written-out example: the newest keys that a query sees, descending."""
    rows = np.full((max(tokens - 1, 0), spec.num_streams, spec.topk), -1, np.int32)
    for position in range(len(rows)):
        available = (position + 1) // spec.ratio
        picks = [e for e in range(available - 1, available - 1 - spec.topk, -1) if e >= 0]
        rows[position, :, : len(picks)] = picks
    return rows
