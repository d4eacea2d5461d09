"""Connections that cost a router without asking for anything: the part of the router benchmark with idle
streams, clients that do not read, and clients that connect anew for each request."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.common import Options, Report
from benchmarks.router.load import Job
from benchmarks.router.processes import PEER, SGLANG_ROUTER, Generator, cpu_seconds, process, two_cores
from benchmarks.router.speed import DIRECT, MANY, ONE, OURS, Leg, ways
from benchmarks.router.standin import FLOOD, HOLD

FILES = 1000
"""Of a process, besides those of streams."""
SETTLE_S = 5.0
"""In which connections end whose clients have gone."""


def measure_connections(options: Options, report: Report, peer_python: Path | None) -> None:
    """Rows of the costs of idle streams, stopped readers and new connections, and their summary."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # A stream takes a router two files.
    idle = min(options.pick(10_000, quick=2_000, tiny=20), (most - FILES) // 2)
    slow = options.pick(64, quick=32, tiny=4)
    seconds, rounds = options.pick((1.0, 5), quick=(0.3, 3), tiny=(0.1, 1))
    flags = ("--max-concurrent-requests", f"{2 * idle},connections={2 * idle}")
    with (
        tempfile.TemporaryDirectory(prefix="router-connections-") as name,
        ways(Path(name), {SGLANG_ROUTER: peer_python}, report, *flags) as (load, legs),
    ):
        rates: dict[str, list[float]] = {}
        kib: dict[tuple[str, str], float] = {}
        for way, leg in legs.items():
            asked = _Asked(load, leg.port, seconds, rounds)
            asked.rate()  # warms up
            kept, anew = asked.rate(), asked.rate(reconnect=True)
            rates[way] = anew
            report.add(
                "reconnecting, 32 conn.", way=way, rps=statistics.median(anew),
                of_kept=statistics.median(anew) / statistics.median(kept),
            )  # fmt: skip
            if way == DIRECT:
                continue
            for case, count, text in (("idle streams", idle, HOLD), ("slow readers", slow, FLOOD)):
                row = _beside(Path(name), leg, asked, count, text, seconds)
                report.add(f"{count} {case}", way=way, **row)
                kib[way, case] = row["kib_each"]
                if way == OURS:
                    report.summary[f"{case.replace(' ', '_')}_p50_ratio"] = row["p50_ratio"]
                    report.summary[f"{case.replace(' ', '_')}_kib"] = row["kib_each"]
        if PEER in rates:
            for case in ("idle streams", "slow readers"):
                key = f"{case.replace(' ', '_')}_kib_vs_sglang_router"
                report.summary[key] = kib[OURS, case] / kib[PEER, case]
            report.summary["reconnecting_rps_vs_sglang_router"] = statistics.median(
                ours / theirs for ours, theirs in zip(rates[OURS], rates[PEER], strict=True)
            )
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    report.note(
        f"connections: /generate of 1 KB, seen before, over one connection beside streams that have had one "
        f"event and get no more ({idle}: a process may open {most} files), and beside clients that read "
        "nothing of streams of 32 MB; memory is what the router's process grew by; left open: connections "
        f"that it still has {SETTLE_S:g} s after those clients have gone"
    )


class _Asked:
    """Short requests to one way."""

    def __init__(self, load: Generator, port: int, seconds: float, rounds: int) -> None:
        self._load = load
        self._job = Job(port, "/generate", 1024, False, ONE, seconds)
        self._rounds = rounds

    def p50_ms(self) -> float:
        return float(statistics.median(self._measure()["p50"] for _ in range(self._rounds))) * 1e3

    def rate(self, *, reconnect: bool = False) -> list[float]:
        results = [self._measure(connections=MANY, reconnect=reconnect) for _ in range(self._rounds)]
        return [result["requests"] / result["seconds"] for result in results]

    def _measure(self, **changes: Any) -> dict[str, Any]:
        result = self._load.measure(dataclasses.replace(self._job, **changes))
        if set(result["statuses"]) != {"200"}:
            raise RuntimeError(f"port {self._job.port}: {result['statuses']}")
        return result


def _beside(folder: Path, leg: Leg, asked: _Asked, count: int, text: str, seconds: float) -> dict[str, float]:
    """The latency of requests beside so many streams, and the cost of the streams."""
    assert leg.running is not None
    pid = leg.running.pid
    quiet, memory, files = asked.p50_ms(), _resident(pid), _files(pid)
    with crowd(folder, leg.port, count, text) as statuses:
        if statuses != {"200": count}:
            raise RuntimeError(f"of {count} streams: {statuses}")
        time.sleep(seconds)
        cpu, since = cpu_seconds(pid), time.perf_counter()
        time.sleep(2 * seconds)
        cpu = (cpu_seconds(pid) - cpu) / (time.perf_counter() - since)
        grown = _resident(pid) - memory
        beside = asked.p50_ms()
    until = time.monotonic() + SETTLE_S
    while (left := max(0, _files(pid) - files - MANY)) and time.monotonic() < until:
        time.sleep(0.05)
    return {
        "p50_ms": beside, "quiet_p50_ms": quiet, "p50_ratio": beside / quiet,
        "kib_each": grown / count / 1024, "idle_cpu": cpu,
        "left_open": left,
    }  # fmt: skip


@contextlib.contextmanager
def crowd(folder: Path, port: int, count: int, text: str) -> Iterator[dict[str, int]]:
    """Streams that are held while the block runs; gives how many began, by status."""
    arguments = json.dumps({"port": port, "count": count, "text": text})
    command = [sys.executable, "-m", "benchmarks.router.crowd", arguments]
    _, core = two_cores()
    with process(command, core=core, log=folder / "crowd.log", talks=True) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the clients ended: {(folder / 'crowd.log').read_text(encoding='utf-8')[-500:]}"
            )
        yield json.loads(line)


def _resident(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
