"""A cluster that is upgraded one server after the other: members of other releases refuse each other by name.

One number per kind of message: registration and its answer (here), the agent's channel (here and in
``test_stream.py``), and KV between servers (``tests/disagg/test_faults.py``). Equal numbers speak, whatever
the releases are: the undamaged twin of each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from agent_rig import Instance, until

from sglang_ext.engine.events import registration as registering
from sglang_ext.engine.events.registration import Registrar
from sglang_ext.errors import PeerError
from sglang_ext.protocol.cluster import PATH, PROTOCOL, Registration
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.cluster import agent_link
from sglang_ext.router.cluster.roster import Member, decode_member, encode_member
from tests.support.servers.workers import StandInWorker, running_worker

Upgrade = Callable[[], Awaitable[None]]


@pytest.fixture
async def rig(tokenizer_dir: Path) -> Any:
    """A router, and an instance with its agent that registers with it."""
    from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_dir), trust_remote_code=False)
    async with (
        running_worker(StandInWorker(tokenizer=tokenizer, tokenizer_path=str(tokenizer_dir))) as worker,
        Router(RouterConfig(port=0, block_size=4)) as router,
    ):
        instance = Instance(url=worker.url)
        registrar = Registrar([router.url], instance.registration, None, instance.agent.silent_s)
        try:
            yield router, instance, registrar
        finally:
            await asyncio.to_thread(registrar.close)
            instance.close()


def refused(registrar: Registrar) -> str:
    return registrar._routers[0].problem


async def test_members_that_speak_the_same_work_together(rig: Any) -> None:
    router, instance, registrar = rig
    registrar.start()
    await until(lambda: router.trees.trusted(instance.registration.url), instance)
    assert refused(registrar) == ""


async def test_a_registration_of_another_protocol_is_refused_by_name(rig: Any) -> None:
    router, instance, _ = rig
    body = msgspec.to_builtins(instance.registration) | {"protocol": PROTOCOL + 1, "newer": "field"}
    async with aiohttp.ClientSession() as session, session.post(router.url + PATH, json=body) as answer:
        assert answer.status == 400
        text = (await answer.json())["error"]["message"]
    assert f"protocol: {PROTOCOL + 1} is spoken there, {PROTOCOL} here; run one release" in text
    assert not router.fleet.rows, "and no instance has joined"


async def test_a_router_that_answers_in_another_protocol_is_left_alone_by_name(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, instance, registrar = rig
    monkeypatch.setattr(registering, "PROTOCOL", PROTOCOL + 1)
    registrar.start()
    await until(lambda: refused(registrar), instance)
    assert f"protocol: {PROTOCOL} is spoken there, {PROTOCOL + 1} here" in refused(registrar)


async def test_an_agent_of_another_protocol_is_not_believed_and_is_named(
    rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves; its cached blocks are unknown."""
    router, instance, registrar = rig
    caplog.set_level(logging.WARNING)
    spoken = agent_link.AGENT_PROTOCOL
    monkeypatch.setattr(agent_link, "AGENT_PROTOCOL", spoken + 1)
    registrar.start()
    await until(lambda: "do not understand each other" in caplog.text, instance)
    assert f"protocol {spoken} is spoken there, {spoken + 1} here; run one release" in caplog.text
    assert not router.trees.trusted(instance.registration.url)
    await until(router.fleet.usable, instance)


@pytest.mark.parametrize("spoken", [PROTOCOL, PROTOCOL + 1])
def test_a_record_of_another_protocol_in_redis_is_left_out_by_name(spoken: int) -> None:
    registration = Registration(url="http://127.0.0.1:1", instance="a", epoch="0" * 32)
    member = encode_member(Member(instance="a", url=registration.url, registration=registration))
    data = member.replace(b'"protocol":%d' % PROTOCOL, b'"protocol":%d' % spoken)
    if spoken == PROTOCOL:
        assert decode_member(data).registration == registration
        return
    with pytest.raises(PeerError, match="run one release"):
        decode_member(data)
