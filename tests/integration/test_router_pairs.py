"""The router in front of a prefill and a decode server: both get the request, decode answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_rig import sglang_program

from router import Router, RouterConfig
from sglang_ext.testing.leaks import LeakGuard
from sglang_ext.testing.models import model_path
from sglang_ext.testing.pd import PdServers, pd_servers
from sglang_ext.testing.servers import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

Json = dict[str, Any]
FLAGS = ("--radix-cache-backend", "global", "--max-total-tokens", "8192", "--enable-cache-report")
TEXT = "A traveller asks the librarian for a map of the town, and then for another one. " * 4
BODIES: list[tuple[str, Json]] = [
    ("/generate", {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 12}}),
    (
        "/generate",
        {
            "input_ids": [list(range(5, 60)), list(range(7, 90))],
            "sampling_params": {"temperature": 0, "max_new_tokens": 6},
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 12},
    ),
    (
        "/v1/messages",
        {
            "model": "m",
            "messages": [{"role": "user", "content": TEXT}],
            "temperature": 0,
            "max_tokens": 12,
        },
    ),
]


@pytest.fixture(scope="module")
def cluster(leak_guard: LeakGuard) -> Iterator[tuple[PdServers, ServerProcess]]:
    """One prefill and one decode server, and one that does both by itself."""
    spec = ServerSpec(flags=FLAGS)
    with leak_guard.adopting(), pd_servers([spec], [spec], [spec]) as (pd, others):
        yield pd, others[0]


def said(body: bytes, *, stream: bool) -> str:
    """All text of an answer, whatever its form."""
    events = [part for part in body.split(b"\n") if part.startswith(b"data: ")] if stream else [body]
    found: dict[str, str] = {}
    for event in events:
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            continue
        _collect(json.loads(data), found, grows=stream)
    return json.dumps(found, sort_keys=True)


def _collect(value: Any, found: dict[str, str], *, grows: bool) -> None:
    for index, element in enumerate(value if isinstance(value, list) else [value]):
        if "meta_info" in element:  # the whole so far
            found[str(element.get("index", index))] = element["text"]
        for choice in element.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or {}
            found["0"] = found.get("0", "") + (part.get("content") or "")
        for block in element.get("content") or [element.get("delta") or {}]:
            if isinstance(block, dict):
                found["0"] = found.get("0", "") + (block.get("text") or "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pair_answers_as_one_server_does(
    stream: bool, cluster: tuple[PdServers, ServerProcess]
) -> None:
    pd, alone = cluster
    prefill, decode = pd.prefill[0].server, pd.decode[0]
    config = RouterConfig(worker_urls=(prefill.url, decode.url), port=0)
    answers: set[str] = set()
    async with (
        Router(config) as router,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client,
    ):
        for path, body in BODIES:
            asked = {**body, "stream": stream}
            async with client.post(alone.url + path, json=asked) as answer:
                expected = said(await answer.read(), stream=stream)
            for _ in range(2):
                async with client.post(router.url + path, json=asked) as answer:
                    assert answer.status == 200, await answer.text()
                    assert answer.headers["x-kv-instance"] == decode.url
                    assert answer.headers["x-kv-prefill-instance"] == prefill.url
                    assert said(await answer.read(), stream=stream) == expected
            answers.add(expected)
        # The comparison can tell answers apart.
        assert len(answers) >= 3
        assert all(row.in_flight == 0 for row in router.fleet.rows.values())
        router.check()


async def test_sixteen_at_a_time(cluster: tuple[PdServers, ServerProcess]) -> None:
    pd, _ = cluster
    config = RouterConfig(worker_urls=tuple(server.url for server in pd.servers), port=0)
    async with (
        Router(config) as router,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client,
    ):

        async def ask(number: int) -> int:
            body = {
                "text": f"Visitor {number}. {TEXT}",
                "stream": number % 2 == 0,
                "sampling_params": {"temperature": 0, "max_new_tokens": 8},
            }
            async with client.post(router.url + "/generate", json=body) as answer:
                await answer.read()
                return answer.status

        assert await asyncio.gather(*(ask(number) for number in range(16))) == [200] * 16


@pytest.mark.parametrize(
    "kit",
    [
        "parity",
        pytest.param("multiturn", marks=pytest.mark.long),
        pytest.param("radix", marks=pytest.mark.long),
    ],
)
async def test_sglangs_own_kits_pass(
    kit: str, cluster: tuple[PdServers, ServerProcess], tmp_path: Path, long_run: bool
) -> None:
    """The checks in SGLang's wheel for prefill and decode apart and for caches."""
    pd, alone = cluster
    prefill, decode = pd.prefill[0].server, pd.decode[0]
    data = tmp_path / "conversations.json"
    turns = [{"from": "human", "value": TEXT}, {"from": "gpt", "value": TEXT}]
    data.write_text(json.dumps([{"conversations": turns}] * 64))
    config = RouterConfig(worker_urls=(prefill.url, decode.url), port=0)
    async with Router(config) as router:
        urls = (router.url, prefill.url, decode.url, alone.url)
        script = str(Path(__file__).with_name("pd_kits.py"))
        size = "8" if long_run else "2"
        out = await sglang_program(
            "script", script, kit, *urls, str(model_path("tiny")), str(data), size, cwd=tmp_path
        )
    assert f"{kit} passed" in out
