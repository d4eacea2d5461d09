"""Time to first token and reuse of every routing policy, over a simulated fleet under real workloads.

Four workloads from the data folder (see `benchmarks.lib.data`): questions about documents at a share ratio of
1 and 2 (MemServe, section 8.4 and figure 15; the latter at two loads), conversations, and a production trace;
each with caches of any size, and with caches too small for it. Then a prefix that all sessions share. The
policies are the router's own code; the fleet is a model (`benchmarks.policies.simulator`), so the figures
compare policies and say nothing of absolute speed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.common import SEED, Options, Report, at_most
from benchmarks.lib.data import data_flag, data_folder
from benchmarks.policies.simulator import FleetPlan, Outcome, simulate
from benchmarks.policies.workloads import (
    BLOCK_TOKENS,
    SimSession,
    arriving,
    loogle,
    mooncake,
    popular_prefix,
    repeated,
    sharegpt,
)
from sglang_ext.cost_model import CostModel, load
from sglang_ext.flags import flag
from sglang_ext.router.policies import POLICIES

NAME = "policies"
INSTANCES = 4
AIMS = {"documents_share_ratio_2_p99_cost_vs_session": at_most(0.41)}
"""MemServe, figure 15: the tail of the time to first token against sessions that stay where they began."""
COMPARED = ("cost", "prompt-tree", "session", "least-load", "round-robin", "random")


@dataclass(frozen=True, kw_only=True)
class PolicyBenchOptions(Options):
    """The flags of this benchmark."""

    data: str | None = data_flag()
    profile: Path | None = flag(
        None, "Cost profile of the instances, instead of the defaults.", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = PolicyBenchOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    run(options, report)
    return report.finish(options)


def run(options: PolicyBenchOptions, report: Report) -> None:
    """Simulate every workload under every policy."""
    folder = data_folder(options.data)
    model = CostModel(load(options.profile)) if options.profile else CostModel()
    documents = loogle(folder)[: options.pick(None, quick=None, tiny=10)]
    talks = sharegpt(folder, options.pick(400, quick=150, tiny=20))
    trace = mooncake(folder, options.pick(2000, quick=600, tiny=50))
    # Loads at which four instances of the default speed are busy for most of the time.
    cases: list[tuple[str, list[SimSession], FleetPlan]] = [
        ("documents, share ratio 1", arriving(documents, 16.0, SEED), FleetPlan(INSTANCES, model=model)),
        (
            "documents, share ratio 2",
            arriving(repeated(documents, 2), 16.0, SEED),
            FleetPlan(INSTANCES, model=model),
        ),
        (
            "documents, share ratio 2, busy",
            arriving(repeated(documents, 2), 24.0, SEED),
            FleetPlan(INSTANCES, model=model),
        ),
        (
            "documents, share ratio 2, scarce",
            arriving(repeated(documents, 2), 16.0, SEED),
            FleetPlan(INSTANCES, 20 * 1024 // BLOCK_TOKENS, model=model),
        ),
        ("conversations", arriving(talks, 20.0, SEED), FleetPlan(INSTANCES, model=model)),
        (
            "conversations, scarce",
            arriving(talks, 20.0, SEED),
            FleetPlan(INSTANCES, 24 * 1024 // BLOCK_TOKENS, model=model),
        ),
        ("production trace", trace, FleetPlan(8 * INSTANCES, model=model)),
        (
            "popular prefix",
            arriving(popular_prefix(options.pick(400, quick=400, tiny=40), 2048, 256), 20.0, SEED),
            FleetPlan(INSTANCES, model=model),
        ),
    ]
    for case, sessions, plan in cases:
        outcomes = {name: simulate(sessions, POLICIES[name], plan) for name in COMPARED}
        _add(report, case, outcomes)
    report.note("simulated: the router's policies over a model of instances; compare policies only")


def _add(report: Report, case: str, outcomes: dict[str, Outcome]) -> None:
    session = outcomes["session"]
    for name, outcome in outcomes.items():
        report.add(
            case,
            policy=name,
            requests=len(outcome.served),
            ttft_p50_ms=outcome.ttft(50) * 1e3,
            ttft_p99_ms=outcome.ttft(99) * 1e3,
            p99_vs_session=outcome.ttft(99) / session.ttft(99),
            reused=outcome.reused,
            busiest=max(outcome.spread.values()) / len(outcome.served),
        )
    key = case.replace(",", "").replace(" ", "_")
    for name in ("cost", "prompt-tree"):
        word = name.replace("-", "_")
        report.summary[f"{key}_p99_{word}_vs_session"] = outcomes[name].ttft(99) / session.ttft(99)
        report.summary[f"{key}_reuse_{word}_vs_session"] = outcomes[name].reused / max(session.reused, 1e-9)


if __name__ == "__main__":
    sys.exit(main())
