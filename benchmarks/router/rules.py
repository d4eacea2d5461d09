"""The cost of the rules for agents' prompts to other traffic: a router with them and one without, in turns.

Judged by CPU time: other load on the machine disturbs the clock more than the rules could.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import timeit
from functools import partial
from pathlib import Path

from benchmarks.lib.common import Options, Report
from benchmarks.router.load import Job, message
from benchmarks.router.processes import (
    cpu_seconds,
    generator,
    our_router,
    process,
    stand_ins,
    two_cores,
    wait_for,
)
from benchmarks.router.speed import MANY, SERVICE_S, WORKERS, Case
from sglang_ext.router.api.dialect import DIALECTS
from sglang_ext.router.api.validation import parse_json_object
from sglang_ext.router.clients.rules import rules_of
from sglang_ext.router.endpoints.repairing import Repairs
from sglang_ext.router.http.types import Request
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.testing.tokenizer import write_tokenizer
from tests.support.servers.ports import free_port

CASES = tuple(
    Case(path, size, False, MANY)
    for path in ("/generate", "/v1/chat/completions")
    for size in (1024, 32 * 1024)
)
WAYS = ("auto", "off")
"""Of ``--client-rules``."""


def measure_rules(options: Options, report: Report) -> None:
    """Rows of CPU time per request with the rules and without, and the worst ratio of the two."""
    seconds, rounds, warm_s = options.pick((0.3, 80, 1.5), quick=(0.3, 12, 1.0), tiny=(0.1, 1, 0.05))
    router_core, other_core = two_cores()
    with tempfile.TemporaryDirectory(prefix="router-rules-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer, 131_072)
        ports = stack.enter_context(
            stand_ins(folder, tokenizer=tokenizer, service_s=SERVICE_S, count=WORKERS, core=other_core)
        )
        load = stack.enter_context(generator(folder, core=other_core))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        routers: dict[str, tuple[int, int]] = {}
        for way in WAYS:
            port = free_port()
            command = our_router(port, urls, "--log-level", "warning", "--client-rules", way)
            running = stack.enter_context(process(command, core=router_core, log=folder / f"{way}.log"))
            wait_for(port, running)
            routers[way] = port, running.pid

        def cpu_us(way: str, job: Job) -> float:
            before = cpu_seconds(routers[way][1])
            result = load.measure(job)
            if set(result["statuses"]) != {"200"}:
                raise RuntimeError(f"{way}: {result['statuses']}")
            requests: int = result["requests"]
            return (cpu_seconds(routers[way][1]) - before) / requests * 1e6

        ratios = []
        for case in CASES:
            for way in WAYS:
                load.measure(case.job(routers[way][0], warm_s))
            spent: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds):
                # Each goes first in every second round.
                for way in WAYS if number % 2 else reversed(WAYS):
                    spent[way].append(cpu_us(way, case.job(routers[way][0], seconds, warmup_s=0.0)))
            on, off = (statistics.median(spent[way]) for way in WAYS)
            pairs = [one / max(other, 1e-3) for one, other in zip(*(spent[way] for way in WAYS), strict=True)]
            ratios.append(statistics.median(pairs))
            looked = {f"looking_us_{way}": _looking_us(case, way) for way in WAYS}
            report.add(
                f"rules, {case.name}",
                cpu_us_auto=on,
                cpu_us_off=off,
                ratio=ratios[-1],
                pairs=len(pairs),
                **looked,
            )
    report.summary["rules_cpu_ratio"] = max(ratios)
    report.note("rules: looking is the least time that a body without anything to repair is looked at for")
    report.note("rules: CPU time of a router for a request, --client-rules auto beside off, medians of pairs")


def _looking_us(case: Case, way: str) -> float:
    """The least time that a request's body is looked at for parts to repair; there is none in it."""
    body = message(case.job(1, 0.0), 0).split(b"\r\n\r\n", 1)[1]
    request = Request("POST", case.path, case.path, {}, body)
    repairs = Repairs(rules_of(way), NoPins(), RouterMetrics())
    payload, record = parse_json_object(body), Record("r", "POST", case.path, 0.0)
    look = partial(repairs.apply, DIALECTS[case.path], payload, request, record)
    return min(timeit.repeat(look, number=200, repeat=50)) / 200 * 1e6


class NoPins:
    """Remembers nothing."""

    def pin(self, session: str, rule: str, at: int, text: str) -> str:
        return text
