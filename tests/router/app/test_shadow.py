"""``router --shadow``: everything passes as it is, and no fault of ours changes or delays an answer."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_ext.errors import ConfigError
from sglang_ext.protocol.recording import Head, Namer, Request, Writer, names_of, read_recording
from sglang_ext.router import RouterConfig, shadow
from sglang_ext.router.api.chat import ChatCompletions
from sglang_ext.router.estimate.command import main
from sglang_ext.router.estimate.prompts import Units
from sglang_ext.router.shadow import Notes, Seen, ShadowRouter
from sglang_ext.router.telemetry.record_file import RecordFile

WORDS = "It reads files and edits code with care. " * 30
PIECES = [b'data: {"a": %d}\n\n' % at for at in range(5)]
USAGE = b'data: {"usage": {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32}}}\n\n'


class Fleet:
    """Today's server: it answers with the request, or streams."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, dict[str, str], bytes]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.got.append((request.method, request.path_qs, headers, body))
        if b'"stream": true' in body:
            answer = web.StreamResponse(headers={"content-type": "text/event-stream", "x-own": "yes"})
            await answer.prepare(request)
            for piece in [*PIECES, USAGE]:
                await answer.write(piece)
            await answer.write_eof()
            return answer
        if request.path == "/odd":
            return web.Response(status=418, body=b"\x00\xff", headers={"x-own": "odd"})
        digest = hashlib.sha256(body).hexdigest()
        return web.json_response({"digest": digest, "usage": {"completion_tokens": 3}})


@pytest.fixture
async def fleet(stack) -> tuple[Fleet, str]:
    served = Fleet()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", served.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return served, f"http://127.0.0.1:{port}"


@asynccontextmanager
async def shadowed(url: str, path: Path, **flags: Any) -> AsyncIterator[ShadowRouter]:
    config = RouterConfig(shadow=True, record=str(path), worker_urls=(url,), port=0, **flags)
    async with ShadowRouter(config) as running:
        yield running


@pytest.fixture(autouse=True)
def key_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def chat(turn: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": WORDS}]
    for at in range(turn):
        messages += [{"role": "assistant", "content": f"{at}"}, {"role": "user", "content": "go on"}]
    return {"model": "m", "messages": messages, **fields}


async def answers(client: aiohttp.ClientSession, url: str) -> list[Any]:
    """The answers to requests of several kinds."""
    found: list[Any] = []
    for method, path, body in (
        ("GET", "/v1/models?x=%2F", b""),
        ("PUT", "/odd", b"\x01"),
        ("POST", "/v1/chat/completions", json.dumps(chat(0)).encode()),
        ("POST", "/v1/chat/completions", json.dumps(chat(1, stream=True)).encode()),
        ("POST", "/v1/chat/completions", b"{ no JSON"),
        ("POST", "/v1/messages", b"[]"),
    ):
        headers = {"authorization": "Bearer theirs", "x-session-id": "talk"}
        async with client.request(method, url + path, data=body, headers=headers) as answer:
            kept = {name: answer.headers.get(name) for name in ("content-type", "x-own")}
            found.append((answer.status, kept, await answer.read()))
    return found


async def test_everything_passes_and_is_recorded_without_its_words(fleet, client, tmp_path) -> None:
    served, url = fleet
    path = tmp_path / "day.jsonl"
    direct = await answers(client, url)
    before = [(method, target, body) for method, target, _, body in served.got]
    served.got.clear()
    async with shadowed(url, path) as running:
        assert await answers(client, running.url) == direct
        assert [(method, target, body) for method, target, _, body in served.got] == before
        assert {headers["authorization"] for _, _, headers, _ in served.got} == {"Bearer theirs"}
        packed = gzip.compress(json.dumps(chat(2)).encode())
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        async with client.post(running.url + "/v1/chat/completions", data=packed, headers=headers) as answer:
            assert answer.status == 200
    data = path.read_bytes()
    assert b"reads files" not in data
    assert b"talk" not in data
    with path.open("rb") as file:
        lines = list(read_recording(file))
    assert isinstance(lines[0], Head)
    asked = [line for line in lines if isinstance(line, Request)]
    assert [(line.status, line.stream, line.completion_tokens) for line in asked] == [
        (200, False, 3), (200, True, 7), (200, False, 3),
    ]  # fmt: skip
    assert asked[1].cached == 32
    first, second, third = [names_of(line.prompts[0].names) for line in asked]
    assert second[: len(first)] == first
    assert third[: len(second) - 1] == second[:-1]
    assert asked[0].session == asked[1].session != ""
    out = io.StringIO()
    assert main([str(path), "--instances", "1"], out) == 0
    assert "3 requests" in out.getvalue()


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a fault of ours")


PARTS = {
    "seen": (shadow, "Seen"),
    "head": (Seen, "begin"),
    "pieces": (Seen, "feed"),
    "queue": (RecordFile, "put"),
    "lines": (Notes, "_lines"),
    "parsing": (ChatCompletions, "parse"),
    "session": (shadow, "session_of"),
    "encoding": (Units, "encode"),
    "names": (Namer, "names"),
    "blocks": (Writer, "blocks"),
    "encoder": (Writer, "line"),
    "disk": (RecordFile, "_write"),
}


@pytest.mark.parametrize("part", PARTS)
async def test_no_part_that_raises_changes_an_answer(part: str, fleet, client, tmp_path, monkeypatch) -> None:
    _, url = fleet
    direct = await answers(client, url)
    async with shadowed(url, tmp_path / "day.jsonl") as running:
        monkeypatch.setattr(*PARTS[part], raises)
        assert await answers(client, running.url) == direct
        monkeypatch.undo()
    assert running.notes.failures or running.notes.file.dropped


@pytest.mark.parametrize("part", ["lines", "encoding", "names", "disk"])
async def test_no_part_that_hangs_delays_an_answer(part: str, fleet, client, tmp_path, monkeypatch) -> None:
    import threading

    _, url = fleet
    direct, gate = await answers(client, url), threading.Event()

    def hangs(*_: Any) -> Any:
        gate.wait(60)
        raise RuntimeError("late")

    async with shadowed(url, tmp_path / "day.jsonl") as running:
        monkeypatch.setattr(*PARTS[part], hangs)
        try:
            for _ in range(3):
                assert await asyncio.wait_for(answers(client, running.url), 30) == direct
            assert not gate.is_set()
        finally:
            gate.set()
    assert running.notes.file.dropped


async def test_a_worker_that_is_gone_is_a_502(client, tmp_path) -> None:
    async with (
        shadowed("http://127.0.0.1:9", tmp_path / "day.jsonl") as running,
        client.get(running.url + "/x") as answer,
    ):
        assert answer.status == 502


def test_it_needs_a_file_and_workers() -> None:
    for flags in ({}, {"record": "x"}, {"worker_urls": ("http://127.0.0.1:1",)}):
        with pytest.raises(ConfigError, match="--record FILE and --worker-urls") as caught:
            RouterConfig(shadow=True, **flags)
        assert caught.value.field == "--shadow"
    # The fleet's servers ask for keys, not we.
    RouterConfig(shadow=True, record="x", worker_urls=("http://127.0.0.1:1",), host="0.0.0.0")
