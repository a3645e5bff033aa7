# SPDX-License-Identifier: Apache-2.0
"""Side data of one microbatch that reaches every decoder layer.

megatron-core 0.19.2 does not hand token ids to the decoder, but it hands the packing object to every layer
and captures it when a layer is recomputed. Ids therefore travel in that object: each microbatch owns one, so
a recomputed layer sees the ids of its own microbatch and not those of the next.
"""

from dataclasses import dataclass, fields
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
    """

    token_ids: torch.Tensor | None = None
    layout: Any = None
    replay_ticket: Any = None


def attach_token_ids(packed: PackedSeqParams | None, token_ids: torch.Tensor) -> VimePackedSeqParams:
    """A new packing object with the fields of `packed` and the ids.

    Args:
        packed: the trainer's object, or None for unpacked [b, s] batches (all packing fields stay None, which
            Megatron's attention treats like an absent object). It is not changed. An object that
            already carries ids is returned as it is.
        token_ids: [b, s] int64.
    """
    if isinstance(packed, VimePackedSeqParams) and packed.token_ids is not None:
        return packed
    known = {} if packed is None else {f.name: getattr(packed, f.name) for f in fields(packed)}
    # A trainer may have put its ticket on an object of Megatron's own class.
    known |= {"token_ids": token_ids, "replay_ticket": getattr(packed, "replay_ticket", None)}
    return VimePackedSeqParams(**known)
