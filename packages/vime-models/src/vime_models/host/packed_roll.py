# SPDX-License-Identifier: Apache-2.0
"""Moves the rows of packed sequences on by one token, for draft layers and their loss.

megatron-core 0.19.2 does it sequence by sequence, with two device round trips for each, and counts rows by the lengths
without padding, which is wrong as soon as a pack has padding. The function that it does so with is replaced; under
context parallelism it stays Megatron's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction

from vime_models.host.microbatch import packed_lengths

Roll = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def roll_packed(
    megatrons: Roll,
    tensor: torch.Tensor,
    shifts: int,
    dims: int,
    packed_seq_params: PackedSeqParams,
    cp_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., t] of the next token of the same sequence, 0 where there is none and in padding, and their sum.

    Args:
        megatrons: Megatron's function of the further arguments.
        tensor: [..., t].
        shifts: -1.
        dims: the last axis.
        packed_seq_params: with the lengths; `cu_seqlens_q_padded` says where rows are.
        cp_group: of the ranks that share the rows, or None.
    """
    if cp_group is not None and cp_group.size() > 1:
        return megatrons(tensor, shifts, dims, packed_seq_params, cp_group)
    starts, lengths = packed_lengths(packed_seq_params), packed_seq_params.cu_seqlens_q.diff()
    rows = torch.arange(tensor.shape[-1], dtype=starts.dtype, device=starts.device)
    sequence = torch.searchsorted(starts[1:], rows, right=True).clamp_max(len(lengths) - 1)
    last = rows + 1 >= starts[sequence] + lengths[sequence]
    rolled = tensor.roll(shifts, dims).masked_fill(last.to(tensor.device), 0)
    return rolled, rolled.sum()


def install() -> None:
    """From now on Megatron moves packed rows with `roll_packed`."""
    known = multi_token_prediction._roll_tensor_packed_seq
    if getattr(known, "func", None) is not roll_packed:
        multi_token_prediction._roll_tensor_packed_seq = partial(roll_packed, known)
