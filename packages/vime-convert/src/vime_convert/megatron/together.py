# SPDX-License-Identifier: Apache-2.0
"""Rank 0 writes, all ranks gather: and all of them learn when the writing failed.

Tensors are made by collectives, so a rank that stops making them leaves the others waiting for ever. Therefore rank 0
looks at the target before the first tensor, keeps taking tensors after a failed write, and the ranks tell each other
at both points how it went. Failures inside a collective itself are the communication library's to report.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from vime_convert.errors import OutputError

Tensors = Iterable[tuple[str, torch.Tensor]]


def write_on_first_rank(
    tensors: Iterator[tuple[str, torch.Tensor]],
    write: Callable[[Tensors], int],
    *,
    ready: Callable[[], None],
) -> int:
    """The number of tensors that rank 0 wrote, on every rank.

    Args:
        tensors: the same names in the same order on every rank, made by collectives.
        write: takes all tensors and returns their number; called on rank 0.
        ready: raises if nothing can be written; called on rank 0 before the first tensor is made.

    Raises:
        OutputError: on the other ranks, what went wrong on the one that failed; that rank raises its own error.
    """
    if not dist.is_available() or not dist.is_initialized():
        return write(tensors)
    first = dist.get_rank() == 0
    _agree(_failure(ready) if first else None)
    written: list[int] = []
    problem = _failure(lambda: written.append(write(tensors))) if first else None
    remaining = _failure(lambda: written.append(sum(1 for _ in tensors)))
    _agree(problem or remaining)
    return written[0]


def _failure(action: Callable[[], object]) -> Exception | None:
    try:
        action()
    except Exception as error:  # whatever it is, the other ranks have to be told
        return error
    return None


def _agree(mine: Exception | None) -> None:
    """Raises on every rank if one of them failed: its own error there, and what it was elsewhere."""
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if mine is None else f"{type(mine).__name__}: {mine}")
    if mine is not None:
        raise mine
    for rank, words in enumerate(told):
        if words is not None:
            raise OutputError(f"rank {rank} failed, so nothing was written: {words}")
