"""Plots of benchmarks as SVG, by nothing but Python: bars in groups, and lines through points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 44, 84
COLORS = ("#3b6ea5", "#d1783c", "#5a9a68", "#a04a5b", "#7d6ba8", "#8a8a8a")


@dataclass(frozen=True)
class Axis:
    """One axis: its name, and a value to mark on it."""

    name: str
    mark: float | None = None


def bars(
    title: str,
    axis: Axis,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    note: str = "",
) -> str:
    """Bars side by side, a series per colour.

    Args:
        groups: below the bars. series: of each, a value per group; None where there is none.

    Raises:
        ValueError: a series has not a value per group.
    """
    if any(len(values) != len(groups) for values in series.values()):
        raise ValueError(f"each series needs {len(groups)} values")
    top = _top([value for values in series.values() for value in values], axis.mark)
    parts = _frame(title, axis, top, list(series), note)
    wide = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    bar = wide * 0.8 / max(1, len(series))
    for at, group in enumerate(groups):
        middle = LEFT + wide * (at + 0.5)
        parts.append(_text(middle, HEIGHT - BOTTOM + 18, group, anchor="middle"))
        for number, values in enumerate(series.values()):
            value = values[at]
            if value is None:
                continue
            x, y = LEFT + wide * (at + 0.1) + bar * number, _y(value, top)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.94:.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{COLORS[number % len(COLORS)]}"/>'
            )
            parts.append(_text(x + bar * 0.47, y - 4, f"{value:.3g}", anchor="middle", size=10))
    return _svg(parts)


def lines(
    title: str, below: Axis, axis: Axis, series: Mapping[str, Mapping[float, float]], note: str = ""
) -> str:
    """Lines through points (x to y), a series per colour, both axes from 0."""
    points = [point for values in series.values() for point in values.items()]
    top = _top([y for _, y in points], axis.mark)
    most = _top([x for x, _ in points], None)
    parts = _frame(title, axis, top, list(series), note)
    span = WIDTH - LEFT - RIGHT
    for at in range(5):
        x = most * at / 4
        parts.append(_text(LEFT + span * at / 4, HEIGHT - BOTTOM + 18, f"{x:g}", anchor="middle"))
    parts.append(_text(LEFT + span / 2, HEIGHT - BOTTOM + 34, below.name, anchor="middle"))
    for number, values in enumerate(series.values()):
        color = COLORS[number % len(COLORS)]
        places = [(LEFT + span * x / most, _y(y, top)) for x, y in sorted(values.items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in places]
    return _svg(parts)


def _top(values: Sequence[float | None], mark: float | None) -> float:
    """A round number that no value exceeds."""
    most = max([value for value in [*values, mark] if value is not None], default=0.0)
    if most <= 0.0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(most))
    return next(step * times for times in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * times >= most * 1.02)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * max(0.0, min(value, top)) / top


def _frame(title: str, axis: Axis, top: float, series: Sequence[str], note: str) -> list[str]:
    parts = [_text(WIDTH / 2, 24, title, anchor="middle", size=15)]
    for at in range(5):
        value = top * at / 4
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}", anchor="end", size=11))
    if axis.mark is not None:
        y = _y(axis.mark, top)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c22" '
            'stroke-dasharray="5 4"/>'
        )
    middle = (HEIGHT + TOP - BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle}" transform="rotate(-90 16 {middle})" text-anchor="middle" '
        f'font-size="12">{escape(axis.name)}</text>'
    )
    x = float(LEFT)
    for number, name in enumerate(series):
        y = HEIGHT - 34
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLORS[number % len(COLORS)]}"/>'
        )
        parts.append(_text(x + 14, y, name, size=11))
        x += 28 + 6.2 * len(name)
    if note:
        parts.append(_text(LEFT, HEIGHT - 12, note, size=10))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _svg(parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" fill="#222">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        f"{body}\n</svg>\n"
    )
