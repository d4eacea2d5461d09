"""The benefit of hints: Symphony's evaluation (section 4) on real servers of this machine, in one run.

Systems: recompute (no cache, balanced), stock SGLang behind sglang-router cache_aware (where that is
installed), sticky swapping (InferCept's way: a session stays where its DRAM is), ours without and with hints.
All serve the model `small` on servers of equal size, whose HBM holds fewer sessions than there are users.

- `systems`: normalized latency, TTFT, requests served and load by the number of users (figures 12 and 13).
- `hits`: TTFT of hinted requests against HBM hits of the same lengths, one request at a time: under load,
  waiting for others would be most of either.
- `missing`, `priority`: figures 17 and 18. The varied parameter changes every few seconds within one
  measurement, so that disturbances of the machine affect all its levels.
- `prefill`: figure 16, prompts of 512 new tokens and answers of one. `agents`: section 4.4, from logged runs.
- `layers`: how many announced sessions the same HBM serves as if they were there, when it holds the lowest
  layers of all instead of whole sessions, over a slow link to DRAM (section 3.3).
- `graph`: agents whose call graph is known and not the path through it: hints go along all its edges, in
  ChatDev's runs and in runs whose agents work at the same time (`benchmarks/advisory/graphs.py`).
- `balance`: figure 14, load by instance over more instances, while sessions come and go. Of two instances the
  median is the mean: one can be at most twofold above it, and sticky sessions are a fifth above.

A run takes the better part of an hour. It can be made in several calls: `--parts` and `--systems` select a
share of it, and `--add-to` continues the report of the call before. `--model` takes another model,
`--disk-tokens` gives each server a disk tier, and `--dram-tokens` as little DRAM as brings KV there.

How many users a system serves "at equal latency" is read off a line through few points: the latency is that
of recompute at 4 users. Where that point lies beyond the measured points of a system, the ratio is a lower
bound, and a note says so. `benchmarks/advisory/talks.py` says how the load differs from people's.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.advisory.fleet import (
    BY_LAYER,
    HINTED,
    RECOMPUTE,
    STICKY,
    STOCK,
    UNHINTED,
    WHOLE,
    Fleet,
    System,
    Tiers,
    progress,
)
from benchmarks.advisory.hits import measure_hits
from benchmarks.advisory.layers import LINK, measure_layers
from benchmarks.advisory.parts import Parts
from benchmarks.advisory.plan import FULL, PARTS, QUICK, QUICK_PARTS, TINY, WORDS, AdvisoryOptions
from benchmarks.advisory.plots import draw
from benchmarks.advisory.summary import add_to, summarise
from benchmarks.advisory.talks import Encode, Shape
from benchmarks.lib.common import Report, at_least, at_most
from benchmarks.lib.data import data_folder
from benchmarks.router.fleet import forked_servers
from benchmarks.router.processes import peer_missing
from sglang_ext.testing.models import model_path

NAME = "advisory"
AIMS = {
    "share_within_1_1_of_hbm_hit": at_least(0.95),
    "sessions_by_layer_vs_whole": at_least(1.5),
    "users_vs_recompute": at_least(5.0),
    "max_over_median_load": at_most(1.2),
    "max_over_median_load_sticky": at_least(1.5),
    "missed10_cost": at_most(0.06),
    "all_edges_wait_vs_unhinted": at_most(1.0),
    "fan_out_wait_vs_unhinted": at_most(1.0),
}


@dataclass(frozen=True)
class Group:
    """The parts that are measured on servers of one kind."""

    kind: str
    instances: int
    tiers: Tiers
    systems: tuple[System, ...]
    parts: frozenset[str]
    link: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = AdvisoryOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    report.note(options.servers)
    if options.add_to is not None:
        try:
            add_to(report, options.add_to)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
            return 2
    # Routers are no guarded processes: an end by SIGTERM has to pass through here, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Benchmark(options, report).run()
    except KeyboardInterrupt:
        report.note("interrupted: only the measurements until then")
    finally:
        signal.signal(signal.SIGTERM, before)
    summarise(report)
    if options.plots is not None:
        draw(report.rows, options.plots)
    return report.finish(options)


class Benchmark:
    """One run: servers of one kind after the other, and the parts that each kind is measured for."""

    def __init__(self, options: AdvisoryOptions, report: Report) -> None:
        plan = options.pick(FULL, quick=QUICK, tiny=TINY)
        crowd = replace(plan.crowd, tiers=options.tiers(plan.crowd.tiers))
        self.plan = replace(plan, tiers=options.tiers(plan.tiers), crowd=crowd)
        self.parts: Sequence[str] = options.parts or (QUICK_PARTS if options.quick else PARTS)
        self.report = report
        shape, folder = Shape(pace=options.pace), data_folder(options.data)
        self._model = options.model
        self._run = Parts(self.plan, report, shape, folder, _encoder(options.model))
        self._instances = options.instances
        self._peer = options.sglang_router_python
        self._asked = {WORDS[word] for word in options.systems}

    def run(self) -> None:
        """Measure all parts."""
        with forked_servers():
            self._run_groups()

    def _run_groups(self) -> None:
        for group in self._groups():
            progress(f"starting {group.instances} servers: {group.kind}")
            with Fleet(group.kind, group.instances, group.tiers, group.link, self._model) as fleet:
                order = "before" if fleet.first else "among"
                self.report.note(f"servers ({group.kind}): run {order} other work of this machine")
                self._measure(fleet, group)

    def _groups(self) -> Iterator[Group]:
        """The servers that are needed, and the parts that need them."""
        crowd = self.plan.crowd
        parts = frozenset(self.parts) - {"balance", "layers"}
        found = [
            Group("ours", self._instances, self.plan.tiers, (STICKY, UNHINTED, HINTED), parts),
            Group("no cache", self._instances, self.plan.tiers, (RECOMPUTE,), parts),
            Group("stock", self._instances, self.plan.tiers, (STOCK,), parts),
        ]
        if "balance" in self.parts:
            found.append(
                Group("ours", crowd.instances, crowd.tiers, (STICKY, HINTED), frozenset({"balance"}))
            )
        if "layers" in self.parts:
            tiers, part = self.plan.layers_tiers, frozenset({"layers"})
            found += [Group(each.servers, 1, tiers, (each,), part, LINK) for each in (WHOLE, BY_LAYER)]
        for group in found:
            systems = tuple(
                system
                for system in group.systems
                if system in self._asked and any(self._takes_part(system, part) for part in group.parts)
            )
            if systems == (STOCK,) and (missing := peer_missing(self._peer)) is not None:
                self.report.note(f"{STOCK.name}: {missing}")
            elif systems:
                yield replace(group, systems=systems)

    def _takes_part(self, system: System, part: str) -> bool:
        if part in ("hits", "missing"):
            return system is HINTED
        if part == "priority":
            return system in (HINTED, RECOMPUTE)
        if part == "layers":
            return system in (WHOLE, BY_LAYER)
        if part == "systems":
            return bool(self._counts(system))
        return True

    def _counts(self, system: System) -> tuple[int, ...]:
        return self.plan.counts.get(system.name, (self.plan.main,))

    # -- one kind of servers ------------------------------------------------------------------------

    def _measure(self, fleet: Fleet, group: Group) -> None:
        # Our systems with and without hints differ in the clients' requests, not in the router.
        for _, systems in itertools.groupby(group.systems, key=lambda system: system.policy):
            sharing = list(systems)
            with fleet.routed(sharing[0], self._peer) as url:
                for system in sharing:
                    self._measure_system(fleet, system, url, group.parts)

    def _measure_system(self, fleet: Fleet, system: System, url: str, parts: frozenset[str]) -> None:
        parts = frozenset(part for part in parts if self._takes_part(system, part))
        run = self._run
        if "hits" in parts:
            measure_hits(self.report, fleet, url, self.plan.hits, self.plan.tiers)
        if "layers" in parts:
            for sessions in self.plan.sessions:
                measure_layers(self.report, fleet, system, url, sessions, self.plan.rounds)
        counts = self._counts(system) if "systems" in parts else ()
        varied = parts & {"missing", "priority", "prefill"}
        most = max([*counts, *([self.plan.main] if varied else [])], default=0)
        if most:
            run.warm(fleet, system, url, most)
        for count in counts:
            run.systems(fleet, system, url, count)
        for part, measure in (
            ("missing", run.missing),
            ("priority", run.priority),
            ("prefill", run.prefill),
            ("balance", run.balance),
            ("agents", run.agents),
            ("graph", run.graph),
        ):
            if part in parts:
                measure(fleet, system, url)


def _encoder(model: str) -> Encode:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(model_path(model) / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


if __name__ == "__main__":
    sys.exit(main())
