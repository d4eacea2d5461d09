"""A router's recording of real servers, replayed by the simulator: the same instances, the same hits.

Three servers with HBM and DRAM answer conversations with shared beginnings (long form). The simulator gets
the arrivals, the prompts, the lengths of the answers, and the times that were observed; its router and its
engines decide by themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_rig import until
from token_requests import random_prompt

from sglang_ext.protocol.recording import Applied, Loaded, Request, read_recording
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.shadow import ShadowRouter
from sglang_ext.simulator.command import Arguments, model_of, settings_of
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import Settings
from sglang_ext.simulator.trace import Trace, read_trace
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

MODEL_FLAG = "--json-model-override-args"
SERVERS, SESSIONS, BEGINNINGS = 3, 72, 5
RATE = 0.6
"""Sessions a second. Servers on two cores are half busy with it: without queues, their weight would be worth
nothing, and with long ones, placements that are nearly worth the same depend on milliseconds."""
THINK_S = 1.5
FLAGS = (
    *("--radix-cache-backend", "global", "--max-total-tokens", "6144"),
    *("--chunked-prefill-size", "1024", "--enable-cache-report", "--sleep-on-idle"),
)
AWAY_S, HINTED_S = 60.0, 0.5
SHADOWED = 6
"""Requests that go through a shadow, too."""


@dataclass(frozen=True)
class Case:
    """How KV moves. fetches: servers have one model and fetch from each other. away: users are away for a
    minute once. hints: half a second before each turn. least: the least shares of requests with the same
    instance and with the same tokens from each tier."""

    dram: str = "24MB"
    disk: bool = False
    fetches: bool = False
    away: bool = False
    hints: bool = False
    least: tuple[float, float] = (0.99, 0.95)


PLAIN = Case()
CROSSINGS = {
    "disks": Case(dram="12MB", disk=True, away=True),
    "hints": Case(dram="96MB", away=True, hints=True),
    # Where each can fetch from each, instances differ by less than milliseconds that are in no recording.
    "fetches": Case(fetches=True, least=(0.3, 0.6)),
}


@dataclass(frozen=True)
class Talk:
    """A session. turns: the tokens that each adds, the length of its answer, and the pause before it."""

    name: str
    start_s: float
    beginning: list[int]
    turns: list[tuple[list[int], int, float]]


def talks(rng: random.Random, case: Case) -> list[Talk]:
    """Sessions as they arrive. The first of their beginnings is the most popular."""
    beginnings = [random_prompt(rng, rng.randint(150, 500)) for _ in range(BEGINNINGS)]
    weights = [1 / place for place in range(1, BEGINNINGS + 1)]
    found, now = [], 0.0
    for number in range(SESSIONS):
        now += rng.expovariate(RATE)
        turns = [
            (random_prompt(rng, rng.randint(20, 220)), rng.randint(4, 24), rng.expovariate(1 / THINK_S))
            for _ in range(rng.randint(2, 8))
        ]
        if case.away:
            more, length, pause_s = turns[-1]
            turns[-1] = (more, length, pause_s + AWAY_S)
        found.append(Talk(f"talk-{number}", now, rng.choices(beginnings, weights)[0], turns))
    return found


async def play(url: str, load: list[Talk], *, hints: bool = False) -> list[str]:
    """Send all turns, each after the answer to the one before. Returns the ids of their requests."""
    names: list[str] = []

    async def pause(client: aiohttp.ClientSession, talk: Talk, seconds: float, first: bool) -> None:
        if first or not hints or seconds < HINTED_S:
            await asyncio.sleep(seconds)
            return
        await asyncio.sleep(seconds - HINTED_S)
        async with client.post(f"{url}/v1/advisory", json={"session": talk.name}) as response:
            assert response.status in (200, 202), await response.text()
        await asyncio.sleep(HINTED_S)

    async def session(client: aiohttp.ClientSession, talk: Talk) -> None:
        await asyncio.sleep(talk.start_s)
        tokens = list(talk.beginning)
        for more, length, pause_s in talk.turns:
            await pause(client, talk, pause_s, tokens == talk.beginning)
            tokens += more
            sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
            body = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
            names.append(f"{talk.name}-{len(names)}")
            headers = {"x-session-id": talk.name, "x-request-id": names[-1]}
            async with client.post(f"{url}/generate", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                ids: list[int] = []
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        ids = json.loads(line[6:])["output_ids"]
            tokens += ids

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as client:
        await asyncio.gather(*(session(client, talk) for talk in load))
    return names


@dataclass(frozen=True)
class Recorded:
    """One run. lines: of its recording. shadow: of the shadow's. metrics, explained: the router's, at the
    end."""

    requests: int
    lines: list[bytes]
    shadow: list[bytes]
    metrics: str
    explained: dict[str, object]

    def trace(self) -> Trace:
        return read_trace(self.lines)


def _servers(stack: ExitStack, url: str, key: Path, case: Case) -> list[ServerProcess]:
    """Servers that a router knows. Unless they fetch, each has a model of another name."""
    servers = []
    for number in range(SERVERS):
        own = ["--kv-instance-id", f"s{number}", "--kv-dram-size", case.dram]
        if not case.fetches:
            own += [MODEL_FLAG, json.dumps({"name": number})]
        if case.disk:
            own += ["--kv-disk-path", str(key.parent / f"disk-{number}"), "--kv-disk-size", "1GB"]
        router = ("--kv-router", url, "--kv-cluster-key-file", str(key))
        servers.append(ServerProcess(ServerSpec(flags=(*FLAGS, *own, *router))))
        stack.callback(servers[-1].stop)
    return servers


async def _run(folder: Path, case: Case) -> Recorded:
    key = folder / "cluster.key"
    key.touch(mode=0o600)
    key.write_text("a-test-s-key-0123456789-abcdefghijklmnop\n", encoding="utf-8")
    day, shadowed = folder / "day.jsonl", folder / "shadow.jsonl"
    with ExitStack() as stack:
        async with Router(
            RouterConfig(port=free_port(), record=str(day), cluster_key_file=str(key), policy="cost")
        ) as router:
            servers = _servers(stack, router.url, key, case)
            await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
            await until(lambda: sum(row.trusted for row in router.fleet.usable()) == SERVERS, 120)
            ids = await play(router.url, talks(random.Random("replay"), case), hints=case.hints)
            async with aiohttp.ClientSession() as client:
                async with client.get(f"{router.url}/metrics") as answer:
                    metrics = await answer.text()
                async with client.get(f"{router.url}/explain/{ids[-1]}") as answer:
                    explained = await answer.json()
            router.check()
        urls = tuple(server.url for server in servers)
        config = RouterConfig(port=free_port(), shadow=True, worker_urls=urls, record=str(shadowed))
        async with ShadowRouter(config) as shadow:
            few = Talk("few", 0.0, [7] * 64, [([8] * 20, 4, 0.0) for _ in range(SHADOWED)])
            assert len(await play(shadow.url, [few])) == SHADOWED
    return Recorded(
        len(ids),
        day.read_bytes().splitlines(keepends=True),
        shadowed.read_bytes().splitlines(keepends=True),
        metrics,
        explained,
    )


@pytest.fixture(scope="module")
def recorded(
    preloaded_servers: None, leak_guard: LeakGuard, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recorded]:
    with leak_guard.adopting():
        yield asyncio.run(_run(tmp_path_factory.mktemp("replay"), PLAIN))


def replay(trace: Trace, settings: Settings) -> Outcome:
    """As the command does it: with the costs that the recording has."""
    return simulate(settings, model_of(Arguments(), trace), trace)


def test_the_simulator_decides_as_the_router_did(recorded: Recorded) -> None:
    """And with other settings it does not."""
    trace = recorded.trace()
    settings = settings_of(Arguments(), trace)
    assert recorded.requests == len(trace.sessions) >= 300
    found = dict(replay(trace, settings).agreement)
    shown = {"as recorded": found}
    changes: list[dict[str, Any]] = [
        {"queue_weight": 2.0},
        {"policy": "round-robin"},
        {"policy": "least-load"},
    ]
    for change in changes:
        shown[str(change)] = dict(replay(trace, replace(settings, **change)).agreement)
    print(json.dumps(shown, indent=1))
    assert trace.costs
    assert found["requests"] == recorded.requests
    assert found["instance"] >= 0.99
    assert found["exact_hits"] >= 0.95
    assert max(abs(found[f"{tier}_points"]) for tier in ("hbm", "dram") if f"{tier}_points" in found) <= 2
    for title, figures in shown.items():
        assert title == "as recorded" or figures["instance"] < 0.99


def test_what_was_chosen_and_found_is_not_read(recorded: Recorded) -> None:
    blank = []
    for line in recorded.lines:
        row = json.loads(line)
        if row["type"] == "request":
            for column in ("choices", "tiers", "instance", "cached"):
                row.pop(column, None)
        blank.append(json.dumps(row).encode() + b"\n")
    trace, without = recorded.trace(), read_trace(blank)
    settings = settings_of(Arguments(), trace)
    assert not without.decided
    assert replay(without, settings).decided == replay(trace, settings).decided


def test_a_recording_has_all_that_happened_and_no_text(recorded: Recorded) -> None:
    lines = list(read_recording(recorded.lines))
    requests = [line for line in lines if isinstance(line, Request)]
    assert len(requests) == recorded.requests
    assert all(line.status == 200 and line.stages and line.first_byte_s for line in requests)
    assert sum(line.tiers.get("hbm", 0) + line.tiers.get("dram", 0) for line in requests) == sum(
        line.cached or 0 for line in requests
    )
    for kind in (Loaded, Applied):
        assert len({line.instance for line in lines if isinstance(line, kind)}) == SERVERS
    assert b"talk-" not in b"".join(recorded.lines)


def test_the_router_shows_its_regret(recorded: Recorded) -> None:
    shares = {
        what: float(line.split()[-1])
        for what in ("hit", "oracle", "unlimited")
        for line in recorded.metrics.splitlines()
        if line.startswith(f'sglang_ext_router_last_hour_cached_ratio{{what="{what}"}}')
    }
    assert 0.3 < shares["hit"] <= shares["oracle"] <= shares["unlimited"] < 1
    assert recorded.explained["oracle"] is not None


def test_a_shadow_passes_requests_on_and_records_them(recorded: Recorded) -> None:
    requests = [line for line in read_recording(recorded.shadow) if isinstance(line, Request)]
    assert len(requests) == SHADOWED
    assert all(line.status == 200 and line.prompts for line in requests)


@pytest.mark.parametrize("name", CROSSINGS)
def test_the_simulator_decides_as_the_router_did_where_kv_moves(
    name: str, preloaded_servers: None, leak_guard: LeakGuard, tmp_path: Path
) -> None:
    case = CROSSINGS[name]
    with leak_guard.adopting():
        recorded = asyncio.run(_run(tmp_path, case))
    if kept := os.environ.get("SGLANG_EXT_REPLAY_KEEP"):
        (Path(kept) / f"{name}.jsonl").write_bytes(b"".join(recorded.lines))
    trace = recorded.trace()
    found = dict(replay(trace, settings_of(Arguments(), trace)).agreement)
    print(json.dumps(found, indent=1))
    assert found["requests"] == recorded.requests
    assert all(
        share >= least
        for share, least in zip((found["instance"], found["exact_hits"]), case.least, strict=True)
    )
