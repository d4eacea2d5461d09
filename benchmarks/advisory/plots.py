"""The figures of Symphony's evaluation that the advisory benchmark has measured, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.advisory.fleet import SYSTEMS
from benchmarks.lib.common import Value
from benchmarks.lib.plots import Axis, bars, lines

Rows = Sequence[Mapping[str, Value]]


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Write a figure for each part that the rows hold; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in FIGURES.items():
        svg = figure(rows)
        if svg is not None:
            path = folder / f"{name}.svg"
            path.write_text(svg, encoding="utf-8")
            written.append(path)
    return written


def _curves(rows: Rows, value: str, axis: str, title: str) -> str | None:
    series: dict[str, dict[float, float]] = {}
    for system in SYSTEMS:
        points = {
            _float(row["users"]): _float(row[value])
            for row in rows
            if row["case"] == "systems" and row["system"] == system.name
        }
        if points:
            series[system.name] = points
    return lines(title, Axis("users"), Axis(axis), series) if series else None


def _latency(rows: Rows) -> str | None:
    return _curves(rows, "normalized_ms", "normalized latency, ms per token", "Latency by users (figure 12a)")


def _ttft(rows: Rows) -> str | None:
    return _curves(rows, "ttft_p50_ms", "TTFT p50, ms", "Time to first token by users (figure 12b)")


def _by_system(rows: Rows, case: str, value: str, axis: Axis, title: str, note: str = "") -> str | None:
    found = {str(row["system"]): _float(row[value]) for row in rows if row["case"] == case and row.get(value)}
    names = [system.name for system in SYSTEMS if system.name in found]
    if not names:
        return None
    return bars(title, axis, names, {axis.name: [found[name] for name in names]}, note)


def _balance(rows: Rows) -> str | None:
    axis = Axis("load of the most loaded over the median instance", 1.2)
    return _by_system(rows, "balance", "max_over_median", axis, "Load balance (figure 14)", "dashed: the aim")


def _prefill(rows: Rows) -> str | None:
    return _by_system(
        rows, "prefill-heavy", "per_s", Axis("requests per second"), "Prefill-heavy load (figure 16)"
    )


def _agents(rows: Rows) -> str | None:
    return _by_system(rows, "agents", "run_s", Axis("seconds per run"), "Agents (section 4.4)")


def _missing(rows: Rows) -> str | None:
    suffix = " of hints missing"
    found = {
        str(row["case"]).removesuffix(suffix): _float(row["normalized_ms"])
        for row in rows
        if str(row["case"]).endswith(suffix) and row["normalized_ms"] is not None
    }
    if not found:
        return None
    axis = Axis("normalized latency, ms per token")
    return bars("Missing hints (figure 17)", axis, list(found), {"ours": list(found.values())})


def _priority(rows: Rows) -> str | None:
    suffix = " high priority"
    levels = list(dict.fromkeys(str(row["case"]) for row in rows if str(row["case"]).endswith(suffix)))
    series: dict[str, list[float | None]] = {}
    for system in SYSTEMS:
        for who in ("high", "regular"):
            values = [
                next(
                    (
                        _float(row["tokens_per_s"])
                        for row in rows
                        if (row["case"], row.get("system"), row.get("priority")) == (level, system.name, who)
                    ),
                    None,
                )
                for level in levels
            ]
            if any(value is not None for value in values):
                series[f"{system.name}, {who}"] = values
    if not series:
        return None
    groups = [level.removesuffix(suffix) + " high" for level in levels]
    return bars("Priorities (figure 18)", Axis("tokens per second of a request"), groups, series)


def _float(value: Value) -> float:
    assert isinstance(value, int | float)
    return float(value)


FIGURES: dict[str, Callable[[Rows], str | None]] = {
    "figure_12a_latency": _latency,
    "figure_12b_ttft": _ttft,
    "figure_14_balance": _balance,
    "figure_16_prefill": _prefill,
    "figure_17_missing": _missing,
    "figure_18_priority": _priority,
    "section_4_4_agents": _agents,
}
"""File name -> the figure; None where its rows are missing."""
