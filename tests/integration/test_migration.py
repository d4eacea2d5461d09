"""Requests that run at an instance which is drained go on at another, as if nothing had been."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from router_rig import FLAGS, running, until

from router import Router, RouterConfig
from router.lifecycle import State
from sglang_ext.cluster_messages import instance_path
from sglang_ext.testing.leaks import LeakGuard
from sglang_ext.testing.pd import pd_servers
from sglang_ext.testing.servers import ServerProcess, ServerSpec, free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Json = dict[str, Any]
TOKENS = 60
PATIENCE = {"health_check_timeout_secs": 5.0}
STORY = "A traveller asks the librarian for a map of the town, and then for another one. "


@dataclass
class Fleet:
    """Servers that register with the router of a test; the last two are of the kind that is drained."""

    port: int
    kind: str
    servers: list[ServerProcess] = field(default_factory=list)


@pytest.fixture(scope="module", params=["decode", "colocated"])
def fleet(request: pytest.FixtureRequest, leak_guard: LeakGuard) -> Iterator[Fleet]:
    """A prefill server and two decode servers, or two that do both."""
    port = free_port()

    def spec(name: str) -> ServerSpec:
        router = ("--kv-router", f"http://127.0.0.1:{port}", "--kv-instance-id", name)
        return ServerSpec(flags=(*FLAGS, "--kv-dram-size", "64MiB", *router))

    with leak_guard.adopting():
        if request.param == "decode":
            with pd_servers([spec("p")], [spec("a"), spec("b")]) as (pd, _):
                yield Fleet(port, request.param, pd.servers)
            return
        servers = [ServerProcess(spec(name)) for name in ("a", "b")]
        try:
            for server in servers:
                server.start()
            yield Fleet(port, request.param, servers)
        finally:
            for server in servers:
                server.stop()


@pytest.fixture
async def router(fleet: Fleet) -> AsyncIterator[Router]:
    async with Router(RouterConfig(port=fleet.port, policy="round-robin", **PATIENCE)) as router:
        await until(lambda: len(router.fleet.usable()) == len(fleet.servers), seconds=60)
        yield router
        router.check()


def bodies(seed: int = 0) -> list[tuple[str, Json]]:
    """Eight requests in every form that can be moved, long enough to be met in the middle."""
    found: list[tuple[str, Json]] = []
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for number in range(8):
        text = f"Visitor {seed}-{number}. " + STORY * 3
        stream = number != 3 and number != 6
        if number % 4 == 0:
            body: Json = {"text": text, "sampling_params": sampling}
            found.append(("/generate", {**body, "stream": stream}))
        elif number % 4 == 1:
            body = {"prompt": text, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            found.append(("/v1/completions", {**body, "stream": stream}))
        elif number % 4 == 2:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            found.append(
                ("/v1/chat/completions", {**body, "ignore_eos": True, "stream": stream, **usage})
            )
        else:
            body = {"input_ids": list(range(50 + number, 200 + number)), "sampling_params": sampling}
            found.append(("/generate", {**body, "stream": stream}))
    return found


@dataclass
class Heard:
    """What a client got: all text, all ids, how many tokens it was told, and every event."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: int | None = None
    events: int = 0
    instance: str = ""
    names: set[str] = field(default_factory=set)
    error: str = ""

    @property
    def said(self) -> tuple[str, tuple[int, ...], int | None]:
        return self.text, tuple(self.ids), self.tokens


class Client:
    """Sends requests, and keeps what it hears as it comes."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self.heard: list[Heard] = []

    async def ask(self, path: str, body: Json) -> Heard:
        heard = Heard()
        self.heard.append(heard)
        async with self._session.post(self._url + path, json=body) as answer:
            heard.instance = answer.headers.get("x-kv-instance", "")
            if answer.status != 200:
                heard.error = await answer.text()
            elif not body["stream"]:
                _take(heard, await answer.json())
            else:
                async for line in answer.content:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        heard.events += 1
                        _take(heard, json.loads(line[6:]))
        return heard


def _take(heard: Heard, event: Json) -> None:
    if "error" in event:
        heard.error = json.dumps(event)
        return
    if "meta_info" in event:
        assert event["text"].startswith(heard.text), "the text was taken back"
        heard.text, heard.ids = event["text"], event["output_ids"]
        heard.tokens = event["meta_info"]["completion_tokens"]
        heard.names.add(event["meta_info"]["id"])
        return
    heard.names.add(f"{event['id']} {event['created']}")
    for choice in event.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        heard.text += part.get("content") or part.get("text") or ""
    if event.get("usage"):
        heard.tokens = event["usage"]["completion_tokens"]


@asynccontextmanager
async def client_of(router: Router) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(router.url, session)


async def moved(router: Router, how: str = "moved") -> float:
    value = router.metrics.registry.get_sample_value(
        "sglang_ext_router_moves_total", {"how": how}
    )
    return value or 0.0


async def drain(router: Router, instance: str, client: aiohttp.ClientSession | None = None) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(router.url + instance_path(instance) + "/drain", json={"deadline_s": 60}) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def test_every_answer_is_the_undisturbed_one(router: Router, fleet: Fleet) -> None:
    async with client_of(router) as client:
        expected = await asyncio.gather(*(client.ask(*each) for each in bodies()))
        assert not any(heard.error for heard in expected), expected
        assert len({heard.said for heard in expected}) == 8

        client.heard.clear()
        answers = [asyncio.create_task(client.ask(*each)) for each in bodies()]
        await until(lambda: sum(heard.events > 3 for heard in client.heard) >= 5)
        url = router.members.member("a").url
        there = router.fleet.rows[url].in_flight
        assert there >= 3
        await drain(router, "a")
        await until(lambda: router.fleet.rows[url].state is State.LEFT, seconds=20)
        # It has left long before the answers have ended.
        assert sum(not task.done() for task in answers) >= there
        got = await asyncio.gather(*answers)
    assert [heard.error for heard in got] == [""] * 8
    for heard, true in zip(got, expected, strict=True):
        assert heard.said == true.said
        assert len(heard.names) == 1, "the answer changed its name in the middle"
    assert await moved(router) >= there
    server = next(server for server in fleet.servers if server.url == url)
    await until(lambda: running([server]) == 0)
    router.members.resume("a")
    await until(lambda: len(router.fleet.usable()) == len(fleet.servers))
    await asyncio.to_thread(server.wait_idle)
