# SPDX-License-Identifier: Apache-2.0
"""Side data of one microbatch that reaches every decoder layer.

megatron-core 0.19.2 does not hand token ids to the decoder, but it hands the packing object to every layer
and captures it when a layer is recomputed. Ids therefore travel in that object: each microbatch owns one, so
a recomputed layer sees the ids of its own microbatch and not those of the next.
"""

from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class VimePackedSeqParams(PackedSeqParams):
    """`PackedSeqParams` with the token ids of the microbatch.

    Attributes:
        token_ids: [b, s] int64 of this context-parallel rank, in the order of the hidden states before
            sequence parallelism scatters them; a layer that consumes ids narrows them itself. None: no ids.
        layout: the `vime_replay.layout.PackLayout` that the trainer packed by, for layers that move rows between
            context-parallel ranks. None: they derive it from the cumulative lengths.
        replay_ticket: the `vime_replay.schedule.ReplayTicket` by which layers find recorded picks of this microbatch.
            None: they take those of the next one.
        token_layout: what the layers have derived from the lengths, for the layers after them.
    """

    token_ids: torch.Tensor | None = None
    layout: Any = None
    replay_ticket: Any = None
    token_layout: Any = field(default=None, init=False, repr=False, compare=False)


def attach_token_ids(packed: PackedSeqParams | None, token_ids: torch.Tensor) -> VimePackedSeqParams:
    """A new packing object with the fields of `packed` and the ids.

    Args:
        packed: the trainer's object, or None for unpacked [b, s] batches (all packing fields stay None, which
            Megatron's attention treats like an absent object). It is not changed. Ids that it already carries win.
        token_ids: [b, s] int64.
    """
    if isinstance(packed, VimePackedSeqParams):
        # A copy all the same: what layers put aside on it ends with this pass through the model.
        own = copy(packed)
        own.token_layout = None
        if own.token_ids is None:
            own.token_ids = token_ids
        return own
    known = {} if packed is None else {f.name: getattr(packed, f.name) for f in fields(packed)}
    # A trainer may have put its ticket and its layout on an object of Megatron's own class.
    known |= {name: getattr(packed, name, None) for name in ("layout", "replay_ticket")}
    return VimePackedSeqParams(**known, token_ids=token_ids)


def packed_lengths(packed: PackedSeqParams) -> Any:
    """Cumulative lengths [B+1] of the rows that are there: padded ones where the trainer pads, None without any."""
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
