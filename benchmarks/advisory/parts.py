"""The measurements of the advisory benchmark: a method for each part, on servers and a router that run
already."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.advisory.figures import (
    Served,
    cost_line,
    cost_of,
    hidden_share,
    max_over_median,
    normalized_latency,
    not_hidden,
)
from benchmarks.advisory.fleet import HINTED, RECOMPUTE, Fleet, System, progress, router_counts
from benchmarks.advisory.graphs import Call, fan_out, logged
from benchmarks.advisory.plan import Plan
from benchmarks.advisory.play import Player, Scene
from benchmarks.advisory.talks import FRESH, Encode, Shape, turns_of, users
from benchmarks.lib.common import SEED, Report, Value, percentile

WARM_AT_ONCE = 4
WINDOW_S = 5.0
FEW, FEW_LONGER = 6, 2
"""Fewer users than this are measured for so many times longer: they send little."""
MOVED = "sglang_ext_router_hint_tokens_total"
PREFILL_TOKENS = 512
TTFT = ("ttft_p50_ms", "ttft_p99_ms")
CHATDEV, FAN_OUT = "agents, all edges", "agents, fan-out"
EVEN_ANSWERS = 24
"""Tokens of every answer where hints are missing: each request then says as much as any other."""


class Parts:
    """See the module's docstring.

    Args:
        plan: how much is measured. report: takes the rows.
        shape: of people's requests. folder: with the workloads. encode: from text to tokens.
    """

    def __init__(self, plan: Plan, report: Report, shape: Shape, folder: Path, encode: Encode) -> None:
        self.plan = plan
        self.report = report
        self.shape = shape
        self._folder = folder
        self._encode = encode
        self._scenes = itertools.count()

    def warm(self, fleet: Fleet, system: System, url: str, count: int) -> None:
        """Have the turns before the measurements computed, once for all of them; nothing else is kept."""
        fleet.flush()
        if system is not RECOMPUTE:
            talks = [next(row) for row in users(self._folder, self._encode, count, SEED, self.shape)]
            begin = time.perf_counter()
            Player(url, self._scene(system, 0.0)).warm(talks, WARM_AT_ONCE)
            fleet.settle()
            advised = sum(len(talk.past) for talk in talks)
            progress(
                f"{system.name}: {advised} tokens of {count} users in {time.perf_counter() - begin:.0f} s; "
                f"HBM holds {self.plan.tiers.hbm * len(fleet.servers)}"
            )

    def systems(self, fleet: Fleet, system: System, url: str, count: int) -> None:
        scene = self._scene(system, self.plan.seconds * (FEW_LONGER if count < FEW else 1))
        read = fleet.disk_tokens()
        moved = self._people(fleet, system, url, scene, count, self.shape)
        row = {**self._row(fleet, scene), "from_disk": fleet.disk_tokens() - read}
        self.report.add("systems", system=system.name, users=count, **row)
        if system is HINTED:
            self._hidden(fleet, scene, count, moved)

    def _hidden(self, fleet: Fleet, scene: Scene, count: int, moved: float) -> None:
        """The share of moves that no request waited for, and the reasons why the rest was not made in
        time."""
        left = not_hidden(scene.served)
        advised = [one.advised for one in scene.served if one.advised is not None]
        ready = [one.ready_s for one in advised if one.ready_s is not None]
        # Of a cycle, all but reading: a session that types or whose request runs wants to be in HBM.
        begin, end = min(one.sent for one in scene.served), max(one.ended for one in scene.served)
        wanted = sum(
            (one.ended - one.sent + (one.advised.gap_s if one.advised else 0.0)) * (one.prompt + one.answer)
            for one in scene.served
        )
        total = moved + sum(left.values())
        self.report.add(
            "hidden",
            users=count,
            moved_tokens=int(moved),
            hidden=hidden_share(moved, sum(left.values())),
            **{word.replace(" ", "_"): tokens / total if total else 0.0 for word, tokens in left.items()},
            gap_p50_s=percentile([one.gap_s for one in advised], 50) if advised else None,
            ready_p50_s=percentile(ready, 50) if ready else None,
            ready_p99_s=percentile(ready, 99) if ready else None,
            hbm_wanted=wanted / (end - begin) / (self.plan.tiers.hbm * len(fleet.servers)),
        )

    def missing(self, fleet: Fleet, system: System, url: str) -> None:
        plan = self.plan
        scene = self._scene(system, plan.varied_s)
        scene.levels = turns_of(plan.missing, plan.varied_s, plan.slice_s, SEED)
        scene.slice_s, scene.missing = plan.slice_s, lambda level: level
        shape = replace(self.shape, answer_tokens=EVEN_ANSWERS)
        self._people(fleet, system, url, scene, plan.main, shape)
        for level in plan.missing:
            at = [one for one in scene.served if one.level == level]
            self.report.add(
                f"{level:.0%} of hints missing",
                users=plan.main,
                requests=len(at),
                normalized_ms=1e3 * normalized_latency(at) if at else None,
                **(_ttft(at) if at else dict.fromkeys(TTFT)),
                cost=cost_of(level, scene.served),
            )
        # No line goes through one level.
        asked = len({one.level for one in scene.served}) > 1
        line = cost_line(scene.served, plan.slice_s, SEED) if asked else None
        for level in (0.1, 0.3, 0.5):
            cost, noise = (None, None) if line is None else line.cost(level)
            self.report.add(
                f"{level:.0%} of hints missing, by the line", users=plan.main, cost=cost, noise=noise
            )

    def priority(self, fleet: Fleet, system: System, url: str) -> None:
        plan = self.plan
        seconds = plan.varied_s / 2
        scene = self._scene(system, seconds)
        scene.levels = turns_of(plan.urgent, seconds, plan.slice_s, SEED)
        scene.slice_s, scene.urgent = plan.slice_s, lambda level: level
        self._people(fleet, system, url, scene, plan.main, self.shape)
        for level in plan.urgent:
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

    def prefill(self, fleet: Fleet, system: System, url: str) -> None:
        scene = self._scene(system, self.plan.seconds)
        self._people(
            fleet,
            system,
            url,
            scene,
            self.plan.main,
            replace(self.shape, prompt_tokens=PREFILL_TOKENS, answer_tokens=1),
        )
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

    def balance(self, fleet: Fleet, system: System, url: str) -> None:
        crowd = self.plan.crowd
        fleet.flush()
        scene = self._scene(system, crowd.seconds)
        self._people(fleet, system, url, scene, crowd.users, replace(crowd.shape, pace=self.shape.pace))
        begin = min(one.sent for one in scene.served) + crowd.settling_s
        served = [one for one in scene.served if one.sent >= begin]
        seconds = max(one.ended for one in served) - begin
        self.report.add(
            "balance",
            system=system.name,
            users=crowd.users,
            instances=len(fleet.servers),
            requests=len(served),
            per_s=_per_second(served),
            normalized_ms=1e3 * normalized_latency(served),
            **_ttft(served),
            max_over_median=max_over_median(served, fleet.urls, crowd.window_s),
            all_the_time=max_over_median(served, fleet.urls, seconds),
            in_flight=sum(one.ended - one.sent for one in served) / seconds / len(fleet.servers),
        )

    def agents(self, fleet: Fleet, system: System, url: str) -> None:
        """The one agent that is called next is hinted."""
        self._agents("agents", self._logged(), fleet, system, url)

    def graph(self, fleet: Fleet, system: System, url: str) -> None:
        """All agents that may be called next are hinted: one of them is called, then all of them are."""
        self._agents(CHATDEV, self._logged(all_edges=True), fleet, system, url)
        plan = self.plan
        runs = fan_out(self._folder, plan.runs, plan.fan_out_rounds, SEED, self.shape)
        self._agents(FAN_OUT, runs, fleet, system, url)

    def _logged(self, *, all_edges: bool = False) -> list[list[Call]]:
        plan = self.plan
        return logged(self._folder, plan.runs, plan.calls, SEED, self.shape, all_edges=all_edges)

    def _agents(
        self, case: str, runs: Sequence[Sequence[Call]], fleet: Fleet, system: System, url: str
    ) -> None:
        scene = self._scene(system, 0.0)
        fleet.flush()
        read = fleet.disk_tokens()
        seconds = Player(url, scene).agents(runs)
        progress(f"{system.name}, {case}: {len(scene.served)} calls, {max(seconds):.0f} s")
        self.report.add(
            case,
            system=system.name,
            runs=len(runs),
            requests=len(scene.served),
            run_s=sum(seconds) / len(seconds),
            last_s=max(seconds),
            of_it_ttft_s=sum(one.ttft for one in scene.served) / len(runs),
            in_hbm=_in_hbm(scene.served),
            from_disk=fleet.disk_tokens() - read,
            hints=scene.hints_sent,
            hints_refused=scene.hints_refused,
            hinted=sum(one.hinted for one in scene.served),
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

    def _row(self, fleet: Fleet, scene: Scene) -> dict[str, Value]:
        served = scene.served
        known = sum(one.known for one in served)
        return {
            "requests": len(served),
            "per_s": _per_second(served),
            "normalized_ms": 1e3 * normalized_latency(served),
            **_ttft(served),
            "max_over_median": max_over_median(served, fleet.urls, WINDOW_S),
            "in_hbm": _in_hbm(served),
            "recomputed": sum(max(0, one.computed - one.prompt + one.known) for one in served) / known,
        }


def _moved(url: str, system: System) -> float:
    return router_counts(url).get(MOVED, 0.0) if system.hints else 0.0


def _ttft(served: Sequence[Served]) -> dict[str, Value]:
    seconds = [one.ttft for one in served]
    return {name: 1e3 * percentile(seconds, percent) for name, percent in zip(TTFT, (50, 99), strict=True)}


def _in_hbm(served: Sequence[Served]) -> float:
    """Of the tokens that were known, the share that was found in HBM."""
    return sum(min(one.hbm, one.known) for one in served) / max(1, sum(one.known for one in served))


def _per_second(served: Sequence[Served]) -> float:
    return len(served) / (max(one.ended for one in served) - min(one.sent for one in served))
