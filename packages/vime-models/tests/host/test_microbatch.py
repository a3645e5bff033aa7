# SPDX-License-Identifier: Apache-2.0
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime_models.host.microbatch import VimePackedSeqParams, attach_token_ids

IDS = torch.arange(6).view(1, 6)


def test_unpacked_batches_get_an_object_that_only_carries_ids() -> None:
    packed = attach_token_ids(None, IDS)
    assert packed.token_ids is IDS
    assert packed.qkv_format is None
    assert packed.cu_seqlens_q is None


def test_packing_fields_are_kept_and_the_original_is_not_changed() -> None:
    original = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=torch.tensor([0, 2, 6]), max_seqlen_q=4, total_tokens=6
    )
    packed = attach_token_ids(original, IDS)
    assert isinstance(packed, VimePackedSeqParams)
    assert not hasattr(original, "token_ids")
    assert packed.cu_seqlens_q is original.cu_seqlens_q
    assert packed.max_seqlen_q == 4
    assert torch.equal(packed.seq_idx, original.seq_idx)


def test_what_a_trainer_put_on_megatrons_object_is_kept() -> None:
    original = PackedSeqParams(qkv_format="thd")
    original.layout, original.replay_ticket = "layout", "ticket"
    packed = attach_token_ids(original, IDS)
    assert (packed.layout, packed.replay_ticket) == ("layout", "ticket")


def test_ids_that_the_trainer_attached_win() -> None:
    packed = attach_token_ids(None, IDS)
    assert attach_token_ids(packed, IDS + 1).token_ids is IDS
    assert attach_token_ids(VimePackedSeqParams(qkv_format="thd"), IDS).token_ids is IDS


def test_what_layers_put_aside_ends_with_a_pass() -> None:
    packed = attach_token_ids(None, IDS)
    packed.token_layout = "of this pass"
    assert attach_token_ids(packed, IDS).token_layout is None
