# SPDX-License-Identifier: Apache-2.0
"""Metrics against loops over Python sets, their sums over ranks, thresholds, and what must not hide or be hidden."""

import json
import logging
import math

import numpy as np
import pytest

from vime_replay.errors import ReplayWarning
from vime_replay.metrics import PREFIX, PickScores, ReplayMetrics, compare
from vime_replay.sinks import JsonLinesSink, ReplayMismatch, Thresholds, log_sink

ROWS, K, KEYS = 40, 6, 30


def picks(rng, low=1):
    rows = np.full((ROWS, K), -1, np.int32)
    for row in rows:
        count = rng.integers(low, K + 1)
        row[rng.permutation(K)[:count]] = rng.permutation(KEYS)[:count]
    return rows


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    fresh, replayed = picks(rng), picks(rng)
    fresh[:10] = replayed[:10]
    fresh[3] = fresh[3][::-1]
    fresh[12:20, :4] = replayed[12:20, :4]
    fresh[20] = -1
    for row in fresh:
        seen = set()
        for column, value in enumerate(row):
            if value in seen:
                row[column] = -1
            seen.add(value)
    scores = rng.integers(0, 4, size=(ROWS, KEYS + 7)).astype(np.float64)
    scores[:, KEYS + 2 :] = -np.inf
    return fresh, replayed, scores


def scores_of(picks_by, fresh, replayed, starts):
    """What a layer tells about scores [rows, keys]; a pick of 0 is column `starts`."""
    rows = np.arange(ROWS)[:, None]
    shown = [picks_by[rows, np.maximum(picks, 0) + starts[:, None]] for picks in (fresh, replayed)]
    return PickScores(*shown, np.log(np.exp(picks_by).sum(axis=1)))


def test_numbers_equal_those_of_python_sets(drawn):
    fresh, replayed, scores = drawn
    starts = np.arange(ROWS) % 2
    found = compare(fresh, replayed, scores_of(scores, fresh, replayed, starts))
    for row in range(ROWS):
        a, b = (set(p[row][p[row] >= 0].tolist()) for p in (fresh, replayed))
        assert found.overlap[row] == pytest.approx(len(a & b) / len(b))
        assert found.jaccard[row] == pytest.approx(len(a & b) / len(a | b))
        assert found.exact[row] == (a == b)
        assert found.mismatch[row] == (len(a & b) < math.ceil(0.8 * len(b)))
        own = scores[row]
        mass = np.exp(own - own.max()) / np.exp(own - own.max()).sum()
        assert found.mass_lost[row] == pytest.approx(sum(mass[e + starts[row]] for e in a - b))
        assert found.differing[row] == len(a ^ b)
        if a:
            last = min(own[e + starts[row]] for e in a)
            assert found.ties[row] == sum(own[e + starts[row]] == last for e in a ^ b)


def collect(metrics, fresh, replayed, scores=None, available=KEYS, layer=2, lags=0):
    positions = np.arange(ROWS) * 3
    metrics.add(
        layer,
        fresh,
        replayed,
        available=np.full(ROWS, available),
        positions=positions,
        lengths=np.full(ROWS, 3 * ROWS),
        lags=lags,
        scores=scores,
    )
    return metrics


def test_ranks_add_up_to_one(drawn):
    fresh, replayed, scores = drawn
    scores = scores_of(scores, fresh, replayed, np.zeros(ROWS, int))
    whole = collect(ReplayMetrics([2, 4]), fresh, replayed, scores)
    collect(whole, replayed, replayed, layer=4, lags=2)
    one = collect(ReplayMetrics([2, 4]), fresh, replayed, scores)
    one.merge(collect(ReplayMetrics([2, 4]), replayed, replayed, layer=4, lags=2))
    assert whole.values(detail=True) == one.values(detail=True)
    other = collect(ReplayMetrics([2, 4]), replayed, replayed, layer=4, lags=2)
    other.merge(collect(ReplayMetrics([2, 4]), fresh, replayed, scores))
    assert other.values(detail=True) == one.values(detail=True)
    values = whole.values(detail=True)
    found = compare(fresh, replayed, scores)
    assert values[f"{PREFIX}/score_mass_lost"] == pytest.approx(found.mass_lost.mean())
    assert values[f"{PREFIX}/boundary_ties"] == pytest.approx(found.ties.sum() / found.differing.sum())
    assert values[f"{PREFIX}/layer_2/overlap_mean"] == pytest.approx(found.overlap.mean())
    assert values[f"{PREFIX}/layer_4/overlap_mean"] == 1.0
    assert values[f"{PREFIX}/lag_2/overlap_mean"] == 1.0
    assert values[f"{PREFIX}/overlap_mean"] == pytest.approx((found.overlap.mean() + 1) / 2)
    assert values[f"{PREFIX}/layer_2/decile_3/overlap_mean"] == pytest.approx(found.overlap[12:16].mean())
    assert values[f"{PREFIX}/overlap_min"] == found.overlap.min()
    assert values[f"{PREFIX}/compared_rows"] == 2 * ROWS
    every = np.sort(np.concatenate([found.overlap, np.ones(ROWS)]))
    assert abs(values[f"{PREFIX}/overlap_p01"] - every[math.ceil(0.01 * len(every)) - 1]) <= 1e-3


def test_rows_that_select_all_do_not_hide_the_rest(drawn):
    fresh, replayed, _ = drawn
    metrics = collect(ReplayMetrics([2]), fresh, replayed)
    before = metrics.values()[f"{PREFIX}/overlap_mean"]
    collect(metrics, replayed, replayed, available=K)
    values = metrics.values()
    assert values[f"{PREFIX}/overlap_mean"] == before
    assert values[f"{PREFIX}/select_all_rows"] == ROWS


def test_rows_that_replay_nothing_are_counted_only(drawn):
    fresh, replayed, _ = drawn
    replayed[5] = -1
    values = collect(ReplayMetrics([2]), fresh, replayed).values()
    assert values[f"{PREFIX}/missing_rows"] == 1
    assert values[f"{PREFIX}/compared_rows"] == ROWS - 1


def test_a_step_without_rows_has_counters_only():
    metrics = ReplayMetrics([2])
    metrics.count(bytes=10, decode_s=0.5)
    metrics.count(bytes=5)
    assert metrics.values(detail=True) == {f"{PREFIX}/bytes": 15, f"{PREFIX}/decode_s": 0.5}
    metrics.clear()
    assert metrics.values() == {}


def test_thresholds_warn_or_stop():
    values = {f"{PREFIX}/overlap_mean": 0.9, f"{PREFIX}/mismatch_rows": 0.02}
    Thresholds(smallest={"overlap_mean": 0.8}, largest={"mismatch_rows": 0.1, "unknown": 0}).check(values, 3)
    with pytest.warns(ReplayWarning, match=r"step 3: mismatch_rows 0\.02 is above 0\.01"):
        Thresholds().check(values, 3)
    strict = Thresholds(smallest={"overlap_mean": 0.97}, action="raise")
    with pytest.raises(ReplayMismatch, match=r"overlap_mean 0\.9 is below 0\.97; mismatch_rows .* is above"):
        strict.check(values, 3)


def test_sinks(tmp_path, caplog):
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink({"a": 1.0}, 1)
    sink({"a": 2.0}, 2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]
    with caplog.at_level(logging.INFO):
        log_sink({"b": 0.5, "a": 1.0}, 7)
    assert "step 7: a=1, b=0.5" in caplog.text
