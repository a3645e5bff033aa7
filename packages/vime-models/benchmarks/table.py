# SPDX-License-Identifier: Apache-2.0
"""Turns the records of train_slice.py into the tables of docs/scaling.md.

    python table.py results/slice-h200.json results/multi_gpu.json --doc ../../../docs/scaling.md

Replaces what stands between `<!-- slice:begin -->` and `<!-- slice:end -->`; with `--check` it only compares. Without
`--doc` it prints.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import predict
from slices import CASES, FLASH_SLICE, FULL

Record = dict[str, Any]
BEGIN, END = "<!-- slice:begin -->", "<!-- slice:end -->"
COLUMNS = (
    "case",
    "step, ms: measured, planned",
    "tokens/s per GPU",
    "of one GPU",
    "MFU",
    "GiB: measured, planned",
    "only wires busy, ms",
    "attention, ms: measured; planned",
)
# By whose times the attention is planned.
KERNELS = Path(__file__).parents[2] / "vime-kernels" / "benchmarks" / "results" / "h200.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when `--check` finds an old table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--doc", type=Path, help="Markdown file with the markers")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    found = {record["name"]: record for path in options.records for record in json.loads(path.read_text())}
    text = table(found)
    if not options.doc:
        print(text)
        return 0
    old = options.doc.read_text()
    if BEGIN not in old or END not in old:
        raise SystemExit(f"table: expected the markers {BEGIN} and {END} in {options.doc}; add them")
    new = f"{old.split(BEGIN)[0]}{BEGIN}\n{text}\n{END}{old.split(END)[-1]}"
    if options.check:
        if new != old:
            print(f"{options.doc}: the table differs from the records; run table.py without --check")
        return int(new != old)
    options.doc.write_text(new)
    return 0


def table(found: dict[str, Record]) -> str:
    """The Markdown table, and where the numbers come from."""
    lines = [row(COLUMNS), row(["---"] * len(COLUMNS))]
    order = {name: number for number, name in enumerate(CASES)}
    ordered = sorted(found.values(), key=lambda record: (order[record["case"]], record["name"]))
    kernels = json.loads(KERNELS.read_text())
    lines += [row(cells(record, found, kernels)) for record in ordered]
    sources = {
        f"{r['device']}; {', '.join(f'{n} {v}' for n, v in r['versions'].items())}; commit {r['commit']}."
        for r in ordered
    }
    return "\n".join([*lines, "", *sorted(sources)])


def row(texts: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def cells(record: Record, found: dict[str, Record], kernels: Sequence[Record]) -> list[str]:
    """Texts of one row. A rate is compared with that of the same commit only."""
    alone = found.get(baseline(record["case"]) or "")
    if alone and alone["commit"].split("-")[0] != record["commit"].split("-")[0]:
        alone = None
    case = CASES[record["case"]]
    planned = ""
    if record["kernels"] == "auto" and not {"tp", "pp"} & set(case.options):
        times = predict.attention_ms(case, FLASH_SLICE, kernels)
        planned = "; " + ", ".join(f"{ms:.1f}" for ms in times)
    rate, exposed = record["tokens_per_s_per_gpu"], max(record["exposed_ms"])
    attention = [f"{ms:.1f}" for ms in record["attention_ms"]] if max(record["attention_ms"]) else []
    return [
        f"`{record['name']}`",
        f"{record['step_ms']:.0f}, {record['predicted_ms']:.0f}",
        f"{rate:,}".replace(",", " "),
        f"{rate / alone['tokens_per_s_per_gpu']:.0%}".replace("%", " %")
        if alone and record["gpus"] > 1
        else "",
        f"{record['mfu']:.0%}".replace("%", " %"),
        f"{record['peak_gib']:.1f}, {record['predicted_gib']:.1f}",
        f"{exposed:.0f}" if record["gpus"] > 1 else "",
        ", ".join(attention) + planned if attention else "",
    ]


def baseline(name: str) -> str | None:
    """The case on one GPU with the same microbatches, recomputed alike."""
    case = CASES[name]
    options = {key: value for key, value in case.options.items() if key in FULL}
    wanted = (1, case.pack, case.microbatches, options)
    return next(
        (other for other, c in CASES.items() if (c.world, c.pack, c.microbatches, c.options) == wanted), None
    )


if __name__ == "__main__":
    sys.exit(main())
