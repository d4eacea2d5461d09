"""Routing with estimated cost profiles, in the simulator: `python -m benchmarks.policies.estimates`.

The instances take the times of a made-up measurement (`benchmarks.router.decisions`). The router expects the
estimate of its model and device (`sglang_ext.cost_model.estimated`), the same with computing times that are
wrong by 0.5 or 2, the defaults, or the measurement itself; it corrects all of them by observed times.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.lib.common import Options, Report, percentile
from benchmarks.router.decisions import PROFILE
from sglang_ext.cost_model import CostModel
from sglang_ext.cost_model.estimated import estimated
from sglang_ext.cost_model.operators import Link
from sglang_ext.cost_model.profile import Decode, Profile
from sglang_ext.flags import flag
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import Settings

NAME = "policies.estimates"
LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
FAST = msgspec.structs.replace(
    PROFILE,
    tiers={"dram": Link(1e-4, 1 / 40e9)},
    transfer=Link(1e-3, 1 / 9e9),
    decode=Decode.linear(0.007, 1e-4),
)
"""The measurement with other links than the defaults have."""
LOADS = ("0.3", "0.6", "0.85")
"""Shares of the capacity."""
TRIAL = 2.0
"""Requests a second of an instance in the run that tells the capacity."""
WRONG = {"cost, estimate": 1.0, "cost, estimate x0.5": 0.5, "cost, estimate x2": 2.0}
COMPARED = ("prompt-tree, defaults", "prompt-tree, estimate", *WRONG, "cost, defaults", "cost, measured")


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(Options):
    """The flags of this benchmark."""

    processes: int = flag(1, "Simulations at a time.")
    fast_links: bool = flag(False, "Instances move KV as an H100 does, not as the defaults assume.")
    seeds: int = flag(3, "Loads that are drawn.")
    cases: tuple[str, ...] = flag(COMPARED, "Policies with costs.", metavar="CASE", several="append")
    loads: tuple[str, ...] = flag(LOADS, "Shares of the capacity.", metavar="SHARE", several="append")


def wrong(profile: Profile, factor: float) -> Profile:
    """The same with computing times that are wrong by a factor."""
    arch = msgspec.structs.replace(
        profile.arch, coefficients=tuple(factor * each for each in profile.arch.coefficients)
    )
    return msgspec.structs.replace(profile, arch=arch)


def expected(case: str, truth: Profile) -> tuple[str, CostModel]:
    """The policy of a case, and the costs that its router expects."""
    policy, _, costs = case.partition(", ")
    if costs == "defaults":
        return policy, CostModel()
    if costs == "measured":
        return policy, CostModel(truth)
    profile = estimated(LLAMA_8B, "h100", model="llama-3.1-8b")
    return policy, CostModel(wrong(profile, WRONG.get(case, 1.0)))


def measure(truth: Profile, requests: int, rate: float, seed: int, case: str) -> dict[str, float]:
    """Figures of one simulation. truth: the costs of the instances."""
    policy, model = expected(case, truth)
    settings = Settings(instances=4, requests=requests, seed=seed, policy=policy, rate=rate)
    outcome = simulate(settings, CostModel(truth), expected=model)
    return {
        "ttft_mean_ms": statistics.fmean(outcome.ttft) * 1e3,
        "ttft_p50_ms": percentile(outcome.ttft, 50) * 1e3,
        "ttft_p99_ms": percentile(outcome.ttft, 99) * 1e3,
        "jct_mean_s": statistics.fmean(outcome.jct),
        "reused": sum(outcome.hits.values()) / outcome.prompt_tokens,
        "capacity_used": outcome.capacity_used,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = EstimateOptions.of(argv, NAME, __doc__)
    report = Report(NAME)
    truth = FAST if options.fast_links else PROFILE
    seeds = range(options.pick(options.seeds, quick=2, tiny=1))
    requests = options.pick(1000, quick=400, tiny=20)
    with ProcessPoolExecutor(options.processes) as pool:
        trial = pool.submit(measure, truth, requests, TRIAL, 0, COMPARED[0]).result()
        capacity = TRIAL / max(trial["capacity_used"], 1e-3)
        for load in options.pick(options.loads, quick=LOADS, tiny=LOADS[:1]):
            ask = functools.partial(measure, truth, requests, float(load) * capacity)
            cells = [(seed, case) for case in options.cases for seed in seeds]
            rows = dict(zip(cells, pool.map(ask, *zip(*cells, strict=True)), strict=True))
            for row in _rows(load, seeds, options.cases, rows):
                report.add(**row)
    report.note(
        f"simulated: 4 instances, {requests} requests of the mix, {len(seeds)} seeds; figures are means over "
        "the seeds, ratios are to the first case at the same seed: their mean and extremes"
    )
    return report.finish(options)


def _rows(
    load: str,
    seeds: Sequence[int],
    cases: Sequence[str],
    found: dict[tuple[int, str], dict[str, float]],
) -> Iterator[dict[str, Any]]:
    for case in cases:
        mine = [found[seed, case] for seed in seeds]
        first = [found[seed, cases[0]] for seed in seeds]
        row: dict[str, Any] = {"case": f"{case}, load {load}"}
        for name in mine[0]:
            row[name] = statistics.fmean(each[name] for each in mine)
        for name in ("ttft_mean_ms", "ttft_p99_ms"):
            ratios = [one[name] / other[name] for one, other in zip(mine, first, strict=True)]
            row[f"{name.removesuffix('_ms')}_ratio"] = statistics.fmean(ratios)
            row[f"{name.removesuffix('_ms')}_ratios"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
        yield row


if __name__ == "__main__":
    sys.exit(main())
