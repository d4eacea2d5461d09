"""Hints that the router makes from learnt pauses, beside hints of clients that know their pauses, and none.

Agents in a closed loop on one real server whose HBM holds fewer sessions than there are, over a link from
DRAM that is as slow as a slow one is to a GPU (``benchmarks/advisory/slow_link.py``). Clients' hints come a
second before their turns, with certainty: no real client knows that, so they are a bound.

Tune with the sessions of ``--sessions tune``; those that were held out are read for the final figures only.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.advisory.fleet import UNHINTED, Fleet, Tiers, bytes_per_token, progress, router_counts
from benchmarks.agents.loop import Agents, Load, Served, lines_of, times
from benchmarks.agents.recorded import programs
from benchmarks.lib.common import Options, Report, at_least
from benchmarks.lib.data import data_flag, data_folder
from benchmarks.router.fleet import forked_servers
from sglang_ext.flags import COUNT, NUMBER, flag, one_of

NAME = "agents.pauses"
AIMS = {"gain_of_learnt_vs_explicit": at_least(0.9)}
NONE, LEARNT, EXPLICIT = "no hints", "learnt hints", "explicit hints"
LEARNT_FLAGS = {
    NONE: ("--tenant-limits", "learnt-hints=0"),
    LEARNT: ("--tenant-limits", "learnt-hints=0.5"),
    EXPLICIT: ("--tenant-limits", "learnt-hints=0"),
}


@dataclass(frozen=True, kw_only=True)
class PausesOptions(Options):
    """The command line."""

    data: str | None = data_flag()
    sessions: str = flag("tune", "Which sessions are played.", one_of("tune", "held-out"))
    agents: int = flag(12, "Agents at a time.", COUNT.positive())
    pace: float = flag(8.0, "By which pauses are divided.", NUMBER.positive())
    hbm_tokens: int = flag(12_288, "Tokens of KV that fit into HBM.", COUNT.positive())
    link: float = flag(64e6, "Bytes per second from DRAM to HBM.", NUMBER.positive())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = PausesOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    seconds, warm, rounds = options.pick((60.0, 20.0, 2), quick=(30.0, 10.0, 1), tiny=(6.0, 2.0, 1))
    tiers = Tiers(hbm=options.hbm_tokens, dram=12 * options.hbm_tokens)
    found = programs(
        data_folder(options.data), held=options.sessions == "held-out", steps=12, pace=options.pace,
        most_tokens=6 * options.hbm_tokens // 10,
    )  # fmt: skip
    mean = statistics.fmean(each.tokens for each in found)
    report.note(f"{options.agents} agents; {len(found)} stretches ({options.sessions}) of {mean:.0f} tokens")
    results: dict[str, list[Load]] = {NONE: [], LEARNT: [], EXPLICIT: []}
    moved: dict[str, float] = dict.fromkeys(results, 0.0)
    with forked_servers(), Fleet("ours", 1, tiers, options.link) as fleet:
        for number in range(rounds):
            for system in (list(results), list(results)[::-1])[number % 2]:
                progress(f"round {number}: {system}")
                fleet.flush()
                with fleet.routed(UNHINTED, flags=LEARNT_FLAGS[system]) as url:
                    load = Load(f"{number}", seconds, system == EXPLICIT, asks=True, warm_s=warm)
                    Agents(url, load).play(lines_of(found, options.agents))
                    counts = router_counts(url)
                    moved[system] += counts.get("sglang_ext_router_hint_tokens_total", 0.0)
                results[system].append(load)
                fleet.settle()
    for system, loads in results.items():
        _add(report, system, [turn for load in loads for turn in load.counted], moved[system])
    _summarise(report)
    return report.finish(options)


def _add(report: Report, system: str, turns: list[Served], moved: float) -> None:
    token = bytes_per_token("small")
    brought = sum(each.moved for each in turns)
    used = sum(min(each.moved, each.hbm) for each in turns)
    report.add(
        system,
        turns=len(turns),
        in_hbm=statistics.fmean(each.in_hbm for each in turns) if turns else 0.0,
        known_tokens_in_hbm=sum(min(each.hbm, each.known) for each in turns)
        / max(1, sum(t.known for t in turns)),
        announced=statistics.fmean(each.expected for each in turns) if turns else 0.0,
        moved_mb=moved * token / 1e6,
        moved_in_vain=1 - used / brought if brought else 0.0,
        **times([each.ttft for each in turns]),
    )


def _summarise(report: Report) -> None:
    rows = {str(row["case"]): row for row in report.rows}
    for key in ("mean_ms", "p50_ms"):
        none, learnt, explicit = (float(rows[name][key] or 0) for name in (NONE, LEARNT, EXPLICIT))
        gain = (none - learnt) / (none - explicit) if none != explicit else 0.0
        report.summary[f"gain_of_learnt_vs_explicit{'' if key == 'mean_ms' else '_p50'}"] = gain


if __name__ == "__main__":
    sys.exit(main())
