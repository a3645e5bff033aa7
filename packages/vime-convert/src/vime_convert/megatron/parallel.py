# SPDX-License-Identifier: Apache-2.0
"""This process's place in Megatron's parallel groups; size-1 groups when Megatron never made any."""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Axis:
    """One parallel dimension: this process's rank, the size, and the group to communicate in."""

    rank: int = 0
    size: int = 1
    group: Any = None


@dataclass(frozen=True)
class Parallel:
    """Tensor, expert-tensor, expert and pipeline parallelism of this process."""

    tp: Axis = field(default_factory=Axis)
    etp: Axis = field(default_factory=Axis)
    ep: Axis = field(default_factory=Axis)
    pp: Axis = field(default_factory=Axis)

    @property
    def is_trivial(self) -> bool:
        """Whether this process holds every parameter whole."""
        return all(axis.size == 1 for axis in (self.tp, self.etp, self.ep, self.pp))


def current() -> Parallel:
    """The groups that Megatron's parallel_state holds now."""
    # Groups can only exist if somebody imported the module, so a missing import needs no megatron-core.
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return Parallel()
    return Parallel(
        tp=_axis(state.get_tensor_model_parallel_group()),
        etp=_axis(state.get_expert_tensor_parallel_group()),
        ep=_axis(state.get_expert_model_parallel_group()),
        pp=_axis(state.get_pipeline_model_parallel_group()),
    )


def _axis(group: Any) -> Axis:
    return Axis(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group)
