# SPDX-License-Identifier: Apache-2.0
"""What a verification shows: a table on the terminal, JSON for programs, one self-contained HTML page for people."""

import html
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vime_convert.verify.case import CaseResult
from vime_convert.verify.plot import layer_plot


def verdict(results: list[CaseResult]) -> str:
    """PASS or FAIL over all cases; no case at all is a failure."""
    return "PASS" if results and all(result.ok for result in results) else "FAIL"


def table(results: list[CaseResult]) -> str:
    """One line per check, the failing ones marked, the verdict last."""
    rows = [("case", "check", "measured", "limit", "", "detail")]
    for result in results:
        for check in result.checks:
            word = "ok" if check.ok else "FAIL"
            rows.append(
                (result.name, check.name, _number(check.value), _number(check.limit), word, check.detail)
            )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows
    ]
    failed = [
        f"{r.name}: {c.name} is {_number(c.value)}, limit {_number(c.limit)}; {c.detail}"
        for r in results
        for c in r.checks
        if not c.ok
    ]
    seconds = sum(result.seconds for result in results)
    count = sum(len(result.checks) for result in results)
    summary = f"{verdict(results)}: {len(results)} case(s), {count} checks, {seconds:.0f} s"
    return "\n".join([*lines, "", *failed, summary])


def _number(value: float) -> str:
    is_count = math.isfinite(value) and value == int(value)
    return str(int(value)) if is_count else f"{value:.1e}"


def as_json(results: list[CaseResult], about: dict[str, Any]) -> str:
    """The whole measurement; infinities become strings so that any JSON reader takes it."""
    cases = [{**asdict(result), "ok": result.ok} for result in results]
    for case, result in zip(cases, results, strict=True):
        for entry, check in zip(case["checks"], result.checks, strict=True):
            entry["ok"] = check.ok
    return json.dumps(_finite({**about, "verdict": verdict(results), "cases": cases}), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


STYLE = """
:root { color-scheme: light dark; --fg: #1c2024; --bg: #fff; --line: #d8dce0; --ok: #14743a; --bad: #c02626; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e6e8ea; --bg: #16181b; --line: #3a3f45; --ok: #4cc27a; --bad: #ff7b72; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
       max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
.ok { color: var(--ok); } .bad { color: var(--bad); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem; } dt { opacity: .7; } dd { margin: 0; }
"""


def as_html(results: list[CaseResult], about: dict[str, Any]) -> str:
    """One page without outside references: verdict, a per-layer error plot and the checks of every case."""
    word = verdict(results)
    facts = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in about.items())
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>verify: {word}</title><style>{STYLE}</style>",
        f"<h1>Verification of {html.escape(str(about.get('model_type', '')))}: ",
        f"<span class='{'ok' if word == 'PASS' else 'bad'}'>{word}</span></h1><dl>{facts}</dl>",
    ]
    for result in results:
        parts.append(
            f"<h2>{html.escape(result.name)}</h2><p>{html.escape(result.covers)} · {result.seq_len} tokens</p>"
        )
        if result.layer_errors:
            parts.append(layer_plot(result))
        parts.append("<table><tr><th>check<th>measured<th>limit<th><th>detail</tr>")
        for check in result.checks:
            mark = "<td class='ok'>ok" if check.ok else "<td class='bad'>FAIL"
            cells = (check.name, _number(check.value), _number(check.limit))
            cells_html = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            parts.append(f"<tr>{cells_html}{mark}</td><td>{html.escape(check.detail)}</td></tr>")
        parts.append("</table>")
    return "".join(parts)


def write_all(stem: Path, results: list[CaseResult], about: dict[str, Any]) -> list[Path]:
    """Writes `stem`.json, .html and, if layers were compared, .svg; returns the paths."""
    texts = {".json": as_json(results, about), ".html": as_html(results, about)}
    plotted = next((result for result in results if result.layer_errors), None)
    if plotted is not None:
        texts[".svg"] = layer_plot(plotted, standalone=True)
    paths = []
    for suffix, text in texts.items():
        paths.append(stem.with_name(stem.name + suffix))
        _write(paths[-1], text)
    return paths


def _write(path: Path, text: str) -> None:
    """Writes beside and renames, so that a reader never sees half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
