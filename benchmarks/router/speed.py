"""The router's cost per request: the part of the router benchmark with fast stand-in workers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.common import SEED, Options, Report
from benchmarks.router.load import WARMUP_S, Job
from benchmarks.router.processes import (
    PEER,
    Generator,
    Peer,
    cpu_seconds,
    generator,
    our_router,
    peer_missing,
    peer_router,
    process,
    stand_ins,
    two_cores,
    wait_for,
)
from sglang_ext.testing.tokenizer import write_tokenizer
from tests.support.servers.ports import free_port

WORKERS = 4
SERVICE_S = 0.001
"""Of a stand-in. Without it, cache_aware sends everything to one worker, which is always free."""
FIRST_FRESH = 1 << 20
DIRECT, OURS = "direct", "ours"
ONE, MANY, CROWD = 1, 32, 256
"""Connections: one shows the added latency of a request, more show how many requests a core carries."""


@dataclass(frozen=True)
class Case:
    """One kind of request of the load."""

    path: str
    prompt_bytes: int
    stream: bool
    connections: int
    fresh: bool = False
    """Whether no prompt was seen before, so that each is tokenized anew."""
    shared_bytes: int = 0
    """Bytes that fresh prompts share at their beginning."""

    @property
    def name(self) -> str:
        what = "generate" if self.path == "/generate" else "chat"
        what += " stream" if self.stream else " fresh" if self.fresh else ""
        if self.shared_bytes:
            what += f" after {self.shared_bytes // 1024} KB shared,"
        return f"{what} {self.prompt_bytes // 1024} KB, {self.connections} conn."

    def job(self, port: int, seconds: float, first: int = 0, warmup_s: float = WARMUP_S) -> Job:
        job = Job(port, self.path, self.prompt_bytes, self.stream, self.connections, seconds, warmup_s)
        if not self.fresh:
            return job
        # More than a router gets through.
        prompts = int(seconds * FRESH_BYTES_PER_S / self.prompt_bytes)
        fresh = max(4 * self.connections, prompts)
        return dataclasses.replace(job, fresh=fresh, first=first, shared_bytes=self.shared_bytes)


FRESH_BYTES_PER_S = 48 << 20
SEEN_CASES = tuple(
    Case(path, size, stream, connections)
    for connections in (ONE, MANY, CROWD)
    for path, stream in (("/generate", False), ("/v1/chat/completions", True))
    for size in (1024, 32 * 1024)
)
FRESH_CASES = (
    *(Case("/generate", size, False, MANY, fresh=True) for size in (1024, 8 * 1024, 32 * 1024)),
    Case("/generate", 32 * 1024, False, MANY, fresh=True, shared_bytes=31 * 1024),
)
CASES = SEEN_CASES + FRESH_CASES


@dataclass
class Leg:
    """A way to the workers, and its results: one per round, for each case."""

    port: int
    running: subprocess.Popen[str] | None
    results: dict[Case, list[dict[str, Any]]] = field(default_factory=dict)


def measure_speed(options: Options, report: Report, peers: Mapping[Peer, Path | None]) -> None:
    """Rows of requests per second and added latency, and their summary."""
    seconds, rounds, warm_s = options.pick((2.0, 5, 1.5), quick=(0.3, 3, 1.5), tiny=(0.1, 1, 0.05))
    numbers = itertools.count(FIRST_FRESH, 1 << 20)
    with (
        tempfile.TemporaryDirectory(prefix="router-speed-") as name,
        ways(Path(name), peers, report) as (load, legs),
    ):
        order = list(legs)
        shuffle = random.Random(SEED)
        for case in CASES:
            for leg in legs.values():
                # Long enough that every prompt has been seen, and so tokenized.
                warm_up = dataclasses.replace(case, connections=MANY, fresh=False, shared_bytes=0)
                load.measure(warm_up.job(leg.port, warm_s))
                leg.results[case] = []
            for _ in range(rounds):
                shuffle.shuffle(order)
                for leg_name in order:
                    leg = legs[leg_name]
                    before = cpu_seconds(leg.running.pid) if leg.running else 0.0
                    result = load.measure(case.job(leg.port, seconds, next(numbers)))
                    result["cpu"] = cpu_seconds(leg.running.pid) - before if leg.running else 0.0
                    if set(result["statuses"]) != {"200"}:
                        raise RuntimeError(f"{leg_name}, {case.name}: {result['statuses']}")
                    leg.results[case].append(result)
        for case in CASES:
            _report_case(report, case, legs)
        summarise(report, legs)


@contextlib.contextmanager
def ways(
    folder: Path, peers: Mapping[Peer, Path | None], report: Report, *flags: str
) -> Iterator[tuple[Generator, dict[str, Leg]]]:
    """The load generator and every way to the workers. The routers share a core, and run one at a time; all
    else runs on another, where there is one.

    Args:
        peers: other routers, with their interpreters.
        flags: of our router.
    """
    router_core, other_core = two_cores()
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer, 131_072)
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(
            stand_ins(folder, tokenizer=tokenizer, service_s=SERVICE_S, count=WORKERS, core=other_core)
        )
        load = stack.enter_context(generator(folder, core=other_core))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        legs = {DIRECT: Leg(ports[0], None)}
        ports_of = {OURS: free_port()}
        commands = {OURS: our_router(ports_of[OURS], urls, "--log-level", "warning", *flags)}
        for peer, python in peers.items():
            missing = peer_missing(python, peer)
            if missing is None and python is not None:
                ports_of[peer.name] = free_port()
                commands[peer.name] = peer_router(python, ports_of[peer.name], urls, peer=peer)
            else:
                report.note(f"{peer.name} {missing}")
        for name, command in commands.items():
            log = folder / f"{name.split()[0]}.log"
            running = stack.enter_context(process(command, core=router_core, log=log))
            wait_for(ports_of[name], running)
            legs[name] = Leg(ports_of[name], running)
        report.note(
            f"speed: {WORKERS} stand-in workers that answer after {SERVICE_S * 1e3:g} ms; each router on one "
            "core, logging warnings only; direct is one worker without a router; 64 prompts, seen before; or "
            "fresh ones, each sent once"
        )
        yield load, legs


def _report_case(report: Report, case: Case, legs: dict[str, Leg]) -> None:
    for name, leg in legs.items():
        results = leg.results[case]

        def middle(key: str, results: list[dict[str, Any]] = results) -> float:
            return float(statistics.median(result[key] for result in results))

        requests = sum(result["requests"] for result in results)
        report.add(
            case.name,
            way=name,
            rps=statistics.median(result["requests"] / result["seconds"] for result in results),
            p50_ms=middle("p50") * 1e3,
            p99_ms=middle("p99") * 1e3,
            first_byte_p50_ms=middle("first_p50") * 1e3,
            first_byte_p99_ms=middle("first_p99") * 1e3,
            added_p50_ms=_median_added(legs, name, case, "p50"),
            added_p99_ms=_median_added(legs, name, case, "p99"),
            cpu_us_per_request=sum(result["cpu"] for result in results) / requests * 1e6,
        )


def _rps(legs: dict[str, Leg], name: str, case: Case) -> float:
    results = legs[name].results[case]
    return float(statistics.median(result["requests"] / result["seconds"] for result in results))


def _added(legs: dict[str, Leg], name: str, case: Case, key: str) -> list[float]:
    """Milliseconds more than without a router, by round."""
    pairs = zip(legs[name].results[case], legs[DIRECT].results[case], strict=True)
    return [(routed[key] - direct[key]) * 1e3 for routed, direct in pairs]


def _median_added(legs: dict[str, Leg], name: str, case: Case, key: str) -> float:
    return statistics.median(_added(legs, name, case, key))


def summarise(report: Report, legs: dict[str, Leg]) -> None:
    """Of several cases, the worst for us counts."""
    single = [case for case in CASES if case.connections == ONE]
    for key in ("p50", "p99"):
        report.summary[f"added_{key}_ms"] = max(_median_added(legs, OURS, case, key) for case in single)
    report.summary["fresh_vs_seen_rps"] = min(
        _rps(legs, OURS, fresh) / _rps(legs, OURS, seen)
        for fresh in FRESH_CASES
        for seen in SEEN_CASES
        if dataclasses.replace(fresh, fresh=False) == seen
    )
    if PEER not in legs:
        return
    for key in ("p50", "p99"):
        report.summary[f"added_{key}_vs_sglang_router"] = max(
            statistics.median(
                ours / max(theirs, 1e-3)
                for ours, theirs in zip(
                    _added(legs, OURS, case, key), _added(legs, PEER, case, key), strict=True
                )
            )
            for case in single
        )
    many = [case for case in SEEN_CASES if case.connections != ONE]
    for key, cases in (("rps_vs_sglang_router", many), ("rps_fresh_vs_sglang_router", FRESH_CASES)):
        report.summary[key] = min(
            statistics.median(
                ours["requests"] / ours["seconds"] / (theirs["requests"] / theirs["seconds"])
                for ours, theirs in zip(legs[OURS].results[case], legs[PEER].results[case], strict=True)
            )
            for case in cases
        )
    report.note("speed: the summary's ratios are those of the case in which ours does worst")
