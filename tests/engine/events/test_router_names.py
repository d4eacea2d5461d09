"""Routers that are found by a name in the DNS, which changes; the look-ups are placed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

import pytest
from agent_rig import Instance, until

from sglang_ext.config import KvConfig
from sglang_ext.engine.events.registration import Registrar
from sglang_ext.engine.events.router_names import AGAIN_S, RouterNames, addresses
from sglang_ext.errors import ConfigError
from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.ports import free_port

NAME = "dns+http://routers.example:30000"


class Dns:
    """Answers with the addresses that the test has set."""

    def __init__(self, *answer: str) -> None:
        self.answer: Sequence[str] | OSError = answer
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


def test_a_name_stands_for_all_its_addresses_and_is_looked_up_again() -> None:
    dns = Dns("10.0.0.1", "fd00::2")
    names = RouterNames(["https://listed:1", NAME], dns)
    assert names.urls(0.0) == ["https://listed:1", "http://10.0.0.1:30000", "http://[fd00::2]:30000"]
    dns.answer = ("10.0.0.3",)
    assert len(names.urls(AGAIN_S - 0.1)) == 3, "it is not yet time"
    assert names.urls(AGAIN_S) == ["https://listed:1", "http://10.0.0.3:30000"]
    assert dns.asked == [("routers.example", 30000)] * 2


def test_a_dns_that_does_not_answer_removes_no_router(caplog: pytest.LogCaptureFixture) -> None:
    dns = Dns("10.0.0.1")
    names = RouterNames([NAME], dns)
    assert names.urls(0.0) == ["http://10.0.0.1:30000"]
    dns.answer = OSError("no answer")
    for again in (1, 2):
        assert names.urls(again * AGAIN_S) == ["http://10.0.0.1:30000"]
    assert caplog.text.count("cannot look up the routers at routers.example") == 1
    dns.answer = ()
    assert names.urls(3 * AGAIN_S) == [], "while a word that there is none does"


class HungDns(Dns):
    """Answers once `gate` is open."""

    def __init__(self, *answer: str) -> None:
        super().__init__(*answer)
        self.gate = threading.Event()

    def __call__(self, host: str, port: int) -> Sequence[str]:
        found = super().__call__(host, port)
        self.gate.wait(60)
        return found


@pytest.fixture
def hung() -> Iterator[HungDns]:
    dns = HungDns("10.0.0.1")
    yield dns
    dns.gate.set()


def test_a_dns_that_hangs_is_asked_once_and_believed_when_it_answers(
    hung: HungDns, caplog: pytest.LogCaptureFixture
) -> None:
    names = RouterNames(["https://listed:1", NAME], hung, limit_s=0.01)
    for again in (0, 1, 2):
        assert names.urls(again * AGAIN_S) == ["https://listed:1"]
    assert len(hung.asked) == 1, "no thread more for each time"
    assert caplog.text.count("routers.example: no answer within 0.01 s") == 1
    hung.gate.set()
    wait_until(lambda: len(names.urls(names._due)) == 2, seconds=30, what="the answer")
    assert names.urls(names._due - 1.0)[1] == "http://10.0.0.1:30000"


def test_closing_waits_for_no_dns_that_hangs(hung: HungDns) -> None:
    instance = Instance()
    registrar = Registrar([NAME], instance.registration, None, instance.agent.silent_s, resolve=hung)
    try:
        registrar.start()
        wait_until(lambda: bool(hung.asked), seconds=30, what="a look-up")
        closing = threading.Thread(target=registrar.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), "while the DNS has not answered"
    finally:
        hung.gate.set()
        instance.close()


def test_nothing_is_looked_up_without_a_name() -> None:
    dns = Dns()
    assert RouterNames(["http://a:1", "http://a:1"], dns).urls(0.0) == ["http://a:1"]
    assert dns.asked == []


def test_this_machines_own_name_can_be_looked_up() -> None:
    assert set(addresses("localhost", 1)) & {"127.0.0.1", "::1"}


def test_what_the_flag_takes() -> None:
    assert KvConfig(router=NAME).router == NAME
    with pytest.raises(ConfigError, match=r"dns\+http"):
        KvConfig(router="dns+https://routers.example:1")


async def test_an_instance_registers_with_every_router_of_a_name_as_they_come_and_go() -> None:
    """Two routers on one port of two addresses: the second comes later, the first goes."""
    instance, port = Instance(), free_port()
    dns = Dns("127.0.0.1")
    name, silent_s = f"dns+http://routers.example:{port}", instance.agent.silent_s
    registrar = Registrar([name], instance.registration, None, silent_s, resolve=dns, look_up_s=0.05)
    try:
        async with AsyncExitStack() as stack:
            routers = [
                await stack.enter_async_context(Router(RouterConfig(host=host, port=port)))
                for host in ("127.0.0.1", "127.0.0.2")
            ]
            registrar.start()
            await until(lambda: len(routers[0].fleet.rows) == 1, instance)
            assert not routers[1].fleet.rows
            dns.answer = ("127.0.0.1", "127.0.0.2")
            await until(lambda: len(routers[1].fleet.rows) == 1, instance)
            dns.answer = ("127.0.0.2",)
            await until(lambda: len(registrar._routers) == 1, instance)
            assert registrar._routers[0].url == f"http://127.0.0.2:{port}"
            await asyncio.to_thread(registrar.close)
            await until(lambda: not routers[1].fleet.rows, instance)
    finally:
        registrar.close()
        instance.close()
