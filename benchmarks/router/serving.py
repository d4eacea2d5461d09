"""How much of the caches a router brings to use: the part of the router benchmark with real servers."""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.common import SEED, Options, Report, percentile
from benchmarks.router.fleet import DISK, DRAM, MODEL, RealFleet, forked_servers
from benchmarks.router.processes import PEER, peer_missing
from benchmarks.router.sessions import Seen, Session, Words, conversations, play_arriving, play_rounds

OURS, SESSION = "auto", "session"
OTHERS = ("cost", "prompt-tree", SESSION, "least-load", "round-robin", "random")
"""Measured once, where the run is not a quick one."""
AT_ONCE = 4
SERVING_CASES = ("ordinary", "scarce", "restart", "sharing")
DOCUMENT, TURN = 384, 48
SHARED_BY = 3


@dataclass(frozen=True)
class Plan:
    """How much is measured. The KV of ``few`` sessions fits into the pools, that of ``many`` is 2.5 times as
    large. ``sharing_instances``, ``sharing_pool``: for long documents. The fewer instances, the more often
    both copies of a document meet by chance: of two, half the time."""

    instances: int
    pool_tokens: int
    sharing_instances: int
    sharing_pool: int
    few: int
    many: int
    turns: int
    documents: int
    rounds: int


def plan_for(options: Options) -> Plan:
    if options.tiny:
        return Plan(2, 2048, 2, 4096, 2, 4, 2, 2, 1)
    if options.quick:
        return Plan(2, 2048, 2, 4096, 6, 36, 3, 6, 1)
    return Plan(3, 2048, 4, 4096, 12, 45, 4, 24, 3)


Leg = Callable[[str, int, Sequence[Session]], list[Seen]]


def measure_serving(options: Options, report: Report, cases: Sequence[str], peer_python: Path | None) -> None:
    """Rows of reuse and TTFT by policy, and their summary."""
    plan = plan_for(options)
    missing = peer_missing(peer_python)
    peers = [PEER] if missing is None else []
    if missing is not None:
        report.note(f"{PEER} {missing}")
    others = [] if options.quick else list(OTHERS)
    report.note(
        f"serving: {plan.instances} servers on the CPU, model {MODEL!r}, pools of {plan.pool_tokens} tokens; "
        f"with tiers, {DRAM} of DRAM and {DISK} of disk each; {plan.turns} turns of {TURN} tokens behind "
        f"{DOCUMENT} tokens that {SHARED_BY} sessions share; {AT_ONCE} requests at a time"
    )
    with tempfile.TemporaryDirectory(prefix="router-serving-") as name, forked_servers():
        if not {"ordinary", "scarce", "restart"}.isdisjoint(cases):
            with RealFleet(Path(name), plan.instances, plan.pool_tokens) as fleet:
                _measure_conversations(_Bench(report, plan, fleet, peer_python), cases, peers, others)
        if "sharing" in cases:
            # Where all share all cores, an instance that has too much to do takes the others'.
            with RealFleet(Path(name), plan.sharing_instances, plan.sharing_pool, apart=True) as fleet:
                _Bench(report, plan, fleet, peer_python).measure_sharing([*peers, *others])


def _measure_conversations(
    bench: _Bench, cases: Sequence[str], peers: Sequence[str], others: Sequence[str]
) -> None:
    plan = bench.plan
    alone: Reuse = {}
    restarted: Reuse = {}
    if "ordinary" in cases:
        ordinary = bench.measure("ordinary", plan.few, bench.all_turns, [OURS, *peers], others)
        bench.compare("reuse_vs_cache_aware", ordinary, ordinary)
    if "scarce" in cases:
        alone = bench.measure("scarce pools", plan.many, bench.all_turns, [OURS, *peers], others)
        bench.compare("reuse_vs_cache_aware_scarce_pools", alone, alone)
    if "restart" in cases:
        restarted = bench.measure("restart", plan.few, bench.restart, peers)
    if {"scarce", "restart"}.isdisjoint(cases):
        return
    bench.fleet.give_tiers()
    if "scarce" in cases:
        with_tiers = bench.measure("scarce pools, tiers", plan.many, bench.all_turns, [OURS])
        bench.compare("reuse_vs_cache_aware_scarce", with_tiers, alone)
    if "restart" in cases:
        with_tiers = bench.measure("restart, tiers", plan.few, bench.restart, [OURS], others)
        bench.compare("reuse_vs_cache_aware_restart", with_tiers, restarted)


Reuse = dict[str, list[float]]
"""Tokens reused by policy, a number per round."""


class _Bench:
    """Measures policies in front of one fleet."""

    def __init__(self, report: Report, plan: Plan, fleet: RealFleet, peer_python: Path | None) -> None:
        self._report = report
        self.plan = plan
        self.fleet = fleet
        self._peer_python = peer_python
        self._legs = 0

    def all_turns(self, policy: str, port: int, sessions: Sequence[Session]) -> list[Seen]:
        """Every turn of every session."""
        return play_rounds(port, sessions, self.plan.turns, at_once=AT_ONCE)

    def restart(self, policy: str, port: int, sessions: Sequence[Session]) -> list[Seen]:
        """An instance restarts after the first turns; the turns after that count."""
        play_rounds(port, sessions, self.plan.turns - 1, at_once=AT_ONCE)
        self.fleet.restart(0)
        if policy != PEER:
            self.fleet.wait_registered(port)
        return play_rounds(port, sessions, 1, at_once=AT_ONCE)

    def measure(
        self, case: str, sessions: int, leg: Leg, policies: Sequence[str], once: Sequence[str] = ()
    ) -> Reuse:
        """Rows of a case.

        Args:
            policies: measured in every round, taking turns.
            once: measured in the first round only.
        """
        reuse: Reuse = {}
        for number in range(self.plan.rounds):
            line = [*policies, *once] if number == 0 else list(policies)
            for policy in line if number % 2 == 0 else reversed(line):
                with self.fleet.routed(policy, self._peer_python) as port:
                    begin = time.perf_counter()
                    seen = leg(policy, port, self._conversations(sessions))
                    elapsed = time.perf_counter() - begin
                reuse.setdefault(policy, []).append(_row(self._report, case, policy, seen, elapsed))
        return reuse

    def _conversations(self, sessions: int) -> list[Session]:
        """The same load with other words each time: a flushed server may know the last ones from its disk."""
        self._legs += 1
        return conversations(
            Words(random.Random(SEED + self._legs)),
            sessions,
            self.plan.turns,
            shared_by=SHARED_BY,
            prefix_tokens=DOCUMENT,
            turn_tokens=TURN,
        )

    def compare(self, key: str, ours: Reuse, theirs: Reuse) -> None:
        """Add to the summary the ratio of tokens reused behind our router to those behind the peer's."""
        if OURS in ours and PEER in theirs:
            self._report.summary[key] = statistics.median(
                mine / max(other, 1.0) for mine, other in zip(ours[OURS], theirs[PEER], strict=True)
            )

    def measure_sharing(self, once: Sequence[str]) -> None:
        """MemServe, figure 15: every session is there twice, under two names (share ratio 2)."""
        plan, report = self.plan, self._report
        rate = 0.0
        tails: dict[str, list[float]] = {}
        for number in range(plan.rounds):
            legs = [OURS, SESSION, *(policy for policy in once if policy != SESSION and number == 0)]
            for policy in legs if number % 2 == 0 else reversed(legs):
                with self.fleet.routed(policy, self._peer_python) as port:
                    rate = rate or _rate(port, plan.sharing_instances)
                    begin = time.perf_counter()
                    seen = play_arriving(port, _twice(plan), rate)
                    elapsed = time.perf_counter() - begin
                _row(report, "share ratio 2", policy, seen, elapsed)
                tails.setdefault(policy, []).append(percentile([one.ttft for one in seen], 99))
        report.note(
            f"share ratio 2: {2 * plan.documents} sessions of 3 questions, {rate:.2g} sessions a second, "
            f"{plan.sharing_instances} instances, each kept on one of {len(os.sched_getaffinity(0))} cores, "
            f"pools of {plan.sharing_pool} tokens"
        )
        report.summary["p99_ttft_vs_session_share2"] = statistics.median(
            ours / theirs for ours, theirs in zip(tails[OURS], tails[SESSION], strict=True)
        )


def _row(report: Report, case: str, policy: str, seen: Sequence[Seen], elapsed: float) -> float:
    """Add a row; returns the tokens reused."""
    cached, prompt = sum(one.cached for one in seen), sum(one.prompt for one in seen)
    sys.stderr.write(f"{case}, {policy}: {cached} of {prompt} tokens reused, {elapsed:.1f} s\n")
    report.add(
        case,
        policy=f"{PEER} cache_aware" if policy == PEER else policy,
        requests=len(seen),
        reused_tokens=cached,
        hit_share=cached / max(1, prompt),
        ttft_p50_ms=percentile([one.ttft for one in seen], 50) * 1e3,
        ttft_p99_ms=percentile([one.ttft for one in seen], 99) * 1e3,
        seconds=elapsed,
    )
    return float(cached)


def _twice(plan: Plan) -> list[Session]:
    words = Words()
    once = [
        [words.text(1024) + words.text(24), words.text(24), words.text(24)] for _ in range(plan.documents)
    ]
    return [Session(f"{number}-{copy}", turns) for copy in range(2) for number, turns in enumerate(once)]


def _rate(port: int, instances: int) -> float:
    """Sessions per second that keep the machine busy nearly all the time, if no copy meets its twin."""
    words = Words()
    words.random.seed(1)
    sessions = [Session(f"rate-{n}", [words.text(1048), words.text(24), words.text(24)]) for n in range(5)]
    play_rounds(port, sessions[:1], 3, at_once=1)
    begin = time.perf_counter()
    play_rounds(port, sessions[1:], 3, at_once=instances)
    return 0.95 * 4 / (time.perf_counter() - begin)
