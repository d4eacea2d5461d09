"""Time to first token and reuse of every routing policy, over a simulated fleet under real workloads.

Four workloads from the data folder (see `benchmarks.lib.data`): questions about documents at a share ratio of
1 and 2 (MemServe, section 8.4 and figure 15; the latter at two loads), conversations, and a production trace;
each with caches of any size, and with caches too small for it. Then a prefix that all sessions share. The
router and the caches are the product's own code (`sglang_ext.simulator`), the times are the cost model's: the
figures compare policies and say nothing of absolute speed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.common import SEED, Options, Report, at_most
from benchmarks.lib.data import data_flag, data_folder
from benchmarks.policies.fleet import ENOUGH
from benchmarks.policies.fleet import run as simulated
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
from sglang_ext.simulator.outcome import Outcome, percentile

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
    cases: list[tuple[str, list[SimSession], tuple[int, int]]] = [
        ("documents, share ratio 1", arriving(documents, 16.0, SEED), (INSTANCES, ENOUGH)),
        (
            "documents, share ratio 2",
            arriving(repeated(documents, 2), 16.0, SEED),
            (INSTANCES, ENOUGH),
        ),
        (
            "documents, share ratio 2, busy",
            arriving(repeated(documents, 2), 24.0, SEED),
            (INSTANCES, ENOUGH),
        ),
        (
            "documents, share ratio 2, scarce",
            arriving(repeated(documents, 2), 16.0, SEED),
            (INSTANCES, 20 * 1024 // BLOCK_TOKENS),
        ),
        ("conversations", arriving(talks, 20.0, SEED), (INSTANCES, ENOUGH)),
        (
            "conversations, scarce",
            arriving(talks, 20.0, SEED),
            (INSTANCES, 24 * 1024 // BLOCK_TOKENS),
        ),
        ("production trace", trace, (8 * INSTANCES, ENOUGH)),
        (
            "popular prefix",
            arriving(popular_prefix(options.pick(400, quick=400, tiny=40), 2048, 256), 20.0, SEED),
            (INSTANCES, ENOUGH),
        ),
    ]
    for case, sessions, (instances, blocks) in cases:
        outcomes = {
            name: simulated(sessions, name, instances, blocks=blocks, model=model) for name in COMPARED
        }
        _add(report, case, outcomes)
    report.note("simulated: times are the cost model's; compare policies only")


def _add(report: Report, case: str, outcomes: dict[str, Outcome]) -> None:
    p99 = {name: percentile(outcome.ttft, 99) for name, outcome in outcomes.items()}
    reused = {name: sum(outcome.hits.values()) / outcome.prompt_tokens for name, outcome in outcomes.items()}
    for name, outcome in outcomes.items():
        report.add(
            case,
            policy=name,
            requests=outcome.requests,
            ttft_p50_ms=percentile(outcome.ttft, 50) * 1e3,
            ttft_p99_ms=p99[name] * 1e3,
            p99_vs_session=p99[name] / p99["session"],
            reused=reused[name],
            of_oracle=outcome.regret["of_oracle"],
            busiest=max(outcome.by_instance.values()) / outcome.requests,
        )
    key = case.replace(",", "").replace(" ", "_")
    for name in ("cost", "prompt-tree"):
        word = name.replace("-", "_")
        report.summary[f"{key}_p99_{word}_vs_session"] = p99[name] / p99["session"]
        report.summary[f"{key}_reuse_{word}_vs_session"] = reused[name] / max(reused["session"], 1e-9)


if __name__ == "__main__":
    sys.exit(main())
