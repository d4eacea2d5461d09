"""Draw the picture of the numbers, docs/benchmarks/headline.svg: ``python scripts/headline_plot.py``.

The figures stand in docs/benchmarks/headline.json, each with the row of the benchmark's page that it comes
from; tests/test_docs.py holds both to each other.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
DATA, PICTURE = FOLDER / "headline.json", FOLDER / "headline.svg"
WIDTH, LEFT, SCALE = 840, 330, 400
"""Pixels: of the picture, left of the bars, and of a bar as long as its baseline."""
TOP, STEP, BAR = 64, 46, 22


def draw(data: dict[str, Any]) -> str:
    """The picture as SVG; readable on light and on dark pages, because it brings its own ground."""
    bars = data["bars"]
    height = TOP + STEP * len(bars) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" role="img">',
        f"<title>{escape(data['title'])}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="20" y="32" font-size="17" font-weight="bold" fill="#1a1a2e">'
        f"{escape(data['title'])}</text>",
    ]
    for number, bar in enumerate(bars):
        y = TOP + STEP * number
        length = round(SCALE * bar["value"])
        lines += [
            f'<text x="{LEFT - 12}" y="{y + 10}" font-size="13" text-anchor="end" fill="#1a1a2e">'
            f"{escape(bar['label'])}</text>",
            f'<text x="{LEFT - 12}" y="{y + 26}" font-size="12" text-anchor="end" fill="#667085">'
            f"against {escape(bar['baseline'])}</text>",
            f'<rect x="{LEFT}" y="{y}" width="{SCALE}" height="{BAR}" fill="#e4e7ec"/>',
            f'<rect x="{LEFT}" y="{y}" width="{length}" height="{BAR}" fill="#3b5bdb"/>',
            f'<text x="{LEFT + SCALE + 12}" y="{y + 16}" font-size="14" font-weight="bold" fill="#1a1a2e">'
            f"{bar['value']:.2f}</text>",
        ]
    bottom = TOP + STEP * len(bars)
    lines += [
        f'<line x1="{LEFT + SCALE}" y1="{TOP - 8}" x2="{LEFT + SCALE}" y2="{bottom - 14}" stroke="#667085" '
        'stroke-dasharray="4 3"/>',
        f'<text x="{LEFT + SCALE}" y="{bottom + 4}" font-size="12" text-anchor="middle" fill="#667085">'
        "1.0 = baseline</text>",
        f'<text x="20" y="{height - 12}" font-size="12" fill="#667085">'
        "Measured on virtual machines with two CPU cores and a small model, no GPU.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the picture."""
    PICTURE.write_text(draw(json.loads(DATA.read_text("utf-8"))), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
