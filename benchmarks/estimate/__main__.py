"""Hit shares of `sglang-ext estimate` beside those of real servers, on recorded traces.

Two tiny servers with HBM and DRAM stand behind a router with --record. A trace is played with its lengths
divided, so that one of its blocks is 16 tokens, and each block's hash drawn as tokens. Then the recording is
estimated: the fleet that it names, its prompts, none of its hits. The aim: a difference of at most 2 points.

Traces to develop with: the first half of Mooncake's conversations, and sessions with an even SHA-256 of their
id: coding agents' (kv_cache_tester), and texts of agents and dialogues (lmcache_agent_traces,
tau_bench_airline). With --held-out, those that are read for final figures only: Mooncake's synthetic trace,
and the sessions with an odd one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp

from benchmarks.agents.recorded import FILE, VOCABULARY, held_out
from benchmarks.lib.common import SEED, Options, Report, at_most
from benchmarks.lib.data import data_flag, data_folder, rows
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
LMCACHE = "lmcache_agent_traces"
TAU = "tau_bench_airline/gpt-4o-airline.tasks_even.jsonl.gz"
BLOCK = 16
TEXT_BYTES = 256
"""Of a text, that become one block: 64 units of 4 bytes."""
MOST_BLOCKS = 120
"""Of a prompt; the context of the tiny model has no more."""
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


def mooncake(folder: Path, name: str, count: int) -> list[list[int]]:
    """Prompts of a Mooncake trace in its order. A block of 512 tokens becomes one of 16."""
    found = []
    for row in rows(folder, f"mooncake/{name}"):
        ids, length = cast(list[int], row["hash_ids"]), int(cast(Any, row["input_length"])) // 32
        if len(ids) <= MOST_BLOCKS:
            found.append(_tokens(name, ids, length))
        if len(found) == count:
            break
    return found


def coding(folder: Path, count: int, *, held: bool) -> list[list[int]]:
    """Turns of coding agents' sessions. A block of 64 tokens becomes one of 16."""
    talks = [_turns(row) for row in rows(folder, FILE) if held_out(str(row["id"])) is held]
    return _together(talks, count)


def recorded_texts(folder: Path, count: int, *, held: bool) -> list[list[int]]:
    """Requests of `lmcache_agent_traces`: coding agents, and dialogues with a simulated user."""
    talks = []
    for path in sorted((folder / LMCACHE).glob("*/*.jsonl.gz")):
        if held_out(path.name.partition(".")[0]) is held:
            found = sorted(
                rows(folder, str(path.relative_to(folder))), key=lambda row: cast(int, row["timestamp"])
            )
            talks.append([_of_text("lmcache", str(row["input"])) for row in found])
    return _together(talks, count)


def dialogues(folder: Path, count: int, *, held: bool) -> list[list[int]]:
    """Requests of `tau_bench_airline`: for each message of the agent, all messages before it. A session is a
    trial of a task."""
    talks = []
    for row in rows(folder, TAU):
        if held_out(f"{row['task_id']}-{row['trial']}") is held:
            talk, text = [], ""
            for message in cast(list[dict[str, Any]], row["traj"]):
                if message["role"] == "assistant":
                    talk.append(_of_text("tau", text))
                text += json.dumps(message)
            talks.append(talk)
    return _together(talks, count)


def _of_text(name: str, text: str) -> list[int]:
    """A prompt's beginning: `TEXT_BYTES` of it become a block, whose tokens all text before it decides."""
    data, chain, found = text.encode(), hashlib.sha256(name.encode()), list[int]()
    for start in range(0, min(len(data), MOST_BLOCKS * TEXT_BYTES), TEXT_BYTES):
        chain.update(data[start : start + TEXT_BYTES])
        size = max(1, len(data[start : start + TEXT_BYTES]) * BLOCK // TEXT_BYTES)
        found += random.Random(chain.hexdigest()).choices(VOCABULARY, k=size)
    return found if len(found) > 1 else [VOCABULARY[0], *found, VOCABULARY[1]]


def _together(talks: list[list[list[int]]], count: int) -> list[list[int]]:
    """Turns of sessions in a random order, eight sessions at a time."""
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


def _turns(row: dict[str, Any]) -> list[list[int]]:
    found = []
    for each in sorted(row["requests"], key=lambda each: each["t"]):
        ids = [id for first, count in each.get("hash_runs", ()) for id in range(first, first + count)]
        # The beginnings of prompts of 90,000 tokens: a session repeats these, too.
        ids = ids[: MOST_BLOCKS * 4 : 4]
        if ids:
            found.append(_tokens("coding", ids, len(ids) * BLOCK + 5))
    return found[:40]


def _tokens(name: str, ids: Sequence[int], length: int) -> list[int]:
    """A prompt: 16 tokens of each block, which its hash alone decides."""
    tokens: list[int] = []
    for id in ids:
        tokens += random.Random(f"{name}/{id}").choices(VOCABULARY, k=BLOCK)
    tokens += random.Random(f"{name}/{ids[-1]}/end").choices(VOCABULARY, k=BLOCK)
    return tokens[: max(2, length)]


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
    if options.held_out:
        name, held = "synthetic_trace.jsonl.gz", True
    else:
        name, held = "conversation_trace.first_half.jsonl.gz", False
    largest = 0.0
    for case, prompts in (
        (f"mooncake {name.partition('.')[0]}", mooncake(folder, name, count)),
        ("coding agents", coding(folder, count, held=held)),
        ("lmcache_agent_traces", recorded_texts(folder, count, held=held)),
        ("tau_bench_airline", dialogues(folder, count, held=held)),
    ):
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
