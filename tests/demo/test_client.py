"""Reading a streamed answer, from a server of our own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from examples.demo.client import say
from sglang_ext.errors import PeerError

MESSAGES = [{"role": "user", "content": "Hello"}]


def piece(text: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}], "usage": None}


TIERS = {"choices": [], "sglext": {"cached_tokens_details": {"device": 32, "host": 16}}}
USAGE = {"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 2}}


class Server:
    """Answers every chat request with the events it is given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 200
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if self.status != 200:
            return web.Response(status=self.status, text="no room")
        response = web.StreamResponse(headers={"x-kv-instance": "http://one", "x-kv-route-reason": "prefix"})
        await response.prepare(request)
        for event in self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as found:
        yield found


async def test_text_and_where_its_prompt_came_from(server: Server, session: aiohttp.ClientSession) -> None:
    server.events = [piece(None), piece(""), piece("Good "), piece("day"), TIERS, USAGE]
    answer = await say(session, server.url, MESSAGES, 2)
    assert answer.text == "Good day"
    assert (answer.instance, answer.reason) == ("http://one", "prefix")
    assert (answer.prompt_tokens, answer.hbm_tokens, answer.dram_tokens) == (60, 32, 16)
    assert answer.computed_tokens == 12
    assert answer.first_token_s > 0
    assert server.asked[0]["messages"] == MESSAGES
    assert server.asked[0]["max_tokens"] == 2


async def test_nothing_cached(server: Server, session: aiohttp.ClientSession) -> None:
    server.events = [piece("Hi"), USAGE]
    answer = await say(session, server.url, MESSAGES, 1)
    assert (answer.hbm_tokens, answer.dram_tokens, answer.computed_tokens) == (0, 0, 60)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([piece("Hi"), {"error": {"message": "worker died"}}], "worker died"),
        ([piece("Hi")], "says nothing of its tokens"),
        ([USAGE], "no text"),
    ],
)
async def test_an_answer_that_cannot_be_used(
    server: Server, session: aiohttp.ClientSession, events: list[dict[str, Any]], says: str
) -> None:
    server.events = events
    with pytest.raises(PeerError, match=says):
        await say(session, server.url, MESSAGES, 1)


async def test_a_refusal_is_passed_on(server: Server, session: aiohttp.ClientSession) -> None:
    server.status = 503
    with pytest.raises(PeerError, match="answered 503: no room"):
        await say(session, server.url, MESSAGES, 1)


async def test_an_unreachable_router_is_an_error(session: aiohttp.ClientSession) -> None:
    with pytest.raises(PeerError, match="no answer from"):
        await say(session, "http://127.0.0.1:1", MESSAGES, 1)
