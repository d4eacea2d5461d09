"""Time to first token by the tier that a prompt's KV lies in, and how much of a load's time it shows.

A prompt is a known beginning and `NEW_TOKENS` new tokens. To put the beginning where it is wanted, other
prompts are asked for until it has left the tiers above: as many as fill HBM, or HBM and DRAM. Every answer
reports the tiers that its tokens came from; an answer from another tier ends the benchmark.

The part of a load that TTFT shows is how much longer the server stood still for loads (`timed_server.py`) in
the request that loads than in the next, which finds the same beginning in HBM and has equally many new
tokens. The difference of their TTFT says the same, only that computing varies by more than a load takes; it
stands beside it. The load time is that of the same bytes on the same tier with nothing to hide behind
(`load.py`), taken in the same round. hidden = 1 - shown / load, within 0 and 1; over several lengths, by the
sums of the lengths' medians.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.common import Report, percentile
from benchmarks.tiers.disk import forget
from benchmarks.tiers.load import PlainLoad
from benchmarks.tiers.servers import BLOCK_TOKENS, Client, Prompt, Prompts, Sizes
from benchmarks.tiers.timed_server import PARTS, Parts
from sglang_ext.tiered_store.disk.state import IoMode

NEW_TOKENS = 512
SWEEPER_TOKENS = 1024
PAUSE_S = 0.1
"""Seconds between requests: background writes of the one before are not part of the next."""
SHARE = 0.9
"""Of a beginning that has to come from the tier that is measured."""
ROUNDS_AT_LEAST = 3
MOST_COLD = 5


@dataclass
class Loads:
    """Rounds of one tier and length, seconds each."""

    tier: str
    tokens: int
    """Of the beginning that is loaded."""
    loading: list[float] = field(default_factory=list)
    """TTFT of the request that loads."""
    present: list[float] = field(default_factory=list)
    """TTFT of the request after it, which finds the same tokens in HBM."""
    load: list[float] = field(default_factory=list)
    """The load, with nothing to hide behind."""
    stood_still: list[Parts] = field(default_factory=list)
    """For how much longer the server stood still in the request that loads than in the other."""

    @property
    def shown(self) -> list[float]:
        """Seconds of the loads that TTFT shows."""
        return [sum(parts.values()) for parts in self.stood_still]

    @property
    def difference(self) -> list[float]:
        """TTFT of the one less TTFT of the other; below zero where something else took longer."""
        return [a - b for a, b in zip(self.loading, self.present, strict=True)]


def hidden(rounds: Sequence[Loads]) -> float:
    """The share of the load time that TTFT does not show, over one length or several."""
    shown = sum(statistics.median(loads.shown) for loads in rounds)
    load = sum(statistics.median(loads.load) for loads in rounds)
    return min(1.0, max(0.0, 1 - shown / load))


@dataclass
class Length:
    """The measurements for prompts of one length."""

    tokens: int
    cold: list[float]
    dram: Loads
    disk: Loads

    @property
    def disk_vs_hbm(self) -> float:
        """Median over rounds of the whole TTFT of a disk hit over that of an HBM hit of the same tokens."""
        pairs = zip(self.disk.loading, self.disk.present, strict=True)
        return statistics.median(a / b for a, b in pairs)

    @property
    def disk_vs_recompute(self) -> float:
        """Median over rounds of TTFT of a disk hit over TTFT of the same length computed."""
        pairs = zip(self.disk.loading, self.cold, strict=False)
        return statistics.median(a / b for a, b in pairs)


def sizes_for(longest: int) -> Sizes:
    """The smallest sufficient tiers: HBM for the longest prompt and the tokens that its second request adds;
    DRAM for the prompts that fill HBM, the longest prompt, and the new tokens of some rounds.
    """
    hbm = longest + 3 * NEW_TOKENS
    return Sizes(hbm, hbm + 2 * SWEEPER_TOKENS + longest + 8 * NEW_TOKENS)


class Stage:
    """One server, and the prompts that push others out of its tiers."""

    def __init__(self, client: Client, sizes: Sizes, prompts: Prompts, folder: Path, io: IoMode) -> None:
        self.io = io
        self.client = client
        self.sizes = sizes
        self.prompts = prompts
        self.folder = folder
        self._for_hbm = sizes.hbm // SWEEPER_TOKENS + 1
        self._at_once = max(1, self._for_hbm - 2)
        count = sizes.dram // SWEEPER_TOKENS + 2
        self._sweepers = [prompts.new(SWEEPER_TOKENS) for _ in range(count)]

    def warm_up(self) -> None:
        """Compute the prompts that the sweeps will load."""
        self._ask(self._sweepers)

    def sweep(self, tier: str) -> None:
        """Push everything else out of HBM (`dram`), or out of HBM and DRAM (`disk`)."""
        self._ask(self._sweepers[: self._for_hbm] if tier == "dram" else self._sweepers)
        if tier == "disk":
            forget(self.folder)
        time.sleep(PAUSE_S)

    def _ask(self, prompts: Sequence[Prompt]) -> None:
        for start in range(0, len(prompts), self._at_once):
            self.client.ask_all(prompts[start : start + self._at_once])

    def settle(self) -> None:
        """Wait until everything is on disk."""
        self.client.wait_until_written()


def measure_length(stage: Stage, tokens: int, *, cold_rounds: int, seconds: float) -> Length:
    """Rounds of each tier for prompts of one length, in about so many seconds, at least a few rounds."""
    base = stage.prompts.new(tokens - NEW_TOKENS)
    with plain_load(len(base), stage.folder.parent / f"load-{tokens}", stage.io) as plain:
        cold = [_cold(stage, tokens) for _ in range(cold_rounds)]
        stage.client.ask(base)
        stage.settle()
        found = {
            tier: _rounds(stage, tier, base, plain, deadline=time.monotonic() + seconds / 2)
            for tier in ("dram", "disk")
        }
    return Length(tokens, cold, found["dram"], found["disk"])


@contextlib.contextmanager
def plain_load(tokens: int, folder: Path, io: IoMode) -> Iterator[PlainLoad]:
    plain = PlainLoad(tokens, folder, io)
    try:
        yield plain
    finally:
        plain.close()


def _cold(stage: Stage, tokens: int) -> float:
    seen = stage.client.ask(stage.prompts.new(tokens))
    seen.require_computed()
    time.sleep(PAUSE_S)
    return seen.ttft


def _rounds(stage: Stage, tier: str, base: Prompt, plain: PlainLoad, *, deadline: float) -> Loads:
    whole = len(base) // BLOCK_TOKENS * BLOCK_TOKENS
    loads = Loads(tier, whole)
    if tier == "dram":
        stage.sweep(tier)  # the first brings the sweepers themselves to DRAM
    while len(loads.load) < ROUNDS_AT_LEAST or time.monotonic() < deadline:
        stage.sweep(tier)
        seen = stage.client.ask(base + stage.prompts.new(NEW_TOKENS))
        seen.require(tier, whole, SHARE)
        time.sleep(PAUSE_S)
        again = stage.client.ask(base + stage.prompts.new(NEW_TOKENS))
        again.require("hbm", whole, 1.0)
        loads.loading.append(seen.ttft)
        loads.present.append(again.ttft)
        loads.stood_still.append({part: seen.stood_still[part] - again.stood_still[part] for part in PARTS})
        loads.load.append(plain.dram() if tier == "dram" else plain.disk())
    return loads


def report_lengths(report: Report, lengths: Sequence[Length]) -> None:
    """Rows and summary of all lengths."""
    for length in lengths:
        cold = statistics.median(length.cold)
        for name, seconds in (
            ("computed", length.cold),
            ("HBM hit", [*length.dram.present, *length.disk.present]),
            ("DRAM hit", length.dram.loading),
            ("disk hit", length.disk.loading),
        ):
            report.add(
                f"TTFT {length.tokens} tokens, {name}",
                median_ms=1000 * statistics.median(seconds),
                p99_ms=1000 * percentile(seconds, 99),
                rounds=len(seconds),
                vs_computed=statistics.median(seconds) / cold,
            )
    for length in lengths:
        for loads in (length.dram, length.disk):
            report.add(
                f"load {loads.tokens} tokens from {loads.tier}",
                ttft_ms=1000 * statistics.median(loads.loading),
                hbm_hit_ttft_ms=1000 * statistics.median(loads.present),
                load_ms=1000 * statistics.median(loads.load),
                shown_ms=1000 * statistics.median(loads.shown),
                shown_p99_ms=1000 * percentile(loads.shown, 99),
                rounds=len(loads.load),
                hidden=hidden([loads]),
            )
    for length in lengths:
        for loads in (length.dram, length.disk):
            parts = {part: [found[part] for found in loads.stood_still] for part in PARTS}
            report.add(
                f"shown of {loads.tokens} tokens from {loads.tier}",
                **{f"{part}_ms": 1000 * statistics.median(found) for part, found in parts.items()},
                ttft_difference_ms=1000 * statistics.median(loads.difference),
                p25_ms=1000 * percentile(loads.difference, 25),
                p75_ms=1000 * percentile(loads.difference, 75),
            )
    report.summary["load_hidden_dram"] = hidden([length.dram for length in lengths])
    report.summary["load_hidden_disk"] = hidden([length.disk for length in lengths])
    for length in lengths:
        report.summary[f"ttft_disk_vs_hbm_{length.tokens // 1024}k"] = length.disk_vs_hbm
        report.summary[f"ttft_disk_vs_recompute_{length.tokens // 1024}k"] = length.disk_vs_recompute
