"""How much of the caches a router brings to use: the part of the router benchmark with real servers."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Options, Report, percentile
from benchmarks.router_fleet import MODEL, RealFleet
from benchmarks.router_processes import PEER, peer_missing
from benchmarks.router_sessions import Seen, Session, Words, conversations, play_arriving, play_rounds

OURS, SESSION = "auto", "session"
POLICIES = (OURS, "cost", "prompt-tree", SESSION, "least-load", "round-robin", "random")
QUICK_POLICIES = (OURS,)
CACHE_AWARE = PEER
AT_ONCE = 4
SERVING_CASES = ("ordinary", "scarce", "restart", "sharing")
DOCUMENT, TURN = 384, 48
SHARED_BY = 3


@dataclass(frozen=True)
class Plan:
    """How much is measured. ``few`` sessions fit into the caches, ``many`` do not."""

    instances: int
    pool_tokens: int
    few: int
    many: int
    turns: int
    documents: int
    rounds: int


def plan_for(options: Options) -> Plan:
    if options.quick:
        return Plan(2, 4096, 6, 45, 3, 6, 1)
    return Plan(3, 4096, 15, 66, 4, 30, 3)


Leg = Callable[[RealFleet, str, int, Sequence[Session]], list[Seen]]


def measure_serving(options: Options, report: Report, peer_python: Path | None) -> None:
    """Rows of reuse and TTFT by policy, and their summary."""
    plan = plan_for(options)
    policies = list(QUICK_POLICIES if options.quick else POLICIES)
    missing = peer_missing(peer_python)
    if missing is None:
        policies.append(CACHE_AWARE)
    else:
        report.note(f"{PEER} {missing}")
    report.note(
        f"serving: {plan.instances} servers on the CPU, model {MODEL!r}, {plan.pool_tokens} tokens "
        "of cache each and no other tier; one that restarts has a disk behind our router, and nothing behind "
        f"the peer; {plan.turns} turns of {TURN} tokens behind {DOCUMENT} tokens that {SHARED_BY} sessions "
        f"share; {AT_ONCE} requests at a time"
    )
    with (
        tempfile.TemporaryDirectory(prefix="router-serving-") as name,
        RealFleet(Path(name), plan.instances, plan.pool_tokens) as fleet,
    ):
        for case, sessions, leg in (
            ("ordinary", plan.few, _all_turns(plan)),
            ("scarce", plan.many, _all_turns(plan)),
        ):
            if case in options.extra.cases:
                _measure_case(report, plan, fleet, case, sessions, leg, policies, peer_python)
        if "sharing" in options.extra.cases:
            _measure_sharing(report, plan, fleet, policies, peer_python)
        if "restart" in options.extra.cases:
            # Last: from here on one server has a disk. First the peer, whose restart gives it an empty one.
            if CACHE_AWARE not in policies:
                fleet.restart(0, keeps=False)
            first = [CACHE_AWARE] if CACHE_AWARE in policies else []
            order = [*first, *(policy for policy in policies if policy not in first)]
            _measure_case(report, plan, fleet, "restart", plan.few, _restart(plan), order, peer_python)
        if "scarce" in options.extra.cases and not options.quick:
            _measure_scarce_with_tiers(report, plan, fleet)


def _all_turns(plan: Plan) -> Leg:
    def leg(fleet: RealFleet, policy: str, port: int, sessions: Sequence[Session]) -> list[Seen]:
        return play_rounds(port, sessions, plan.turns, at_once=AT_ONCE)

    return leg


def _restart(plan: Plan) -> Leg:
    """An instance restarts after the first turns; what counts is the turns after that.

    Behind our router it keeps a disk tier. Behind the peer, which is for servers without tiers, it starts
    with an empty one, that is with nothing, as stock SGLang does.
    """

    def leg(fleet: RealFleet, policy: str, port: int, sessions: Sequence[Session]) -> list[Seen]:
        play_rounds(port, sessions, plan.turns - 1, at_once=AT_ONCE)
        fleet.restart(0, keeps=policy != CACHE_AWARE)
        if policy != CACHE_AWARE:
            fleet.wait_registered(port)
        return play_rounds(port, sessions, 1, at_once=AT_ONCE)

    return leg


def _measure_case(
    report: Report,
    plan: Plan,
    fleet: RealFleet,
    case: str,
    sessions: int,
    leg: Leg,
    policies: Sequence[str],
    peer_python: Path | None,
) -> None:
    reuse: dict[str, list[float]] = {policy: [] for policy in policies}
    # A restart takes half a minute; one round of those has to do.
    for number in range(plan.rounds if case != "restart" else 1):
        for policy in policies if number % 2 == 0 else reversed(policies):
            talks = conversations(
                Words(), sessions, plan.turns, shared_by=SHARED_BY, prefix_tokens=DOCUMENT, turn_tokens=TURN
            )
            with fleet.routed(policy, peer_python) as port:
                begin = time.perf_counter()
                seen = leg(fleet, policy, port, talks)
                elapsed = time.perf_counter() - begin
            reuse[policy].append(_row(report, case, policy, seen, elapsed))
    if CACHE_AWARE in policies:
        key = "reuse_vs_cache_aware" + ("" if case == "ordinary" else f"_{case}")
        report.summary[key] = statistics.median(
            ours / max(theirs, 1.0) for ours, theirs in zip(reuse[OURS], reuse[CACHE_AWARE], strict=True)
        )


def _measure_scarce_with_tiers(report: Report, plan: Plan, fleet: RealFleet) -> None:
    """The same load as "scarce", behind our router, when what leaves a pool goes to DRAM and disk.

    On that load no choice of instances reuses much more than another: conversations with one document go to
    one place either way, and what is evicted there is gone. What is below the pool decides.
    """
    for index in range(plan.instances):
        fleet.restart(index, keeps=False)
    case = "scarce, with tiers"
    _measure_case(report, plan, fleet, case, plan.many, _all_turns(plan), [OURS], None)

    def reused(case: str, policy: str) -> list[float]:
        return [
            float(row["reused_tokens"] or 0)
            for row in report.rows
            if row["case"] == case and row["policy"] == policy
        ]

    ours, theirs = reused(case, OURS), reused("scarce", f"{CACHE_AWARE} cache_aware")
    if ours and theirs:
        ratio = statistics.median(ours) / max(1.0, statistics.median(theirs))
        report.summary["reuse_vs_cache_aware_scarce_tiers"] = ratio


def _row(report: Report, case: str, policy: str, seen: Sequence[Seen], elapsed: float) -> float:
    """Add a row; returns the tokens reused."""
    cached, prompt = sum(one.cached for one in seen), sum(one.prompt for one in seen)
    sys.stderr.write(f"{case}, {policy}: {cached} of {prompt} tokens reused, {elapsed:.1f} s\n")
    report.add(
        case,
        policy=f"{CACHE_AWARE} cache_aware" if policy == CACHE_AWARE else policy,
        requests=len(seen),
        reused_tokens=cached,
        hit_share=cached / max(1, prompt),
        ttft_p50_ms=percentile([one.ttft for one in seen], 50) * 1e3,
        ttft_p99_ms=percentile([one.ttft for one in seen], 99) * 1e3,
        seconds=elapsed,
    )
    return float(cached)


def _measure_sharing(
    report: Report, plan: Plan, fleet: RealFleet, policies: Sequence[str], peer_python: Path | None
) -> None:
    """MemServe, figure 15: every session is there twice, under two names (share ratio 2)."""
    legs = list(dict.fromkeys([OURS, SESSION, *(policies if plan.rounds > 1 else ())]))
    rate = 0.0
    tails: dict[str, list[float]] = {policy: [] for policy in legs}
    for number in range(plan.rounds):
        for policy in legs if number % 2 == 0 else reversed(legs):
            with fleet.routed(policy, peer_python) as port:
                rate = rate or _rate(port)
                begin = time.perf_counter()
                seen = play_arriving(port, _twice(plan), rate)
                elapsed = time.perf_counter() - begin
            _row(report, "share ratio 2", policy, seen, elapsed)
            tails[policy].append(percentile([one.ttft for one in seen], 99))
    report.note(f"share ratio 2: {2 * plan.documents} sessions of 3 questions, {rate:.2g} sessions a second")
    report.summary["p99_ttft_vs_session_share2"] = statistics.median(
        ours / theirs for ours, theirs in zip(tails[OURS], tails[SESSION], strict=True)
    )


def _twice(plan: Plan) -> list[Session]:
    words = Words()
    once = [
        [words.text(1024) + words.text(24), words.text(24), words.text(24)] for _ in range(plan.documents)
    ]
    return [Session(f"{number}-{copy}", turns) for copy in range(2) for number, turns in enumerate(once)]


def _rate(port: int) -> float:
    """Sessions per second that keep the machine busy nearly all the time, if no copy meets its twin."""
    words = Words()
    words.random.seed(1)
    sessions = [Session(f"rate-{n}", [words.text(1048), words.text(24), words.text(24)]) for n in range(5)]
    play_rounds(port, sessions[:1], 3, at_once=1)
    begin = time.perf_counter()
    play_rounds(port, sessions[1:], 3, at_once=2)
    return 0.95 * 4 / (time.perf_counter() - begin)
