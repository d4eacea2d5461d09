"""Outcomes for people: a table in the terminal, and one page of HTML with plots."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sglang_ext.simulator.outcome import Outcome, percentile

ROWS: Final[Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]]] = (
    ("times of requests", lambda f: f["times"]),
    ("requests answered", lambda f: f"{f['requests']:,}"),
    ("requests without an answer", lambda f: f"{sum(f['failed'].values()):,}"),
    ("virtual time", lambda f: f"{f['virtual_seconds']:,.0f} s"),
    ("mean prompt, tokens", lambda f: f"{f['mean_prompt_tokens']:,.0f}"),
    ("mean answer, tokens", lambda f: f"{f['mean_output_tokens']:,.0f}"),
    ("TTFT P50, P90, P99", lambda f: _times(f["ttft_s"])),
    ("JCT P50, P90, P99", lambda f: _times(f["jct_s"])),
    ("TPOT P50, P90, P99", lambda f: _times(f["tpot_s"])),
    ("mean TTFT at 10 % less and more load", lambda f: _interval(f, "ttft_s")),
    ("mean JCT at 10 % less and more load", lambda f: _interval(f, "jct_s")),
    ("prompt tokens reused", lambda f: f"{f['reused']:.1%} ({_shares(f['reused_by_tier'])})"),
    ("an oracle of equal capacity", lambda f: _regret(f, "oracle_reused")),
    ("an infinite cache", lambda f: _regret(f, "infinite_reused")),
    ("decisions as recorded", lambda f: _agreement(f["agreement"])),
    ("capacity used", lambda f: f"{f['capacity_used']:.0%}"),
    ("busiest instance over the mean", lambda f: f"{f['busiest_over_mean']:.2f}"),
    ("device time of prompts", lambda f: f"{f['computed_device_s']:,.0f} s"),
    ("device time saved by reuse", lambda f: f"{f['saved_device_s']:,.0f} s"),
    ("agents: answer tokens a second, of turns in time", lambda f: _agents(f, "goodput")),
    ("agents: share of turns in time", lambda f: _agents(f, "in_time")),
    ("agents: longest wait over the mean", lambda f: _agents(f, "longest_wait_vs_mean")),
)
"""Of each row, its name, and its text from the figures of a column."""


MOST_TENANTS: Final = 20
"""Tenants with rows of their own. JSON has all."""


def print_table(console: Console, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Print outcomes side by side, and their warnings.

    Args:
        columns: figures of `Outcome.as_json` by title, and in ``times`` where their times are from, in
            ``warnings`` sentences, and where they were simulated, ``interval`` and ``agents``.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")
    for name, values in rows_of(columns):
        table.add_row(name, *values)
    console.print(table)
    for warning in warnings_of(columns):
        console.print(warning)


def rows_of(columns: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The table: the name of each row, and its text in each column."""
    found = [(name, [text(figures) for figures in columns.values()]) for name, text in ROWS]
    found += _tenants(columns)
    for kind, unit in (("link_bytes", " bytes"), ("counts", "")):
        for name in sorted({name for figures in columns.values() for name in figures[kind]}):
            found.append((name, [f"{figures[kind].get(name, 0):,.0f}{unit}" for figures in columns.values()]))
    return found


def _tenants(columns: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Two rows of each tenant, those with the most requests first; beyond `MOST_TENANTS`, one row of all
    further ones."""
    sent: Counter[str] = Counter()
    for figures in columns.values():
        for name, tenant in figures["tenants"].items():
            sent[name] += tenant["requests"] + sum(tenant["failed"].values())
    order = sorted(sent, key=lambda name: (-sent[name], name))
    shown, further = order[:MOST_TENANTS], order[MOST_TENANTS:]
    found = []
    for name in shown:
        tenants = [figures["tenants"].get(name) for figures in columns.values()]
        found.append((f"{name}: answered, refused", [_answered([t] if t else []) for t in tenants]))
        found.append((f"{name}: TTFT P50, P90, P99", [_times(t["ttft_s"]) if t else "-" for t in tenants]))
    if further:
        rest = [[t for name in further if (t := f["tenants"].get(name))] for f in columns.values()]
        found.append((f"{len(further):,} further tenants: answered, refused", [_answered(t) for t in rest]))
    return found


def _answered(tenants: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{sum(each[name] for each in tenants):,}" for name in ("requests", "refused"))


def warnings_of(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The warnings of all columns."""
    return [warning for figures in columns.values() for warning in figures["warnings"]]


def _times(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{spread[name] * 1e3:,.0f}" for name in ("p50", "p90", "p99")) + " ms"


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{tier} {share:.1%}" for tier, share in shares.items() if share) or "none"


def _agreement(found: Mapping[str, float]) -> str:
    return f"{found['instance']:.1%}, hits {found['exact_hits']:.1%}" if found else "-"


def _interval(figures: Mapping[str, Any], name: str) -> str:
    if "interval" not in figures:
        return "-"
    low, high = figures["interval"][name]
    return f"{low * 1e3:,.0f} to {high * 1e3:,.0f} ms"


def _agents(figures: Mapping[str, Any], name: str) -> str:
    return f"{figures['agents'][name]:.3g}" if "agents" in figures else "-"


def _regret(figures: Mapping[str, Any], name: str) -> str:
    share = figures["regret"].get(name)
    return "-" if share is None else f"{share:.1%}"


WIDTH, HEIGHT, LEFT, BOTTOM = 460, 240, 56, 40
COLORS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")


def page(outcomes: Mapping[str, Outcome], columns: Mapping[str, Mapping[str, Any]], note: str) -> str:
    """One page of HTML, which needs nothing else.

    Args:
        outcomes: by title. columns: their figures. note: names the load.
    """
    head = "".join(f"<th>{html.escape(title)}</th>" for title in columns)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for name, values in rows_of(columns)
    )
    warnings = "".join(f"<p class='warning'>{html.escape(warning)}</p>" for warning in warnings_of(columns))
    tiers = sorted({tier for figures in columns.values() for tier in figures["reused_by_tier"]})
    reused = [
        (title, [figures["reused_by_tier"].get(tier, 0.0) for tier in tiers])
        for title, figures in columns.items()
    ]
    plots = [
        _lines("Time to first token (s), by share", [(t, _curve(o.ttft)) for t, o in outcomes.items()]),
        _lines("Time to the last token (s), by share", [(t, _curve(o.jct)) for t, o in outcomes.items()]),
        _lines("Requests of each instance, sorted", [(t, _sorted(o)) for t, o in outcomes.items()]),
        _bars("Prompt tokens reused, by tier", tiers, reused),
    ]
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>sglang-ext simulate</title>"
        "<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}"
        "td,th{padding:3px 12px;text-align:right;border-bottom:1px solid #ddd}td:first-child{text-align:left}"
        "svg{margin:12px 12px 0 0}.warning{color:#b00}</style>"
        f"<h1>sglang-ext simulate</h1><p>{html.escape(note)}</p>{warnings}"
        f"<table><tr><th></th>{head}</tr>{rows}</table><div>{''.join(plots)}</div></html>\n"
    )


def _curve(values: Iterable[float]) -> list[tuple[float, float]]:
    kept = sorted(values)
    return [(percent / 100, percentile(kept, percent)) for percent in range(1, 100)] if kept else []


def _sorted(outcome: Outcome) -> list[tuple[float, float]]:
    counts = sorted(outcome.by_instance.values())
    return [(float(place), float(count)) for place, count in enumerate(counts)]


def _lines(title: str, curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    points = [point for _, curve in curves for point in curve]
    right = max((x for x, _ in points), default=1.0) or 1.0
    top = max((y for _, y in points), default=1.0) or 1.0
    drawn = []
    for color, (name, curve) in zip(COLORS * len(curves), curves, strict=False):
        path = " ".join(f"{_x(x / right):.1f},{_y(y / top):.1f}" for x, y in curve)
        drawn.append(f"<polyline fill='none' stroke='{color}' points='{path}'>{_title(name)}</polyline>")
    return _frame(title, f"{right:g}", f"{top:.3g}", drawn, [name for name, _ in curves])


def _bars(title: str, parts: Sequence[str], bars: Sequence[tuple[str, Sequence[float]]]) -> str:
    drawn = []
    width = 1 / max(1, len(bars))
    for number, (name, values) in enumerate(bars):
        below = 0.0
        for color, part, value in zip(COLORS, parts, values, strict=False):
            x, y = _x((number + 0.15) * width), _y(below + value)
            size = f"width='{0.7 * width * _inner()[0]:.1f}' height='{value * _inner()[1]:.1f}'"
            label = _title(f"{name}: {part}")
            drawn.append(f"<rect x='{x:.1f}' y='{y:.1f}' {size} fill='{color}'>{label}</rect>")
            below += value
    return _frame(title, "", "1", drawn, list(parts))


def _frame(title: str, right: str, top: str, drawn: Sequence[str], names: Sequence[str]) -> str:
    labels = "".join(
        f"<text x='{LEFT + 6}' y='{30 + 14 * place}' fill='{color}' font-size='12'>{html.escape(name)}</text>"
        for place, (color, name) in enumerate(zip(COLORS, names, strict=False))
    )
    floor = HEIGHT - BOTTOM
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}'><text x='4' y='14'>{html.escape(title)}</text>"
        f"<path d='M{LEFT} 20V{floor}H{WIDTH - 10}' fill='none' stroke='#444'/>"
        f"<text x='4' y='30' font-size='12'>{html.escape(top)}</text>"
        f"<text x='4' y='{floor}' font-size='12'>0</text>"
        f"<text x='{WIDTH - 40}' y='{floor + 16}' font-size='12'>{html.escape(right)}</text>"
        f"{''.join(drawn)}{labels}</svg>"
    )


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>"


def _inner() -> tuple[int, int]:
    return WIDTH - 10 - LEFT, HEIGHT - BOTTOM - 20


def _x(share: float) -> float:
    return LEFT + share * _inner()[0]


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * _inner()[1]
