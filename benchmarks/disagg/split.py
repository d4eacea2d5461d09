"""One long prompt computed by two instances at once (MemServe, table 3), beside the same prompt on one.

Two colocated servers behind two routers: one has `--sequence-parallel`, the other one has not. Each prompt is
asked of both, in an order that changes, under names of their own, so that nothing is cached. The answers have
to be alike. `helped_tokens` counts the prompt's tokens that came from the helper; 0 means that it was not
split, or in vain.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.disagg.loads import FIRST_ID, LAST_ID
from benchmarks.disagg.servers import Asked, Group, GroupSpec, ask, routed, running
from benchmarks.lib.common import SEED, Options, Report
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.ports import free_port

LENGTHS = (4096, 16_384)
ANSWER = 4
FIGURE = "ttft_split_16k_vs_alone"
ALONE, SPLIT = "one instance", "split"
SERVERS = (
    *("--radix-cache-backend", "global", "--kv-dram-size", "1GB", "--mem-fraction-static", "0.3"),
    *("--max-total-tokens", "40000", "--chunked-prefill-size", "8192", "--enable-cache-report"),
)


def split(options: Options, report: Report, until: float = math.inf) -> None:
    """Rows of each length, with one instance and with two. until: by `time.monotonic`; a round that takes
    longer is left out, but for the first."""
    lengths = (512, 1024) if options.tiny else LENGTHS
    rounds = options.rounds(7, quick=3)
    mode = str(lengths[0]) if options.tiny else "auto"
    ports = {ALONE: free_port(), SPLIT: free_port()}
    urls = [flag for port in ports.values() for flag in ("--kv-router", f"http://{LOOPBACK}:{port}")]
    rng, wrong = random.Random(SEED), 0
    seen: dict[tuple[int, str], list[Asked]] = {}
    with running({"all": GroupSpec(0, 2, (*SERVERS, *urls))}) as started, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-routers-")))
        groups = {name: replace(started["all"]) for name in ports}
        for name, group in groups.items():
            flags = ("--policy", "round-robin", "--sequence-parallel", mode if name == SPLIT else "off")
            stack.enter_context(routed(group, folder, port=ports[name], flags=flags))
        wait_until(
            lambda: all(group.registered() == 2 for group in groups.values()),
            seconds=60,
            what="both servers to register",
        )
        # Uncounted, and enough for each server to have computed and to have helped.
        for number in range(2):
            _round(groups, rng, lengths[0], f"warm/{number}")
        for number in range(rounds):
            began = time.monotonic()
            for length in lengths:
                for name, asked in _round(groups, rng, length, str(number)).items():
                    seen.setdefault((length, name), []).append(asked)
                wrong += seen[length, ALONE][-1].tokens != seen[length, SPLIT][-1].tokens
            if 2 * time.monotonic() - began > until and number + 1 < rounds:
                report.note(f"{number + 1} rounds of {rounds}: --minutes are over")
                break
    for length in lengths:
        alone, halves = seen[length, ALONE], seen[length, SPLIT]
        ratios = [two.ttft / one.ttft for one, two in zip(alone, halves, strict=True)]
        for name, found in ((ALONE, alone), (SPLIT, halves)):
            report.add(
                f"{length} tokens",
                by=name,
                ttft_median_ms=statistics.median(one.ttft for one in found) * 1e3,
                ttft_least_ms=min(one.ttft for one in found) * 1e3,
                ttft_most_ms=max(one.ttft for one in found) * 1e3,
                helped_tokens=statistics.median(one.cached for one in found),
                ratio=statistics.median(ratios) if name == SPLIT else 1.0,
                requests=len(found),
            )
        if length == LENGTHS[-1]:
            report.summary[FIGURE] = statistics.median(ratios)
    report.summary["wrong_answers"] = wrong


def _round(groups: dict[str, Group], rng: random.Random, length: int, name: str) -> dict[str, Asked]:
    """A prompt, asked of each; nothing of it is left afterwards."""
    prompt = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]
    found: dict[str, Asked] = {}
    for leg in rng.sample(sorted(groups), len(groups)):
        key = f"{name}/{length}/{leg}"
        found[leg] = asyncio.run(ask(groups[leg], prompt, ANSWER, 0, (key, key), by_router=True))
        groups[leg].settle()
    groups[ALONE].flush()
    return found
