# SPDX-License-Identifier: Apache-2.0
"""Packed rows move as Megatron moves them where nothing is padded, and stay inside the real rows where something is."""

from functools import partial

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction

from vime_models.host import packed_roll


@pytest.fixture
def rolls(monkeypatch: pytest.MonkeyPatch) -> tuple[packed_roll.Roll, packed_roll.Roll]:
    """Ours as Megatron calls it, and Megatron's."""
    name = "_roll_tensor_packed_seq"
    known = getattr(multi_token_prediction, name)
    megatrons = known.args[0] if isinstance(known, partial) else known
    monkeypatch.setattr(multi_token_prediction, name, megatrons)
    packed_roll.install()
    ours = getattr(multi_token_prediction, name)
    packed_roll.install()
    assert getattr(multi_token_prediction, name) is ours, "installed twice"
    return ours, megatrons


@pytest.mark.parametrize("lengths", [(5,), (1, 1), (3, 0, 4, 1)], ids=str)
def test_without_padding_it_is_megatrons(
    rolls: tuple[packed_roll.Roll, ...], lengths: tuple[int, ...]
) -> None:
    edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=edges)
    for rows in (torch.arange(1, sum(lengths) + 1)[None], torch.rand(2, sum(lengths), dtype=torch.float64)):
        ours, theirs = (roll(rows, -1, -1, packing) for roll in rolls)
        assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_padding_is_zero_and_its_sequences_neighbours_do_not_move_in(
    rolls: tuple[packed_roll.Roll, ...],
) -> None:
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 2, 3, 6], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 4, 6, 9], dtype=torch.int32),
    )
    rolled, total = rolls[0](torch.arange(1, 10)[None], -1, -1, packing)
    assert rolled.tolist() == [[2, 0, 0, 0, 0, 0, 8, 9, 0]]
    assert total == 19
