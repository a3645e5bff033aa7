# SPDX-License-Identifier: Apache-2.0
"""When a layer asks for rows, and of which microbatch: stages, and tickets that name the microbatch.

| pass of one rollout step | stage |
| --- | --- |
| log-probabilities of the reference or a teacher; evaluation | fallthrough |
| log-probabilities of the actor | replay_forward with rows of the rollout, else record |
| training, outside the forward step: recomputation during backward | replay_backward |
| training, inside the forward step | replay_forward |

One model chunk runs its microbatches in order, forward as well as backward, whatever the pipeline schedule; so two
cursors per layer suffice until something leaves that order: a schedule that plans layers and runs them later, or a
step that is repeated after a failure. A ticket on the microbatch's packing object is free of order. Megatron hands
that object to every layer and captures it for recomputation.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Phase = Literal["forward", "backward"]


class Stage(StrEnum):
    """What a layer does instead of selecting."""

    FALLTHROUGH = "fallthrough"
    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


@dataclass(frozen=True, slots=True)
class ReplayTicket:
    """Names one microbatch of one rollout step.

    Attributes:
        step: rollout step, so that a packing object kept from an earlier step finds nothing.
        microbatch: number in the step, from 0, over all its optimizer steps.
    """

    step: int
    microbatch: int


def ticket_of(packed: Any) -> ReplayTicket | None:
    """The ticket that a packing object carries as `replay_ticket`; None for an object without one, or for None."""
    return getattr(packed, "replay_ticket", None)
