"""Simulations whose figures are kept in a folder, a file each, so that an interrupted run goes on there."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.common import percentile
from sglang_ext.cost_model import CostModel
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import Settings, changed

WARM_UP = 1 / 3
"""Share of the time until the last arrival whose requests do not count in the times."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One simulation of the built-in mix. settings: as ``--settings`` takes them."""

    title: str
    settings: str

    @property
    def file(self) -> str:
        digest = hashlib.blake2b(self.settings.encode(), digest_size=6).hexdigest()
        return f"{digest}.json"


def measured(cell: Cell, folder: Path | None, model: CostModel | None = None) -> Figures:
    """The figures of a cell, from the folder if they are there."""
    path = None if folder is None else folder / cell.file
    if path is not None and path.exists():
        found: Figures = json.loads(path.read_text(encoding="utf-8"))
        return found
    settings = changed(Settings(), cell.settings)
    before = _cpu_s()
    outcome = simulate(settings, model)
    figures = figures_of(outcome, settings) | {"settings": asdict(settings)}
    figures["cpu_ms_a_request"] = 1e3 * (_cpu_s() - before) / settings.requests
    text = json.dumps(figures, indent=1)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, path)
    sys.stderr.write(f"{cell.title}: {figures['cpu_ms_a_request']:.1f} ms of CPU a request\n")
    as_read: Figures = json.loads(text)  # JSON has lists in place of tuples
    return as_read


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def figures_of(outcome: Outcome, settings: Settings) -> Figures:
    """Figures of an outcome: times in ms, of the requests that came after the warm-up."""
    first, last = min(outcome.arrivals), max(outcome.arrivals)
    since = first + WARM_UP * (last - first)
    counted = [place for place, at in enumerate(outcome.arrivals) if at >= since]
    ttft = sorted(outcome.ttft[place] * 1e3 for place in counted)
    jct = [outcome.jct[place] * 1e3 for place in counted]
    tokens = max(1, outcome.prompt_tokens)
    return {
        "requests": outcome.requests,
        "failed": dict(outcome.failed),
        "retried": outcome.retried,
        "arriving_s": last - first,
        "ttft_mean_ms": statistics.fmean(ttft),
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p90_ms": percentile(ttft, 90),
        "ttft_p99_ms": percentile(ttft, 99),
        "jct_mean_ms": statistics.fmean(jct),
        "mean_prompt_tokens": tokens / outcome.requests,
        "reused": sum(outcome.hits.values()) / tokens,
        "by_tier": {tier.name: count / tokens for tier, count in sorted(outcome.hits.items())},
        "of_oracle": outcome.regret["of_oracle"],
        "capacity_used": outcome.capacity_used,
        "busiest": max(outcome.by_instance.values()) * settings.instances / outcome.requests,
        "computed_tokens": outcome.counts["computed tokens"] / outcome.requests,
        "link_bytes": dict(outcome.link_bytes),
        "deaths": outcome.counts.get("deaths", 0),
    }


def ratio(figures: Mapping[str, Any], name: str, base: Mapping[str, Any]) -> float:
    """A figure relative to that of another cell."""
    return float(figures[name]) / max(1e-9, float(base[name]))
