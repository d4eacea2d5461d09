"""A server that stood still begins a request over a connection that the other side has ended and that it
still takes for open: it connects anew, once, and the request goes on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from pd_rig import METADATA, PAGES, Rig, Side, held, rig

from sglang_ext.disagg.errors import SessionEndedError
from sglang_ext.disagg.handover import ReceiverState, SenderState, ended
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.messages import Abort
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.protocol.agent import PrefillServer, PrefillServers

pytestmark = pytest.mark.slow

ROWS = bytes(range(METADATA))
HERE, THERE = [5, 3, 9], [40, 2, 7]
NUMBERS = itertools.count(1)


def connected(servers: Rig) -> Instance:
    """Decode's connection to prefill, which it made ahead of its requests."""
    decode = servers.decode[0].agent
    decode.prefill_servers(PrefillServers("r", (PrefillServer("p", b"1" * 16, servers.address),)))
    servers.wait(lambda: decode.peer(servers.address), "a connection")
    # The connection is kept, and only a request makes another one.
    decode.prefill_servers(PrefillServers("r", ()))
    peer = decode.peer(servers.address)
    assert peer is not None
    return peer.instance


def notices_nothing(side: Side, instance: Instance) -> None:
    """Its next heartbeat does not come."""
    for link in instance.links:
        side.agent.transfers.run(link._tasks.cancel())


def end_sessions(sides: Sequence[Side]) -> None:
    """End the sessions as an owner does with readers that were silent for too long."""
    for side in sides:
        owner = side.agent.endpoint.owner
        for session in owner.sessions:
            side.agent.transfers.run(owner.end(session))


def open_at(sides: Sequence[Side], number: int) -> list[SendingHandover]:
    return [side.agent.sender.open(number) for side in sides]


def goes_through(servers: Rig, given: Sequence[SendingHandover], taken: ReceivingHandover) -> None:
    """A request that was opened on both sides, and perhaps computed, up to its end; with every byte."""
    decode = servers.decode[0]
    waits = ReceiverState.READY if taken.read else ReceiverState.WAITING
    if taken.read:
        compute(servers, given)
    servers.wait(lambda: taken.state is waits or ended(taken.state), "prefill")
    assert (taken.state, taken.reason) == (waits, "")
    decode.agent.receiver.read(taken, Wanted(np.array(THERE), 0, row=1))
    if not taken.read:
        for each in given:
            servers.wait(lambda each=each: each.granted() is not None, "decode's pages")
        compute(servers, given)
    servers.wait(lambda: ended(taken.state), "the KV")
    assert (taken.state, taken.reason) == (ReceiverState.HELD, "")
    sent = np.concatenate([side.kv(HERE, servers.page) for side in servers.prefill], axis=2)
    assert np.array_equal(sent, decode.kv(THERE, servers.page))
    servers.wait(lambda: all(each.state is SenderState.RELEASED for each in given), "the release")
    nothing_is_left(servers)


def compute(servers: Rig, given: Sequence[SendingHandover]) -> None:
    for side, each in zip(servers.prefill, given, strict=True):
        if each.state is SenderState.COMPUTING:
            side.agent.sender.complete(each, np.array(HERE), ROWS)


def nothing_is_left(servers: Rig) -> None:
    """One connection, and neither hand-over, page nor grant of the ended ones."""
    for side in (*servers.prefill, *servers.decode):
        agent = side.agent
        servers.wait(lambda agent=agent: agent.sender.live == agent.receiver.live == 0, "hand-overs to end")
        servers.wait(lambda agent=agent: not agent.sender.early, "nothing to wait for a hand-over")
        pages = agent.endpoint.pools[HBM_POOL]
        assert not pages.is_sealed(np.arange(PAGES)).any()
        servers.wait(lambda pages=pages: pages.granted == 0, "grants to end")
    for side in servers.prefill:
        owner = side.agent.endpoint.owner
        servers.wait(lambda owner=owner: len(owner.sessions) <= 1, "the former session's end")
    servers.check()


@pytest.mark.parametrize(("ranks", "ended_at"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize(
    ("mode", "computed"), [("pull", True), ("pull", False), ("push", False)], ids=["computed", "pull", "push"]
)
def test_what_decode_asks_after_it_stood_still_goes_through(
    mode: str, computed: bool, ranks: int, ended_at: int
) -> None:
    """All of prefill's ranks have ended its connection, or only the first: the other lets it join, is left,
    and lets it join again. Computed: the other has leased its pages by then."""
    with rig(ranks, mode=mode) as servers:
        former, decode = connected(servers), servers.decode[0].agent
        notices_nothing(servers.decode[0], former)
        end_sessions(servers.prefill[:ended_at])
        assert not former.gone
        number = next(NUMBERS)
        given = open_at(servers.prefill, number)
        if computed:
            compute(servers, given)
        taken = decode.receiver.open(servers.address, number)
        if not computed:
            servers.wait(lambda: decode.state().connects.get("request"), "a new connection")
            servers.wait(lambda: all(each.readers for each in given), "decode to take part by it")
        goes_through(servers, given, taken)
        assert former.gone
        assert decode.state().connects == {"ahead": 1, "request": 1}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_session_may_end_while_decode_waits_for_the_request_to_come(mode: str, ranks: int) -> None:
    """At prefill's first rank; where there is another it still waits there, and does again."""
    with rig(ranks, mode=mode) as servers:
        notices_nothing(servers.decode[0], connected(servers))
        number = next(NUMBERS)
        taken = servers.decode[0].agent.receiver.open(servers.address, number)
        for side in servers.prefill:
            servers.wait(lambda side=side: side.agent.sender.early.waiting(number), "decode to wait")
        end_sessions(servers.prefill[:1])
        given = open_at(servers.prefill[:1], number)
        servers.wait(lambda: given[0].readers, "decode to take part")
        assert not any(side.agent.sender.early.given_up(number) for side in servers.prefill)
        given += open_at(servers.prefill[1:], number)
        goes_through(servers, given, taken)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_it_connects_anew_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill that ends each connection gives a request no others than two."""
    with rig(mode=mode) as servers:
        former, sender = connected(servers), servers.prefill[0].agent.sender
        notices_nothing(servers.decode[0], former)
        monkeypatch.setattr(sender.rank, "connected", lambda session: False)
        number = next(NUMBERS)
        (given,) = open_at(servers.prefill, number)
        taken = servers.decode[0].agent.receiver.open(servers.address, number)
        servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end")
        assert "this session is over; connect again" in taken.reason
        assert servers.decode[0].agent.state().connects["request"] == 1
        assert (given.state, given.readers) == (SenderState.COMPUTING, {})
        given.give_up("its other side has failed")
        nothing_is_left(servers)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_part_that_was_taken_is_over_with_its_session(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode is back before prefill has processed the end of the session: it gets no other part."""
    with rig(mode=mode) as servers:
        former, prefill = connected(servers), servers.prefill[0].agent
        notices_nothing(servers.decode[0], former)
        looks = prefill.sender.tick
        monkeypatch.setattr(prefill.sender, "tick", lambda: None)
        number = next(NUMBERS)
        (given,) = open_at(servers.prefill, number)
        taken = servers.decode[0].agent.receiver.open(servers.address, number)
        servers.wait(lambda: given.readers and taken.state is ReceiverState.WAITING, "decode to take part")
        end_sessions(servers.prefill)
        # As its next heartbeat does.
        ends = SessionEndedError("session: this session is over; connect again")
        servers.decode[0].agent.transfers.loop.call_soon_threadsafe(former.links[0].fail, ends)
        servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end on decode")
        assert given.state is SenderState.COMPUTING
        monkeypatch.setattr(prefill.sender, "tick", looks)
        servers.wait(lambda: given.state is SenderState.LOST, "the end on prefill")
        assert given.reason == "the decode server is gone"
        nothing_is_left(servers)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_request_may_be_aborted_while_decode_connects_anew(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(mode=mode) as servers:
        former, receiver = connected(servers), servers.decode[0].agent.receiver
        notices_nothing(servers.decode[0], former)
        end_sessions(servers.prefill)
        connect, go_on = receiver._peers._connect, asyncio.Event()
        connecting: list[str] = []

        async def held_connect(address: str) -> object:
            connecting.append(address)
            await go_on.wait()
            return await connect(address)

        monkeypatch.setattr(receiver._peers, "_connect", held_connect)
        number = next(NUMBERS)
        given = open_at(servers.prefill, number)
        taken = receiver.open(servers.address, number)
        servers.wait(lambda: connecting, "decode to connect")
        receiver.abort(taken, "the client is gone")
        servers.wait(lambda: receiver.live == 0, "the task's end")
        assert (taken.state, taken.reason) == (ReceiverState.FAILED, "the client is gone")
        assert given[0].readers == {}
        given[0].give_up("the client is gone")
        nothing_is_left(servers)
        servers.decode[0].agent.transfers.loop.call_soon_threadsafe(go_on.set)
        number = next(NUMBERS)
        goes_through(servers, open_at(servers.prefill, number), receiver.open(servers.address, number))


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_request_may_be_aborted_while_a_rank_of_prefill_is_left(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank does not get the message, and ends the request with its session."""
    with rig(2, mode=mode) as servers:
        former, receiver = connected(servers), servers.decode[0].agent.receiver
        notices_nothing(servers.decode[0], former)
        second = servers.prefill[1].agent
        hears, told = asyncio.Event(), []
        answer = held(second.answers.answer, Abort, hears)

        async def answered(identity: bytes, message: object) -> object:
            told.extend([message] if isinstance(message, Abort) else [])
            return await answer(identity, message)

        monkeypatch.setattr(second.answers, "answer", answered)
        end_sessions(servers.prefill[:1])
        number = next(NUMBERS)
        given = open_at(servers.prefill, number)
        taken = receiver.open(servers.address, number)
        servers.wait(lambda: told, "the other rank to be left")
        assert given[1].readers
        assert told[0].rejoins
        receiver.abort(taken, "the client is gone")
        servers.wait(lambda: given[1].state is SenderState.LOST, "the end there")
        servers.wait(lambda: receiver.live == 0, "the task's end")
        assert given[0].readers == {}
        given[0].give_up("the client is gone")
        second.transfers.loop.call_soon_threadsafe(hears.set)
        nothing_is_left(servers)


def test_who_has_named_pages_cannot_leave_and_come_again() -> None:
    """Prefill may write there: the request is over, and nothing writes any more."""
    with rig(mode="push") as servers:
        prefill, decode = servers.prefill[0].agent, servers.decode[0].agent
        number = next(NUMBERS)
        (given,) = open_at(servers.prefill, number)
        taken = decode.receiver.open(servers.address, number)
        servers.wait(lambda: taken.state is ReceiverState.WAITING, "the meeting")
        decode.receiver.read(taken, Wanted(np.array(THERE), 0, row=1))
        servers.wait(lambda: given.granted() is not None, "decode's pages")
        (epoch,) = given.readers
        prefill.sender.peer_aborts(number, epoch, "it comes again", rejoins=True)
        assert given.state is SenderState.LOST
        servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end on decode")
        nothing_is_left(servers)


@pytest.mark.parametrize("anew", [True, False], ids=["anew", "twin"])
def test_prefill_that_stood_still_claims_pages_by_a_new_connection(
    anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode has ended the connection by which prefill writes; the twin has no other one."""
    with rig(mode="push") as servers:
        prefill, receiver = servers.prefill[0].agent, servers.decode[0].agent.receiver
        number = next(NUMBERS)
        goes_through(servers, open_at(servers.prefill, number), receiver.open(servers.address, number))
        (former,) = prefill.endpoint.instances
        notices_nothing(servers.prefill[0], former)
        end_sessions(servers.decode)
        assert not former.gone
        number = next(NUMBERS)
        given, taken = open_at(servers.prefill, number), receiver.open(servers.address, number)
        if anew:
            goes_through(servers, given, taken)
            return

        async def reach(*addresses: str, use: str = "") -> Instance:
            return former

        monkeypatch.setattr(prefill.endpoint, "reach", reach)
        servers.wait(lambda: taken.state is ReceiverState.WAITING, "the meeting")
        receiver.read(taken, Wanted(np.array(THERE), 0, row=1))
        servers.wait(lambda: given[0].state is SenderState.LOST, "the end")
        assert "decode's pages cannot be written: session" in given[0].reason
        servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end on decode")
        nothing_is_left(servers)
