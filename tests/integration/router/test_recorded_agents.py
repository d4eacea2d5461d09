"""Sessions that the real clients have sent, before a real server: each turn finds all that it repeats.

The requests are as their clients sent them (``recorded/README.md``), but for short and certain answers.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_rig import FLAGS, routers_before, running, until

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.api.dialect import DIALECTS
from sglang_ext.router.clients.repairs import repair
from sglang_ext.router.clients.rules import shipped
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

Json = dict[str, Any]
BLOCK = 16
FOLDER = Path(__file__).parent / "recorded"
AGENTS = (
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"),
    *("--chat-template", str(FOLDER / "tools.jinja")),
)
"""Claude Code asks for thinking, which SGLang refuses of a model without a reasoning parser. The tiny model's
template renders no tools, which are most of these prompts."""
FLAGS_OF_AGENTS = (*FLAGS[:-1], "32768", *AGENTS)
RECORDED = sorted(FOLDER.glob("*.json"))
SHORT: dict[str, Json] = {
    "/v1/messages": {"max_tokens": 8},
    "/v1/chat/completions": {"max_tokens": 8},
    "/v1/responses": {"max_output_tokens": 8},
}
"""Limits of answers, whose text a recorded turn does not repeat: it has the answers of the recording."""


@pytest.fixture(scope="module")
def server(get_server: Callable[[ServerSpec], ServerProcess]) -> ServerProcess:
    return get_server(ServerSpec(flags=FLAGS_OF_AGENTS))


@pytest.fixture(scope="module")
def stock(get_server: Callable[[ServerSpec], ServerProcess]) -> ServerProcess:
    """SGLang with its own cache."""
    return get_server(ServerSpec(flags=("--max-total-tokens", "32768", *AGENTS)))


@pytest.fixture
async def start(server: ServerProcess) -> AsyncIterator[Callable[..., Any]]:
    async with routers_before(server) as begin:
        yield begin


def read(path: Path) -> list[Json]:
    """The requests of a session, with short answers."""
    requests: list[Json] = json.loads(path.read_text("utf-8"))["requests"]
    for request in requests:
        request["body"] |= {**SHORT[request["path"]], "temperature": 0, "stream": False}
        request["body"].pop("stream_options", None)
    return requests


def common(a: bytes, b: bytes) -> int:
    """Tokens with which both begin."""
    least = min(len(a), len(b))
    low, high = 0, least // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


async def post(session: aiohttp.ClientSession, url: str, request: Json, id: str) -> Json:
    headers = {**request["headers"], "x-request-id": id}
    async with session.post(url + request["path"], json=request["body"], headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def text(answer: Json) -> Any:
    """The generated part of an answer of any of the APIs."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        return message.get("content"), message.get("tool_calls")
    if "output" in answer:
        return [item.get("content") or item.get("arguments") for item in answer["output"]]
    return [block.get("text") or block.get("input") for block in answer["content"]]


@dataclass(frozen=True)
class Turn:
    """One request. session: of its client. prompt: its tokens, as the router knows them."""

    answer: Json
    session: str
    prompt: bytes
    tokens: int
    cached: int

    def repeats(self, before: Turn) -> int:
        """Tokens with which both prompts begin, in whole blocks."""
        # The last token of a prompt is always computed.
        return min(common(self.prompt, before.prompt), self.tokens - 1) // BLOCK * BLOCK


async def turns(requests: list[Json], *routers: Router, name: str = "turn") -> list[Turn]:
    """The turns of a recording, in their order, each through the next router."""
    found = []
    async with aiohttp.ClientSession() as session:
        for number, (request, router) in enumerate(zip(requests, itertools.cycle(routers), strict=False)):
            answer = await post(session, router.url, request, f"{name}-{number}")
            logged = router.request_log.find(f"{name}-{number}", tenant=None, admin=True)
            assert logged is not None
            encoded, record = logged.prompts[0], logged.record
            assert record.prompt_tokens is not None
            assert encoded.namespace[0] == "tokens", "the router knows the tokens, not the text alone"
            assert len(encoded.key) // TOKEN_BYTES == record.prompt_tokens, "as the server counts them"
            cached = record.cached_tokens or 0
            found.append(Turn(answer, logged.session or "", encoded.key, record.prompt_tokens, cached))
    return found


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
async def test_a_recorded_session_finds_what_it_repeats(
    path: Path, start: Callable[..., Any], server: ServerProcess
) -> None:
    """And its answers are the server's own to the prompts, once repaired; the long form asks stock SGLang."""
    requests = read(path)
    router = await start()
    found = await turns(copy.deepcopy(requests), router)
    reused(path, found)
    await answers_alone(server, requests, found, router.fleet.model.model.name)


def reused(path: Path, found: list[Turn]) -> None:
    """Verify that each turn has found the tokens that it repeats, and print the sums."""
    shared = cached = repeated = 0
    for number, turn in enumerate(found):
        most = max((turn.repeats(before) for before in found[:number]), default=0)
        assert turn.cached >= 0.95 * most, f"turn {number}"
        shared, cached, repeated = shared + most, cached + turn.cached, repeated + (most > 10 * BLOCK)
    assert repeated >= len(found) // 2
    assert cached >= 0.95 * shared > 300
    prompts = sum(turn.tokens for turn in found)
    assert shared >= 0.6 * prompts
    print(f"{path.stem}: {cached} tokens cached of {shared} repeated, of {prompts} in all prompts")


async def answers_alone(server: ServerProcess, requests: list[Json], found: list[Turn], model: str) -> None:
    """Verify that the flushed server gives the same answers to the repaired requests."""
    for request in requests:
        dialect = DIALECTS[request["path"]]
        repair(dialect, request["body"], [rule for rule in shipped().rules if rule.on], None)
        request["body"]["model"] = model
    await until(lambda: running([server]) == 0)
    server.flush()
    async with aiohttp.ClientSession() as session:
        for number, request in enumerate(requests):
            answer = await post(session, server.url, request, f"alone-{number}")
            assert text(answer) == text(found[number].answer), f"turn {number}"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
async def test_recorded_sessions_find_what_they_repeat_at_a_pair_behind_two_routers(
    stock: ServerProcess, leak_guard: LeakGuard
) -> None:
    spec = ServerSpec(flags=FLAGS_OF_AGENTS)
    every = {path: read(path) for path in RECORDED}
    with RedisServer() as redis, leak_guard.adopting(), pd_servers([spec], [spec]) as (pd, _):
        urls = tuple(each.url for each in (pd.prefill[0].server, pd.decode[0]))
        options: dict[str, Any] = {"worker_urls": urls, "port": 0, "cluster": redis.url}
        async with Router(RouterConfig(**options)) as one, Router(RouterConfig(**options)) as two:
            await until(lambda: all(len(router.members.store.others) == 1 for router in (one, two)), 60)
            await until(lambda: all(router.tokenizers.trust.tools for router in (one, two)), 60)
            found = {
                path: await turns(copy.deepcopy(requests), one, two, name=path.stem)
                for path, requests in every.items()
            }
            model = one.fleet.model.model.name
    for path, requests in every.items():
        reused(path, found[path])
        await answers_alone(stock, requests, found[path], model)


async def test_a_changed_word_is_computed_again(start: Callable[..., Any]) -> None:
    """The twin: turns whose system prompts begin with another word share nothing."""
    requests = read(next(path for path in RECORDED if path.stem == "opencode"))[1:4]
    for number, request in enumerate(requests):
        request["body"]["messages"][0]["content"] = f"{number} {request['body']['messages'][0]['content']}"
        request["body"].pop("tools")
        request["body"].pop("tool_choice")
    found = await turns(requests, await start())
    assert all(turn.cached < 3 * BLOCK < turn.tokens for turn in found)


@pytest.mark.parametrize(("rules", "least", "most"), [("auto", 0.5, 1.0), ("off", 0.0, 0.05)])
async def test_claude_code_s_next_session_begins_with_the_last_one_s(
    rules: str, least: float, most: float, start: Callable[..., Any]
) -> None:
    """Tools and system prompt are the same; without the rules the fingerprint in front of them is not."""
    requests = read(FOLDER / "claude_code.json")
    sessions = [request["headers"]["X-Claude-Code-Session-Id"] for request in requests]
    first = sessions.index(sessions[-1])
    found = await turns([requests[first - 1], requests[first]], await start(client_rules=rules))
    assert found[0].session != found[1].session
    assert least * found[1].tokens <= found[1].cached <= most * found[1].tokens
