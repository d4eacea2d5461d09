"""Requests that run at an instance which is drained go on at another, as if nothing had been.

Between decode servers; those that do both are held to the same answers. The long form has every test with
each kind of server and each mode of transfer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hooked_server import FOLDER
from listening import (
    AGENT,
    BOOTSTRAP,
    GLOO,
    HTTP,
    STORE,
    TRANSFER,
    beyond_loopback,
    ports_of_server,
    rows,
)
from pd_fleet import FaultySpec, fault
from places import CLOCKS_OFF_S, Outside, Place, clock_off_s, place_of
from router_rig import FLAGS, running, until
from token_requests import generate, random_prompt

from sglang_ext.cluster.guard import descendants
from sglang_ext.protocol.agent import ToAgent, Watch
from sglang_ext.protocol.cluster import instance_path
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.router.tokens.tokenizer_check import EVERYTHING
from sglang_ext.stages import StageTimes
from tests.support.compare import Answer, assert_same
from tests.support.lab import clock
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Json = dict[str, Any]
TOKENS, MANY_TOKENS = 96, 192
"""Tokens of an answer; the larger number where it has to last for as long as a command takes."""
RUNS_S, STANDS_S = 0.01, 0.03
"""Seconds for which a scheduler that is made slow runs and stands still, in turns."""
DRAM = ("--kv-dram-size", "64MiB", "--enable-metrics")
SWITCH = "--enable-pd-role-switch"
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
STORY = "A traveller asks the librarian for a map of the town, and then for another one. "


@dataclass
class Fleet:
    """Servers that register with the router of a test; the last two are of the kind that is drained.

    place: where they run.

    kind: `colocated`, `decode`, or `decode-` with the name of a deviation from the defaults, or of a model.
    """

    place: Place
    port: int
    kind: str
    servers: list[ServerProcess] = field(default_factory=list)
    faults: dict[str, Path] = field(default_factory=dict)
    """Where those that prefill or decode look for faults (`faulty_pd_server`)."""


KINDS = ("decode", "colocated", "decode-push", "decode-push-by-layer", "decode-tp2", "decode-lab")


FAMILIES = ("tiny-moe", "tiny-mla", "tiny-mla-moe", "tiny-gemma3")


def with_servers(*short: str, more: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A test of all kinds and more, of which the short form has some."""
    kinds = [pytest.param(kind, marks=() if kind in short else pytest.mark.long) for kind in (*KINDS, *more)]
    return pytest.mark.parametrize("fleet", kinds, indirect=True)


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, leak_guard: LeakGuard, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """A prefill server and two decode servers, or two that do both."""
    port = free_port()
    faults: dict[str, Path] = {}
    kind, _, otherwise = request.param.partition("-")
    where = "here"
    if otherwise == "lab":
        where = otherwise
        request.getfixturevalue("truth")  # while this thread is outside of the lab
    apart = kind == "decode"

    def spec(name: str, *more: str) -> ServerSpec:
        router = ("--kv-router", place.router_url(port), "--kv-instance-id", name, *place.flags)
        mode = ("--kv-transfer-mode", otherwise) if otherwise.startswith("push") else ()
        flags = (*FLAGS, *DRAM, *router, *mode, *more)
        if not apart:
            return ServerSpec(flags=flags)
        faults[name] = place.folder / name
        faults[name].mkdir()
        model = otherwise if otherwise in FAMILIES else "tiny"
        return FaultySpec(model=model, flags=flags, environment={FOLDER: str(faults[name])})

    def decoding(name: str) -> ServerSpec:
        own = spec(name, *switch, "--disaggregation-bootstrap-port", str(free_port()))
        if otherwise != "tp2":
            return own
        return replace(own, flags=(*own.flags, "--tp", "2"), environment={**own.environment, **TWO_RANKS})

    switch = () if otherwise == "push-by-layer" else (SWITCH,)
    names = ("p", "a", "b") if apart else ("a", "b")
    with place_of(where, names, tmp_path_factory.mktemp("place"), leak_guard) as place:
        prefill = [spec("p", *switch)] if apart else []
        decode = [decoding("a"), decoding("b")] if apart else []
        others = [] if apart else [spec("a"), spec("b")]
        hosts = iter(names)
        with (
            leak_guard.adopting(),
            pd_servers(prefill, decode, others, lambda each: place.server(each, next(hosts))) as (pd, rest),
        ):
            yield Fleet(place, port, request.param, [*pd.servers, *rest], faults)


@pytest.fixture
async def router(fleet: Fleet) -> AsyncIterator[Router]:
    config = RouterConfig(
        port=fleet.port, policy="round-robin", health_check_timeout_secs=5.0, **fleet.place.router_options
    )
    async with Router(config) as router:
        await until(lambda: len(router.fleet.usable()) == len(fleet.servers), seconds=60)
        # Before that prompts are matched by their text, and copied ahead of no move.
        await until(lambda: router.tokenizers.trust == EVERYTHING, seconds=60)
        yield router
        router.check()


def bodies(seed: int = 0, *, short: bool = False, tokens: int = TOKENS) -> list[tuple[str, Json]]:
    """Eight requests in every form that can be moved, with answers so long that a busy router finds them
    running. Short prompts are moved at once, others are copied while their requests run."""
    found: list[tuple[str, Json]] = []
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    for number in range(8):
        text = f"Visitor {seed}-{number}. " + STORY * (1 if short else 3)
        stream = number != 3 and number != 6
        if number % 4 == 0:
            body: Json = {"text": text, "sampling_params": sampling}
            found.append(("/generate", {**body, "stream": stream}))
        elif number % 4 == 1:
            body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            found.append(("/v1/completions", {**body, "stream": stream}))
        elif number % 4 == 2:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            found.append(("/v1/chat/completions", {**body, "ignore_eos": True, "stream": stream, **usage}))
        else:
            ids = list(range(50 + number, (90 if short else 200) + number))
            body = {"input_ids": ids, "sampling_params": sampling}
            found.append(("/generate", {**body, "stream": stream}))
    return found


@dataclass
class Received:
    """A client's view of an answer: all text, all ids, the reported number of tokens, and every event."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: int | None = None
    events: int = 0
    instance: str = ""
    names: set[str] = field(default_factory=set)
    error: str = ""
    stages: StageTimes | None = None
    """As its answer reports them, in /generate."""
    seconds: float = 0.0

    @property
    def said(self) -> tuple[str, tuple[int, ...], int | None]:
        return self.text, tuple(self.ids), self.tokens


class Client:
    """Sends requests, and keeps their events as they come."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self.received: list[Received] = []

    async def ask(self, path: str, body: Json) -> Received:
        received = Received()
        self.received.append(received)
        since = time.monotonic()
        async with self._session.post(self._url + path, json=body) as answer:
            received.instance = answer.headers.get("x-kv-instance", "")
            if answer.status != 200:
                received.error = await answer.text()
            elif not body["stream"]:
                _take(received, await answer.json())
            else:
                async for line in answer.content:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        received.events += 1
                        _take(received, json.loads(line[6:]))
        received.seconds = time.monotonic() - since
        return received


def _take(received: Received, event: Json) -> None:
    if "error" in event:
        received.error = json.dumps(event)
        return
    if "meta_info" in event:
        assert event["text"].startswith(received.text), "the text was taken back"
        received.text, received.ids = event["text"], event["output_ids"]
        received.tokens = event["meta_info"]["completion_tokens"]
        received.names.add(event["meta_info"]["id"])
        received.stages = StageTimes.of_details(event["meta_info"].get("cached_tokens_details") or {})
        return
    received.names.add(event["id"])
    for choice in event.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        received.text += part.get("content") or part.get("text") or ""
    if event.get("usage"):
        received.tokens = event["usage"]["completion_tokens"]


@asynccontextmanager
async def client_of(router: Router) -> AsyncIterator[Client]:
    async with session_of(router) as session:
        yield Client(router.url, session)


def session_of(router: Router) -> aiohttp.ClientSession:
    """With the router's key, where it asks for one."""
    key = router.config.api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=120))


async def moved(router: Router, how: str = "moved") -> float:
    value = router.metrics.registry.get_sample_value("sglang_ext_router_moves_total", {"how": how})
    return value or 0.0


async def drain(router: Router, instance: str) -> None:
    async with (
        session_of(router) as session,
        session.post(router.url + instance_path(instance) + "/drain", json={"deadline_s": 60}) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def asked_and_drained(
    router: Router,
    fleet: Fleet,
    client: Client,
    asked: list[tuple[str, Json]],
    enough: asyncio.Event | None = None,
    standing: Callable[[], object] = lambda: None,
) -> list[asyncio.Task[Received]]:
    """Ask, and drain instance a in the middle of its answers: its scheduler stands still from the first words
    of one until the drain has begun, and is slow from then until a request has moved or it is enough. However
    long the router and the other instance take, then, answers do not end before.

    standing: called while it stands still.
    """
    source = router.members.member("a").url
    schedulers = next(each for each in fleet.servers if each.url == source).processes("sglang::scheduler")
    client.received.clear()
    answers = [asyncio.create_task(client.ask(*each)) for each in asked]
    await until(lambda: any(received.instance == source and received.events for received in client.received))
    before = await moved(router)
    for pid in schedulers:
        os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.to_thread(standing)
        await drain(router, "a")
        while not (await moved(router) > before or (enough is not None and enough.is_set())):
            assert not all(answer.done() for answer in answers), "no request was moved"
            for number in (signal.SIGCONT, signal.SIGSTOP):
                for pid in schedulers:
                    os.kill(pid, number)
                await asyncio.sleep(RUNS_S if number is signal.SIGCONT else STANDS_S)
    finally:
        for pid in schedulers:
            os.kill(pid, signal.SIGCONT)
    return answers


@pytest.mark.long
@pytest.mark.parametrize("fleet", ["decode-lab"], indirect=True)
def test_hosts_have_clocks_that_are_minutes_apart(fleet: Fleet) -> None:
    """The premise of the tests below: prefill and both decode servers have clocks to be misled by."""
    if clock.why_not():
        pytest.skip(clock.why_not())
    off = [clock_off_s(server) for server in fleet.servers]
    assert off == pytest.approx([*CLOCKS_OFF_S, CLOCKS_OFF_S[0]], abs=30)
    for server in fleet.servers:
        for pid in server.processes("sglang::scheduler"):
            assert "clock.so" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


@with_servers("decode", more=tuple(f"decode-{model}" for model in FAMILIES))
async def test_every_answer_is_the_undisturbed_one(router: Router, fleet: Fleet) -> None:
    async with client_of(router) as client:
        expected = await asyncio.gather(*(client.ask(*each) for each in bodies()))
        assert not any(received.error for received in expected), expected
        assert len({received.said for received in expected}) == 8
        # Else the instance that requests are moved to may have their prompts already, and nothing is copied.
        for server in fleet.servers:
            await asyncio.to_thread(server.wait_idle)
            await asyncio.to_thread(server.flush)
        url, before = router.members.member("a").url, await moved(router)
        answers = await asked_and_drained(router, fleet, client, bodies())
        await until(lambda: router.fleet.rows[url].state is State.LEFT, seconds=60)
        got = await asyncio.gather(*answers)
    assert await moved(router) > before
    assert [received.error for received in got] == [""] * 8
    for received, true in zip(got, expected, strict=True):
        assert received.said == true.said
        assert len(received.names) == 1, "the answer changed its name in the middle"
        if received.stages is not None:  # of /generate
            # A decode server computes no prompt: where a request has moved, this came with its state.
            assert received.stages.prefill > 0.0
            assert received.stages.total <= received.seconds
    assert any(received.stages is not None and received.instance == url for received in got)
    server = next(server for server in fleet.servers if server.url == url)
    await until(lambda: running([server]) == 0)
    target = next(server for server in fleet.servers[-2:] if server.url != url)
    await until(lambda: copied_ahead(target) > 0)
    router.members.resume("a")
    await until(lambda: len(router.fleet.usable()) == len(fleet.servers))
    await asyncio.to_thread(server.wait_idle)


def copied_ahead(target: ServerProcess) -> float:
    """Blocks of prompts that were brought before their requests were stopped, over all ranks."""
    samples = target.metrics().items()
    return sum(
        value
        for name, value in samples
        if name.startswith("sglang_ext_cache_peers_total{") and 'event="fetched_blocks"' in name
    )


OLD_STATE = {
    "output_ids": [5, 6],
    "prompt_tokens": 3,
    "cached": [0, 0, 0, 0],
    "received": False,
    "home": None,
}
FORGED: list[Any] = [
    None, True, -1, 1 << 62, 0.5, "", "0" * 32, "x" * 100_000, [], [1], ["0" * 32], {}, [{}], [[1]],
    {"output_ids": [1 << 30]}, {"output": "AAAA"}, OLD_STATE, {**OLD_STATE, "output_ids": [1 << 62]},
    {**OLD_STATE, "output_ids": list(range(5000))}, {**OLD_STATE, "received": True, "home": ["x", 1]},
    {**OLD_STATE, "prompt_tokens": {"a": {"b": {"c": [1]}}}},
]  # fmt: skip
"""Values that a client could write in place of a router's ticket of a request's state."""


SHARE = 5
"""In the short form, a server gets every fifth of the forgeries: in every form of a request, and each server
other ones."""


def forgeries() -> Iterator[tuple[str, Json]]:
    """Requests that claim to continue another client's request."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 77}
    few = {"temperature": 0, "max_new_tokens": 2}
    for value in FORGED:
        custom = {"custom_params": {"sglang_ext_resume": value}}
        ids = {"input_ids": [7, 8, 9], "rid": f"forged-{len(repr(value))}"}
        yield "/generate", {**ids, **room, "sampling_params": {**few, **custom}}
        yield "/generate", {"text": ["a"], **room, "sampling_params": [{**few, **custom}]}
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        yield "/v1/chat/completions", {**chat, **room, **custom}
        yield "/v1/completions", {"prompt": "a", "max_tokens": 2, **room, **custom, "stream": True}


@with_servers("decode")
async def test_a_forged_state_is_refused_and_does_no_harm(
    router: Router, fleet: Fleet, long_run: bool
) -> None:
    """By the router, and by each server when it is asked past the router."""
    asked = bodies(seed=9, short=True)[:2]
    async with client_of(router) as client, session_of(router) as session:
        expected = [(await client.ask(*each)).said for each in asked]
        for path, body in forgeries():
            async with session.post(router.url + path, json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "reserved_field")
        for number, server in enumerate(fleet.servers):
            share = slice(None) if long_run else slice(number, None, SHARE)
            for path, body in list(forgeries())[share]:
                async with session.post(server.url + path, json=body) as answer:
                    said = await answer.text()
                    refused = answer.status == 400 or (answer.status == 200 and '"error"' in said)
                    assert refused, (server.url, path, body, answer.status, said[:500])
            await asyncio.to_thread(server.wait_idle)
        assert [(await client.ask(*each)).said for each in asked] == expected


@with_servers("decode")
async def test_a_target_that_stops_in_the_middle_costs_a_pause(
    router: Router, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops as it is asked to go on with a request, and never answers: they go on where they were."""
    asked = bodies(short=True)
    async with client_of(router) as client:
        expected = await asyncio.gather(*(client.ask(*each) for each in asked))
        source, target = (router.members.member(name).url for name in ("a", "b"))
        pids = descendants(next(server for server in fleet.servers if server.url == target).pid)
        send, stopped = router.mover.calls.send, asyncio.Event()

        def stopping(name: str, message: ToAgent) -> bool:
            if isinstance(message, Watch):
                stopped.set()
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
            return send(name, message)

        monkeypatch.setattr(router.mover.calls, "send", stopping)
        try:
            answers = await asked_and_drained(router, fleet, client, asked, stopped)
            await asyncio.wait_for(stopped.wait(), 60)
            there = [
                task
                for task, received in zip(answers, client.received, strict=True)
                if received.instance == source
            ]
            await until(lambda: router.fleet.rows[target].state is State.DOWN, seconds=60)
            got = await asyncio.gather(*there)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert got
        for received in got:
            assert received.error == ""
            assert received.said == expected[client.received.index(received)].said
        assert await moved(router, "failed") >= 1
        router.members.resume("a")
        await asyncio.gather(*answers)
        await until(lambda: len(router.fleet.usable()) == len(fleet.servers))
    for server in fleet.servers:
        await asyncio.to_thread(server.wait_idle)


async def role(router: Router, instance: str, wanted: str) -> tuple[int, Json]:
    async with (
        session_of(router) as session,
        session.post(router.url + instance_path(instance) + "/role", json={"role": wanted}) as answer,
    ):
        return answer.status, await answer.json()


async def command(router: Router, verb: str, *words: str) -> tuple[int | None, str]:
    """``sglang-ext VERB --router ...``: its exit status, and its output."""
    key = {"SGLANG_EXT_API_KEY": router.config.api_key or ""}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_ext.cli", verb, "--router", router.url, *words),
        env={**os.environ, **key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 300)
    return process.returncode, said.decode()


def listens(server: ServerProcess) -> Counter[str]:
    """The sockets of a server by their rows in docs/security.md, gloo's and all others on loopback alone. A
    change of role ends and makes parts of it anew, bootstrap's server among them."""
    pids = server.pids
    assert beyond_loopback(pids) == []
    found = rows(pids, ports_of_server(server.server_info()))
    assert found.pop(GLOO) > 0
    assert found - Counter({BOOTSTRAP: 1}) == Counter({HTTP: 1, AGENT: 1, TRANSFER: 2, STORE: 1})
    return found


@with_servers()
async def test_a_server_that_changes_its_role_keeps_its_cache(router: Router, fleet: Fleet) -> None:
    if fleet.kind in ("decode-push-by-layer", "decode-tp2"):
        pytest.skip("its servers do not change their roles: layers are watched, or prefill has one rank")
    if fleet.kind == "colocated":
        status, said = await role(router, "a", "prefill")
        assert (status, said["error"]["code"]) == (409, "role_is_fixed")
        return
    status, complaint = await command(router, "role", "p", "decode")
    assert status == 1
    assert "last prefill" in complaint
    async with client_of(router) as client:
        asked = bodies(seed=1, tokens=MANY_TOKENS)
        expected = await asyncio.gather(*(client.ask(*each) for each in asked))
        url = router.members.member("b").url
        at_b = [each for each, received in zip(asked, expected, strict=True) if received.instance == url]
        assert at_b
        client.received.clear()
        on_loopback = fleet.kind == "decode"
        before = listens(fleet.servers[-1]) if on_loopback else None
        # Traffic goes on through the change, to and fro.
        for wanted in ("prefill", "decode"):
            answers = [asyncio.create_task(client.ask(*each)) for each in asked]
            await until(lambda: sum(received.events > 1 for received in client.received) >= 5)
            # As a user changes it.
            assert await command(router, "role", "b", wanted) == (
                0,
                f"b is {wanted}, ready\n",
            )
            got = await asyncio.gather(*answers)
            assert [received.error for received in got] == [""] * 8
            assert [received.said for received in got] == [received.said for received in expected]
            client.received.clear()
            assert before is None or listens(fleet.servers[-1]) == before
            if wanted == "prefill":
                await found_by_what_it_had(router, url, at_b)


@with_servers()
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "twin"])
async def test_kv_that_was_kept_answers_alike_in_the_other_role(
    router: Router, fleet: Fleet, truth: ServerProcess, damaged: bool
) -> None:
    """A server prefills with the KV that it had read as a decode server; and decodes with the KV that it had
    prefilled. The twin shows that they do: the last token's value in the last layer has one bit changed while
    the role changes."""
    if fleet.kind not in ("decode", "decode-push", "decode-lab"):
        pytest.skip("its servers do not change their roles")
    servers = {name: router.members.member(name).url for name in ("p", "b")}
    prefills, decodes = "x-kv-prefill-instance", "x-kv-instance"
    # In its old role and then in its new one: the header that names it, and the other server of that role.
    was = {"b": (decodes, "a"), "p": (prefills, "b")}
    wanted = {"b": ("prefill", (prefills, "p")), "p": ("decode", (decodes, "a"))}
    rng = random.Random(f"kept {damaged}")
    async with session_of(router) as session:

        async def asked_of(name: str, prompt: list[int], header: str, but: str) -> Answer:
            """This server's answer while the other one of that role is drained."""
            await drain(router, but)
            await until(lambda: len(router.fleet.usable()) == len(fleet.servers) - 1)
            answer, headers = await generate(session, router.url, prompt)
            assert headers[header] == servers[name]
            router.members.resume(but)
            await until(lambda: len(router.fleet.usable()) == len(fleet.servers), seconds=60)
            return answer

        try:
            for name, (new_role, now) in wanted.items():
                prompt = random_prompt(rng, 13 * 16)
                await asked_of(name, prompt, *was[name])
                for server in fleet.servers:
                    await asyncio.to_thread(server.wait_idle)
                with fault(fleet.faults[name], "damage-kept") if damaged else nullcontext():
                    assert (await role(router, name, new_role))[0] == 200
                again = [*prompt, *random_prompt(rng, 5)]
                answer = await asked_of(name, again, *now)
                expected = await asyncio.to_thread(
                    Outside(truth, fleet.place).generate, again, max_new_tokens=len(answer.tokens)
                )
                with pytest.raises(AssertionError) if damaged else nullcontext():
                    assert_same(expected, answer)
        finally:
            for server in fleet.servers:
                await asyncio.to_thread(server.wait_idle)
                await asyncio.to_thread(server.flush)
            for name, old_role in (("p", "prefill"), ("b", "decode")):
                assert (await role(router, name, old_role))[0] == 200
    await until(lambda: len(router.fleet.usable()) == len(fleet.servers))


@pytest.mark.long
@with_servers("decode")
async def test_roles_change_by_themselves(fleet: Fleet) -> None:
    """Long prompts: one of two decode servers is made a prefill server, under load, and finds its KV.

    Its short twins: `tests/router/cluster/test_role_policy.py` (the decision) and the change of a role above.
    """
    if fleet.kind not in ("decode", "decode-push", "decode-lab"):
        pytest.skip("its servers do not change their roles")
    config = RouterConfig(
        port=fleet.port,
        policy="round-robin",
        health_check_timeout_secs=5.0,
        role_controller="on",
        role_dwell_secs=3.0,
        **fleet.place.router_options,
    )
    async with Router(config) as router, client_of(router) as client:
        await until(lambda: len(router.fleet.usable()) == len(fleet.servers), seconds=60)
        await until(lambda: router.tokenizers.trust == EVERYTHING, seconds=60)
        asked = bodies(seed=5, tokens=MANY_TOKENS)
        expected = await asyncio.gather(*(client.ask(*each) for each in asked))
        # The client sees the instance where its answer began; it may end at another.
        decoded_by = {received.instance: each for each, received in zip(asked, expected, strict=True)}
        assert len(decoded_by) == 2

        async def lane(number: int) -> None:
            for turn in range(1 << 20):
                ids = [100 + (number * 7919 + turn * 104_729 + at) % 300 for at in range(900)]
                body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
                received = await client.ask("/generate", {**body, "stream": True})
                assert received.error == ""

        lanes = [asyncio.create_task(lane(number)) for number in range(6)]
        answers: list[Received] = []
        try:
            while not (changes := router.role_changes.recent()):
                answers += await asyncio.gather(*(client.ask(*each) for each in asked))
                assert not any(each.done() for each in lanes)
        finally:
            for each in lanes:
                each.cancel()
            ends = await asyncio.gather(*lanes, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
        assert [(change.role, change.why, change.outcome) for change in changes] == [
            ("prefill", "prefill", "done")
        ]
        for number, received in enumerate(answers):
            assert (received.error, received.said) == ("", expected[number % len(asked)].said)
        changed = router.members.member(changes[0].instance)
        await found_by_what_it_had(router, changed.url, [decoded_by[changed.url]])
        # The load is another now, and the controller may be about to change them back.
        await until(lambda: all(member.changing is None for member in router.members.roster), seconds=60)
    # Restore the roles that the other tests expect.
    config = RouterConfig(port=fleet.port, health_check_timeout_secs=5.0, **fleet.place.router_options)
    async with Router(config) as router:
        await until(lambda: len(router.fleet.usable()) == len(fleet.servers), seconds=60)
        for instance, wanted in (("p", "prefill"), (changed.instance, "decode")):
            status, said = await role(router, instance, wanted)
            assert status == 200, said


async def found_by_what_it_had(router: Router, url: str, asked: list[tuple[str, Json]]) -> None:
    """Send requests until the server that decoded has prefilled one: it finds its KV."""
    async with session_of(router) as session:
        for path, body in asked * 4:
            body = {**body, "stream": False}
            async with session.post(router.url + path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                if answer.headers["x-kv-prefill-instance"] == url:
                    assert int(answer.headers["x-kv-cached-tokens"]) >= 32
                    return
    raise AssertionError("no request was prefilled by the server that had decoded")
