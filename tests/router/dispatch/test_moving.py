"""Requests that are moved while they run: stand-in workers, and agents that send the reports that a test
scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import (
    MAX_TAG,
    Advise,
    Advised,
    Expecting,
    Export,
    Fetch,
    FromAgent,
    Park,
    Parked,
    Resume,
    Running,
    Source,
    ToAgent,
    Unpark,
    Watch,
)
from sglang_ext.protocol.cluster import Registration
from sglang_ext.router import Router
from sglang_ext.router.api.validation import MAX_NAME_CHARACTERS
from sglang_ext.router.dispatch.move_calls import LEAST_AHEAD
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.testing.waiting import until
from tests.support.servers.workers import Gate, StandInWorker

pytestmark = pytest.mark.slow

EPOCH = bytes(16)
STATE = Resume(encode_tokens([1]), bytes(16))
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi there"}], "max_tokens": 8},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 8},
}


@dataclass
class Agents(AgentChannels):
    """Agents of all workers. Each stops the requests that it is asked to stop, and reports that a request
    runs when the worker has received it with the ticket sent to the agent."""

    router: Router
    why: str = ""
    silent: set[type] = field(default_factory=set)
    endpoints: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Where the instances' KV can be read; nowhere, unless a test says so."""
    told: list[tuple[str, ToAgent]] = field(default_factory=list)
    workers: tuple[StandInWorker, ...] = ()
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def registration(self, name: str) -> Registration | None:
        return Registration(url=name, instance="i", epoch="0" * 32, endpoints=self.endpoints.get(name, ()))

    def send(self, name: str, message: ToAgent) -> bool:
        self.told.append((name, message))
        answer: FromAgent | None = None
        if isinstance(message, Park):
            export = message.id if self.endpoints else ""
            answer = Parked(
                EPOCH, message.id, self.why, STATE, meeting="127.0.0.1:7", bootstrap_room=5, export=export
            )
        elif isinstance(message, Advise):
            answer = Advised(EPOCH, message.id, "done", 0, 0, 0)
        elif isinstance(message, Fetch):
            answer = Expecting(EPOCH, message.id)
        elif isinstance(message, Watch):
            answer = Expecting(EPOCH, message.ticket)
            self.running.append(asyncio.create_task(self._says_that_it_runs(name, message)))
        if answer is not None and type(message) not in self.silent:
            asyncio.get_running_loop().call_soon(self.router.mover.calls.on_message, name, answer)
        return True

    async def _says_that_it_runs(self, name: str, watch: Watch) -> None:
        if Running in self.silent:
            return
        (worker,) = [worker for worker in self.workers if worker.url == name]
        await until(lambda: watch.ticket in tickets_at(worker), 10)
        self.router.mover.calls.on_message(name, Running(EPOCH, watch.id))

    def ends(self) -> list[bool]:
        """The outcome of each stopped request: whether it stays."""
        return [message.stay for _, message in self.told if isinstance(message, Unpark)]


def tickets_at(worker: StandInWorker) -> list[Any]:
    """Of the requests that a worker has got."""
    bodies = [body.get("sampling_params", body) for _, body, _ in worker.requests]
    return [body["custom_params"]["sglang_ext_resume"] for body in bodies if body.get("custom_params")]


@dataclass
class Rig:
    source: StandInWorker
    target: StandInWorker
    router: Router
    agents: Agents
    gate: Gate


@pytest.fixture
async def rig(start_worker: Any, start_router: Any) -> AsyncIterator[Rig]:
    """A router that knows one worker, which stops after some chunks; another one joins before the drain."""
    source, target = await start_worker(), await start_worker()
    gate = source.between_chunks = Gate()
    router: Router = await start_router(source, target, policy="round-robin")
    agents = Agents(router, workers=(source, target))
    router.mover.calls._channels = agents
    yield Rig(source, target, router, agents, gate)
    for task in agents.running:
        task.cancel()
    await asyncio.gather(*agents.running, return_exceptions=True)


async def first_there(rig: Rig, client: Any, path: str, body: Any) -> Any:
    """An answer that the source has begun."""
    while True:
        answer = await client.post(rig.router.url + path, json=body)
        if answer.headers["x-kv-instance"] == rig.source.url:
            return answer
        await answer.read()


def without_ids(data: bytes) -> list[Any]:
    events = [json.loads(part[6:]) for part in data.split(b"\n\n") if part and b"[DONE]" not in part]
    for event in events:
        for name in ("id", "created", "meta_info"):
            if name == "meta_info" and name in event:
                event[name] = event[name]["completion_tokens"]
            else:
                event.pop(name, None)
    return events


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_goes_on_elsewhere(path: str, rig: Rig, client: Any, eventually: Any) -> None:
    body = {**BODIES[path], "stream": True}
    async with client.post(rig.target.url + path, json=body) as answer:
        expected = await answer.read()
    rig.source.chunks_before_gate = 4
    answer = await first_there(rig, client, path, body)
    await rig.gate.reached()
    rig.router.members.drain(rig.router.members.member(rig.source.url).instance, 60)
    got = await asyncio.wait_for(answer.read(), 10)
    assert without_ids(got) == without_ids(expected)
    assert got.endswith(b"data: [DONE]\n\n")
    assert rig.agents.ends() == [False]
    await eventually(lambda: rig.router.fleet.rows[rig.source.url].state is State.LEFT)
    assert rig.router.fleet.rows[rig.target.url].in_flight == 0
    rig.gate.open()


async def test_a_whole_answer_comes_from_elsewhere(rig: Rig, client: Any, eventually: Any) -> None:
    body = BODIES["/generate"]
    rig.source.before_head, rig.source.between_chunks = rig.gate, None
    async with client.post(rig.target.url + "/generate", json=body) as answer:
        expected = await answer.json()
    asked = [asyncio.create_task(read(client, rig.router.url, body)) for _ in range(2)]
    await rig.gate.reached()
    rig.router.members.drain(rig.router.members.member(rig.source.url).instance, 60)
    for status, instance, got in await asyncio.gather(*asked):
        assert (status, instance) == (200, rig.target.url)
        assert got["text"] == expected["text"]
    assert rig.agents.ends() == [False]
    rig.gate.open()


async def read(client: Any, url: str, body: Any) -> tuple[int, str, Any]:
    async with client.post(url + "/generate", json=body) as answer:
        return answer.status, answer.headers["x-kv-instance"], await answer.json()


@pytest.mark.parametrize(
    "trouble", ["no answer", "the target does not expect it", "the target refuses", "it cannot be moved"]
)
async def test_what_is_not_taken_ends_where_it_is(
    trouble: str, rig: Rig, client: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.router.dispatch.moving.ANSWER_S", 0.1)
    monkeypatch.setattr("sglang_ext.router.dispatch.moving.WATCH_S", 0.1)
    path, body = "/generate", {**BODIES["/generate"], "stream": True}
    async with client.post(rig.target.url + path, json=body) as answer:
        expected = await answer.read()
    rig.source.chunks_before_gate = 4
    answer = await first_there(rig, client, path, body)
    await rig.gate.reached()
    if trouble == "no answer":
        rig.agents.silent = {Park}
    elif trouble == "the target does not expect it":
        rig.agents.silent = {Watch}
    elif trouble == "the target refuses":
        rig.agents.silent = {Running}
        rig.target.deaths_before_head = 100
    else:
        rig.agents.why = "penalties"
    rig.router.members.drain(rig.router.members.member(rig.source.url).instance, 60)
    await eventually(lambda: any(isinstance(message, Park) for _, message in rig.agents.told))
    if trouble != "it cannot be moved":
        await eventually(lambda: bool(rig.agents.ends()))
        assert rig.agents.ends()[0] is True
    rig.gate.open()
    assert without_ids(await asyncio.wait_for(answer.read(), 10)) == without_ids(expected)
    assert False not in rig.agents.ends()
    if trouble != "the target refuses":
        assert not tickets_at(rig.target), "no request there waits for it"


async def test_the_twin_that_repeats_a_token_is_seen(
    rig: Rig, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker makes another answer: the client gets an error, and none of that answer."""
    body = {**BODIES["/generate"], "stream": True}
    rig.source.chunks_before_gate = 4
    answer = await first_there(rig, client, "/generate", body)
    await rig.gate.reached()
    monkeypatch.setattr(rig.target, "text", lambda ids: "x" * len(ids))
    rig.router.members.drain(rig.router.members.member(rig.source.url).instance, 60)
    got = await asyncio.wait_for(answer.read(), 10)
    events = without_ids(got)
    assert "another answer" in events[-1]["error"]["message"]
    assert b"[DONE]" not in got
    rig.gate.open()


async def test_the_state_does_not_travel_in_the_body(rig: Rig, client: Any) -> None:
    """The body has a ticket, another one for each move; the state went to the agent under it."""
    rig.source.chunks_before_gate = 4
    answers = [
        await first_there(rig, client, "/generate", {**BODIES["/generate"], "stream": True}) for _ in range(2)
    ]
    await rig.gate.reached()
    rig.router.members.drain(rig.router.members.member(rig.source.url).instance, 60)
    for answer in answers:
        await asyncio.wait_for(answer.read(), 10)
    watches = [message for _, message in rig.agents.told if isinstance(message, Watch)]
    assert {watch.ticket: watch.resume for watch in watches} == dict.fromkeys(tickets_at(rig.target), STATE)
    assert len({watch.ticket for watch in watches}) == 2
    assert all(len(watch.ticket) >= 32 for watch in watches)
    rig.gate.open()


FORGED = {"sglang_ext_resume": {"output_ids": [1 << 30], "prompt_tokens": 4}}
TICKET = {"sglang_ext_resume": "0" * 32}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        *(
            ("/generate", {"sampling_params": sampling})
            for sampling in (
                {"custom_params": FORGED},
                {"custom_params": TICKET},
                {"custom_params": {"sglang_ext_resume": None}},
                {"custom_params": [FORGED]},
            )
        ),
        ("/generate", {"text": ["a"], "sampling_params": [{"custom_params": FORGED}]}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"custom_params": TICKET}]}),
        ("/generate", {"custom_params": FORGED}),
        ("/v1/chat/completions", {"custom_params": FORGED}),
        ("/v1/chat/completions", {"custom_params": [TICKET]}),
        ("/v1/completions", {"custom_params": TICKET}),
    ],
)
async def test_clients_cannot_say_what_was_generated(
    path: str, more: dict[str, Any], rig: Rig, client: Any
) -> None:
    async with client.post(rig.router.url + path, json={**BODIES[path], **more}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "reserved_field"
    assert not rig.source.requests
    assert not rig.target.requests


async def test_each_of_several_is_moved_once(
    rig: Rig, client: Any, start_worker: Any, eventually: Any
) -> None:
    """While the last ones are still there, those that have gone are left where they are."""
    body = {**BODIES["/generate"], "stream": True}
    async with client.post(rig.target.url + "/generate", json=body) as answer:
        expected = without_ids(await answer.read())
    rig.source.chunks_before_gate = 4
    answers = [await first_there(rig, client, "/generate", body) for _ in range(5)]
    rig.target.between_chunks, rig.target.chunks_before_gate = Gate(), 6
    rig.agents.why = "again"
    rig.router.members.drain(rig.router.members.member(rig.source.url).instance, 60)
    await eventually(lambda: sum(isinstance(message, Park) for _, message in rig.agents.told) >= 5)
    rig.agents.why = ""
    await eventually(lambda: rig.router.fleet.rows[rig.source.url].state is State.LEFT)
    assert rig.router.fleet.rows[rig.target.url].in_flight == 5
    rig.target.between_chunks.open()
    for each in answers:
        assert without_ids(await asyncio.wait_for(each.read(), 10)) == expected
    assert rig.agents.ends() == [False] * 5
    rig.gate.open()


@pytest.mark.parametrize(("tokens", "tag"), [(100, "t" * MAX_NAME_CHARACTERS), (10, "t")])
async def test_a_prompt_is_copied_while_its_request_still_runs(
    tokens: int, tag: str, rig: Rig, client: Any, eventually: Any
) -> None:
    """If it is worth it. A message to an agent has room for every tenant's name."""
    assert MAX_NAME_CHARACTERS <= MAX_TAG
    rig.agents.endpoints = {rig.source.url: ("there:1",), rig.target.url: ("here:1",)}
    sampling = {"max_new_tokens": 8}
    body = {"input_ids": [5] * tokens, "sampling_params": sampling, "stream": True, "extra_key": tag}
    rig.source.chunks_before_gate = 4
    answer = await first_there(rig, client, "/generate", body)
    await rig.gate.reached()
    rig.router.members.drain(rig.router.members.member(rig.source.url).instance, 60)
    await asyncio.wait_for(answer.read(), 10)
    assert rig.agents.ends() == [False]
    told = [(name, message) for name, message in rig.agents.told if not isinstance(message, Unpark)]
    kinds = [(name == rig.source.url, type(message)) for name, message in told]
    ahead = [(True, Export), (False, Advise)] if tokens >= LEAST_AHEAD else []
    assert kinds == [*ahead, (True, Park), (False, Fetch), (False, Watch)]
    if ahead:
        (_, export), (_, hint) = told[:2]
        assert isinstance(export, Export)
        assert isinstance(hint, Advise)
        assert [span.source for span in hint.spans] == [Source(("there:1",), export.export)]
        assert hint.tokens == export.tokens == encode_tokens([5] * tokens)
    rig.gate.open()
