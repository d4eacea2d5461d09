"""Comparisons of prefill and decode apart under load: requests that arrive as a Poisson process.

Pull and push (KVDirect, figure 16), by layer, by request and aggregated (MemServe, figure 12), and numbers of
prefill and decode servers (KVDirect, figure 12). Rows are means over requests, at several rates; the rates
are shares of one pair's capacity, measured first.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.disagg.loads import FIRST_ID, LAST_ID
from benchmarks.disagg.report import breakdown
from benchmarks.disagg.servers import Asked, Group, GroupSpec, ask, pair, routed, running
from benchmarks.lib.common import SEED, Options, Report, percentile
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.ports import free_port

SHARES = (0.9, 0.4)
"""Of one pair's capacity."""


@dataclass(frozen=True)
class Load:
    """prompt, answer: tokens of each request. requests: how many at each rate."""

    prompt: int
    answer: int
    requests: int


def pull_vs_push(options: Options, report: Report, until: float = math.inf, *, short: bool = False) -> None:
    """KVDirect, figure 16: decode has room for a few requests only, and pushing reserves it beforehand.

    Args:
        until: by `time.monotonic`; rates and rounds that take longer are left out, but for the first.
        short: once, and at the highest rate only.
    """
    load = Load(options.rounds(1024, quick=768), options.rounds(48, quick=24), options.rounds(16, quick=8))
    slots = ("--max-total-tokens", str(6 * (load.prompt + load.answer)))
    specs = {
        "pull": pair(*slots, "--kv-transfer-mode", "pull"),
        "push": pair(*slots, "--kv-transfer-mode", "push"),
    }
    shares, rounds = (SHARES[:1], 1) if short else (SHARES, options.rounds(3, quick=1))
    means = _compare(report, "pull vs push", specs, load, shares, rounds, until)
    report.summary["pull_vs_push_jct"] = _over(report, means, "pull", "push")


def layers(options: Options, report: Report, until: float = math.inf) -> None:
    """MemServe, figure 12: 1024 tokens of prompt and 32 of answer. until: as in `pull_vs_push`."""
    load = Load(1024, options.rounds(32, quick=16), options.rounds(16, quick=8))
    specs = {
        "by layer": pair("--kv-transfer-mode", "push-by-layer"),
        "by request": pair("--kv-transfer-mode", "push"),
        "by request, aggregated": pair("--kv-transfer-mode", "push", "--kv-transfer-layout", "aggregated"),
    }
    means = _compare(report, "layers", specs, load, SHARES, options.rounds(3, quick=1), until)
    for name in ("by layer", "by request"):
        _over(report, means, "by request, aggregated", name)


def coalescing(options: Options, report: Report, until: float = math.inf) -> None:
    """KVDirect, figure 17, in serving: its worth is in the stage `transfer`. until: as in `pull_vs_push`."""
    load = Load(options.rounds(1024, quick=512), 8, options.rounds(32, quick=8))
    specs = {
        name: replace(pair(), environment=(("SGLANG_EXT_KV_TRANSFER_COALESCING", name),))
        for name in ("on", "off")
    }
    means = _compare(report, "coalescing", specs, load, SHARES[1:], options.rounds(3, quick=1), until)
    _over(report, means, "on", "off")


def xpyd(options: Options, report: Report, until: float = math.inf) -> None:
    """KVDirect, figure 12: the same load on one or several prefill and decode servers. until: as in
    `pull_vs_push`.
    """
    most = options.rounds(3, quick=2)
    sizes = [(1, 1), *((1, n) for n in range(2, most + 1)), *((n, 1) for n in range(2, most + 1))]
    answers = (16, options.rounds(96, quick=48))
    loads = [Load(1024, answer, options.rounds(20, quick=8)) for answer in answers]
    with running({"all": pair(prefill=most, decode=most)}) as groups:
        group = groups["all"]
        for load in loads:
            rate = 0.9 * capacity(group, load)
            if time.monotonic() + len(sizes) * load.requests / rate > until and load is not loads[0]:
                report.note(f"{load.prompt}-{load.answer} was left out: --minutes are over")
                break
            for prefill, decode in sizes:
                asked = play(group, load, rate, (prefill, decode))
                name = f"{prefill}P{decode}D"
                _row(report, f"{load.prompt}-{load.answer}", name, rate, mean(asked), len(asked))


def joins(options: Options, report: Report, until: float = math.inf) -> None:
    """KVDirect, section 4.2: the first requests of pairs whose servers have served others, beside later ones
    of the same pairs; a router announced the prefill servers to decode, or did not. until: as in
    `pull_vs_push`.
    """
    load = Load(16, 2, options.rounds(20, quick=10))  # longer prompts hide a connection behind their prefill
    seen: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds(3, quick=1)):
        for name in ("told by a router", "not told"):
            if seen and number and time.monotonic() > until:
                report.note(f"round {number + 1} was left out: --minutes are over")
                break
            for when, seconds in _new_pairs(load, told=name != "not told").items():
                seen.setdefault((name, when), []).extend(seconds)
    for name in dict.fromkeys(name for name, _ in seen):
        first, later = (statistics.median(seen[name, when]) for when in ("first", "later"))
        report.add(
            "joins",
            design=name,
            first_ttft_ms=first * 1e3,
            later_ttft_ms=later * 1e3,
            ratio=first / later,
            pairs=len(seen[name, "first"]),
            requests=len(seen[name, "later"]),
        )
        if name != "not told":
            report.summary["ttft_new_pair_vs_warm"] = first / later


def _new_pairs(load: Load, *, told: bool) -> dict[str, list[float]]:
    """Times to the first token, in seconds, over two pairs that are new to each other and to no one else."""
    port, prompts = free_port(), iter(_prompts(random.Random(SEED), load, 10 + 2 + load.requests))
    flags = ("--kv-router", f"http://{LOOPBACK}:{port}") if told else ()

    def ttft(group: Group, prefill: int, decode: int) -> float:
        number = random.getrandbits(62) + 1
        found = asyncio.run(ask(group, next(prompts), load.answer, number, which=(prefill, decode)))
        group.settle()
        return found.ttft

    with running({"all": pair(*flags, prefill=2, decode=2)}) as groups, ExitStack() as stack:
        group = groups["all"]
        if told:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-routers-")))
            stack.enter_context(routed(group, folder, port=port))
            wait_until(lambda: group.connected() == 4, seconds=60, what="decode to connect to both")
        for _ in range(5):
            for each in range(2):
                ttft(group, each, each)
        assert group.connected() == (4 if told else 2)
        crossed = [(0, 1), (1, 0)]
        first = [ttft(group, *each) for each in crossed]
        later = [ttft(group, *crossed[number % 2]) for number in range(load.requests)]
    return {"first": first, "later": later}


@dataclass(frozen=True)
class Mean:
    """Means over requests, in seconds; p99 of the time to the first token."""

    ttft: float
    ttft_p99: float
    tpot: float
    jct: float


def mean(asked: Sequence[Asked]) -> Mean:
    """Of requests of one run."""
    return Mean(
        statistics.mean(one.ttft for one in asked),
        percentile([one.ttft for one in asked], 99),
        statistics.mean(one.tpot for one in asked),
        statistics.mean(one.jct for one in asked),
    )


def capacity(group: Group, load: Load) -> float:
    """Requests per second that one pair serves when four are always under way."""
    prompts = _prompts(random.Random(SEED + 1), load, 8)

    async def lane(mine: Sequence[list[int]]) -> None:
        for prompt in mine:
            await ask(group, prompt, load.answer, random.getrandbits(62) + 1)

    async def all_lanes() -> None:
        await asyncio.gather(*(lane(prompts[at::4]) for at in range(4)))

    asyncio.run(lane(prompts[:1]))
    begin = time.perf_counter()
    asyncio.run(all_lanes())
    return len(prompts) / (time.perf_counter() - begin)


def play(group: Group, load: Load, rate: float, size: tuple[int, int] = (1, 1)) -> list[Asked]:
    """Requests at a rate, spread in turn over so many prefill and decode servers."""
    group.flush()
    rng = random.Random(SEED)
    prompts = _prompts(rng, load, load.requests)
    gaps = [rng.expovariate(rate) for _ in prompts]

    async def arrive() -> list[Asked]:
        tasks = []
        for number, (prompt, gap) in enumerate(zip(prompts, gaps, strict=True)):
            await asyncio.sleep(gap)
            which = (number % size[0], number % size[1])
            tasks.append(
                asyncio.create_task(ask(group, prompt, load.answer, random.getrandbits(62) + 1, which=which))
            )
        return await asyncio.gather(*tasks)

    found = asyncio.run(arrive())
    group.settle()
    return found


def _prompts(rng: random.Random, load: Load, count: int) -> list[list[int]]:
    return [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(load.prompt)] for _ in range(count)]


def _compare(
    report: Report,
    case: str,
    specs: Mapping[str, GroupSpec],
    load: Load,
    shares: Sequence[float],
    rounds: int,
    until: float,
) -> dict[tuple[str, float], Mean]:
    """Rows of each way at each rate. The ways take turns, and every one gets the same arrivals."""
    found: dict[tuple[str, float], list[Asked]] = {}
    with running(specs) as groups:
        for group in groups.values():
            capacity(group, Load(64, 4, 1))
        rate = capacity(next(iter(groups.values())), load)
        try:
            for number in range(rounds):
                for share in shares:
                    takes = len(groups) * load.requests / (share * rate)
                    if found and time.monotonic() + takes > until:
                        continue
                    for name in sorted(groups, reverse=number % 2 == 1):
                        found.setdefault((name, share), []).extend(play(groups[name], load, share * rate))
        finally:
            means = {key: mean(asked) for key, asked in found.items()}
            for (name, share), value in means.items():
                _row(report, case, name, share * rate, value, len(found[name, share]))
                told = [(one.stages, one.jct) for one in found[name, share]]
                breakdown(report, f"{case}, breakdown", f"{name} at {share * rate:.1f}/s", told)
    return means


def _over(report: Report, means: Mapping[tuple[str, float], Mean], over: str, under: str) -> float:
    """Job completion time of one way over that of another: the mean of the rates' ratios."""
    shares = [share for name, share in means if name == over]
    ratio = statistics.mean(means[over, share].jct / means[under, share].jct for share in shares)
    report.add("all rates", what="jct", design=over, over=under, ratio=ratio)
    return ratio


def _row(report: Report, case: str, name: str, rate: float, found: Mean, requests: int) -> None:
    report.add(
        case,
        design=name,
        requests_per_s=rate,
        prefill_stage_ms=found.ttft * 1e3,
        prefill_stage_p99_ms=found.ttft_p99 * 1e3,
        tpot_ms=found.tpot * 1e3,
        decode_stage_ms=(found.jct - found.ttft) * 1e3,
        jct_ms=found.jct * 1e3,
        requests=requests,
    )
