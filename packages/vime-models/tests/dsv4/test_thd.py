# SPDX-License-Identifier: Apache-2.0
"""Packed sequences give what each sequence gives alone, and nothing leaks between them."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime_kernels.dsa import gated_pool
from vime_models.dsv4.rope import RotaryTable
from vime_models.dsv4.thd import TokenLayout, position_in_sequence, token_layout
from vime_replay.layout import PackLayout

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


def test_layers_share_what_they_derive_from_lengths(twin, monkeypatch):
    pair, made = twin("flash", "float64"), []
    original = RotaryTable.cos_sin

    def counted(self, positions, dtype):
        made.append(self)
        return original(self, positions, dtype)

    monkeypatch.setattr(RotaryTable, "cos_sin", counted)
    for _ in range(2):
        pair.logits()
        # Two tables for tokens, and one of them for the entries of each ratio; five layers use them.
        assert len(made) == 4
        made.clear()


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
    rows = torch.arange(7, dtype=torch.int32)
    assert position_in_sequence(cu_seqlens, rows).tolist() == [0, 1, 0, 1, 2, 0, 1]


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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("fmt", ["thd", "bshd"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_offsets_are_those_of_the_pack_layout(fmt, size, ratio):
    lengths = (200, 1, 259, 3, 500) if fmt == "thd" else (384 * size,) * 2
    for rank in range(size):
        pack = PackLayout(lengths, fmt, cp_size=size, cp_rank=rank)
        batch = 1 if fmt == "thd" else len(lengths)
        packing = packed([*pack.cu_seqlens[1:] - pack.cu_seqlens[:-1]]) if fmt == "thd" else None
        hidden = torch.zeros(pack.local_rows // batch, batch, 1)
        halo = 128 if size > 1 else 0
        layout = token_layout(hidden, packing, cp_size=size, cp_rank=rank, halo=halo)
        sample, position = pack.owners("contiguous")
        assert layout.rows.tolist() == pack.rows("contiguous").tolist()
        assert layout.positions.tolist() == position.tolist()
        starts, ends = layout.visible(ratio)
        offsets = torch.from_numpy(pack.key_offsets(ratio))
        inside = torch.from_numpy(sample >= 0)
        assert torch.equal(starts[inside].long(), offsets[torch.from_numpy(sample)[inside]])
        assert torch.equal((ends - starts).long(), (torch.from_numpy(position) + 1) // ratio)


@pytest.mark.parametrize("ratio, overlap", [(4, True), (128, False)])
@pytest.mark.parametrize("lengths", [(700,), (37, 259, 130, 86), (1, 3, 127, 128, 129, 124)], ids=str)
def test_ranks_pool_every_entry_once_and_alike(lengths, ratio, overlap):
    """Token numbers as values and equal weights: an entry's value says which tokens it was made of."""
    generator = torch.Generator().manual_seed(0)
    size, total = 2, sum(lengths)
    length = total // size
    values = torch.randn(total, 2, dtype=torch.float64, generator=generator)
    scores = torch.randn(total, 2, dtype=torch.float64, generator=generator)
    ape = torch.zeros(ratio, 2, dtype=torch.float64)
    cu_seqlens = packed(lengths).cu_seqlens_q
    whole, cu_entries = gated_pool(values, scores, ape, cu_seqlens, ratio, overlap=overlap)
    seen = []
    for rank in range(size):
        start = rank * length
        starts = torch.tensor([start], dtype=torch.int32)
        layout = TokenLayout(cu_seqlens, starts, length, None, halo=128)
        reach, cu_pools, first = layout.pools(ratio, overlap=overlap)
        rows = torch.arange(start - reach, start + length).clamp(min=0)
        pooled, _ = gated_pool(values[rows], scores[rows], ape, cu_pools, ratio, overlap=overlap)
        numbers, count = layout.owned_entries(ratio)
        owned = numbers[0, : int(count)].tolist()
        mine = pooled[int(first) : int(first) + len(owned)]
        torch.testing.assert_close(mine, whole[owned], rtol=0, atol=1e-14)
        seen += owned
    assert seen == list(range(int(cu_entries[-1])))
