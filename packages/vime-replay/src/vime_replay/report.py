# SPDX-License-Identifier: Apache-2.0
"""One HTML page from the numbers of a run: overlap over steps, and a heat map of layers by position.

Reads the lines that `sinks.JsonLinesSink` writes. The page needs nothing else: no scripts, no fonts, no network.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from vime_replay.errors import ReplayPayloadError
from vime_replay.metrics import DECILES, MAX_LAG, PREFIX

Record = dict[str, float]
CELL = re.compile(rf"{PREFIX}/layer_(\d+)/decile_(\d)/overlap_mean")
HEALTH = (
    "missing_rows",
    "padded_rows",
    "select_all_rows",
    "bytes",
    "decode_s",
    "pack_s",
    "h2d_s",
    "prefetch_stall_s",
)
SUMMARY = (
    ("overlap_mean", "share of replayed picks that fresh picks contain"),
    ("overlap_p01", "the same, first percentile of rows"),
    ("overlap_min", "the same, worst row"),
    ("jaccard_mean", "common picks over all picks"),
    ("exact_rows", "rows with the same set"),
    ("mismatch_rows", "rows that miss more than a fifth"),
    ("score_mass_lost", "softmax mass of fresh picks that are not replayed"),
    ("boundary_ties", "differing picks whose score is that of the last pick"),
    ("compared_rows", "rows compared"),
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .6rem; text-align: right }
th:first-child, td:first-child, .words { text-align: left } tr { border-bottom: 1px solid #e4e4e4 }
.map td { min-width: 2.6rem; font-size: 12px; border: 1px solid #fff } svg { width: 100%; height: auto }
"""


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Numbers of every step, in order of steps.

    Raises:
        ReplayPayloadError: a file that is missing, or a line that is not what the sink writes.
    """
    records: list[Record] = []
    for path in paths:
        if not path.is_file():
            raise ReplayPayloadError(f"{path}: expected a file of JsonLinesSink, found none")
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError as error:
            raise ReplayPayloadError(
                f"{path}: expected a text file of JsonLinesSink, got other bytes at {error.start}"
            ) from error
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                numbers = {str(name): float(value) for name, value in record.items()}
                # A number that is none leaves a gap in the page.
                finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
                records.append(finite | {"step": finite["step"]})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ReplayPayloadError(
                    f"{path}: line {number}: expected an object of numbers with a step, got {line[:40]!r}"
                ) from error
    if not records:
        raise ReplayPayloadError(f"{', '.join(map(str, paths))}: expected lines of numbers, found none")
    return sorted(records, key=lambda record: record["step"])


def render(records: Sequence[Record], title: str) -> str:
    """The page, as HTML.

    Args:
        records: of `read_records`; the last one with cells by layer and decile gives the heat map.
        title: names the run.
    """
    last = records[-1]
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>Indexer replay: {escape(title)}</h1>",
        f"<p>{len(records)} steps, {records[0]['step']:.0f} to {last['step']:.0f}. Rows that see no more keys "
        "than they pick always agree and are not compared.</p>",
        *_summary(last),
        *_curve(records),
        *_heat_map(records),
        *_lags(last),
        *_health(last),
    ]
    return "\n".join(parts) + "</html>\n"


def _summary(record: Record) -> Iterator[str]:
    yield f"<h2>Step {record['step']:.0f}</h2><table>"
    for name, meaning in SUMMARY:
        value = record.get(f"{PREFIX}/{name}")
        if value is not None:
            yield f"<tr><td>{name}</td><td>{value:.6g}</td><td class='words'>{meaning}</td></tr>"
    yield "</table>"


def _curve(records: Sequence[Record]) -> Iterator[str]:
    width, height, left = 900, 220, 60
    for name in ("overlap_mean", "overlap_p01"):
        points = [(r["step"], r[f"{PREFIX}/{name}"]) for r in records if f"{PREFIX}/{name}" in r]
        if len(points) < 2:
            continue
        first, last = points[0][0], points[-1][0]
        low = min(value for _, value in points)
        low = min(low, 0.999)
        span = max(last - first, 1.0)
        line = " ".join(
            f"{left + (x - first) / span * (width - left - 10):.1f},{10 + (1 - y) / (1 - low) * (height - 40):.1f}"
            for x, y in points
        )
        yield f"<h2>{name} by step</h2><svg viewBox='0 0 {width} {height}' role='img' aria-label='{name} by step'>"
        for value, y in ((1.0, 10), (low, height - 30)):
            yield f"<line x1='{left}' x2='{width - 10}' y1='{y}' y2='{y}' stroke='#ccc'/>"
            yield f"<text x='{left - 6}' y='{y + 4}' text-anchor='end' font-size='12'>{value:.4f}</text>"
        for value, x in ((first, left), (last, width - 10)):
            yield f"<text x='{x}' y='{height - 8}' text-anchor='middle' font-size='12'>{value:.0f}</text>"
        yield f"<polyline points='{line}' fill='none' stroke='#0b62a8' stroke-width='2'/></svg>"


def _heat_map(records: Sequence[Record]) -> Iterator[str]:
    for record in reversed(records):
        found = ((CELL.fullmatch(name), value) for name, value in record.items())
        cells = {(int(m[1]), int(m[2])): value for m, value in found if m}
        if cells:
            break
    else:
        return
    low = min(min(cells.values()), 0.99)
    yield f"<h2>Overlap by layer and position, step {record['step']:.0f}</h2>"
    yield "<p>Columns are tenths of the sample, from its start; the darkest cell is "
    yield f"{min(cells.values()):.4f}, white is 1.</p><table class='map'><tr><th>layer</th>"
    yield "".join(f"<th>{decile * 10}%</th>" for decile in range(DECILES)) + "</tr>"
    for layer in sorted({layer for layer, _ in cells}):
        yield f"<tr><td>{layer}</td>"
        for decile in range(DECILES):
            value = cells.get((layer, decile))
            yield "<td></td>" if value is None else _cell(value, (1 - value) / (1 - low))
        yield "</tr>"
    yield "</table>"


def _cell(value: float, depth: float) -> str:
    light = 97 - 55 * min(max(depth, 0.0), 1.0)
    ink = "#fff" if light < 60 else "#1c1c1c"
    return f"<td style='background:hsl(20,75%,{light:.0f}%);color:{ink}'>{value:.3f}</td>"


def _lags(record: Record) -> Iterator[str]:
    names = [f"{PREFIX}/lag_{lag}/overlap_mean" for lag in range(MAX_LAG + 1)]
    if not any(name in record for name in names):
        return
    yield "<h2>Overlap by age of the weights that made the rows</h2><table><tr><th>updates</th><th>overlap</th></tr>"
    for lag, name in enumerate(names):
        if name in record:
            yield f"<tr><td>{lag}{' or more' if lag == MAX_LAG else ''}</td><td>{record[name]:.6g}</td></tr>"
    yield "</table>"


def _health(record: Record) -> Iterator[str]:
    rows = [(name, record[f"{PREFIX}/{name}"]) for name in HEALTH if f"{PREFIX}/{name}" in record]
    if rows:
        yield "<h2>Rows and time</h2><table>"
        yield "".join(f"<tr><td>{name}</td><td>{value:.6g}</td></tr>" for name, value in rows) + "</table>"
