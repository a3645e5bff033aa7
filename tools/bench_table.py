# SPDX-License-Identifier: Apache-2.0
"""Turns benchmark records into a Markdown table and a plot of the speed beside each peer.

`--doc FILE` replaces what stands between `<!-- bench:begin -->` and `<!-- bench:end -->` in FILE; with `--check` it
only compares. The records are those of packages/vime-kernels/benchmarks/run.py.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
HEADER = "| operation | shape | direction | ms | peer time / ours | relative error | MiB |\n|" + 7 * " --- |"
COLOURS = {"torch": "#4878a8", "torch.topk": "#6aa56e", "FlashMLA": "#c8734a"}
Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when `--check` finds an old table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--doc", type=Path, help="Markdown file with the markers")
    parser.add_argument("--svg", type=Path, help="plot to write")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    records = json.loads(options.records.read_text())
    text = table(records)
    if options.svg and not options.check:
        options.svg.write_text(plot(records))
    if not options.doc:
        print(text)
        return 0
    old = options.doc.read_text()
    new = replaced(old, text)
    if options.check:
        if new != old:
            print(
                f"{options.doc}: table differs from {options.records}; run tools/bench_table.py without --check"
            )
        return int(new != old)
    options.doc.write_text(new)
    return 0


def replaced(document: str, text: str) -> str:
    """The document with a new table between the markers.

    Raises:
        ValueError: a marker is missing.
    """
    for marker in (BEGIN, END):
        if marker not in document:
            raise ValueError(f"bench_table: expected the marker {marker} in the document, found none; add it")
    head, tail = document.split(BEGIN)[0], document.split(END)[-1]
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def cells(records: list[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """Records by operation, shape and direction, in the order of the runner."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record["op"], record["shape"], record["direction"]), []).append(record)
    return found


def table(records: list[Record]) -> str:
    """The Markdown table, and a line on where the numbers come from."""
    lines = [HEADER]
    for (op, shape, direction), group in cells(records).items():
        first = group[0]
        if first["failure"]:
            lines.append(f"| `{op}` | {shape} | {direction} | failed | | | |")
            continue
        peers = [f"{r['peer']} {r['ratio']:.{2 if r['ratio'] < 10 else 0}f}×" for r in group if r["ratio"]]
        error = "exact" if first["rel_error"] == 0 else f"{first['rel_error']:.1e}"
        numbers = [f"{first['ours_ms']:.3f}", ", ".join(peers), error, f"{first['peak_mib']:.0f}"]
        lines.append(f"| {' | '.join([f'`{op}`', shape, direction, *numbers])} |")
    source = records[0]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    lines += ["", f"{source['device']}, {versions}; commit {source['commit']}. `{source['command']}`"]
    return "\n".join(lines)


def plot(records: list[Record]) -> str:
    """An SVG with one bar per peer: how many times as long as ours the peer takes, on a logarithmic axis."""
    bars = [record for record in records if record["ratio"]]
    bars.sort(key=lambda r: (r["peer"] == "torch", r["op"], r["shape"], r["direction"]))
    left, width, step = 330, 520, 17
    low, high = -1.0, 2.0
    height = step * len(bars) + 50

    def x(ratio: float) -> float:
        return left + width * (min(max(math.log10(ratio), low), high) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        f'<text x="{left}" y="14">time of the peer / our time (right of 1: ours is faster)</text>',
    ]
    for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100):
        colour = "#444" if tick == 1 else "#ddd"
        parts.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="30" y2="{height - 14}" stroke="{colour}"/>'
        )
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 2}" text-anchor="middle">{tick:g}</text>')
    for row, bar in enumerate(bars):
        y = 32 + row * step
        begin, end = sorted((x(1), x(bar["ratio"])))
        label = f"{bar['op']} {bar['shape']} {bar['direction']} · {bar['peer']}"
        parts.append(f'<text x="{left - 6}" y="{y + 10}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect x="{begin:.1f}" y="{y}" width="{max(end - begin, 1):.1f}" height="{step - 5}" '
            f'fill="{COLOURS.get(bar["peer"], "#888")}"/>'
        )
        parts.append(f'<text x="{end + 4:.1f}" y="{y + 10}">{bar["ratio"]:.2g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
