"""The weight of exec in equation 1, and prompt-tree's balance of caches, beside other values of both.

``python -m benchmarks.policies.weights`` prints, for each workload of `benchmarks.policies` with four
instances, the P99 and the mean of the time to first token under each value, relative to the default's: the
mean of three seeds of arrivals, and the least and the largest of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.common import SEED
from benchmarks.lib.data import data_folder
from benchmarks.policies.fleet import ENOUGH
from benchmarks.policies.fleet import run as simulated
from benchmarks.policies.workloads import (
    BLOCK_TOKENS,
    SimSession,
    arriving,
    loogle,
    popular_prefix,
    repeated,
    sharegpt,
)
from sglang_ext.simulator.outcome import percentile
from sglang_ext.simulator.settings import Settings

COMPARED: Sequence[tuple[str, Mapping[str, Any]]] = (
    *(("cost", {"exec_weight": weight}) for weight in (1.5, 1.0, 2.0)),
    *(("prompt-tree", {"balance_cache": factor}) for factor in (4.0, 1.0, 2.0, 8.0)),
)
"""Of each policy, the default first."""


SEEDS = (SEED, SEED + 1, SEED + 2)


def workloads(seed: int) -> dict[str, tuple[list[SimSession], int]]:
    """Sessions, and the blocks of an instance's HBM, by the name of the workload."""
    folder = data_folder()
    documents, talks = loogle(folder), sharegpt(folder, 150)
    twice = repeated(documents, 2)
    popular = popular_prefix(400, 2048, 256)
    return {
        "documents, 16 sessions/s": (arriving(documents, 16.0, seed), ENOUGH),
        "the same at share ratio 2": (arriving(twice, 16.0, seed), ENOUGH),
        "and 24 sessions/s": (arriving(twice, 24.0, seed), ENOUGH),
        "and HBM of 20,480 tokens, 16 sessions/s": (arriving(twice, 16.0, seed), 20_480 // BLOCK_TOKENS),
        "conversations, 20 sessions/s": (arriving(talks, 20.0, seed), ENOUGH),
        "and HBM of 24,576 tokens": (arriving(talks, 20.0, seed), 24_576 // BLOCK_TOKENS),
        "a prefix that everybody has": (arriving(popular, 20.0, seed), ENOUGH),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print."""
    loads = [workloads(seed) for seed in SEEDS]
    for name in loads[0]:
        defaults: dict[str, list[tuple[float, float]]] = {}
        for policy, change in COMPARED:
            settings = dataclasses.replace(Settings(), **change)
            found = []
            for load in loads:
                sessions, blocks = load[name]
                ttft = simulated(sessions, policy, blocks=blocks, settings=settings).ttft
                found.append((percentile(ttft, 99), sum(ttft) / len(ttft)))
            first = defaults.setdefault(policy, found)
            shown = []
            for figure, title in enumerate(("P99", "mean")):
                ratios = [one[figure] / other[figure] for one, other in zip(found, first, strict=True)]
                mean = sum(ratios) / len(ratios)
                shown.append(f"{title} {mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            print(f"{name}: {policy} {change}: {', '.join(shown)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
