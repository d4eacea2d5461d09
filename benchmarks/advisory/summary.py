"""The summary of the advisory benchmark: read off its rows, so that a run can be made in several calls."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.advisory.figures import times_the_users, users_at
from benchmarks.advisory.fleet import BY_LAYER, HINTED, RECOMPUTE, STICKY, STOCK, UNHINTED, WHOLE
from benchmarks.advisory.parts import CHATDEV, FAN_OUT
from benchmarks.advisory.plan import SERVERS
from benchmarks.lib.common import Report, Row, Value

EQUAL = 4
"""Users of recompute: at their latency, others are compared. A measured point, so that it is not recompute's
curve that makes the ratio."""
NAMES = ("case", "system", "users", "priority", "runs", "announced")
"""The fields of a row's identity: of two rows that agree in them, the newer one counts."""
HITS = "TTFT, hinted"


def add_to(report: Report, path: Path) -> None:
    """Begin a report with the rows of an earlier one.

    Raises:
        ValueError: the file holds no report of this benchmark, or one of other servers.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        rows, notes = told["rows"], told.get("notes", [])
        if told["name"] != report.name:
            raise ValueError(f"a report of {told['name']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--add-to {path}: no report of `benchmarks.{report.name}` ({error}); give the file of --json"
        ) from error
    theirs = next((note for note in notes if note.startswith(SERVERS)), None)
    ours = next((note for note in report.notes if note.startswith(SERVERS)), None)
    if theirs != ours:
        raise ValueError(
            f"--add-to {path}: a report of other servers ({theirs or 'it does not say which'}; now: {ours}); "
            "give the same --model, --dram-tokens and --disk-tokens, or begin another report"
        )
    report.rows[:0] = rows
    report.notes[:0] = [note for note in notes if " ms per token: " not in note]


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of the same measurement, the last one only, where the first one was."""
    found: dict[tuple[Value, ...], Row] = {}
    for row in rows:
        found[tuple(row.get(name) for name in NAMES)] = row
    return list(found.values())


def summarise(report: Report) -> None:
    """Fill the summary in from the rows."""
    report.rows = newest(report.rows)
    report.notes = list(dict.fromkeys(report.notes))
    rows = report.rows
    summary = report.summary
    _hits(rows, summary)
    _users(report)
    _balance(rows, summary)
    _layers(rows, summary)
    _agents(rows, summary)
    for row in rows:
        name = str(row["case"])
        if name.endswith("of hints missing, by the line"):
            level = name.split("%")[0]
            summary[f"missed{level}_cost"], summary[f"missed{level}_noise"] = row["cost"], row["noise"]
    hidden = [row for row in rows if row["case"] == "hidden"]
    if hidden:
        middle = min(hidden, key=lambda row: _number(row["hbm_wanted"]))
        summary["hidden_share"] = middle["hidden"]


def _hits(rows: Sequence[Row], summary: dict[str, Value]) -> None:
    for row in rows:
        if row["case"] == HITS:
            summary["share_within_1_1_of_hbm_hit"] = row["within_1_1"]


def _layers(rows: Sequence[Row], summary: dict[str, Value]) -> None:
    """The most announced sessions that were served as HBM hits, by layers over as wholes."""
    served = {
        system.name: [_number(row["within_1_1"]) for row in rows if row.get("system") == system.name]
        for system in (WHOLE, BY_LAYER)
    }
    if all(served.values()) and max(served[WHOLE.name]):
        summary["sessions_by_layer_vs_whole"] = max(served[BY_LAYER.name]) / max(served[WHOLE.name])


def _users(report: Report) -> None:
    curves: dict[str, dict[int, float]] = {}
    for row in report.rows:
        if row["case"] == "systems":
            curve = curves.setdefault(str(row["system"]), {})
            curve[int(_number(row["users"]))] = _number(row["normalized_ms"]) / 1e3
    recompute, ours = curves.get(RECOMPUTE.name), curves.get(HINTED.name)
    if not recompute or not ours:
        return
    equal = min(recompute, key=lambda users: abs(users - EQUAL))
    for users, latency in sorted(recompute.items()):
        if users != equal:
            served = _told(users_at(latency, ours))
            report.note(f"{1e3 * latency:.0f} ms per token: ours {served}, {RECOMPUTE.name} {users} users")
    latency = recompute[equal]
    many = users_at(latency, ours)
    for key, name in (("users_vs_recompute", RECOMPUTE.name), ("users_vs_stock_router", STOCK.name)):
        curve = curves.get(name, {})
        theirs = users_at(latency, curve) if curve else None
        report.summary[key] = times_the_users(many, theirs) if theirs else None
        if theirs:
            report.note(f"{1e3 * latency:.0f} ms per token: ours {_told(many)}, {name} {_told(theirs)} users")


def _balance(rows: Sequence[Row], summary: dict[str, Value]) -> None:
    """From the part that is made for it; else from that of all systems, at the users that all had."""
    for key, name in (
        ("max_over_median_load", HINTED.name),
        ("max_over_median_load_sticky", STICKY.name),
    ):
        found = [row for row in rows if row["case"] == "balance" and row["system"] == name]
        if not found:
            shared = [
                row["users"] for row in rows if row["case"] == "systems" and row["system"] == STICKY.name
            ]
            found = [
                row
                for row in rows
                if row["case"] == "systems" and row["system"] == name and row["users"] in shared
            ]
        if found:
            summary[key] = found[0]["max_over_median"]


def _agents(rows: Sequence[Row], summary: dict[str, Value]) -> None:
    """How long runs wait for first tokens when hints go along the edges, over how long without hints."""
    for key, case in (("all_edges_wait_vs_unhinted", CHATDEV), ("fan_out_wait_vs_unhinted", FAN_OUT)):
        waits = {row["system"]: _number(row["of_it_ttft_s"]) for row in rows if row["case"] == case}
        if HINTED.name in waits and UNHINTED.name in waits:
            summary[key] = waits[HINTED.name] / waits[UNHINTED.name]


def _told(bounds: tuple[float, float]) -> str:
    low, high = bounds
    if low == high:
        return f"{low:.1f}"
    return f"{low:.0f} or more" if math.isinf(high) else f"fewer than {high:.0f}"


def _number(value: Value) -> float:
    assert isinstance(value, int | float)
    return float(value)
