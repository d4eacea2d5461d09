"""P99 of the time to first token at share ratio 2, over many loads: `python -m benchmarks.fleet.tails`.

MemServe's documents (figure 15), each twice, at four colocated instances with the default costs; beside it
the share of an oracle's reuse at equal capacity, with HBM that is scarce too, and on the traces that are held
out (`benchmarks.estimate.traces`). One seed says little of a P99 of some hundred requests: figures are of
several loads, each policy against session routing under the same.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.estimate.traces import Talk, traces
from benchmarks.lib.common import SEED, Options, Report, at_least, at_most, percentile
from benchmarks.lib.data import data_flag, data_folder
from benchmarks.policies.fleet import run as simulated
from benchmarks.policies.workloads import BLOCK_TOKENS, SimSession, arriving, loogle, repeated, sharegpt
from sglang_ext.flags import flag
from sglang_ext.keys import encode_tokens
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import Settings
from sglang_ext.simulator.workload import Turn

NAME = "fleet.tails"
SCARCE = 20 * 1024 // BLOCK_TOKENS
POLICIES = ("cost", "prompt-tree")
REQUESTS_PER_S, THINK_S = 8.0, 5.0
"""Of the four instances, on traces; between two turns of a session."""
AIMS = {"p99_cost_vs_session_at_24": at_most(0.41), "least_of_oracle": at_least(0.95)}
"""MemServe, figure 15; at 24 sessions/s session routing uses 0.6 of the capacity."""


@dataclass(frozen=True, kw_only=True)
class TailOptions(Options):
    """The flags of this benchmark."""

    data: str | None = data_flag()
    seeds: int = flag(10, "Loads that are drawn.")
    first: int = flag(0, "The first seed.")
    rates: tuple[str, ...] = flag(("16", "24", "32"), "Sessions a second.", metavar="RATE", several="append")
    parts: tuple[str, ...] = flag(
        ("tails", "scarce", "held-out"), "Parts to run.", metavar="PART", several="append"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = TailOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    folder = data_folder(options.data)
    documents = repeated(loogle(folder, options.pick(80, quick=80, tiny=6)), 2)
    count = options.pick(options.seeds, quick=2, tiny=1)
    seeds = range(options.first, options.first + count)
    rates = [float(rate) for rate in options.pick(options.rates, quick=("24",), tiny=("24",))]
    shares = []
    for rate in rates if "tails" in options.parts else ():
        shares += _tails(report, documents, rate, seeds)
    if "scarce" in options.parts:
        talks = sharegpt(folder, options.pick(400, quick=150, tiny=10))
        for case, sessions, rate in (("documents", documents, 16.0), ("conversations", talks, 20.0)):
            shares.append(_scarce(report, case, sessions, rate, seeds[:3]))
    if "held-out" in options.parts:
        count = options.pick(3000, quick=600, tiny=40)
        for case, played in traces(folder, held=True).items():
            shares += [_held_out(report, case, played, count, dram) for dram in (4 * SCARCE, 0)]
    report.summary["least_of_oracle"] = min(shares)
    return report.finish(options)


def _tails(report: Report, documents: list[SimSession], rate: float, seeds: Sequence[int]) -> list[float]:
    loads = [arriving(documents, rate, seed) for seed in seeds]
    base = [simulated(load, "session") for load in loads]
    shares = []
    for policy in POLICIES:
        found = [simulated(load, policy) for load in loads]
        ratios = [_p99(mine) / _p99(other) for mine, other in zip(found, base, strict=True)]
        report.add(
            "documents at share ratio 2",
            sessions_per_s=rate,
            policy=policy,
            seeds=len(ratios),
            p99_vs_session=statistics.fmean(ratios),
            least=min(ratios),
            most=max(ratios),
            p99_ms=1e3 * statistics.fmean(map(_p99, found)),
            of_oracle=_mean_share(found),
            capacity_used=statistics.fmean(each.capacity_used for each in found),
            session_capacity_used=statistics.fmean(each.capacity_used for each in base),
        )
        report.summary[f"p99_{policy.replace('-', '_')}_vs_session_at_{rate:g}"] = statistics.fmean(ratios)
        if policy == "cost":
            shares.append(_mean_share(found))
    return shares


def _scarce(
    report: Report, case: str, sessions: list[SimSession], rate: float, seeds: Sequence[int]
) -> float:
    """Reuse of `cost` with HBM of 20,480 tokens. Returns its share of the oracle's."""
    shares = {}
    for policy in ("cost", "prompt-tree", "session", "least-load"):
        found = [simulated(arriving(sessions, rate, seed), policy, blocks=SCARCE) for seed in seeds]
        shares[policy] = _mean_share(found)
    report.add(f"share of an oracle's reuse, HBM of {SCARCE * BLOCK_TOKENS:,} tokens", load=case, **shares)
    return shares["cost"]


@dataclass(frozen=True, slots=True)
class Played:
    """A session of a trace. Answers are not in it: each is a token."""

    name: str
    start_s: float
    prompts: Talk
    tenant: int = 0

    def turns(self) -> Iterator[Turn]:
        for number, prompt in enumerate(self.prompts):
            yield Turn(encode_tokens(prompt), encode_tokens([1]), THINK_S if number else 0.0)


def _held_out(report: Report, case: str, talks: list[Talk], count: int, dram: int) -> float:
    """Reuse on a trace, sessions as many at a time as keep a quarter of the capacity busy. Returns the share
    of the oracle's reuse that `cost` has.

    Args:
        count: requests. dram: blocks of each instance.
    """
    single = all(len(talk) == 1 for talk in talks)
    draw, now, sessions = random.Random(SEED), 0.0, []
    order = talks if single else draw.sample(talks, len(talks))
    for number, talk in enumerate(order):
        sessions.append(Played(f"{case} {number}", now, talk))
        now += draw.expovariate(REQUESTS_PER_S / len(talk))
    row = {}
    for policy in ("cost", "prompt-tree", "session", "least-load"):
        settings = Settings(requests=count, policy=policy, hbm=SCARCE, dram=max(1, dram))
        found = simulate(settings, sessions=iter(sessions))
        row[policy] = found.regret["of_oracle"]
        if policy == "cost":
            reused = sum(found.hits.values()) / found.prompt_tokens
            row |= {"reused_cost": reused, "oracle": found.regret["oracle_reused"]}
            row |= {"infinite": found.regret["infinite_reused"], "capacity_used": found.capacity_used}
    report.add(
        "share of an oracle's reuse, held-out traces", trace=case, dram_tokens=dram * BLOCK_TOKENS, **row
    )
    return row["cost"]


def _p99(outcome: Outcome) -> float:
    return percentile(outcome.ttft, 99)


def _mean_share(found: Sequence[Outcome]) -> float:
    return statistics.fmean(each.regret["of_oracle"] for each in found)


if __name__ == "__main__":
    sys.exit(main())
