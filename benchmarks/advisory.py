"""What hints are worth: Symphony's evaluation (section 4) on real servers of this machine, in one run.

Systems: recompute (no cache, balanced), stock SGLang behind sglang-router cache_aware (where that is
installed), sticky swapping (InferCept's way: a session stays where its DRAM is), ours without and with hints.
All serve the model `small` on servers of equal size, whose HBM holds fewer sessions than there are users.

- `systems`: normalized latency, TTFT, requests served and load by the number of users (figures 12 to 14).
- `hits`: TTFT of hinted requests against HBM hits of the same lengths, one request at a time: under load,
  waiting for others would be most of either.
- `missing`, `priority`: figures 17 and 18. What is varied takes turns every few seconds within one
  measurement, so that what disturbs the machine disturbs all of it.
- `prefill`: figure 16, prompts of 512 new tokens and answers of one. `agents`: section 4.4, from logged runs.

How many users a system serves "at equal latency" is read off a line through few points: the latency is 1.5
times that of recompute at its fewest users. Where it lies beyond what was measured of a system, the ratio is
the least that it can be, and a note says so. `advisory_talks.py` says how the load differs from people's.
"""

from __future__ import annotations

import argparse
import itertools
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.advisory_figures import (
    Served,
    cost_of,
    hidden_share,
    max_over_median,
    normalized_latency,
    times_the_users,
    users_at,
)
from benchmarks.advisory_fleet import (
    HINTED,
    MODEL,
    RECOMPUTE,
    STICKY,
    STOCK,
    UNHINTED,
    Fleet,
    System,
    Tiers,
    progress,
    router_counts,
)
from benchmarks.advisory_hits import measure_hits
from benchmarks.advisory_play import Player, Scene
from benchmarks.advisory_talks import FRESH, Encode, Shape, agents, turns_of, users
from benchmarks.common import SEED, Options, Report, Value, parse, percentile
from benchmarks.data import data_folder
from benchmarks.router_processes import peer_missing
from sglang_ext.testing.models import model_path

NAME = "advisory"
PARTS = ("systems", "hits", "missing", "priority", "prefill", "agents")
WARM_AT_ONCE = 4
WINDOW_S = 5.0
SLICE_S = 4.0
MISSING = (0.0, 0.1, 0.3, 0.5)
URGENT = (0.1, 0.3, 0.5)
FEW, FEW_LONGER = 6, 2
"""Fewer users than this are measured for so many times longer: they send little."""
EQUAL = 1.5
"""The latency at which users are compared, over recompute's at its fewest users."""
MOVED = "sglang_ext_router_hint_tokens_total"
PREFILL = Shape(prompt_tokens=512, answer_tokens=1)


@dataclass(frozen=True)
class Plan:
    """How much is measured. counts: users by system; the one that all share is ``main``."""

    main: int
    counts: dict[str, tuple[int, ...]]
    seconds: float
    varied_s: float
    missing: tuple[float, ...]
    hits: int
    runs: int
    calls: int
    tiers: Tiers = field(default_factory=Tiers)


QUICK = Plan(
    main=16,
    counts={"recompute": (2, 4), "stock, cache_aware": (8, 16), "ours without hints": (), "ours": (16, 24)},
    seconds=8.0,
    varied_s=24.0,
    missing=(0.0, 0.1, 0.3),
    hits=32,
    runs=3,
    calls=5,
    tiers=Tiers(hbm=12_288),
)
FULL = Plan(
    main=24,
    counts={
        "recompute": (2, 4, 8),
        "stock, cache_aware": (4, 12, 24),
        "ours": (12, 24, 40),
    },
    seconds=16.0,
    varied_s=96.0,
    missing=MISSING,
    hits=160,
    runs=6,
    calls=12,
)
QUICK_PARTS = ("systems", "hits", "missing")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="folder with the workloads")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="what to measure; all without --quick")
    parser.add_argument("--instances", type=int, default=2, help="servers of each system (default: 2)")
    parser.add_argument("--pace", type=float, default=Shape().pace, help="how much shorter pauses are")
    parser.add_argument(
        "--sglang-router-python", type=Path, help="interpreter of an environment with sglang-router"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse(argv, NAME, __doc__, add_flags)
    report = Report(NAME)
    # Routers are no guarded processes: an end by SIGTERM has to pass through here, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Benchmark(options, report).run()
    except KeyboardInterrupt:
        report.note("interrupted: only what was measured until then")
    finally:
        signal.signal(signal.SIGTERM, before)
    return report.finish(options)


class Benchmark:
    """One run: servers of a kind after the other, and what each kind is measured for."""

    def __init__(self, options: Options, report: Report) -> None:
        extra = options.extra
        self.plan = QUICK if options.quick else FULL
        self.parts: Sequence[str] = extra.parts or (QUICK_PARTS if options.quick else PARTS)
        self.report = report
        self.shape = Shape(pace=extra.pace)
        self._folder = data_folder(extra.data)
        self._instances: int = extra.instances
        self._peer: Path | None = extra.sglang_router_python
        self._encode = _encoder()
        self._scenes = itertools.count()
        self._curves: dict[str, dict[int, float]] = {}
        self._latency: dict[tuple[str, str], float] = {}

    def run(self) -> None:
        """Measure all parts."""
        kinds: list[tuple[str, tuple[System, ...]]] = [
            ("ours", (STICKY, UNHINTED, HINTED)),
            ("no cache", (RECOMPUTE,)),
        ]
        missing = peer_missing(self._peer)
        if missing is None:
            kinds.append(("stock", (STOCK,)))
        else:
            self.report.note(f"{STOCK.name}: {missing}")
        for kind, systems in kinds:
            progress(f"starting {self._instances} servers: {kind}")
            with Fleet(kind, self._instances, self.plan.tiers) as fleet:
                order = "before" if fleet.first else "among"
                self.report.note(f"servers ({kind}): run {order} other work of this machine")
                self._measure(fleet, systems)
        self._summarise()

    # -- one kind of servers ------------------------------------------------------------------------

    def _measure(self, fleet: Fleet, systems: Sequence[System]) -> None:
        # Ours with and without hints differ in what the clients send, not in the router.
        by_policy = itertools.groupby(systems, key=lambda system: system.policy)
        for _, group in by_policy:
            sharing = list(group)
            with fleet.routed(sharing[0], self._peer) as url:
                for system in sharing:
                    self._measure_system(fleet, system, url)

    def _measure_system(self, fleet: Fleet, system: System, url: str) -> None:
        if "hits" in self.parts and system is HINTED:
            measure_hits(self.report, fleet, url, self.plan.hits, self.plan.tiers)
        counts = self.plan.counts.get(system.name, (self.plan.main,)) if "systems" in self.parts else ()
        varied = self._varied(system)
        most = max([*counts, *([self.plan.main] if varied else [])], default=0)
        if most:
            self._warm(fleet, system, url, most)
        for count in counts:
            self._systems(fleet, system, url, count)
        if "missing" in varied:
            self._missing(fleet, system, url)
        if "priority" in varied:
            self._priority(fleet, system, url)
        if "prefill" in varied:
            self._prefill(fleet, system, url)
        if "agents" in self.parts:
            self._agents(fleet, system, url)

    def _varied(self, system: System) -> set[str]:
        """Of the parts that play people at one number of users, those that this system takes part in."""
        of_all = {"prefill"}
        if system is HINTED:
            of_all |= {"missing", "priority"}
        elif system is RECOMPUTE:
            of_all |= {"priority"}
        return of_all & set(self.parts)

    def _warm(self, fleet: Fleet, system: System, url: str, count: int) -> None:
        """Have what was said before the measurements computed, once for all of them; nothing else is kept."""
        fleet.flush()
        if system is not RECOMPUTE:
            talks = [next(row) for row in users(self._folder, self._encode, count, SEED, self.shape)]
            begin = time.perf_counter()
            Player(url, self._scene(system, 0.0)).warm(talks, WARM_AT_ONCE)
            fleet.settle()
            told = sum(len(talk.past) for talk in talks)
            progress(
                f"{system.name}: {told} tokens of {count} users in {time.perf_counter() - begin:.0f} s; "
                f"HBM holds {self.plan.tiers.hbm * len(fleet.servers)}"
            )

    def _systems(self, fleet: Fleet, system: System, url: str, count: int) -> None:
        scene = self._scene(system, self.plan.seconds * (FEW_LONGER if count < FEW else 1))
        moved = self._people(fleet, system, url, scene, count, self.shape)
        row = self._row(fleet, scene, moved)
        self.report.add("systems", system=system.name, users=count, **row)
        self._curves.setdefault(system.name, {})[count] = normalized_latency(scene.served)
        if count == self.plan.main:
            if system is HINTED:
                self.report.summary["max_over_median_load"] = row["max_over_median"]
                self.report.summary["hidden_share"] = row["hidden"]
            elif system is STICKY:
                self.report.summary["max_over_median_load_sticky"] = row["max_over_median"]

    def _missing(self, fleet: Fleet, system: System, url: str) -> None:
        levels = turns_of(self.plan.missing, self.plan.varied_s, SLICE_S, SEED)
        scene = self._scene(system, self.plan.varied_s)
        scene.levels, scene.slice_s, scene.missing = levels, SLICE_S, lambda level: level
        self._people(fleet, system, url, scene, self.plan.main, self.shape)
        for level in self.plan.missing:
            at = [one for one in scene.served if one.level == level]
            cost = cost_of(level, scene.served)
            self.report.add(
                f"{level:.0%} of hints missing",
                users=self.plan.main,
                requests=len(at),
                normalized_ms=1e3 * normalized_latency(at),
                **_ttft(at),
                cost=cost,
            )
            if level in (0.1, 0.3):
                self.report.summary[f"missed{level * 100:.0f}_cost"] = cost

    def _priority(self, fleet: Fleet, system: System, url: str) -> None:
        levels = turns_of(URGENT, self.plan.varied_s, SLICE_S, SEED)
        scene = self._scene(system, self.plan.varied_s)
        scene.levels, scene.slice_s, scene.urgent = levels, SLICE_S, lambda level: level
        self._people(fleet, system, url, scene, self.plan.main, self.shape)
        for level in URGENT:
            for priority, who in ((1, "high"), (0, "regular")):
                at = [one for one in scene.served if one.level == level and one.priority == priority]
                if at:
                    self.report.add(
                        f"{level:.0%} high priority",
                        system=system.name,
                        priority=who,
                        requests=len(at),
                        normalized_ms=1e3 * normalized_latency(at),
                        tokens_per_s=1 / normalized_latency(at),
                        **_ttft(at),
                    )

    def _prefill(self, fleet: Fleet, system: System, url: str) -> None:
        scene = self._scene(system, self.plan.seconds)
        shape = Shape(self.shape.pace, prompt_tokens=PREFILL.prompt_tokens, answer_tokens=1)
        self._people(fleet, system, url, scene, self.plan.main, shape)
        self.report.add(
            "prefill-heavy",
            system=system.name,
            users=self.plan.main,
            requests=len(scene.served),
            per_s=_per_second(scene.served),
            normalized_ms=1e3 * normalized_latency(scene.served),
            **_ttft(scene.served),
            max_over_median=max_over_median(scene.served, fleet.urls, WINDOW_S),
        )

    def _agents(self, fleet: Fleet, system: System, url: str) -> None:
        chains = agents(self._folder, self.plan.runs, self.plan.calls, SEED, self.shape)
        scene = self._scene(system, 0.0)
        fleet.flush()
        seconds = Player(url, scene).chains(chains)
        self.report.add(
            "agents",
            system=system.name,
            runs=len(chains),
            requests=len(scene.served),
            run_s=sum(seconds) / len(seconds),
            last_s=max(seconds),
            normalized_ms=1e3 * normalized_latency(scene.served),
            **_ttft(scene.served),
        )

    # -- a measurement ------------------------------------------------------------------------------

    def _scene(self, system: System, seconds: float) -> Scene:
        name = system.name.replace(" ", "-")
        return Scene(name, SEED, seconds, hints=system.hints, mark=FRESH[1] + next(self._scenes))

    def _people(
        self, fleet: Fleet, system: System, url: str, scene: Scene, count: int, shape: Shape
    ) -> float:
        """Play users; tokens that hints have moved."""
        fleet.settle()
        before = _moved(url, system)
        Player(url, scene).people(users(self._folder, self._encode, count, SEED, shape))
        progress(
            f"{system.name}, {count} users: {len(scene.served)} requests, "
            f"{1e3 * normalized_latency(scene.served):.0f} ms per token"
        )
        return _moved(url, system) - before

    def _row(self, fleet: Fleet, scene: Scene, moved: float) -> dict[str, Value]:
        served = scene.served
        known = sum(one.known for one in served)
        return {
            "requests": len(served),
            "per_s": _per_second(served),
            "normalized_ms": 1e3 * normalized_latency(served),
            **_ttft(served),
            "max_over_median": max_over_median(served, fleet.urls, WINDOW_S),
            "in_hbm": sum(min(one.hbm, one.known) for one in served) / known,
            "recomputed": sum(max(0, one.computed - one.prompt + one.known) for one in served) / known,
            "hidden": hidden_share(moved, sum(one.dram + one.disk for one in served))
            if scene.hints
            else None,
        }

    def _summarise(self) -> None:
        recompute, ours = self._curves.get(RECOMPUTE.name), self._curves.get(HINTED.name)
        if not recompute or not ours:
            return
        latency = EQUAL * recompute[min(recompute)]
        many = users_at(latency, ours)
        for key, name in (("users_vs_recompute", RECOMPUTE.name), ("users_vs_stock_router", STOCK.name)):
            curve = self._curves.get(name)
            theirs = users_at(latency, curve) if curve else None
            self.report.summary[key] = times_the_users(many, theirs) if theirs else None
            if theirs:
                self.report.note(
                    f"{1e3 * latency:.0f} ms per token: ours {_users(many)}, {name} {_users(theirs)} users"
                )


def _users(bounds: tuple[float, float]) -> str:
    low, high = bounds
    if low == high:
        return f"{low:.1f}"
    return f"{low:.0f} or more" if math.isinf(high) else f"fewer than {high:.0f}"


def _moved(url: str, system: System) -> float:
    return router_counts(url).get(MOVED, 0.0) if system.hints else 0.0


def _ttft(served: Sequence[Served]) -> dict[str, Value]:
    return {
        "ttft_p50_ms": 1e3 * percentile([one.ttft for one in served], 50),
        "ttft_p99_ms": 1e3 * percentile([one.ttft for one in served], 99),
    }


def _per_second(served: Sequence[Served]) -> float:
    return len(served) / (max(one.ended for one in served) - min(one.sent for one in served))


def _encoder() -> Encode:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(model_path(MODEL) / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


if __name__ == "__main__":
    sys.exit(main())
