# SPDX-License-Identifier: Apache-2.0
"""The per-layer error plot as SVG text: relative difference of the streams after each layer, logarithmic."""

import html
import math

from vime_convert.verify.case import CaseResult
from vime_convert.verify.precision import PRECISIONS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 280, 64, 150, 16, 44
COLOURS = {"float64": "#2f6fde", "float32": "#d9822b", "bfloat16": "#2a9d6f"}
LOW, HIGH = -17, 1  # decades shown: below float64's rounding up to a relative error of 10


def layer_plot(result: CaseResult, *, standalone: bool = False) -> str:
    """An SVG element: one line per precision with its limit dashed.

    Args:
        result: a case with layer errors.
        standalone: for a file of its own: a white ground and dark text. Otherwise text and axes follow the page.
    """
    count = len(result.layers)
    step = (WIDTH - LEFT - RIGHT) / max(count - 1, 1)

    def x(layer: int) -> float:
        return LEFT + step * layer

    def y(value: float) -> float:
        decade = HIGH if not math.isfinite(value) else math.log10(max(value, 10.0**LOW))
        return TOP + (HIGH - min(decade, HIGH)) / (HIGH - LOW) * (HEIGHT - TOP - BOTTOM)

    label = "relative difference of the streams after each layer"
    colour = " color='#1c2024'" if standalone else ""
    parts = [
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' xmlns='http://www.w3.org/2000/svg' aria-label='{label}'",
        f"{colour} style='width:100%;max-width:760px' font-family='system-ui, sans-serif' font-size='12'",
        f" fill='currentColor'><title>{html.escape(result.name)}: {label}</title>",
    ]
    if standalone:
        parts.append(f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#fff'/>")
    for decade in range(LOW + 1, HIGH + 1, 4):
        level = y(10.0**decade)
        parts.append(
            f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{level:.1f}' y2='{level:.1f}' stroke='#8884'/>"
        )
        parts.append(f"<text x='{LEFT - 8}' y='{level + 4:.1f}' text-anchor='end'>1e{decade}</text>")
    stride = math.ceil(count / 12)
    for layer, word in enumerate(result.layers):
        if layer % stride == 0:
            text = f"{layer}: {word}"
            parts.append(
                f"<text x='{x(layer):.1f}' y='{HEIGHT - 22}' text-anchor='middle'>{html.escape(text)}</text>"
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f"<text x='{middle}' y='{HEIGHT - 4}' text-anchor='middle'>layer and its compression ratio</text>"
    )
    for name, errors in result.layer_errors.items():
        colour = COLOURS[name]
        limit = y(PRECISIONS[name].states)
        parts.append(
            f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{limit:.1f}' y2='{limit:.1f}' "
            f"stroke='{colour}' stroke-dasharray='5 4'/>"
        )
        parts.append(f"<text x='{WIDTH - RIGHT + 8}' y='{limit + 4:.1f}' fill='{colour}'>{name} limit</text>")
        points = " ".join(f"{x(e.layer):.1f},{y(e.relative):.1f}" for e in errors)
        parts.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>")
        for e in errors:
            tip = f"{name}, layer {e.layer}: relative {e.relative:.1e}, max {e.max_abs:.1e}"
            place = f"cx='{x(e.layer):.1f}' cy='{y(e.relative):.1f}'"
            parts.append(f"<circle {place} r='3.5' fill='{colour}'><title>{tip}</title></circle>")
        parts.append(
            f"<text x='{WIDTH - RIGHT + 8}' y='{y(errors[-1].relative) + 4:.1f}' fill='{colour}'>{name}</text>"
        )
    return "".join([*parts, "</svg>"])
