"""Tenant B's latency while tenant A stays within its key's limits and drives one mechanism to its maximum.

Each mechanism has a router of its own; A and B are processes, too. B sends requests at a steady pace; A does
one thing as fast as its key lets it, or is silent. Both kinds of phases take turns. The aim is a P99 of B's
of at most 1.5 times that of B alone. Refusals of A (429) are its limits at work and are counted. A row is
void, and has no ratio, where a request failed, where A got nothing done, or where B alone did not become as
fast as before A began.

Before stand-in workers: tokenizing, the endpoint for it, hints, documents, priorities. Before SGLang servers:
`disk` (A writes new KV to disk, B's conversations are written there and come from there) and `spilling` (A
has four times the conversations that fit into DRAM, B's would fit; another server keeps evicted KV). In
these, A's prompts are computed by the same server as B's.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.lib.common import Options, Report, at_most, percentile
from benchmarks.noisy_neighbour.mechanisms import MECHANISMS, Mechanism
from benchmarks.noisy_neighbour.noise import Noise, noise
from benchmarks.noisy_neighbour.sides import KEYS, NotSettledError, Side, failed, pace, settle
from sglang_ext.flags import flag, one_of

RATIO = 1.5
AIMS = {f"p99_{name}_vs_alone": at_most(RATIO) for name in MECHANISMS}


@dataclass(frozen=True, kw_only=True)
class NoisyOptions(Options):
    """The flags of this benchmark."""

    mechanisms: tuple[str, ...] = flag(tuple(MECHANISMS), "What A drives.", one_of(*MECHANISMS), several="+")


@dataclass
class Seen:
    """B's latencies alone and beside A (noisy). void: why they mean nothing."""

    alone: list[float] = field(default_factory=list)
    noisy: list[float] = field(default_factory=list)
    void: str = ""

    def ratio(self) -> float | None:
        """Of B's P99 beside A to that alone, over all rounds."""
        return None if self.void else percentile(self.noisy, 99) / percentile(self.alone, 99)


def why_void(a: Counter[int], b: Counter[int]) -> str:
    """Why latencies beside A mean nothing; empty where they do."""
    if failed(b) or b[429]:
        return f"{failed(b) + b[429]} of B's requests failed: {dict(b)}"
    if failed(a):
        return f"{failed(a)} of A's requests failed: {dict(a)}"
    if not a[200]:
        return "A got nothing done"
    return ""


async def measure(mechanism: Mechanism, options: NoisyOptions, a: Noise, b: Side) -> Seen:
    """Phases of B alone and beside A, in turns."""
    seconds, rounds = options.pick((10.0, 8), quick=(6.0, 2), tiny=(1.0, 1))
    ask, per_s, seen = mechanism.ask, mechanism.per_s, Seen()
    await pace(b, ask, seconds, per_s)  # compiles, connects, and fills caches; not counted
    median = percentile(await pace(b, ask, seconds, per_s), 50)
    for _ in range(rounds):
        try:
            await settle(b, ask, median)
        except NotSettledError as error:
            seen.void = str(error)
            break
        seen.alone += await pace(b, ask, seconds, per_s)
        await a.begin()
        seen.noisy += await pace(b, ask, seconds, per_s)
        await a.stop()
    seen.void = seen.void or why_void(a.statuses, b.statuses)
    return seen


async def _measure(name: str, options: NoisyOptions, report: Report, url: str) -> None:
    """A row of a mechanism."""
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        with noise(name, url) as a:
            seen = await measure(MECHANISMS[name], options, a, Side(session, url, KEYS["b"]))
    ratio = seen.ratio()
    report.add(
        name,
        b_p50_alone_ms=_ms(seen.alone, 50),
        b_p99_alone_ms=_ms(seen.alone, 99),
        b_p50_ms=_ms(seen.noisy, 50),
        b_p99_ms=_ms(seen.noisy, 99),
        ratio=ratio,
        void=seen.void or None,
        b_each=len(seen.noisy),
        a_done=a.statuses[200],
        a_refused=a.statuses[429],
        a_failed=failed(a.statuses),
    )
    report.summary[f"p99_{name}_vs_alone"] = ratio
    if seen.void:
        report.note(f"{name} is void: {seen.void}")


def _ms(seconds: Sequence[float], percent: float) -> float | None:
    return percentile(seconds, percent) * 1e3 if seconds else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when a row is void."""
    options = NoisyOptions.of(argv, "noisy_neighbour", __doc__)
    report = Report("noisy_neighbour", AIMS)
    for name in options.mechanisms:
        with MECHANISMS[name].stage() as url:
            asyncio.run(_measure(name, options, report, url))
    void = any(row["void"] for row in report.rows)
    return report.finish(options) or int(void)


if __name__ == "__main__":
    sys.exit(main())
