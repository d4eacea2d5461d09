"""Policies, fetching, hints, disks and deaths of instances in a simulated fleet of hundreds of instances.

The load is the simulator's built-in mix, with the default costs of instances. The fleet starts with nothing
in its memory; times are of the requests after the first third of the time. Each simulation has a file in
``--results``, so that a run which was interrupted goes on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.cells import Cell, Figures, measured, ratio
from benchmarks.lib.common import Options, Report
from benchmarks.lib.plots import Axis, bars
from sglang_ext.flags import flag

NAME = "fleet"
POLICIES = ("cost", "prompt-tree", "session", "least-load", "round-robin")
MEMORY = "hbm=1024,dram=512"
BUSY, MIDDLE, QUIET = 5.0, 3.5, 2.5
"""Requests a second of an instance."""
MECHANISMS = {
    "cost": "",
    "without fetching": "fetch=off",
    "hints for half of the turns": "hints=0.5",
    "disks": "disk=8192",
    "disks, hints, without fetching": "disk=8192,hints=0.5,fetch=off",
    "all three": "disk=8192,hints=0.5",
}
DEATHS = {
    "none": "",
    "deaths": "failures=56,restart_s=10",
    "deaths, disks": "failures=56,restart_s=10,disk=8192",
}
"""A death in 64 s of an instance, 5,600 times 1 % an hour: a run of minutes has none at that rate."""
COLUMNS = (
    "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "jct_mean_ms", "reused", "of_oracle", "computed_tokens",
    "capacity_used", "busiest",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FleetOptions(Options):
    """The flags of this benchmark."""

    results: Path | None = flag(None, "Keep the figures of each simulation here.", metavar="FOLDER")
    plots: Path | None = flag(None, "Write the plots here, as SVG.", metavar="FOLDER")
    parts: tuple[str, ...] = flag(
        ("thousand", "busy", "mechanisms", "thousand-mechanisms", "deaths", "quiet"),
        "Parts to run.",
        metavar="PART",
        several="append",
    )
    seeds: int = flag(1, "Loads that are drawn, but for the parts of a thousand instances, which have one.")


def main(argv: Sequence[str] | None = None) -> int:
    options = FleetOptions.of(argv, NAME, __doc__)
    report = Report(NAME)
    for part in options.parts:
        PARTS[part](options, report)
    report.note("simulated: times are the cost model's; compare ratios")
    return report.finish(options)


def fleet(options: FleetOptions, instances: int, requests: int, rate: float, seed: int, more: str) -> str:
    """Settings of a fleet. requests: of each instance."""
    instances = options.pick(instances, quick=instances // 10, tiny=4)
    each = options.pick(requests, quick=requests // 2, tiny=5)
    what = f"instances={instances},requests={instances * each},rate={rate},seed={seed},{MEMORY}"
    return f"{what},{more}" if more else what


def thousand(options: FleetOptions, report: Report) -> None:
    """A thousand instances under each policy."""
    found = {
        policy: measured(
            Cell(f"1,000, {policy}", fleet(options, 1000, 10, 5.0, 0, f"policy={policy}")), options.results
        )
        for policy in POLICIES
    }
    _add(report, "a thousand instances, 5 requests/s each", found, "prompt-tree")
    _draw(options, "fleet-thousand", "A thousand instances: P99 TTFT and share reused", found)


def policies(options: FleetOptions, report: Report, rate: float, instances: int) -> None:
    """Fewer for longer, so that memory is full."""
    for seed in range(options.pick(options.seeds, quick=1, tiny=1)):
        found = {
            policy: measured(
                Cell(
                    f"{instances}, {policy}, {rate}/s, seed {seed}",
                    fleet(options, instances, 50, rate, seed, f"policy={policy}"),
                ),
                options.results,
            )
            for policy in POLICIES
        }
        _add(report, f"{instances} instances, {rate:g} requests/s each, seed {seed}", found, "prompt-tree")
        if seed == 0:
            _draw(
                options,
                f"fleet-policies-{rate:g}",
                f"{instances} instances at {rate:g} requests/s each",
                found,
            )


def thousand_mechanisms(options: FleetOptions, report: Report) -> None:
    """The mechanisms at a thousand instances."""
    found = {
        title: measured(
            Cell(
                f"1,000, {title}",
                fleet(options, 1000, 20, MIDDLE, 0, f"policy=cost,{more}".rstrip(",")),
            ),
            options.results,
        )
        for title, more in MECHANISMS.items()
    }
    _add(report, f"mechanisms, a thousand instances, {MIDDLE:g} requests/s each", found, "cost")


def mechanisms(options: FleetOptions, report: Report) -> None:
    """Fetching, hints and disks, with the policy ``cost``."""
    for seed in range(options.pick(options.seeds, quick=1, tiny=1)):
        found = {
            title: measured(
                Cell(
                    f"50, {title}, seed {seed}",
                    fleet(options, 50, 50, MIDDLE, seed, f"policy=cost,{more}".rstrip(",")),
                ),
                options.results,
            )
            for title, more in MECHANISMS.items()
        }
        _add(report, f"mechanisms, 50 instances, {MIDDLE:g} requests/s each, seed {seed}", found, "cost")
        if seed == 0:
            _draw(options, "fleet-mechanisms", "Policy cost with and without its mechanisms", found)


def deaths(options: FleetOptions, report: Report) -> None:
    """Instances that die, over some minutes."""
    found = {
        title: measured(
            Cell(f"10, {title}", fleet(options, 10, 80, 2.5, 0, f"policy=cost,{more}".rstrip(","))),
            options.results,
        )
        for title, more in DEATHS.items()
    }
    _add(report, "deaths, 10 instances, 2.5 requests/s each", found, "none")
    for title, figures in found.items():
        count = figures["deaths"]
        report.add(
            "of each death",
            run=title,
            deaths=count,
            retried=figures["retried"] / max(1, count),
            broken_off=figures["failed"].get("broken_off", 0) / max(1, count),
            lost=sum(figures["failed"].values()),
        )


def _add(report: Report, case: str, found: Mapping[str, Figures], base: str) -> None:
    for name, figures in found.items():
        row = {column: figures[column] for column in COLUMNS}
        tiers = {f"in_{tier}": figures["by_tier"].get(tier, 0.0) for tier in ("hbm", "dram", "disk")}
        fetched = figures["link_bytes"].get("between instances", 0.0) / figures["requests"] / 1e6
        report.add(
            case,
            run=name,
            **row,
            **tiers,
            fetched_mb_a_request=fetched,
            mean_vs_base=ratio(figures, "ttft_mean_ms", found[base]),
            p99_vs_base=ratio(figures, "ttft_p99_ms", found[base]),
            cpu_ms=figures["cpu_ms_a_request"],
        )


def _draw(options: FleetOptions, name: str, title: str, found: Mapping[str, Figures]) -> None:
    """Times as bars, and the share that was reused in the names below them."""
    if options.plots is None:
        return
    options.plots.mkdir(parents=True, exist_ok=True)
    groups = ("mean", "P90", "P99")
    series: dict[str, Sequence[float | None]] = {
        f"{run} ({figures['reused']:.2f})": [figures[f"ttft_{at}_ms"] for at in ("mean", "p90", "p99")]
        for run, figures in found.items()
    }
    picture = bars(
        title, Axis("time to first token, ms"), groups, series, "in brackets: share of prompt tokens reused"
    )
    (options.plots / f"{name}.svg").write_text(picture, encoding="utf-8")


PARTS: dict[str, Callable[[FleetOptions, Report], None]] = {
    "thousand": thousand,
    "busy": functools.partial(policies, rate=BUSY, instances=100),
    "mechanisms": mechanisms,
    "thousand-mechanisms": thousand_mechanisms,
    "deaths": deaths,
    "quiet": functools.partial(policies, rate=QUIET, instances=50),
}


if __name__ == "__main__":
    sys.exit(main())
