"""Tenant B's latency while tenant A stays within its key's limits and drives one mechanism to its maximum.

Each mechanism has a router of its own; A and B are processes, too. B sends requests at a steady pace; A does
one thing as fast as its key lets it, or is silent. The phases take turns. The aim is a P99 of B's of at most
1.5 times that of B alone. Refusals of A (429) are its limits at work and are counted. A row is void, and has
no ratio, where a request failed, where A got nothing done, or where B alone did not become as fast as before
A began.

Two tenants share cores whatever A does. So there is a control: A sends plain requests which cost the same
compute without the mechanism. The ratio to the control shows the cost of the mechanism itself for B.

Before stand-in workers: tokenizing, the endpoint for it, hints, documents, priorities. In the control, A
sends as many requests of token ids per second as it got done, and for each of them a process beside takes as
many CPU seconds as all processes took for one of A's beyond what B's took. Before SGLang servers: `disk` (A
writes new KV to disk, B's conversations are written there and come from there) and `spilling` (A has four
times the conversations that fit into DRAM, B's would fit; another server keeps evicted KV). In these, A's
prompts are computed by the same server as B's. In the control, A sends the same requests: with `disk`, to a
server whose DRAM holds everything; with `spilling`, to the same servers while nothing is spilled.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.lib.common import Options, Report, at_most, percentile
from benchmarks.noisy_neighbour.compute import cpu_seconds
from benchmarks.noisy_neighbour.mechanisms import MECHANISMS, Mechanism
from benchmarks.noisy_neighbour.noise import Noise, noise
from benchmarks.noisy_neighbour.sides import KEYS, NotSettledError, Side, failed, pace, settle
from sglang_ext.flags import flag, one_of

RATIO = 1.5
AIMS = {f"p99_{name}_vs_{to}": at_most(RATIO) for name in MECHANISMS for to in ("alone", "control")}


@dataclass(frozen=True, kw_only=True)
class NoisyOptions(Options):
    """The flags of this benchmark."""

    mechanisms: tuple[str, ...] = flag(tuple(MECHANISMS), "What A drives.", one_of(*MECHANISMS), several="+")


@dataclass
class Seen:
    """B's latencies alone, beside A (noisy) and in the control (plain). void: why they mean nothing.

    a_cpu_s: CPU seconds of one of A's requests.
    """

    alone: list[float] = field(default_factory=list)
    noisy: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    a_cpu_s: float = 0.0
    void: str = ""

    def ratio(self) -> float | None:
        """Of B's P99 beside A to that alone, over all rounds."""
        return self._ratio(self.alone)

    def control_ratio(self) -> float | None:
        """Of B's P99 beside A to that in the control."""
        return self._ratio(self.plain)

    def _ratio(self, than: list[float]) -> float | None:
        return None if self.void or not than else percentile(self.noisy, 99) / percentile(than, 99)


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
    """Phases of B alone, beside A, and in the control where that needs no other servers, in turns."""
    seconds, rounds = options.pick((10.0, 8), quick=(6.0, 2), tiny=(1.0, 1))
    ask, per_s, seen = mechanism.ask, mechanism.per_s, Seen()
    await pace(b, ask, seconds, per_s)  # compiles, connects, and fills caches; not counted
    median = percentile(await pace(b, ask, seconds, per_s), 50)
    for _ in range(rounds):
        try:
            await settle(b, ask, median)
            alone, alone_s, _ = await _phase(b, mechanism, seconds)
            seen.alone += alone
            await a.begin()
            noisy, noisy_s, took = await _phase(b, mechanism, seconds)
            seen.noisy += noisy
            done = await a.stop()
            if mechanism.control is None and done:
                seen.a_cpu_s = max(0.0, noisy_s - alone_s) / done
                await settle(b, ask, median)
                await a.begin((done / took, seen.a_cpu_s))
                seen.plain += (await _phase(b, mechanism, seconds))[0]
                await a.stop()
        except NotSettledError as error:
            seen.void = str(error)
            break
    seen.void = seen.void or why_void(a.statuses, b.statuses)
    return seen


async def _phase(b: Side, mechanism: Mechanism, seconds: float) -> tuple[list[float], float, float]:
    """(B's latencies, CPU seconds of all processes but B's, seconds)."""
    began, before = time.perf_counter(), cpu_seconds()
    latencies = await pace(b, mechanism.ask, seconds, mechanism.per_s)
    return latencies, cpu_seconds() - before, time.perf_counter() - began


async def _seen(
    name: str, mechanism: Mechanism, options: NoisyOptions, url: str
) -> tuple[Seen, Counter[int]]:
    """B's latencies beside a mechanism, and the number of A's answers by status."""
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        with noise(name, url) as a:
            seen = await measure(mechanism, options, a, Side(session, url, KEYS["b"]))
            return seen, a.statuses


def _measure(name: str, options: NoisyOptions, report: Report) -> None:
    """A row of a mechanism."""
    mechanism = MECHANISMS[name]
    with mechanism.stage() as url:
        seen, statuses = asyncio.run(_seen(name, mechanism, options, url))
    if mechanism.control is not None:
        with mechanism.control() as url:
            control, _ = asyncio.run(_seen(name, mechanism, options, url))
        seen.plain, seen.void = control.noisy, seen.void or (control.void and f"control: {control.void}")
    ratio, control_ratio = seen.ratio(), seen.control_ratio()
    report.add(
        name,
        b_p50_alone_ms=_ms(seen.alone, 50),
        b_p99_alone_ms=_ms(seen.alone, 99),
        b_p50_control_ms=_ms(seen.plain, 50),
        b_p99_control_ms=_ms(seen.plain, 99),
        b_p50_ms=_ms(seen.noisy, 50),
        b_p99_ms=_ms(seen.noisy, 99),
        ratio=ratio,
        control_ratio=control_ratio,
        void=seen.void or None,
        b_each=len(seen.noisy),
        a_done=statuses[200],
        a_refused=statuses[429],
        a_failed=failed(statuses),
        a_cpu_ms=seen.a_cpu_s * 1e3 or None,
        load=os.getloadavg()[0],
    )
    report.summary[f"p99_{name}_vs_alone"] = ratio
    report.summary[f"p99_{name}_vs_control"] = control_ratio
    if seen.void:
        report.note(f"{name} is void: {seen.void}")


def _ms(seconds: Sequence[float], percent: float) -> float | None:
    return percentile(seconds, percent) * 1e3 if seconds else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when a row is void."""
    options = NoisyOptions.of(argv, "noisy_neighbour", __doc__)
    report = Report("noisy_neighbour", AIMS)
    for name in options.mechanisms:
        _measure(name, options, report)
    void = any(row["void"] for row in report.rows)
    return report.finish(options) or int(void)


if __name__ == "__main__":
    sys.exit(main())
