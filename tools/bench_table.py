# SPDX-License-Identifier: Apache-2.0
"""Turns benchmark records into a Markdown table, and into plots of the speed beside each peer.

`--doc FILE` replaces what stands between `<!-- bench:begin -->` and `<!-- bench:end -->` in FILE; with `--check` it
only compares. `--png FOLDER` draws, and needs matplotlib: `uv run --with matplotlib tools/bench_table.py …`.
The records are those of packages/vime-kernels/benchmarks/run.py.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
HEADER = (
    "| operation | shape | direction | ms | rate | peer time / ours | error, theirs | MiB, theirs |\n|"
    + 8 * " --- |"
)
COLOURS = {
 "torch.topk": "#888888", "FlashMLA": "#c8734a", "cuDNN": "#6aa56e", "TileLang": "#4878a8",
    "DeepGEMM": "#a05aa0", "Miles": "#c9a227", "SGLang": "#2a9d8f", "TileKernels": "#b0413e", "DeepSeek": "#5c6bc0",
}  # fmt: skip
PLOTS = {
    "kernels-attention": ("sparse_attention",),
    "kernels-indexer": ("indexer", "topk", "kpool"),
    "kernels-memory-bound": (
        "gated_pool",
        "fake_quant",
        "act_quant",
        "hadamard",
        "mhc",
        "sinkhorn",
        "rotate",
        "swiglu",
        "gather_sum",
    ),
}  # fmt: skip
Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when `--check` finds an old table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--doc", type=Path, help="Markdown file with the markers")
    parser.add_argument("--png", type=Path, help="folder for the plots")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    records = json.loads(options.records.read_text())
    text = table(records)
    if options.png and not options.check:
        for name, ops in PLOTS.items():
            draw(bars(records, ops), records[0], options.png / f"{name}.png")
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
    """The Markdown table, and a line on where the numbers come from.

    Our time and rate are those of the record without a peer; each ratio is of two times measured in turns. Our memory
    is the most that any record of the cell saw.
    """
    lines = [HEADER]
    for (op, shape, direction), group in cells(records).items():
        ours = group[0]
        if ours["failure"]:
            lines.append(f"| `{op}` | {shape} | {direction} | failed | | | | |")
            continue
        peers = sorted((r for r in group if r["ratio"]), key=lambda r: (r["peer"] == "torch", r["peer"]))
        ratios = [f"{r['peer']} {r['ratio']:.{2 if r['ratio'] < 10 else 0}f}×" for r in peers]
        errors = [number(r["rel_error"]) for r in group[:1]]
        errors += [f"{r['peer']} {number(r['peer_error'])}" for r in peers if r["peer"] != "torch"]
        memory = [f"{max(r['peak_mib'] for r in group if r['peak_mib'] is not None):.0f}"]
        memory += [f"{r['peer']} {r['peer_peak_mib']:.0f}" for r in peers if r["peer"] != "torch"]
        texts = [f"`{op}`", shape, direction, f"{ours['ours_ms']:.3f}", f"{ours['rate']:.0f} {ours['unit']}"]
        texts += [", ".join(ratios), ", ".join(errors), ", ".join(memory)]
        lines.append(f"| {' | '.join(texts)} |")
    source = records[0]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    devices = "; ".join(sorted({record["device"] for record in records}))
    lines += ["", f"{devices}; {versions}; commit {source['commit']}. `{source['command']}`"]
    return "\n".join(lines)


def number(error: float | None) -> str:
    """An error in a table."""
    if error is None:
        return "–"
    return "exact" if error == 0 else f"{error:.1e}"


def bars(records: list[Record], ops: tuple[str, ...]) -> list[tuple[str, list[tuple[str, float]]]]:
    """(label, [(peer, ratio)]) of every cell of these operations that has a peer with kernels of its own."""
    found = []
    for (op, shape, direction), group in cells(records).items():
        peers = [(record["peer"], record["ratio"]) for record in group if record["ratio"]]
        peers = [pair for pair in peers if pair[0] != "torch"]
        if op.startswith(ops) and peers:
            found.append((f"{op}  {shape}  {direction}", peers))
    return found


def draw(rows: list[tuple[str, list[tuple[str, float]]]], source: Record, path: Path) -> None:
    """A PNG with one line per cell and one dot per peer: how many times as long as ours the peer takes.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit(
            "bench_table: --png needs matplotlib; run it with `uv run --with matplotlib`"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 0.8 + 0.24 * len(rows)), layout="constrained")
    axes.axvline(1, color="#444444", linewidth=1)
    named: set[str] = set()
    for place, (_, peers) in enumerate(rows):
        for peer, ratio in peers:
            colour = COLOURS.get(peer) or COLOURS.get(peer.split()[0].rstrip(","), "#000000")
            label = peer if peer not in named else None
            named.add(peer)
            hollow = peer.endswith(("fast", "proposal"))
            axes.plot(ratio, place, "o", color=colour, fillstyle="none" if hollow else "full", label=label)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "1235" else "")
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("time of the peer / our time, in the same run (right of 1: ours is faster)", fontsize=8)
    axes.set_title(f"{source['device'].split(',')[0]}, commit {source['commit']}", fontsize=8)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
