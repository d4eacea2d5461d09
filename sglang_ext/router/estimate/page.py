"""An estimate as a page: the report, and the curve of hit shares as an SVG. It loads nothing."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

from sglang_ext.router.estimate.estimate import Estimate

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 320, 48, 36
_COLOURS: Final = ("#8a8f98", "#1f6feb")
_STYLE: Final = (
    "body{font:14px system-ui,sans-serif;margin:2rem;max-width:60rem}"
    "pre{font:13px ui-monospace,monospace}text{font:11px system-ui,sans-serif}"
)


def page(estimate: Estimate, lines: Sequence[str]) -> str:
    """The whole page. lines: the report for people."""
    return (
        f"<!doctype html><meta charset=utf-8><title>sglang-ext estimate</title><style>{_STYLE}</style>"
        f"<h1>Prompts found cached, by KV of an instance</h1>{_plot(estimate)}"
        f"<pre>{html.escape(chr(10).join(lines))}</pre>\n"
    )


def _plot(estimate: Estimate) -> str:
    curve = estimate.curve()
    low, high = (math.log2(max(1, size)) for size in (curve[0][0], curve[-1][0]))
    span = max(high - low, 1e-9)

    def at(size: int, share: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 8) * (math.log2(max(1, size)) - low) / span
        return round(x, 1), round((HEIGHT - BOTTOM) * (1 - share) + 8, 1)

    parts = []
    for tenth in range(0, 11, 2):
        _, y = at(curve[0][0], tenth / 10)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - 8}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{10 * tenth} %</text>')
    for size, _, _ in curve[:: max(1, len(curve) // 8)]:
        x, _ = at(size, 0)
        parts.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{size / (1 << 30):.3g} GiB</text>')
    names = ("in turn", "by prefix")
    for number, (name, colour) in enumerate(zip(names, _COLOURS, strict=True)):
        points = " ".join("{},{}".format(*at(row[0], row[1 + number])) for row in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 12}" y="{24 + 16 * number}" fill="{colour}">{name}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
