"""More agents than HBM holds: goodput at 1 to 16 times its capacity, with admission by program and without.

Agents in a closed loop on one real server. Goodput counts answer tokens of turns whose time to first token
is within 4 times the unloaded one, that of the same system with one agent. Systems: stock SGLang; the same
behind our router by session; ours, and ours with admission by program (``--max-concurrent-requests
program-share``).

Each measurement lasts longer with more agents, so that each of them gets several turns. A run can be made in
several calls, by ``--systems`` and ``--times``.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.advisory.fleet import UNHINTED, Fleet, System, Tiers, progress
from benchmarks.agents.loop import Agents, Load, lines_of, times
from benchmarks.agents.recorded import Program, programs
from benchmarks.lib.common import Options, Report, at_least, at_most
from benchmarks.lib.data import data_flag, data_folder
from benchmarks.lib.plots import Axis, lines
from benchmarks.router.fleet import forked_servers
from sglang_ext.flags import COUNT, NUMBER, flag, one_of

NAME = "agents.crowd"
SHORT_PAUSE_S = 0.3
WITHIN = 4.0
"""Times the unloaded time to first token."""
AIMS = {"least_over_peak": at_least(0.8), "longest_wait_vs_mean": at_most(2.0)}
SESSION = System("stock, by session", "session", "stock", "session")
DIRECT = System("stock", "stock", "stock", "round-robin")
LEARNT = ("--tenant-limits", "learnt-hints=0.5")
PATIENT = ("--queue-timeout-secs", "600")


@dataclass(frozen=True)
class Way:
    """A system. flags: of the router."""

    name: str
    system: System
    flags: tuple[str, ...] = ()


WAYS = {
    "stock": Way("stock SGLang", DIRECT, ("--tenant-limits", "learnt-hints=0")),
    "session": Way("stock SGLang, by session", SESSION, ("--tenant-limits", "learnt-hints=0")),
    "unhinted": Way("ours without admission, without hints", UNHINTED, ("--tenant-limits", "learnt-hints=0")),
    "ours": Way("ours without admission", UNHINTED, LEARNT),
    "admission": Way(
        "ours with admission",
        UNHINTED,
        ("--tenant-limits", "learnt-hints=0", *PATIENT, "--max-concurrent-requests", "program-share=2"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class CrowdOptions(Options):
    """The command line."""

    data: str | None = data_flag()
    sessions: str = flag("tune", "Which sessions are played.", one_of("tune", "held-out"))
    systems: tuple[str, ...] = flag(tuple(WAYS), "Systems to measure.", one_of(*WAYS), several="+")
    times: tuple[int, ...] = flag(
        (1, 2, 4, 8, 16), "Agents, in times what HBM holds.", COUNT.positive(), several="+"
    )
    pace: float = flag(8.0, "By which pauses are divided.", NUMBER.positive())
    hbm_tokens: int = flag(12_288, "Tokens of KV that fit into HBM.", COUNT.positive())
    link: float = flag(64e6, "Bytes per second from DRAM to HBM.", NUMBER.positive())
    plot: Path | None = flag(None, "Also draw goodput there, as SVG.", metavar="FILE")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = CrowdOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    crowd = Crowd(options, report)
    ways = [WAYS[word] for word in options.systems]
    with forked_servers():
        for kind in sorted({way.system.servers for way in ways}):
            with Fleet(kind, 1, crowd.tiers, None if kind == "stock" else options.link) as fleet:
                for way in ways:
                    if way.system.servers == kind:
                        crowd.measure(fleet, way)
    if options.plot is not None:
        draw(report, options.plot)
    return report.finish(options)


class Crowd:
    """One run: each system with ever more agents."""

    def __init__(self, options: CrowdOptions, report: Report) -> None:
        self.tiers = Tiers(hbm=options.hbm_tokens, dram=24 * options.hbm_tokens)
        self._times = options.times
        self._seconds = options.pick(30.0, quick=20.0, tiny=4.0)
        self._more_s = options.pick(4.0, quick=1.5, tiny=0.5)
        self._report = report
        self._programs = programs(
            data_folder(options.data), held=options.sessions == "held-out", steps=12, pace=options.pace,
            most_tokens=options.hbm_tokens // 3,
        )  # fmt: skip
        mean = statistics.fmean(each.tokens for each in self._programs)
        self._fit = max(1, round(options.hbm_tokens / mean))
        report.note(
            f"{self._fit} sessions of {mean:.0f} tokens fit into HBM; {len(self._programs)} stretches"
        )

    def measure(self, fleet: Fleet, way: Way) -> None:
        """All numbers of agents with one system."""
        unloaded, found = 0.0, []
        for number in (0, *self._times):
            agents = self._fit * number or 1
            seconds = self._seconds + self._more_s * agents
            progress(f"{way.name}: {agents} agents, {seconds:.0f} s")
            fleet.flush()
            with fleet.routed(way.system, flags=way.flags) as url:
                load = Load(f"{number}", seconds, warm_s=seconds / 4)
                queued = lines_of(self._programs, agents)
                Agents(url, load).play(queued if number else [[_hurried(each) for each in queued[0]]])
            fleet.settle()
            if not number:
                unloaded = statistics.median([turn.ttft for turn in load.counted])
                continue
            found.append(self._add(way, number, agents, load, unloaded))
        self._report.summary[f"least_over_peak ({way.name})"] = min(found) / max(found) if max(found) else 0.0

    def _add(self, way: Way, number: int, agents: int, load: Load, unloaded: float) -> float:
        turns = load.counted
        good = [turn for turn in turns if turn.ttft <= WITHIN * unloaded]
        seconds = load.seconds - load.warm_s
        waited = defaultdict[str, float](float)
        for turn in load.served:
            waited[turn.program.split("/")[1]] += turn.ttft
        mean = statistics.fmean(waited.values()) if waited else 0.0
        goodput = sum(turn.answer for turn in good) / seconds
        self._report.add(
            way.name,
            times=number,
            agents=agents,
            goodput=goodput,
            tokens_per_s=sum(turn.answer for turn in turns) / seconds,
            turns=len(turns),
            good=len(good) / max(1, len(turns)),
            in_hbm=statistics.fmean([turn.in_hbm for turn in turns] or [0.0]),
            longest_wait_vs_mean=max(waited.values(), default=0.0) / mean if mean else 0.0,
            refused=sum(turn.status != 200 for turn in load.served),
            unloaded_ms=1e3 * unloaded,
            **times([turn.ttft for turn in turns]),
        )
        progress(
            f"{way.name}, {number} times: goodput {goodput:.2f}, {len(good)} of {len(turns)} turns in time"
        )
        return goodput


def _hurried(program: Program) -> Program:
    """The same with short pauses: for the time to first token of one agent, turns are what counts."""
    steps = tuple(replace(step, pause_s=min(step.pause_s, SHORT_PAUSE_S)) for step in program.steps)
    return replace(program, steps=steps)


def draw(report: Report, path: Path) -> None:
    """Goodput by the number of agents, a line for each system."""
    series = defaultdict[str, dict[float, float]](dict)
    for row in report.rows:
        series[str(row["case"])][float(row["times"] or 0)] = float(row["goodput"] or 0)
    title = "Goodput of agents beyond HBM's capacity"
    x, y = Axis("agents, in times what HBM holds"), Axis("answer tokens per second of turns in time")
    path.write_text(lines(title, x, y, series), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
