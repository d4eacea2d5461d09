"""The router in front of a prefill and a decode server: both get the request, decode answers."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from dram_damage import arena_files, make_huge, snapshot
from ollama_requests import CHAT, PROMPT
from ollama_requests import ask as ask_whole
from ollama_requests import settled as but_for_times
from pd_fleet import TRUTH, FaultySpec, fault, kill, nothing_is_left
from places import KINDS, Place, place_of
from router_rig import sglang_program
from token_requests import GREEDY, advise, cold, generate, random_prompt, settled

from sglang_ext.keys import encode_tokens
from sglang_ext.patches.versions import installed_sglang_version
from sglang_ext.protocol.cluster import instance_path
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.router.policies import Match
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import until
from sglang_ext.tiers import Tier
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

Json = dict[str, Any]
HBM_TOKENS = 8192
DECODE_TOKENS = 4096
"""Decode has half the room of prefill."""
# In short chunks: a prompt that is aborted does not keep a busy machine's prefill for long.
FLAGS = (
    *("--radix-cache-backend", "global", "--chunked-prefill-size", "512"),
    *("--max-total-tokens", str(HBM_TOKENS)),
)
DECODE_FLAGS = (*FLAGS[:-1], str(DECODE_TOKENS))
BLOCK = 16
NS = ("tokens", None, None, None)
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
def port() -> int:
    """Where the two servers look for a router; only some tests have one there."""
    return free_port()


def tells(router: str) -> tuple[str, ...]:
    return ("--kv-router", router, "--kv-dram-size", "56MB", "--kv-check", "--enable-metrics")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the decode server looks for faults."""
    return tmp_path_factory.mktemp("faults") / "decode"


@pytest.fixture(scope="module")
def cluster(leak_guard: LeakGuard, port: int, faults: Path) -> Iterator[tuple[PdServers, ServerProcess]]:
    """One prefill and one decode server, and a colocated one."""
    told = tells(f"http://127.0.0.1:{port}")
    prefill = ServerSpec(flags=(*FLAGS, *told), environment=STRICT)
    decode = FaultySpec(flags=(*DECODE_FLAGS, *told)).looking_at(faults)
    with leak_guard.adopting(), pd_servers([prefill], [decode], [ServerSpec(flags=FLAGS)]) as (pd, others):
        yield pd, others[0]
        pd.prefill[0].server.stop()  # a restarted server may have replaced the first one


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


def connections(decode: ServerProcess) -> Json:
    """To prefill servers: how many there are, and made ahead of requests and by requests."""
    told = decode.metrics()
    return {
        what: sum(value for sample, value in told.items() if sample.startswith(prefix))
        for what, prefix in (
            ("there", 'sglang_ext_pd_prefill_servers{state="connected"'),
            ("ahead", 'sglang_ext_pd_connects_total{tp_rank="0",why="ahead"'),
            ("request", 'sglang_ext_pd_connects_total{tp_rank="0",why="request"'),
        )
    }


@pytest.fixture(params=KINDS)
def placed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard, port: int
) -> Iterator[tuple[Place, PdServers, ServerProcess]]:
    """The cluster, and where it is; in a lab it is one of its own."""
    names = ("prefill", "decode", "alone")
    with place_of(request.param, names, tmp_path_factory.mktemp("place"), leak_guard) as place:
        if place.lab is None:
            yield place, *request.getfixturevalue("cluster")
            return
        spec, small = (
            ServerSpec(flags=(*flags, *tells(place.router_url(port)), *place.flags))
            for flags in (FLAGS, DECODE_FLAGS)
        )
        hosts = iter(names)
        with (
            leak_guard.adopting(),
            pd_servers([spec], [small], [TRUTH], lambda each: place.server(each, next(hosts))) as (
                pd,
                others,
            ),
        ):
            yield place, pd, others[0]
            pd.prefill[0].server.stop()


async def test_decode_is_connected_before_the_first_request(
    port: int,
    placed: tuple[Place, PdServers, ServerProcess],
    rng: random.Random,
    leak_guard: LeakGuard,
) -> None:
    """Because the router announced the prefill server; and anew when that was killed and came back."""
    place, pd, alone = placed
    decode = pd.decode[0]
    config = RouterConfig(port=port, **place.router_options)

    async def answers(router: Router) -> None:
        prompt = random_prompt(rng, 10 * BLOCK)
        async with aiohttp.ClientSession(headers=place.headers) as client:
            answer, headers = await generate(client, router.url, prompt)
            assert headers["x-kv-prefill-instance"] == pd.prefill[0].server.url
            assert_same(await cold(client, alone, prompt), answer)

    async with Router(config) as router:
        router.agents.verdict_s = 20.0
        for made in (1, 2):
            await until(lambda: len(router.fleet.usable()) == 2, 60, "both servers")
            wanted = {"there": 1, "ahead": made, "request": 0}
            await until(lambda w=wanted: connections(decode) == w, 30, "a connection")
            await answers(router)
            assert connections(decode) == wanted, "a request has connected by itself"
            if made == 1:
                kill(pd.prefill[0].server)
                await until(lambda: connections(decode)["there"] == 0, 30, "the verdict")
                with leak_guard.adopting():
                    fresh = place.server(pd.prefill[0].server.spec, "prefill")
                    pd.prefill[0].server = fresh
                    await asyncio.to_thread(fresh.start)
        router.check()


async def test_a_decode_server_with_another_rope_is_refused_by_its_name(
    cluster: tuple[PdServers, ServerProcess], port: int, rng: random.Random
) -> None:
    """Its weights are equal. With both values of the setting: by the servers, and by a router with which they
    register, which asks the decode server that fits."""
    pd, alone = cluster
    prefill, first, prompt = pd.prefill[0].server, pd.decode[0], random_prompt(rng, 10 * BLOCK)
    flags = (*first.spec.flags, "--json-model-override-args", '{"rope_theta": 654321.0}')
    body = {"input_ids": prompt, "sampling_params": GREEDY}
    with ServerProcess(replace(first.spec, flags=flags)) as other:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
            # A router without the servers' registrations.
            async with (
                Router(RouterConfig(worker_urls=(prefill.url, other.url), port=0)) as router,
                client.post(f"{router.url}/generate", json=body) as refused,
            ):
                text = await refused.text()
                assert refused.status == 500, text
                assert re.search(r"the models' settings differ: rope\S+ \(\S+ there, 654321\.0 here\)", text)
            async with Router(RouterConfig(port=port)) as router:
                rows = router.fleet.rows
                servers = {prefill.url, first.url, other.url}
                await until(
                    lambda: {url for url, row in rows.items() if row.registration and row.facts} == servers,
                    60,
                    "three servers",
                )
                async with client.get(f"{router.url}/cluster") as answer:
                    (found,) = (await answer.json())["incompatible"]
                names = {url: row.registration.instance for url, row in rows.items() if row.registration}
                halves = ([names[prefill.url]], [names[other.url]])
                assert (found["instances"], found["others"]) == halves
                (setting,) = found["differences"]
                assert "rope" in setting["setting"]
                assert setting["other"] == "654321.0" != setting["one"]
                for _ in range(4):
                    answered, headers = await generate(client, router.url, prompt)
                    assert headers["x-kv-instance"] == first.url
                assert_same(await cold(client, alone, prompt), answered)
                drain = instance_path(names[first.url], "drain")
                async with client.post(router.url + drain, json={}) as answer:
                    assert answer.status == 200
                await until(lambda: rows[first.url].state is State.LEFT, 60, "the drain")
                async with client.post(f"{router.url}/generate", json=body) as refused:
                    text = await refused.text()
                assert refused.status == 503, text
                assert "no prefill and decode instance fit together: rope" in text
                assert "654321.0 at" in text


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
        # The comparison can distinguish answers.
        assert len(answers) >= 3
        assert all(row.in_flight == 0 for row in router.fleet.rows.values())
        router.check()


def alike(one: list[float | None], other: list[float | None]) -> bool:
    """Whether log probabilities are equal, but for rounding."""
    values = (np.array(each, np.float64) for each in (one, other))
    return np.allclose(*values, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_log_probabilities_of_the_prompt(
    stream: bool, cluster: tuple[PdServers, ServerProcess], faults: Path
) -> None:
    """As evaluations ask for them. Prefill computes them, decode answers."""
    pd, alone = cluster
    body = {
        "model": "m",
        "prompt": TEXT,
        "echo": True,
        "logprobs": 2,
        "temperature": 0,
        "max_tokens": 3,
        "stream": stream,
    }

    async def asked(client: aiohttp.ClientSession, url: str) -> tuple[list[str], list[float | None]]:
        tokens: list[str] = []
        values: list[float | None] = []
        async with client.post(url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            lines = (await answer.text()).splitlines()
        for line in lines:
            data = line.removeprefix("data: ")
            if not data.startswith("{"):
                continue
            for choice in json.loads(data)["choices"]:
                if choice["logprobs"] is not None:
                    tokens += choice["logprobs"]["tokens"]
                    values += choice["logprobs"]["token_logprobs"]
        return tokens, values

    config = RouterConfig(worker_urls=tuple(server.url for server in pd.servers), port=0)
    async with (
        Router(config) as router,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client,
    ):
        tokens, values = await asked(client, alone.url)
        assert len(tokens) > 50
        for _ in range(2):
            got_tokens, got_values = await asked(client, router.url)
            assert got_tokens == tokens
            assert alike(got_values, values)
        # The twin: one bit of the values that prefill sends.
        with fault(faults, "damage-logprobs"):
            got_tokens, got_values = await asked(client, router.url)
        assert got_tokens == tokens
        assert not alike(got_values, values)


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
async def test_ollama_is_answered_by_a_pair_as_by_one_server(
    path: str, cluster: tuple[PdServers, ServerProcess], client: aiohttp.ClientSession
) -> None:
    if path == "/api/chat" and installed_sglang_version() in ("0.5.21", "0.5.22"):
        pytest.skip("beside transformers 5, servers of this version answer every /api/chat with 500")
    pd, alone = cluster
    prefill, decode = pd.servers
    body = CHAT if path == "/api/chat" else PROMPT
    whole = {**body, "stream": False}

    def text(answer: Json) -> str:
        return str(answer["message"]["content"] if path == "/api/chat" else answer["response"])

    expected, _ = await ask_whole(client, alone.url + path, whole)
    streamed, _ = await ask_whole(client, alone.url + path, body)
    async with Router(RouterConfig(worker_urls=(prefill.url, decode.url), port=0)) as router:
        for _ in range(2):
            async with client.post(router.url + path, json=whole) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.headers["x-kv-instance"] == decode.url
                assert answer.headers["x-kv-prefill-instance"] == prefill.url
                assert but_for_times(await answer.json()) == but_for_times(expected)
            lines, kind = await ask_whole(client, router.url + path, body)
            assert kind == "application/x-ndjson"
            # SGLang 0.5.23 leaves the last piece out of a stream; the router's has all of the text.
            assert "".join(map(text, lines)) == text(expected)
            assert but_for_times(lines[-1]) == but_for_times(streamed[-1])
        # The twin: a prompt with one more letter is answered otherwise.
        changed = json.loads(json.dumps(whole).replace("The librarian", "Ahe librarian", 1))
        answer_to_it, _ = await ask_whole(client, router.url + path, changed)
        assert text(answer_to_it) != text(expected)
        router.check()
    assert nothing_is_left(pd.servers, 30)


# -- decode with half the room of prefill ---------------------------------------------------------


@pytest.mark.parametrize("room", [40, pytest.param(400, marks=pytest.mark.long)])
async def test_a_prompt_that_all_but_fills_decodes_pool_is_answered(
    room: int,
    cluster: tuple[PdServers, ServerProcess],
    faults: Path,
    client: aiohttp.ClientSession,
    rng: random.Random,
) -> None:
    """It leaves half of prefill's pool free. SGLang's decode keeps room for 512 tokens of any answer."""
    pd, alone = cluster
    prompt = random_prompt(rng, DECODE_TOKENS - room)
    expected = await cold(client, alone, prompt)
    async with Router(RouterConfig(worker_urls=tuple(each.url for each in pd.servers), port=0)) as router:
        answer, _ = await generate(client, router.url, prompt)
        assert_same(expected, answer)
        assert_same(expected, await asyncio.to_thread(pd.generate, prompt, max_new_tokens=8))
        assert await asyncio.to_thread(nothing_is_left, pd.servers, 30)
        # The twin: one damaged bit.
        for server in pd.servers:
            await asyncio.to_thread(server.flush)
        with fault(faults, "damage"):
            damaged, _ = await generate(client, router.url, prompt)
        with pytest.raises(AssertionError):
            assert_same(expected, damaged)
        await asyncio.to_thread(pd.wait_idle)
        for server in pd.servers:
            await asyncio.to_thread(server.flush)
        router.check()


def assert_refused(status: int, text: str, why: str, *, stream: bool) -> None:
    """With 400; a stream of SGLang's has begun by then, and its only event carries that status."""
    assert re.search(why, text), text
    if not stream:
        assert status == 400, text
        return
    event, end = (line.removeprefix("data: ") for line in text.splitlines() if line)
    assert json.loads(event)["meta_info"]["finish_reason"]["status_code"] == 400
    assert end == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_decode_has_no_room_for_is_refused_with_its_length(
    stream: bool, cluster: tuple[PdServers, ServerProcess], client: aiohttp.ClientSession, rng: random.Random
) -> None:
    """By decode, which reports how much it takes, and not after a deadline; nothing stays behind at prefill.
    Through the router, and where decode is asked itself."""
    pd, alone = cluster
    prompt = random_prompt(rng, DECODE_TOKENS + 10)
    why = rf"{len(prompt)} tokens.*maximum allowed length \({DECODE_TOKENS - 6} tokens\)"
    body = {"input_ids": prompt, "sampling_params": GREEDY, "stream": stream}
    small = random_prompt(rng, 100)
    expected = await cold(client, alone, small)
    async with Router(RouterConfig(worker_urls=tuple(each.url for each in pd.servers), port=0)) as router:
        async with client.post(f"{router.url}/generate", json=body) as refused:
            text = await refused.text()
            assert_refused(refused.status, text, why, stream=stream)
        await asyncio.to_thread(pd.wait_idle)
        assert await asyncio.to_thread(nothing_is_left, pd.servers, 30)
        answer, _ = await generate(client, router.url, small)
        assert_same(expected, answer)
        router.check()
    async with client.post(f"{pd.decode[0].url}/generate", json=body | pd.pair()) as refused:
        assert_refused(refused.status, await refused.text(), why, stream=stream)
    assert await asyncio.to_thread(nothing_is_left, pd.servers, 30)


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


async def test_an_abort_ends_the_named_request_only(cluster: tuple[PdServers, ServerProcess]) -> None:
    """Requests whose names begin with the same characters go on."""
    pd, _ = cluster
    config = RouterConfig(worker_urls=tuple(server.url for server in pd.servers), port=0)
    async with (
        Router(config) as router,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as client,
    ):

        async def ask(rid: str, tokens: int) -> Json:
            sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            body = {"text": f"Visitor {rid}. {TEXT}", "rid": rid, "sampling_params": sampling}
            async with client.post(router.url + "/generate", json=body) as answer:
                value: Json = await answer.json()
                return value

        named = asyncio.create_task(ask("job-1", 3000))
        others = [asyncio.create_task(ask(rid, 64)) for rid in ("job-10", "job-11")]
        await until(lambda: len(router.flights) == 3)
        async with client.post(router.url + "/abort_request", json={"rid": "job-1"}) as answer:
            assert await answer.json() == {"aborted": 1}
        for value in await asyncio.gather(*others):
            assert value["meta_info"]["finish_reason"] == {"type": "length", "length": 64}
        assert "abort" in json.dumps(await named).lower()


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
        script = str(Path(__file__).parents[1].joinpath("pd_kits.py"))
        size = "8" if long_run else "2"
        out = await sglang_program(
            "script", script, kit, *urls, str(model_path("tiny")), str(data), size, cwd=tmp_path
        )
    assert f"{kit} passed" in out


# -- hints ----------------------------------------------------------------------------------------


def holds(router: Router, server: ServerProcess, prompt: list[int]) -> Match:
    return router.trees.match(NS, encode_tokens(prompt)).get(server.url, Match(0))


async def said_and_pushed_out(
    router: Router, client: aiohttp.ClientSession, pd: PdServers, rng: random.Random
) -> tuple[list[int], dict[str, tuple[Path, int]]]:
    """A conversation of the session ``s`` whose KV both servers have in DRAM only, and of each the last byte
    of it in its arena."""
    arenas = {server.url: arena_files(server.pid)[0] for server in pd.servers}
    before = {url: snapshot(arena) for url, arena in arenas.items()}
    prompt = random_prompt(rng, 20 * BLOCK)
    answer, _ = await generate(client, router.url, prompt, session="s")
    said = [*prompt, *answer.tokens]
    known = len(said) // BLOCK * BLOCK
    for server in pd.servers:  # decode's KV goes back to prefill
        await until(lambda s=server: holds(router, s, said).tokens >= known, 20, "both to hold it")
        await asyncio.to_thread(server.wait_idle)
    last = {}
    for url, arena in arenas.items():
        changed: list[int] = []

        def copied(url: str = url, arena: Path = arena, changed: list[int] = changed) -> bool:
            now = snapshot(arena)
            changed[:] = np.flatnonzero(now != before[url])[-1:].tolist()
            return bool(changed) and np.array_equal(now, snapshot(arena))

        await until(copied, 20, "a copy in DRAM")
        last[url] = (arena, changed[0])
    for _ in range(HBM_TOKENS // 1500 + 1):
        await generate(client, router.url, random_prompt(rng, 1500))
    for server in pd.servers:
        await until(
            lambda s=server: holds(router, s, said) == Match(known, own=True, below={Tier.DRAM: known}),
            20,
            "HBM to be rid",
        )
    return said, last


async def hinted_turn(
    router: Router, client: aiohttp.ClientSession, pd: PdServers, said: list[int], rng: random.Random
) -> tuple[list[int], Answer]:
    """The next request of the session ``s``, after its hint: both servers had all in HBM before it."""
    prefill, decode = pd.prefill[0].server, pd.decode[0]
    known = len(said) // BLOCK * BLOCK
    told = await advise(client, router, session="s")
    assert (told["instance"], told["decode"]) == (prefill.url, decode.url)
    ready = await settled(client, router, told["id"])
    assert ready["state"] == "ready"
    assert (ready["moved_tokens"], ready["decode_moved_tokens"]) == (known, known)
    for server in pd.servers:
        await until(lambda s=server: holds(router, s, said).hbm == known, 60, "the index to see it")
    turn = [*said, *random_prompt(rng, 5)]
    answer, headers = await generate(client, router.url, turn, session="s")
    assert headers["x-kv-route-reason"] == "advised"
    assert headers["x-kv-instance"] == decode.url
    assert headers["x-kv-prefill-instance"] == prefill.url
    return turn, answer


@pytest.mark.long
async def test_a_hint_brings_kv_up_at_both_ends_and_changes_no_answer(
    port: int,
    cluster: tuple[PdServers, ServerProcess],
    client: aiohttp.ClientSession,
    rng: random.Random,
) -> None:
    """And one damaged bit is seen, wherever it lies: else the same answer would prove nothing."""
    pd, alone = cluster
    async with Router(RouterConfig(port=port, policy="prompt-tree")) as router:
        router.agents.verdict_s = 20.0  # on a busy machine a server may be without a core for longer than 3 s
        await until(
            lambda: len(router.fleet.usable()) == 2 and all(router.trees.trusted(s.url) for s in pd.servers),
            30,
            "both servers",
        )
        said, _ = await said_and_pushed_out(router, client, pd, rng)
        turn, answer = await hinted_turn(router, client, pd, said, rng)
        assert answer.cached_tokens == len(said) // BLOCK * BLOCK
        assert_same(await cold(client, alone, turn), answer)
        for server in pd.servers:
            said, last = await said_and_pushed_out(router, client, pd, rng)
            arena, offset = last[server.url]
            make_huge(arena, offset)
            turn, damaged = await hinted_turn(router, client, pd, said, rng)
            with pytest.raises(AssertionError):
                assert_same(await cold(client, alone, turn), damaged)
            await asyncio.to_thread(pd.wait_idle)
            for each in pd.servers:
                await asyncio.to_thread(each.flush)
        router.check()


def state_of(router: Router, id: str) -> str:
    entry = router.advisor.book.find(id)
    return "" if entry is None else entry.state.value


async def test_a_hint_that_has_expired_changes_no_answer(
    port: int,
    cluster: tuple[PdServers, ServerProcess],
    client: aiohttp.ClientSession,
    rng: random.Random,
) -> None:
    """Its request is placed like any other; the twin's request comes in time, and follows the hint."""
    pd, alone = cluster
    async with Router(RouterConfig(port=port, policy="prompt-tree")) as router:
        router.agents.verdict_s = 20.0
        await until(
            lambda: len(router.fleet.usable()) == 2 and all(router.trees.trusted(s.url) for s in pd.servers),
            30,
            "both servers",
        )
        said = random_prompt(rng, 20 * BLOCK)
        for ttl_s in (0.5, 60):
            answer, _ = await generate(client, router.url, said, session="s")
            said += answer.tokens
            told = await advise(client, router, session="s", ttl_s=ttl_s)
            assert (told["instance"], told["decode"]) == tuple(server.url for server in pd.servers)
            await settled(client, router, told["id"])
            if ttl_s < 1:
                await until(lambda told=told: state_of(router, told["id"]) == "expired", 20, "its end")
            said += random_prompt(rng, 5)
            answer, headers = await generate(client, router.url, said, session="s")
            assert (headers["x-kv-route-reason"] == "advised") == (ttl_s > 1)
            assert headers["x-kv-prefill-instance"] == pd.prefill[0].server.url
            assert_same(await cold(client, alone, said), answer)
            said += answer.tokens
        router.check()
