# SPDX-License-Identifier: Apache-2.0
"""The Miles names give what the operations give, in Miles' argument order and shapes."""

import torch

from vime_kernels import dsa, miles
from vime_kernels.testing import assert_bitwise, cu_seqlens_of, randn


def test_lighting_indexer_with_and_without_a_topk_fn():
    q, k, w = (
        randn(6, 16, 4, seed=0),
        randn(6, 4, seed=1),
        randn(6, 16, seed=2),
    )  # enough heads: no ties at zero
    starts, ends = dsa.causal_ranges(cu_seqlens_of([6]))
    for actual, expected in zip(
        miles.lighting_indexer(q, k, w, starts, ends, 2),
        dsa.lightning_indexer(q, k, w, starts, ends, 2),
        strict=True,
    ):
        assert_bitwise(actual, expected)

    def by_torch(logits, topk):
        values, columns = logits.topk(topk)
        return columns.masked_fill(values == -torch.inf, -1)

    _, picks = miles.lighting_indexer(q, k, w, starts, ends, 2, by_torch)
    assert picks.dtype == torch.int32
    assert_bitwise(picks[1:].sort().values, dsa.indexer_topk(q, k, w, starts, ends, 2)[1:])
    assert picks[0].tolist() == [0, -1]


def test_logits_of_a_batch():
    q, k, w = randn(5, 2, 3, 4, seed=0), randn(7, 2, 4, seed=1), randn(5, 2, 3, seed=2)
    starts, ends = torch.zeros(5, dtype=torch.int32), torch.tensor([1, 2, 7, 0, 5], dtype=torch.int32)
    logits = miles.indexer_logits_sbhd(q, k, w, starts, ends)
    assert logits.shape == (2, 5, 7)
    assert_bitwise(
        logits[1],
        dsa.indexer_logits(q[:, 1].contiguous(), k[:, 1].contiguous(), w[:, 1].contiguous(), starts, ends),
    )


def test_compressed_ranges():
    starts, ends = miles.causal_ranges_compressed(9, 4)
    assert starts.tolist() == [0] * 9
    assert ends.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_pooled_keys_and_their_selection():
    lengths = [9, 3, 14]
    cu = cu_seqlens_of(lengths)
    k, gate, ape = randn(26, 4, seed=0), randn(26, 4, seed=1), randn(4, 4, seed=2)
    pooled, cu_pools = dsa.gated_pool(k, gate, ape, cu, 4)
    keys = miles.build_pooled_keys(k, gate, ape, cu, 4)
    assert len(keys) == 5
    assert_bitwise(keys, pooled[:5])
    q, w = randn(26, 3, 4, seed=3), randn(26, 3, seed=4)
    picks = miles.kpool_select_topk(q, keys, w, cu, cu_pools, 8, 4)
    assert picks.shape == (26, 1, 64)
    assert_bitwise(picks[:, 0], dsa.kpool_select(q, pooled, w, cu, 8, 4))
