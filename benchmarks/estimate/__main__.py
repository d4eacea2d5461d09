"""Hit shares of `sglang-ext estimate` beside those of real servers, on recorded traces.

Two tiny servers with HBM and DRAM stand behind a router with --record. A trace is played with its lengths
divided, so that one of its blocks is 16 tokens, and each block's hash drawn as tokens. Then the recording is
estimated: the fleet that it names, its prompts, none of its hits. The aim: a difference of at most 2 points.
With --held-out, the traces are those that are read for final figures only (`traces`).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.estimate.traces import Talk, traces
from benchmarks.lib.common import SEED, Options, Report, at_most
from benchmarks.lib.data import data_flag, data_folder
from benchmarks.lib.quiet import DEFAULT, go_first, start_first
from sglang_ext.cost_model import CostModel
from sglang_ext.flags import flag
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.estimate.arrivals import Log
from sglang_ext.router.estimate.command import Arguments, fleet_of
from sglang_ext.router.estimate.estimate import Estimate
from sglang_ext.router.estimate.prompts import Units, lines_of
from sglang_ext.testing.waiting import until
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

NAME = "estimate"
HBM_TOKENS = 6144
DRAM = "48MB"
STREAMS = 3
"""Requests at a time."""
AIMS = {"largest_difference_points": at_most(2.0)}


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(Options):
    """The flags of this benchmark."""

    data: str | None = data_flag()
    held_out: bool = flag(False, "Play the traces that are held out.")


def _together(talks: list[Talk], count: int) -> list[list[int]]:
    """Turns of sessions in a random order, eight sessions at a time; of single requests, in their order."""
    if all(len(talk) == 1 for talk in talks):
        return [talk[0] for talk in talks[:count]]
    random.Random(SEED).shuffle(talks)
    found: list[list[int]] = []
    open_talks = [iter(talk) for talk in talks[:8]]
    rest = iter(talks[8:])
    while open_talks and len(found) < count:
        for talk in list(open_talks):
            if (turn := next(talk, None)) is not None:
                found.append(turn)
                continue
            at = open_talks.index(talk)
            open_talks[at : at + 1] = [iter(each) for each in [next(rest, None)] if each is not None]
    return found[:count]


async def _play(router: Router, prompts: Sequence[list[int]]) -> None:
    waiting: Iterator[list[int]] = iter(prompts)

    async def stream(client: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            async with client.post(router.url + "/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as client:
        await asyncio.gather(*(stream(client) for _ in range(STREAMS)))


async def _measure(prompts: Sequence[list[int]], folder: Path) -> Estimate:
    """Play a trace over a new cluster, and estimate its recording."""
    port, key, record = free_port(), folder / "cluster.key", folder / "day.jsonl"
    key.touch(mode=0o600)
    key.write_text("a-benchmark-s-key-0123456789-abcdefghij\n", encoding="utf-8")
    config = RouterConfig(port=port, cluster_key_file=str(key), record=str(record), policy="prompt-tree")
    with ExitStack() as stack:
        async with Router(config) as router:
            servers = [
                ServerProcess(
                    ServerSpec(
                        flags=(
                            *(
                                "--radix-cache-backend",
                                "global",
                                "--kv-instance-id",
                                name,
                                "--enable-cache-report",
                            ),
                            *("--kv-router", router.url, "--kv-cluster-key-file", str(key)),
                            *("--kv-dram-size", DRAM, "--max-total-tokens", str(HBM_TOKENS)),
                            *("--chunked-prefill-size", "2048", "--sleep-on-idle"),
                        )
                    )
                )
                for name in ("one", "two")
            ]
            for server in servers:
                stack.callback(server.stop)
            stack.callback(go_first, [os.getpid()], DEFAULT)
            await asyncio.to_thread(start_first, servers)
            await until(lambda: sum(row.trusted for row in router.fleet.usable()) == 2, 120, "both servers")
            await _play(router, prompts)
    log = Log(lines_of(str(record)), Units())
    return Estimate(log, fleet_of(Arguments(file=str(record)), log), CostModel())


def run(options: EstimateOptions, report: Report) -> None:
    """Play every trace."""
    folder, count = data_folder(options.data), options.pick(600, quick=200, tiny=20)
    largest = 0.0
    for case, talks in traces(folder, held=options.held_out).items():
        prompts = _together(talks, count)
        with tempfile.TemporaryDirectory() as scratch:
            estimate = asyncio.run(_measure(prompts, Path(scratch)))
        found = estimate.as_json()
        measured, ours = found["measured_hit_share"], found["with_sglang_ext"]
        difference = 100 * (ours["hit_share"] - measured)
        largest = max(largest, abs(difference))
        report.add(
            case,
            requests=estimate.requests,
            prompt_tokens=estimate.prompt_tokens,
            measured_percent=100 * measured,
            estimated_percent=100 * ours["hit_share"],
            difference_points=difference,
            estimated_hbm_percent=100 * ours["hit_share_by_tier"]["hbm"],
            in_turn_percent=100 * found["today"]["hit_share"],
            unlimited_percent=100 * found["without_a_limit"],
        )
    report.summary["largest_difference_points"] = largest
    report.note("held out" if options.held_out else "traces to develop with")


def main(argv: Sequence[str] | None = None) -> int:
    options = EstimateOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    run(options, report)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
