"""A request's time in the router: bytecodes, calls and microseconds by stage; and the same of the floor, a
proxy in Python that only passes bytes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools

from benchmarks.lib.common import Options, Report
from benchmarks.router.load import DISTINCT, Job, message
from benchmarks.router.processes import (
    cpu_seconds,
    floor,
    generator,
    process,
    stand_ins,
    two_cores,
    wait_for,
    watched,
)
from benchmarks.router.speed import MANY, SERVICE_S, WORKERS, Case
from sglang_ext.testing.tokenizer import write_tokenizer
from tests.support.servers.ports import free_port

CASES = (
    Case("/generate", 1024, False, MANY),
    Case("/generate", 32 * 1024, False, MANY),
    Case("/v1/chat/completions", 1024, False, MANY),
    Case("/v1/chat/completions", 1024, True, MANY),
)
TOLD_S = 30.0
"""Most that an observation may take to be written."""
BETWEEN = "event loop, parser, kernel"
"""Stage of C code between callbacks."""
STAGES = {
    "radix_global": "index", "index": "index", "policies": "decision", "placing": "dispatch",
    "dispatch": "dispatch", "fleet": "fleet", "http": "http", "api": "api", "tenancy": "admission",
    "app": "service", "endpoints": "service", "tokens": "tokens", "telemetry": "telemetry",
    "hints": "hints", "cost_model": "decision",
}  # fmt: skip
"""Folder of a module -> stage; a module in none of them is a library's, or shared."""


@dataclass
class Spent:
    """By one stage, for one request."""

    bytecodes: float = 0.0
    calls: float = 0.0
    us: float = 0.0


def measure_profile(options: Options, report: Report) -> None:
    """Rows of each stage's cost per request, by case, and of the total."""
    asked, seconds = options.pick((256, 12.0), quick=(128, 5.0), tiny=(4, 0.1))
    router_core, other_core = two_cores()
    with tempfile.TemporaryDirectory(prefix="router-profile-") as name:
        folder = Path(name)
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer, 131_072)
        with (
            stand_ins(
                folder, tokenizer=tokenizer, service_s=SERVICE_S, count=WORKERS, core=other_core
            ) as ports,
            generator(folder, core=other_core) as load,
        ):
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            for number, case in enumerate(CASES):
                seen = folder / str(number)
                seen.mkdir()
                port = free_port()
                command = watched(seen, port, urls, "--log-level", "warning")
                with process(command, core=router_core, log=folder / "router.log") as running:
                    wait_for(port, running)
                    load.measure(case.job(port, min(seconds, 1.5)))
                    _switch(running.pid, seen / "begun-1")
                    began = time.monotonic()
                    _ask(case.job(port, 0.0), asked)
                    took_s = time.monotonic() - began
                    codes = _seen(_switch(running.pid, seen / "bytecodes.json"))
                    _switch(running.pid, seen / "begun-3")
                    time.sleep(took_s)
                    idle = _seen(_switch(running.pid, seen / "idle.json"))
                    codes += [[*names, -steps, -calls] for *names, steps, calls in idle]
                    _switch(running.pid, seen / "begun-5")
                    before = cpu_seconds(running.pid)
                    result = load.measure(case.job(port, seconds, warmup_s=0.0))
                    cpu_us = (cpu_seconds(running.pid) - before) / result["requests"] * 1e6
                    ticks = _seen(_switch(running.pid, seen / "ticks.json"))
                _report(report, case, _by_stage(codes, ticks, asked, cpu_us))
                port = free_port()
                with process(floor(port, ports), core=router_core, log=folder / "floor.log") as running:
                    wait_for(port, running)
                    load.measure(case.job(port, min(seconds, 1.5)))
                    before = cpu_seconds(running.pid)
                    result = load.measure(case.job(port, seconds, warmup_s=0.0))
                    cpu_us = (cpu_seconds(running.pid) - before) / result["requests"] * 1e6
                _report_floor(report, case, cpu_us)
    report.note("floor: a proxy over uvloop and httptools that passes bytes on and does nothing else")
    report.note(
        f"profile: bytecodes and calls of {asked} requests one by one, less those of as long a time without "
        "requests; microseconds of CPU, sampled, with "
        f"{MANY} connections; what a function has C code do counts as its own"
    )


def _ask(job: Job, count: int) -> None:
    """Send so many requests, one after the other."""
    with socket.create_connection(("127.0.0.1", job.port)) as connection:
        for number in range(count):
            connection.sendall(message(job, number % DISTINCT))
            answer = _Answer()
            while not answer.complete:
                answer.parser.feed_data(connection.recv(1 << 16))


class _Answer:
    """Until it is complete."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.complete = False

    def on_message_complete(self) -> None:
        self.complete = True


def _switch(pid: int, answer: Path) -> Path:
    """Begin an observation of the watched router or end it; returns the file that confirms it."""
    os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + TOLD_S
    while not answer.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"the router has not written {answer.name}")
        time.sleep(0.01)
    return answer


def _seen(file: Path) -> list[list[Any]]:
    rows: list[list[Any]] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def _by_stage(
    codes: list[list[Any]], ticks: list[list[Any]], requests: int, cpu_us: float
) -> dict[str, Spent]:
    stages: defaultdict[str, Spent] = defaultdict(Spent)
    for file, _, steps, calls in codes:
        spent = stages[stage_of(file)]
        spent.bytecodes += steps / requests
        spent.calls += calls / requests
    total = sum(row[2] for row in ticks) or 1
    for file, _, count, _ in ticks:
        stages[stage_of(file)].us += count / total * cpu_us
    return dict(sorted(stages.items(), key=lambda item: -item[1].bytecodes))


def stage_of(file: str) -> str:
    """The stage of the code in a file."""
    if not file:
        return BETWEEN
    return STAGES.get(Path(file).parent.name, "other")


def _report(report: Report, case: Case, stages: dict[str, Spent]) -> None:
    name = _name(case)
    total = Spent()
    for stage, spent in stages.items():
        report.add(name, stage=stage, bytecodes=spent.bytecodes, calls=spent.calls, us=spent.us)
        total.bytecodes += spent.bytecodes
        total.calls += spent.calls
        total.us += spent.us
    report.add(name, stage="all", bytecodes=total.bytecodes, calls=total.calls, us=total.us)
    report.summary[f"bytecodes_{_key(case)}"] = total.bytecodes
    report.summary[f"cpu_us_{_key(case)}"] = total.us


def _report_floor(report: Report, case: Case, us: float) -> None:
    report.add(_name(case), stage="floor", bytecodes=0.0, calls=0.0, us=us)
    report.summary[f"floor_cpu_us_{_key(case)}"] = us


def _name(case: Case) -> str:
    return case.name.partition(",")[0]


def _key(case: Case) -> str:
    return _name(case).replace(" ", "_").lower()
