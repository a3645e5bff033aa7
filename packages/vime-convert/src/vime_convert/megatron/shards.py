# SPDX-License-Identifier: Apache-2.0
"""How tensor parallelism cuts a whole Megatron tensor, and the way back; pure functions on tensors.

A joined gate and up projection is cut per half, so that every rank holds matching columns of both: that is the
layout in which Megatron's gated activation expects its input.
"""

from collections.abc import Sequence

import torch

from vime_convert.errors import CheckpointError
from vime_convert.rules import Rule


def is_split(rule: Rule, local_shape: Sequence[int], size: int) -> bool:
    """Whether a rank holds a part: some models replicate what others split, so the local shape decides."""
    return size > 1 and rule.tp_dim is not None and local_shape[rule.tp_dim] < rule.mcore_shape[rule.tp_dim]


def whole_shape(rule: Rule, local_shape: Sequence[int], size: int, name: str) -> tuple[int, ...]:
    """Shape of the whole Megatron tensor, vocabulary padding included, of which a rank holds `local_shape`.

    Raises:
        CheckpointError: the local shape is no part of what the rule describes.
    """
    whole = list(local_shape)
    if is_split(rule, local_shape, size) and rule.tp_dim is not None:
        whole[rule.tp_dim] *= size
    expected = list(rule.mcore_shape)
    if rule.vocab and len(whole) == len(expected):
        expected[0] = max(expected[0], whole[0])
    if whole != expected:
        raise CheckpointError(
            f"{name}: expected the model to hold {list(rule.mcore_shape)} over {size} rank(s), got "
            f"{list(local_shape)} on this one; build the model from the config of this checkpoint"
        )
    return tuple(whole)


def split(rule: Rule, whole: torch.Tensor, local_shape: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """The part of a whole tensor that a rank holds; vocabulary rows are padded with zeros first."""
    if not is_split(rule, local_shape, size):
        return _padded(whole, local_shape[0]) if rule.vocab else whole
    assert rule.tp_dim is not None  # is_split
    if rule.vocab:
        whole = _padded(whole, local_shape[0] * size)
    if rule.kind == "gate_up" and rule.tp_dim == 0:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=rule.tp_dim)[rank]


def join(rule: Rule, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor of which every rank holds one of `parts`, without vocabulary padding."""
    if len(parts) == 1 or rule.tp_dim is None:
        whole = parts[0]
    elif rule.kind == "gate_up" and rule.tp_dim == 0:
        halves = [part.chunk(2) for part in parts]
        whole = torch.cat([half[i] for i in (0, 1) for half in halves])
    else:
        whole = torch.cat(list(parts), dim=rule.tp_dim)
    return whole[: rule.mcore_shape[0]] if rule.vocab else whole


def _padded(whole: torch.Tensor, rows: int) -> torch.Tensor:
    if rows == whole.shape[0]:
        return whole
    return torch.cat([whole, whole.new_zeros(rows - whole.shape[0], *whole.shape[1:])])
