# SPDX-License-Identifier: Apache-2.0
"""Packed sequences give what each sequence gives alone, and nothing leaks between them."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime_models.dsv4.thd import local_positions, token_layout

LENGTHS = [1, 3, 127, 128, 129, 4, 133]


def packed(lengths: list[int], padded: list[int] | None = None) -> PackedSeqParams:
    def cumulative(values):
        return torch.tensor([0, *values]).cumsum(0).to(torch.int32)

    cu = cumulative(lengths)
    cu_padded = None if padded is None else cumulative(padded)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
    )


# Both have all three ratios; one routes by score only, the other hashes.
@pytest.mark.parametrize("name", ["pruned", "large-eps"])
def test_packed_equals_one_by_one(twin, name):
    pair = twin(name, "float64")
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(pair.case.config["vocab_size"], (1, sum(LENGTHS)), generator=generator)
    together = pair.logits(ids, packed_seq_params=packed(LENGTHS))
    start = 0
    for length in LENGTHS:
        alone = pair.logits(ids[:, start : start + length])
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=0, atol=1e-11)
        start += length


def test_padding_inside_the_pack_changes_no_real_token(twin):
    pair = twin("large-eps", "float64")
    real, padded = [5, 130, 9], [8, 136, 16]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 160, (1, sum(padded)), generator=generator)
    starts = [0, 8, 144]
    rows = torch.cat(
        [torch.arange(start, start + length) for start, length in zip(starts, real, strict=True)]
    )
    other = torch.full_like(ids, 17)
    other[:, rows] = ids[:, rows]
    arguments = {"packed_seq_params": packed(real, padded)}
    first, second = pair.logits(ids, **arguments), pair.logits(other, **arguments)
    torch.testing.assert_close(first[:, rows], second[:, rows], rtol=0, atol=1e-11)
    assert (first - second).abs().max() > 1e-3  # padding rows themselves do change


def test_positions_restart_and_empty_sequences_are_skipped():
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert local_positions(cu_seqlens, 7).tolist() == [0, 1, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    "shape, packing, message",
    [
        ((5, 2, 4), packed([5]), r"\[t, 1, h\]"),
        ((5, 1, 4), PackedSeqParams(qkv_format="thd"), "cu_seqlens_q=None"),
        ((5, 1, 4), packed([2, 2]), "number of tokens \\(5\\), got 4"),
    ],
    ids=["batch", "no-lengths", "short-lengths"],
)
def test_impossible_packing_is_refused(shape, packing, message):
    with pytest.raises(ValueError, match=message):
        token_layout(torch.zeros(shape), packing)
