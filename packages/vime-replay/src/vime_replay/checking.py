# SPDX-License-Identifier: Apache-2.0
"""Compares replayed picks with fresh ones while a model trains: a few rows of each layer and microbatch.

Layers hand over tensors of the device and go on; they are read when the step ends, so nothing waits. What the numbers
mean is in `metrics`, where they go in `sinks`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from vime_replay.memory import Microbatch
from vime_replay.metrics import PickScores, ReplayMetrics
from vime_replay.spec import ReplaySpec

if TYPE_CHECKING:
    from vime_replay.selection import Scores


@dataclass
class PickCheck:
    """A `check` for `ReplayManager`.

    Attributes:
        spec: of the rows.
        metrics: what comparisons are added to.
    """

    spec: ReplaySpec
    metrics: ReplayMetrics
    _pending: list[tuple[int, Microbatch, tuple[torch.Tensor, ...], "Scores | None"]] = field(
        default_factory=list
    )

    @classmethod
    def of(cls, spec: ReplaySpec) -> "PickCheck":
        """A check of all layers with a stream."""
        return cls(spec, ReplayMetrics(spec.layer_ids))

    def __call__(
        self,
        layer: int,
        batch: Microbatch,
        rows: torch.Tensor,
        replayed: torch.Tensor,
        fresh: torch.Tensor,
        scores: "Scores | None" = None,
    ) -> None:
        """See `selection.Check`."""
        self._pending.append((layer, batch, (rows, replayed, fresh), scores))

    def flush(self) -> ReplayMetrics:
        """Reads what layers handed over; the metrics with all of it."""
        for layer, batch, tensors, scores in self._pending:
            rows, replayed, fresh = (tensor.cpu().numpy() for tensor in tensors)
            if batch.layout is None:
                continue
            rows = rows + (batch.local.start or 0 if batch.local else 0)
            sample, position = (each[rows] for each in batch.layout.owners())
            lengths = np.asarray([*batch.layout.lengths, 0])[sample]
            recorded = position < lengths - 1
            self.metrics.add(
                layer,
                fresh,
                replayed,
                available=np.where(recorded, self.spec.available(position), 0),
                positions=position,
                lengths=lengths,
                scores=None if scores is None else PickScores(*(each.cpu().numpy() for each in scores)),
            )
        self._pending.clear()
        return self.metrics
