# SPDX-License-Identifier: Apache-2.0
"""How far the picks that a model would make now are from the ones that it replays.

A few rows per layer are selected afresh and compared, as sets, with the replayed ones. Sums and counts are kept by
layer, by decile of the position and by age of the weights that made the rows, so that ranks add their tables (data and
context parallel ranks; of tensor-parallel ranks only the first) and means are taken last. Rows that see no more keys
than they pick always agree; they are counted and left out, because they would hide everything else.
Numpy only. Left out: choosing rows and selecting afresh (`selection`), and what becomes of the numbers (`sinks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vime_replay.rows import Picks
from vime_replay.spec import Ints

Floats = npt.NDArray[np.floating[Any]]
PREFIX = "indexer_replay"
DECILES = 10
# Ages are counted up to this; older rows are counted with it.
MAX_LAG = 4
BINS = 1000
COLUMNS = ("rows", "overlap", "jaccard", "exact", "mismatch", "scored", "mass_lost", "differing", "ties")
# Share of a row's picks that must be found again.
MIN_OVERLAP = 0.8


@dataclass(frozen=True, eq=False)
class Comparison:
    """Numbers of each compared row, float64 [S] each; `scored` is 1 where scores were given."""

    overlap: Floats
    jaccard: Floats
    exact: Floats
    mismatch: Floats
    scored: Floats
    mass_lost: Floats
    differing: Floats
    ties: Floats


@dataclass(frozen=True, eq=False)
class PickScores:
    """What fresh picks were chosen by.

    Attributes:
        fresh_SK, replayed_SK: score of each pick; anything where there is none.
        log_mass: [S], log Σ exp(score) over all keys that a row may pick.
    """

    fresh_SK: Floats
    replayed_SK: Floats
    log_mass: Floats

    def of(self, rows: Ints) -> "PickScores":
        """Of some rows."""
        return PickScores(self.fresh_SK[rows], self.replayed_SK[rows], self.log_mass[rows])


def compare(
    fresh_SK: Picks,
    replayed_SK: Picks,
    scores: PickScores | None = None,
    *,
    min_overlap: float = MIN_OVERLAP,
) -> Comparison:
    """Fresh picks A against replayed picks B, row by row, as sets.

    overlap |A ∩ B| / |B|; jaccard |A ∩ B| / |A ∪ B|; mismatch |A ∩ B| < ceil(min_overlap · |B|); mass lost, the
    softmax mass of A without B; ties, the picks in one set only whose score equals the smallest of A.

    Args:
        fresh_SK: int32 [S, K], -1 for unused slots.
        replayed_SK: int32 [S, K'], rows with at least one pick.
        scores: of both, by the model that picked A; None leaves out what is made of them.
        min_overlap: share of B that must be found again.
    """
    order_a, order_b = (np.argsort(picks.view(np.uint32), axis=1) for picks in (fresh_SK, replayed_SK))
    fresh = np.take_along_axis(fresh_SK, order_a, axis=1)
    replayed = np.take_along_axis(replayed_SK, order_b, axis=1)
    both = _members(fresh, replayed)
    count_a, count_b = (fresh >= 0).sum(axis=1), (replayed >= 0).sum(axis=1)
    common = both.sum(axis=1)
    scored = np.zeros(len(fresh))
    lost = ties = scored
    if scores is not None:
        scored = np.ones(len(fresh))
        of_a = np.take_along_axis(scores.fresh_SK, order_a, axis=1)
        of_b = np.take_along_axis(scores.replayed_SK, order_b, axis=1)
        only_a, only_b = (fresh >= 0) & ~both, (replayed >= 0) & ~_members(replayed, fresh)
        shares = np.exp(np.where(only_a, of_a, -np.inf) - scores.log_mass[:, None], dtype=np.float64)
        lost = shares.sum(axis=1)
        last = np.where(fresh >= 0, of_a, np.inf).min(axis=1, keepdims=True)
        ties = ((of_a == last) & only_a).sum(axis=1) + ((of_b == last) & only_b).sum(axis=1)
    return Comparison(
        overlap=common / np.maximum(count_b, 1),
        jaccard=common / np.maximum(count_a + count_b - common, 1),
        exact=((common == count_a) & (common == count_b)).astype(np.float64),
        mismatch=(common < np.ceil(min_overlap * count_b)).astype(np.float64),
        scored=scored,
        mass_lost=lost,
        differing=scored * (count_a + count_b - 2 * common),
        ties=ties.astype(np.float64),
    )


class ReplayMetrics:
    """Sums of comparisons over one step.

    Args:
        layers: layers with an indexer, over the whole model.

    Attributes:
        table: float64 [layers, deciles, lags, COLUMNS]; ranks add theirs.
        histogram: int64 [BINS + 1], rows by overlap; ranks add theirs.
        worst: smallest overlap; ranks take the smallest.
        counters: bytes, seconds and rows that were counted, by name; ranks add theirs.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.clear()

    def clear(self) -> None:
        """Starts a new step."""
        self.table = np.zeros((len(self.layers), DECILES, MAX_LAG + 1, len(COLUMNS)))
        self.histogram = np.zeros(BINS + 1, np.int64)
        self.worst = 1.0
        self.counters: dict[str, float] = {}

    def count(self, **values: float) -> None:
        """Adds to counters, such as `bytes`, `decode_s`, `pack_s`, `missing_rows`."""
        for name, value in values.items():
            self.counters[name] = self.counters.get(name, 0.0) + value

    def add(
        self,
        layer: int,
        fresh_SK: Picks,
        replayed_SK: Picks,
        *,
        available: Ints,
        positions: Ints,
        lengths: Ints,
        lags: npt.ArrayLike = 0,
        scores: PickScores | None = None,
    ) -> None:
        """Adds compared rows of one layer; rows that select all, or replay nothing, are counted and left out.

        Args:
            layer: number over the whole model.
            fresh_SK, replayed_SK, scores: as for `compare`.
            available: [S], keys that each row may see.
            positions: [S], position of each row in its sample.
            lengths: [S], tokens of its sample.
            lags: [S] or one number, weight versions between rollout and now.
        """
        topk = replayed_SK.shape[1]
        recorded = (replayed_SK >= 0).any(axis=1)
        telling = recorded & (available > topk)
        self.count(
            select_all_rows=float((recorded & (available <= topk)).sum()),
            missing_rows=float((~recorded & (available > 0)).sum()),
        )
        if not telling.any():
            return
        pick = np.flatnonzero(telling)
        found = compare(fresh_SK[pick], replayed_SK[pick], None if scores is None else scores.of(pick))
        decile = np.minimum(positions[pick] * DECILES // np.maximum(lengths[pick], 1), DECILES - 1)
        lag = np.clip(np.broadcast_to(np.asarray(lags), len(telling))[pick], 0, MAX_LAG)
        columns = [np.ones(len(pick)), *(getattr(found, name) for name in COLUMNS[1:])]
        np.add.at(self.table[self.layers.index(layer)], (decile, lag), np.stack(columns, axis=1))
        bins = np.floor(found.overlap * BINS).astype(np.int64)
        self.histogram += np.bincount(bins, minlength=BINS + 1)
        self.worst = min(self.worst, float(found.overlap.min()))

    def merge(self, other: "ReplayMetrics") -> None:
        """Adds what another rank, or another part of the step, found."""
        self.table += other.table
        self.histogram += other.histogram
        self.worst = min(self.worst, other.worst)
        self.count(**other.counters)

    def values(self, *, detail: bool = False) -> dict[str, float]:
        """The numbers of the step, by name.

        Args:
            detail: also by layer, by layer and decile, and by lag.
        """
        result = {f"{PREFIX}/{name}": value for name, value in self.counters.items()}
        total = _means(self.table.sum(axis=(0, 1, 2)))
        result |= {f"{PREFIX}/{name}": value for name, value in total.items()}
        if total:
            reached = np.cumsum(self.histogram) >= 0.01 * self.histogram.sum()
            result[f"{PREFIX}/overlap_p01"] = int(np.argmax(reached)) / BINS
            result[f"{PREFIX}/overlap_min"] = self.worst
        if detail:
            for number, layer in enumerate(self.layers):
                self._drill(result, f"layer_{layer}", self.table[number].sum(axis=(0, 1)))
                for decile in range(DECILES):
                    self._drill(
                        result, f"layer_{layer}/decile_{decile}", self.table[number, decile].sum(axis=0)
                    )
            for lag in range(MAX_LAG + 1):
                self._drill(result, f"lag_{lag}", self.table[:, :, lag].sum(axis=(0, 1)))
        return result

    @staticmethod
    def _drill(result: dict[str, float], name: str, sums: Floats) -> None:
        means = _means(sums)
        for key in ("overlap_mean", "exact_rows"):
            if key in means:
                result[f"{PREFIX}/{name}/{key}"] = means[key]


def _means(sums: Floats) -> dict[str, float]:
    total = dict(zip(COLUMNS, (float(value) for value in sums), strict=True))
    rows = total["rows"]
    if not rows:
        return {}
    means = {
        "compared_rows": rows,
        "overlap_mean": total["overlap"] / rows,
        "jaccard_mean": total["jaccard"] / rows,
        "exact_rows": total["exact"] / rows,
        "mismatch_rows": total["mismatch"] / rows,
    }
    if total["scored"]:
        means["score_mass_lost"] = total["mass_lost"] / total["scored"]
        means["boundary_ties"] = total["ties"] / total["differing"] if total["differing"] else 0.0
    return means


def _members(of: Picks, among: Picks) -> npt.NDArray[np.bool_]:
    """bool, entries of sorted rows that are in the same row of `among`, sorted too; -1 is in none."""
    # One search for all rows: each row's numbers lie above those of the row before.
    base = np.arange(len(of), dtype=np.int64)[:, None] << 32
    keys = (base + among.view(np.uint32)).ravel()
    wanted = (base + of.view(np.uint32)).ravel()
    place = np.minimum(np.searchsorted(keys, wanted), max(keys.size - 1, 0))
    return (keys[place] == wanted).reshape(of.shape) & (of >= 0)
