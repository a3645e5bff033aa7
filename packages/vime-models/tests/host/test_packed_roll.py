# SPDX-License-Identifier: Apache-2.0
"""Packed rows move as Megatron moves them where nothing is padded, and stay inside the real rows where something is."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime_models.host.packed_roll import _MEGATRONS, roll_packed


@pytest.mark.parametrize("lengths", [(5,), (1, 1), (3, 0, 4, 1)], ids=str)
def test_without_padding_it_is_megatrons(lengths: tuple[int, ...]) -> None:
    edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=edges)
    for rows in (torch.arange(1, sum(lengths) + 1)[None], torch.rand(2, sum(lengths), dtype=torch.float64)):
        for ours, theirs in zip(
            roll_packed(rows, -1, -1, packing), _MEGATRONS(rows, -1, -1, packing), strict=True
        ):
            assert ours.equal(theirs)


def test_padding_is_zero_and_its_sequences_neighbours_do_not_move_in() -> None:
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 2, 3, 6], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 4, 6, 9], dtype=torch.int32),
    )
    rolled, total = roll_packed(torch.arange(1, 10)[None], -1, -1, packing)
    assert rolled.tolist() == [[2, 0, 0, 0, 0, 0, 8, 9, 0]]
    assert total == 19
