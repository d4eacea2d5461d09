"""Decode connects to the prefill servers that routers announce, before their first request comes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import zmq
from pd_rig import METADATA, Rig, Rows, pool, rig, transfer_thread
from test_pd_deaths import PAGE, Victim

from sglang_ext.disagg.errors import PeerGoneError, RefusedError, TransportUnavailableError
from sglang_ext.disagg.handover import VERDICT_SECONDS, ReceiverState
from sglang_ext.engine.pd import joins, peers
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.joins import (
    BELIEVED_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PrefillJoins,
)
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.messages import MESSAGES, Topology
from sglang_ext.engine.pd.peers import Local
from sglang_ext.protocol.agent import PrefillServer, PrefillServers
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.slow


def server_list(*addresses: str, router: str = "r", epoch: bytes = b"1" * 16) -> PrefillServers:
    return PrefillServers(router, tuple(PrefillServer("p", epoch, address) for address in addresses))


# -- connections, without servers -----------------------------------------------------------------


class Peer:
    """A connection."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def ended(self) -> None:
        await self.over.wait()


class Peers:
    """Connects, or fails as the test has set."""

    def __init__(self) -> None:
        self.failing: Exception | None = None
        self.stalls = False
        self.asked: list[str] = []
        self.there: dict[str, Peer] = {}

    def known(self, address: str) -> Peer | None:
        peer = self.there.get(address)
        return peer if peer is not None and not peer.over.is_set() else None

    async def get(self, address: str, seconds: float, why: str) -> Peer:
        assert why == "ahead"
        self.asked.append(address)
        if self.stalls:
            await asyncio.sleep(3600)
        if self.failing is not None:
            raise self.failing
        return self.there.setdefault(address, Peer())


class Stage:
    def __init__(self) -> None:
        self.clock, self.peers = FakeClock(), Peers()
        self.joins = PrefillJoins(self.peers, self.clock)  # type: ignore[arg-type]

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def stage() -> Stage:
    return Stage()


async def test_each_server_is_connected_once_however_often_it_is_named(stage: Stage) -> None:
    for router in ("r", "s", "r"):
        stage.joins.on_server_list(server_list("a:1", "b:1", router=router))
        await stage.turn()
    assert sorted(stage.peers.asked) == ["a:1", "b:1"]
    assert stage.joins.awaited == frozenset()
    await stage.joins.close()
    assert "0 servers" in repr(stage.joins)


@pytest.mark.parametrize(
    "error", [PeerGoneError("not there"), RefusedError("page_size", "4 there"), ValueError("a fault of ours")]
)
async def test_it_is_tried_again_and_again_with_longer_pauses(stage: Stage, error: Exception) -> None:
    stage.peers.failing = error
    stage.joins.on_server_list(server_list("a:1"))
    await stage.turn()
    assert stage.joins.awaited == {"a:1"}
    await stage.clock.pass_time(20)
    # A second of growing pauses, then one every 2.5 to 5 s.
    assert 4 <= len(stage.peers.asked) <= 16
    stage.peers.failing = None
    await stage.clock.pass_time(LONGEST_PAUSE_SECONDS)
    assert stage.joins.awaited == frozenset()
    tries = len(stage.peers.asked)
    await stage.clock.pass_time(60)
    assert len(stage.peers.asked) == tries
    await stage.joins.close()


@pytest.mark.parametrize(
    "error", [RefusedError("transport", "none from p to d"), TransportUnavailableError("none from p to d")]
)
async def test_a_server_that_no_transport_reaches_is_named_in_the_log(
    stage: Stage, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stage.peers.failing = error
    with caplog.at_level("WARNING"):
        stage.joins.on_server_list(server_list("a:1"))
        await stage.turn()
    assert "prefill server p (a:1) is not connected" in caplog.text
    assert "none from p to d" in caplog.text
    await stage.joins.close()


async def test_a_connection_that_ends_is_made_anew(stage: Stage) -> None:
    stage.joins.on_server_list(server_list("a:1"))
    await stage.turn()
    stage.peers.there.pop("a:1").over.set()
    await stage.turn()
    await stage.clock.pass_time(1)
    assert stage.peers.asked == ["a:1", "a:1"]
    assert stage.joins.awaited == frozenset()
    await stage.joins.close()


@pytest.mark.parametrize("while_", ["connecting", "pausing", "connected"])
async def test_it_gives_up_when_the_server_has_left(stage: Stage, while_: str) -> None:
    stage.peers.stalls = while_ == "connecting"
    stage.peers.failing = PeerGoneError("not there") if while_ == "pausing" else None
    stage.joins.on_server_list(server_list("a:1"))
    await stage.turn()
    stage.joins.on_server_list(server_list("a:1", router="s"))
    stage.joins.on_server_list(server_list())
    await stage.turn()
    assert "1 servers" in repr(stage.joins), "the other router still has it"
    stage.joins.on_server_list(server_list(router="s"))
    await stage.turn()
    tries = len(stage.peers.asked)
    await stage.clock.pass_time(30)
    assert len(stage.peers.asked) == tries
    assert "0 servers" in repr(stage.joins)
    assert len(asyncio.all_tasks()) == 1, "a task is left"


async def test_a_server_that_was_started_anew_is_tried_at_once(stage: Stage) -> None:
    stage.peers.failing = PeerGoneError("not there")
    stage.joins.on_server_list(server_list("a:1"))
    await stage.clock.pass_time(30)
    stage.peers.failing = None
    tries = len(stage.peers.asked)
    stage.joins.on_server_list(server_list("a:1", epoch=b"2" * 16))
    await stage.turn()
    assert len(stage.peers.asked) == tries + 1
    assert stage.joins.awaited == frozenset()
    await stage.joins.close()


async def test_a_router_that_says_nothing_more_is_not_believed(stage: Stage) -> None:
    stage.peers.failing = PeerGoneError("not there")
    stage.joins.on_server_list(server_list("a:1"))
    await stage.clock.pass_time(BELIEVED_SECONDS - 1)
    stage.joins.tick()
    assert stage.joins.awaited == {"a:1"}
    await stage.clock.pass_time(2)
    stage.joins.tick()
    assert stage.joins.awaited == frozenset()
    await stage.turn()
    assert len(asyncio.all_tasks()) == 1


# -- with agents ------------------------------------------------------------------------------------


def connects(agent: Agent) -> dict[str, int]:
    return dict(agent.state().connects)


def hand_over(servers: Rig, number: int) -> None:
    receiver, sender = servers.decode[0].agent.receiver, servers.prefill[0].agent.sender
    there = receiver.open(servers.address, number)
    sender.complete(sender.open(number), np.array([1, 2]), bytes(METADATA))
    servers.wait(lambda: there.state is ReceiverState.READY, "an offer")
    receiver.read(there, Wanted(np.array([3, 4]), 0, row=1))
    servers.wait(lambda: there.state is ReceiverState.HELD, "the KV")
    assert np.array_equal(servers.prefill[0].kv([1, 2], 4), servers.decode[0].kv([3, 4], 4))


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_first_request_finds_a_connection(is_listed: bool) -> None:
    with rig() as servers:
        decode = servers.decode[0].agent
        if is_listed:
            decode.prefill_servers(server_list(servers.address))
            servers.wait(lambda: decode.state().prefill_servers["connected"], "a connection")
            assert decode.state().prefill_servers == {"connected": 1, "awaited": 0}
        hand_over(servers, 1)
        hand_over(servers, 2)
        # The twin: without the announcement, decode connects while its first request waits.
        assert connects(decode) == ({"ahead": 1} if is_listed else {"request": 1})
        servers.check()


def test_every_rank_connects_to_every_rank() -> None:
    with rig(2, 2) as servers:
        for side in servers.decode:
            side.agent.prefill_servers(server_list(servers.address))
        for side in servers.decode:
            servers.wait(lambda side=side: side.agent.peer(servers.address), "a connection")
            (peer,) = [side.agent.peer(servers.address)]
            assert peer is not None
            assert len(peer.instance.links) == 2


@contextmanager
def decode_alone() -> Iterator[Agent]:
    with ExitStack() as stack:
        spec, _ = pool(0, 1, PAGE, seed=2)
        transfers = transfer_thread("decode", [spec])
        stack.callback(transfers.close)
        agent = Agent(AgentConfig(Local(0, 1, PAGE, METADATA), "weights"), transfers, Rows())
        stack.callback(agent.close)
        yield agent


def test_a_server_that_comes_later_is_found() -> None:
    address = f"127.0.0.1:{free_port()}"
    with decode_alone() as decode, ExitStack() as stack:
        decode.prefill_servers(server_list(address))
        wait_until(lambda: decode.state().prefill_servers["awaited"] == 1, seconds=20, what="an attempt")
        bootstrap = BootstrapService("127.0.0.1", int(address.rpartition(":")[2]), None)
        stack.callback(bootstrap.close)
        victim = Victim("prefill", "pull", bootstrap.address)
        stack.callback(victim.close)
        wait_until(lambda: decode.peer(address) is not None, seconds=20, what="a connection")
        assert connects(decode) == {"ahead": 1}


@pytest.mark.parametrize(
    "how",
    [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)],
    ids=lambda how: how.name,
)
def test_a_server_that_dies_and_comes_back_is_connected_anew(how: signal.Signals) -> None:
    """At the same address, with another endpoint; nothing is asked for meanwhile."""
    bootstrap = BootstrapService("127.0.0.1", 0, None)
    with decode_alone() as decode, ExitStack() as stack:
        stack.callback(bootstrap.close)
        first = Victim("prefill", "pull", bootstrap.address)
        stack.callback(first.close)
        decode.prefill_servers(server_list(bootstrap.address))
        wait_until(lambda: decode.peer(bootstrap.address) is not None, seconds=20, what="a connection")
        before = decode.peer(bootstrap.address)
        os.kill(first.process.pid, how)
        wait_until(lambda: decode.peer(bootstrap.address) is None, seconds=20, what="the verdict")
        second = Victim("prefill", "pull", bootstrap.address)
        stack.callback(second.close)
        decode.prefill_servers(server_list(bootstrap.address, epoch=b"2" * 16))
        wait_until(lambda: decode.peer(bootstrap.address) is not None, seconds=30, what="another one")
        assert decode.peer(bootstrap.address) is not before
        assert connects(decode) == {"ahead": 2}


@pytest.mark.parametrize("ends", ["left", "closed"])
def test_a_server_that_stands_still_while_it_is_connected_holds_up_nothing(ends: str) -> None:
    """Its bootstrap port accepts the connection and sends nothing: death in the middle of CONNECT."""
    with socket.create_server(("127.0.0.1", 0)) as mute, decode_alone() as decode:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        decode.prefill_servers(server_list(address))
        wait_until(lambda: decode.state().prefill_servers["awaited"] == 1, seconds=20, what="an attempt")
        if ends == "left":
            decode.prefill_servers(server_list())
            wait_until(lambda: decode.state().prefill_servers["awaited"] == 0, seconds=20, what="the end")
        # Closing the agent, at the end of the block, waits for no attempt either: it has CALL_SECONDS.


@contextmanager
def mute() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A bootstrap port that answers nothing by itself, and its address."""
    context = zmq.Context()
    try:
        port = context.socket(zmq.ROUTER)
        yield port, f"127.0.0.1:{port.bind_to_random_port('tcp://127.0.0.1')}"
    finally:
        context.destroy(linger=0)


def test_a_bootstrap_port_that_stood_still_for_a_look_up_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "LOOKUP_SECONDS", 0.2)
    with rig() as servers, mute() as (port, address):
        decode, sender = servers.decode[0].agent, servers.prefill[0].agent.sender
        decode.prefill_servers(server_list(servers.address))
        servers.wait(lambda: decode.peer(servers.address), "who is behind the port")
        known = decode.peer(servers.address)
        assert known is not None
        given, taken = sender.open(1), decode.receiver.open(address, 1)
        assert port.poll(20_000), "a look-up"
        port.recv_multipart()
        # Whatever is asked from now on is waited for.
        monkeypatch.setattr(peers, "LOOKUP_SECONDS", 60.0)

        def takes_part() -> bool:
            while port.poll(0):
                asker, question, _ = port.recv_multipart()
                answer = MESSAGES.replies.encode(Topology(known.ranks))
                port.send_multipart([asker, question, answer])
            return bool(given.readers)

        servers.wait(takes_part, "decode to take part")
        assert taken.reason == ""


def test_a_bootstrap_port_that_never_answers_is_asked_for_as_long_as_connecting_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "LOOKUP_SECONDS", 0.1)
    monkeypatch.setattr(peers, "CONNECT_SECONDS", 1.0)
    with decode_alone() as decode, mute() as (_, address):
        taken = decode.receiver.open(address, 1)
        wait_until(lambda: taken.state is ReceiverState.FAILED, seconds=20, what="the end")
        assert taken.reason == f"no prefill server answers at {address} within 1 s"


def test_the_thread_may_have_ended() -> None:
    with decode_alone() as decode:
        pass
    decode.prefill_servers(server_list("127.0.0.1:1"))


def test_the_bounds_fit_each_other() -> None:
    assert VERDICT_SECONDS < joins.ATTEMPT_SECONDS < joins.BELIEVED_SECONDS
