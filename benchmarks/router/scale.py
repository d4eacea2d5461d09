"""Large states: the part of the router benchmark with a thousand instances, and snapshots that come in."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.lib.common import Options, Report
from benchmarks.router.decisions import POLICIES
from benchmarks.router.processes import two_cores

FEW, MANY = 4, 1000
"""Instances."""
MOST_S = 3600.0


def measure_scale(options: Options, report: Report) -> None:
    """Rows of memory, events and decisions at few and at many instances, and of decisions while a snapshot
    comes in, and their summary."""
    few, many = options.pick((FEW, MANY), quick=(FEW, MANY), tiny=(2, 3))
    blocks = options.pick(20_480, quick=512, tiny=32)
    names = options.pick(400_000, quick=400_000, tiny=100)
    decisions, rounds = options.pick((2000, 12), quick=(200, 4), tiny=(2, 1))
    found: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for instances, policy in itertools.product((few, many), POLICIES):
        rows = _apart(
            what="state", instances=instances, blocks=blocks, name_count=names, decisions=decisions,
            policy=policy,
        )  # fmt: skip
        found[instances, policy] = {_title(row): row for row in rows}
        for row in rows:
            report.add(**{"policy": policy, **row})
    quiet, storm = _apart(what="storm", instances=few, name_count=names, rounds=rounds)
    for row in (quiet, storm):
        report.add(**row)
    report.summary["storm_vs_quiet_p99"] = storm["p99_ms"] / quiet["p99_ms"]
    for policy, count in itertools.product(POLICIES, (0, 1)):
        title = f"decision, {count}, idle"
        report.summary[f"{policy}_decision_many_vs_few_{count}_holders"] = (
            found[many, policy][title]["p50_us"] / found[few, policy][title]["p50_us"]
        )
    for count in (1, 100, many):
        for fleet in ("idle", "busy"):
            decided = found[many, "cost"].get(f"decision, {count}, {fleet}")
            if decided is not None:
                report.summary[f"cost_{count}_holders_{fleet}_p50_us"] = decided["p50_us"]
    title, policy = "blocks in memory, , ", POLICIES[0]
    report.summary["events_many_vs_few"] = (
        found[many, policy][title]["events_per_s"] / found[few, policy][title]["events_per_s"]
    )
    report.note(
        f"scale: {blocks} blocks of 16 tokens at each of {few} or {many} instances, in runs of 16; "
        "decisions one by one, in the process that keeps the index, in CPU time, each of another prompt and "
        "with events and load reports before it, by the policy that is named, with a profile; late: how long "
        "after its time a decision ends, "
        f"every 2 ms, while snapshots of {names} names come in one after the other, and without"
    )


def _title(row: dict[str, Any]) -> str:
    return f"{row['case']}, {row.get('holders', '')}, {row.get('fleet', '')}"


def _apart(**arguments: Any) -> list[dict[str, Any]]:
    """Rows of a measurement in a process of its own, whose memory is that of the state only."""
    core, _ = two_cores()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.router.state", json.dumps(arguments)],
        stdout=subprocess.PIPE, check=True, timeout=MOST_S,
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows
