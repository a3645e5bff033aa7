# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of `metrics` go: a logger, a file that `vime-replay report` reads, and limits that warn or stop."""

import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from vime_replay.errors import ReplayError, ReplayWarning
from vime_replay.metrics import PREFIX


class MetricSink(Protocol):
    """Takes the numbers of one step."""

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        """Logs or stores `values`."""


class ReplayMismatch(ReplayError):
    """Picks are further from the replayed ones than a threshold with action "raise" allows."""


@dataclass(frozen=True)
class Thresholds:
    """Limits on the numbers of a step.

    Attributes:
        smallest: by name without prefix, such as {"overlap_mean": 0.97}.
        largest: such as {"mismatch_rows": 0.01}.
        action: what a number beyond its limit does.
    """

    smallest: Mapping[str, float] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=lambda: {"mismatch_rows": 0.01})
    action: Literal["warn", "raise"] = "warn"

    def check(self, values: Mapping[str, float], step: int) -> None:
        """Compares; names that the step has no number for pass.

        Raises:
            ReplayMismatch: a number beyond its limit, with action "raise"; with "warn" it is a ReplayWarning.
        """
        beyond = [
            f"{name} {value:.4g} is {word} {limit:.4g}"
            for limits, word, sign in ((self.smallest, "below", -1), (self.largest, "above", 1))
            for name, limit in limits.items()
            if (value := values.get(f"{PREFIX}/{name}")) is not None and sign * (value - limit) > 0
        ]
        if not beyond:
            return
        message = (
            f"indexer replay, step {step}: {'; '.join(beyond)}; compare checkpoints, index-sharing settings and "
            "precision of trainer and rollout engine"
        )
        if self.action == "raise":
            raise ReplayMismatch(message)
        warnings.warn(message, ReplayWarning, stacklevel=2)


def log_sink(values: Mapping[str, float], step: int) -> None:
    """Writes the numbers to this module's logger."""
    logging.getLogger(__name__).info(
        "step %d: %s", step, ", ".join(f"{name}={value:.6g}" for name, value in sorted(values.items()))
    )


class JsonLinesSink:
    """Appends one line of JSON a step to a file; `vime-replay report` reads it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        """See `MetricSink`."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
