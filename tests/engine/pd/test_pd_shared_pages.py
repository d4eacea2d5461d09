"""Pushes from more ranks than decode has, and from fewer: the part that each rank writes, and the moment when
the pages are free.

Where prefill is cut finer than decode, several ranks fill one page, each its heads. Every test of the
received bytes has a twin that leaves one of the writers out.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest
from pd_rig import HEADS, LAYERS, METADATA, Planes, Rig, Rows, pool, rig, transfer_thread
from test_pd_deaths import FREED_SECONDS, PAGE, SIGNALS, Scene, Victim, assert_nothing_is_held, writers
from test_pd_handovers import push

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import ReceiverState, SenderState, ended, pins
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.granting import Claims
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.messages import Join, Meet
from sglang_ext.engine.pd.peers import Local, PrefillPeer
from sglang_ext.engine.pd.pushing import Computing
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.testing.transfer.rig import Gate
from sglang_ext.testing.waiting import wait_until

pytestmark = pytest.mark.slow

HERE, THERE = [5, 3, 9], [40, 2, 7]
ROWS = bytes(range(METADATA))
NUMBERS = itertools.count(1 << 30)
ANOTHERS = 7.0
CUTS = [(2, 1), (1, 2), (4, 2), (2, 4)]


def same(servers: Rig, here: list[int], there: list[int]) -> bool:
    """Whether decode's pages equal prefill's, over all heads."""
    given = np.concatenate([side.kv(here, servers.page) for side in servers.prefill], axis=2)
    taken = np.concatenate([side.kv(there, servers.page) for side in servers.decode], axis=2)
    assert given.shape[2] == HEADS
    return np.array_equal(given, taken)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "twin"])
@pytest.mark.parametrize("transport", [TransportName.CMA, TransportName.TCP])
def test_each_rank_fills_its_heads(
    transport: TransportName, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        stock = PrefillPeer.push

        async def without_the_last(self: PrefillPeer, *rest: object) -> object:
            self._needed.discard(max(self._needed))
            return await stock(self, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(PrefillPeer, "push", without_the_last)
    with rig(2, 1, mode="push", transports=(transport,)) as servers:
        for _ in range(2):
            sending, receiving = push(servers, HERE, THERE)
            assert [handover.reason for handover in (*sending, *receiving)] == [""] * 3
            assert same(servers, HERE, THERE) is whole
        servers.check()


def opened(servers: Rig) -> tuple[list[SendingHandover], list[ReceivingHandover]]:
    """A request whose pages decode's ranks have named to all of prefill's."""
    number = next(NUMBERS)
    sending = [side.agent.sender.open(number) for side in servers.prefill]
    receiving = [side.agent.receiver.open(servers.address, number) for side in servers.decode]
    servers.wait(lambda: all(each.state is ReceiverState.WAITING for each in receiving), "a connection")
    for side, taken in zip(servers.decode, receiving, strict=True):
        side.agent.receiver.read(taken, Wanted(np.array(THERE), 0, row=0))
    for side, given in zip(servers.prefill, sending, strict=True):
        servers.wait(lambda s=side, g=given: g.granted() is not None, "decode's pages")
    return sending, receiving


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "twin"])
@pytest.mark.parametrize(("prefill", "decode"), CUTS)
def test_layers_are_pushed_by_all_ranks(prefill: int, decode: int, damaged: bool) -> None:
    """By layer: each rank's forward pass runs ahead by itself. The twin damages one byte of one head."""
    with rig(prefill, decode, mode="push-by-layer") as servers:
        sending, receiving = opened(servers)
        for side, given in zip(servers.prefill, sending, strict=True):
            sender = side.agent.sender
            writings = given.writings()
            assert len(writings) == max(1, decode // prefill)
            feed = side.agent.layer_feed(0, LAYERS)
            feed.forward_begins([Computing(np.array([0, 1]), lambda: np.array(HERE[:2]), given.writings)])
            for layer in range(LAYERS):
                feed.layer_begins(layer)
            feed.forward_ended()
            for writing in writings:
                servers.wait(lambda w=writing: w.layers_ahead == 2 * LAYERS, "the layers")
            if side is not servers.prefill[-1]:
                sender.complete(given, np.array(HERE), ROWS)
        # All but one rank have written all: that is not the request yet.
        servers.wait(
            lambda: all(given.state is SenderState.RELEASED for given in sending[:-1]), "the first ranks"
        )
        assert receiving[-1].state is ReceiverState.GRANTED
        assert writers(servers.decode[-1].agent, receiving[-1]) == 1
        servers.prefill[-1].agent.sender.complete(sending[-1], np.array(HERE), ROWS)
        servers.wait(lambda: all(taken.state is ReceiverState.HELD for taken in receiving), "the KV")
        if damaged:
            plane = servers.decode[-1].planes[1, "v"]
            plane[THERE[1] * servers.page, -1:].view(np.uint8)[..., 0] ^= 1
        assert same(servers, HERE, THERE) is not damaged
        assert not any(
            writers(side.agent, taken) for side, taken in zip(servers.decode, receiving, strict=True)
        )
        servers.check()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2)])
def test_what_every_rank_has_is_written_by_one(prefill: int, decode: int) -> None:
    """A latent: the other ranks write nothing, and end the request all the same."""
    with rig(prefill, decode, mode="push", latent=True) as servers:
        sending, receiving = push(servers, HERE, THERE)
        assert [handover.reason for handover in (*sending, *receiving)] == [""] * (prefill + decode)
        for side in servers.decode:
            assert np.array_equal(servers.prefill[0].kv(HERE, servers.page), side.kv(THERE, servers.page))
        servers.wait(lambda: all(given.state is SenderState.RELEASED for given in sending), "the release")
        moved = [
            sum(stats.bytes for stats in side.agent.endpoint.totals().values()) for side in servers.prefill
        ]
        whole = servers.decode[0].kv(THERE, servers.page).nbytes
        assert sum(moved) == whole * decode
        assert sum(size > 0 for size in moved) == min(prefill, decode)
        servers.check()


# -- ends -------------------------------------------------------------------------------------------


def test_one_rank_that_loses_a_request_ends_it_everywhere() -> None:
    with rig(2, 1, mode="push") as servers:
        sending, (taken,) = opened(servers)
        sending[1].give_up("this rank has no room")
        servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end on decode")
        servers.wait(lambda: sending[0].state is SenderState.LOST, "the end at the other rank")
        assert "this rank has no room" in taken.reason
        assert "this rank has no room" in sending[0].reason
        servers.wait(lambda: servers.decode[0].agent.endpoint.owner.grants == 0, "the grants")
        servers.check()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_no_rank_waits_for_a_decode_server_that_another_refuses(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two decode servers with one room, each first at another rank: neither keeps the other's."""
    with rig(2, 1, mode=mode) as servers:
        number = next(NUMBERS)
        sending = [side.agent.sender.open(number) for side in servers.prefill]
        second = servers.prefill[1].agent
        # The other decode server is simulated and has no connection: count it as connected.
        monkeypatch.setattr(second.sender.rank, "connected", lambda session: True)

        async def other_comes() -> None:
            if mode == "push":
                await second.sender.meet(Meet(number, b"e" * 16, b"s" * 16, 1, "weights"))
            else:
                with suppress(RefusedError):
                    await second.sender.join(Join(number, b"e" * 16, b"s" * 16, 0, 1, True, "weights"))

        second.transfers.start(other_comes())
        servers.wait(lambda: bool(sending[1].readers), "the other decode server")
        taken = servers.decode[0].agent.receiver.open(servers.address, number)
        servers.wait(lambda: taken.state is ReceiverState.FAILED, "the refusal")
        assert "another decode server takes part" in taken.reason
        servers.wait(lambda: sending[0].state is SenderState.LOST, "the end at the first rank")
        assert sending[1].state is SenderState.COMPUTING
        sending[1].give_up("the test is over")


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "twin"])
@pytest.mark.parametrize("transport", [TransportName.CMA, TransportName.TCP])
def test_pages_are_kept_until_the_last_writer_has_stopped(
    transport: TransportName, fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is held in front of its first byte while decode gives the request up. The twin takes the
    first writer's word for both's."""
    if not fenced:
        stock, stock_remove = Claims._unclaim, Claims.remove

        async def revoke_nothing(name: str) -> None:
            pass

        async def remove(self: Claims, name: str) -> None:
            self._revoke = revoke_nothing
            await stock_remove(self, name)

        def unclaim_all(self: Claims, name: str) -> None:
            known = self._named.get(name)
            if known is not None:
                known.writers = 1
            stock(self, name)

        monkeypatch.setattr(Claims, "remove", remove)
        monkeypatch.setattr(Claims, "_unclaim", unclaim_all)
    with rig(2, 1, mode="push", transports=(transport,)) as servers:
        sending, (taken,) = opened(servers)
        late, decode = servers.prefill[1].agent, servers.decode[0].agent
        (link,) = [link for instance in late.endpoint.instances for link in instance.links]
        gate = Gate(link.peer, "write")
        slots = (np.array(THERE)[:, None] * servers.page + np.arange(servers.page)).ravel()
        try:
            late.sender.complete(sending[1], np.array(HERE), ROWS)
            servers.wait(gate.reached.is_set, "the push of the one")
            decode.receiver.abort(taken, "the client is gone")
            servers.wait(lambda: sending[0].state is SenderState.LOST, "the other's end")
            if fenced:
                owner = decode.endpoint.owner
                servers.wait(lambda: owner.grants == 1, "the word of the writer that has stopped")
                assert taken.state is ReceiverState.STOPPING
                assert (writers(decode, taken), decode.state().unfenced_pages) == (1, len(THERE))
                if transport is TransportName.CMA:
                    gate.go.set()  # for decode, the writer may still run: only its own message frees them
            servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end")
            for plane in servers.decode[0].planes.values():
                plane[slots] = ANOTHERS
        finally:
            gate.go.set()
        servers.wait(lambda: not link.peer._requests, "the late write")
        intact = all((plane[slots] == ANOTHERS).all() for plane in servers.decode[0].planes.values())
        assert intact is fenced
        servers.wait(lambda: sending[1].state is SenderState.LOST, "the end on prefill")
        servers.wait(lambda: decode.endpoint.owner.grants == 0, "the grants")


# -- deaths -----------------------------------------------------------------------------------------


@pytest.fixture
def stage() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def survivor(stack: ExitStack, role: str, rank: int, ranks: int, address: str) -> tuple[Agent, Planes]:
    spec, planes = pool(rank, ranks, PAGE, seed=4)
    transfers = transfer_thread(role, [spec], rank=rank)
    stack.callback(transfers.close)
    local = Local(rank, ranks, PAGE, METADATA, "push")
    bootstrap = address if role == "prefill" else ""
    agent = Agent(AgentConfig(local, "weights", bootstrap=bootstrap), transfers, Rows())
    stack.callback(agent.close)
    return agent, planes


STATES = ["waiting", "granted", "the other has written", "writing"]


@pytest.mark.parametrize("how", SIGNALS, ids=lambda how: how.name)
@pytest.mark.parametrize("state", STATES)
def test_the_death_of_one_of_two_writers_ends_the_request(
    stage: ExitStack, state: str, how: signal.Signals
) -> None:
    """Decode and the other writer live. A writer that only stood still does no harm when it goes on."""
    bootstrap = BootstrapService("127.0.0.1", 0, None)
    stage.callback(bootstrap.close)
    first, _ = survivor(stage, "prefill", 0, 2, bootstrap.address)
    decode, planes = survivor(stage, "decode", 0, 1, bootstrap.address)
    victim = Victim("prefill", "push", bootstrap.address, rank=1, ranks=2)
    stage.callback(victim.close)
    number = next(NUMBERS)
    given, taken = first.sender.open(number), decode.receiver.open(bootstrap.address, number)
    victim.do(f"open {number}")
    wait_until(lambda: taken.state is ReceiverState.WAITING, seconds=20, what="a connection")
    if state != "waiting":
        decode.receiver.read(taken, Wanted(np.array([3, 4]), 0, 0))
        wait_until(lambda: writers(decode, taken) == 2, seconds=20, what="both writers' claims")
    if state == "the other has written":
        first.sender.complete(given, np.array([1, 2]), ROWS)
        wait_until(lambda: given.state is SenderState.RELEASED, seconds=20, what="the other's writes")
        assert (taken.state, writers(decode, taken)) == (ReceiverState.GRANTED, 1)
    if state == "writing":
        victim.do("hold")
        victim.do("complete")
        wait_until(lambda: victim.do("held") == "held", seconds=20, what="its first byte")
    os.kill(victim.process.pid, how)
    wait_until(
        lambda: ended(taken.state) and ended(given.state) and not pins(taken.state),
        seconds=FREED_SECONDS,
        what=f"the ends, from {taken.state} and {given.state}",
    )
    assert taken.state is ReceiverState.FAILED
    written = state == "the other has written"
    assert given.state is (SenderState.RELEASED if written else SenderState.LOST)
    for agent in (first, decode):
        assert_nothing_is_held(Scene(agent, victim, bootstrap.address, number, planes))
    if how is signal.SIGSTOP:
        for plane in planes.values():
            plane[:] = ANOTHERS
        os.kill(victim.process.pid, signal.SIGCONT)
        victim.do("go")
        wait_until(lambda: victim.do("look") == "lost", seconds=20, what="its own verdict")
        assert all((plane == ANOTHERS).all() for plane in planes.values())


@pytest.mark.parametrize("how", SIGNALS, ids=lambda how: how.name)
def test_both_writers_survive_decode(stage: ExitStack, how: signal.Signals) -> None:
    bootstrap = BootstrapService("127.0.0.1", 0, None)
    stage.callback(bootstrap.close)
    writers = [survivor(stage, "prefill", rank, 2, bootstrap.address) for rank in range(2)]
    victim = Victim("decode", "push", bootstrap.address)
    stage.callback(victim.close)
    number = next(NUMBERS)
    given = [agent.sender.open(number) for agent, _ in writers]
    victim.do(f"open {number}")
    victim.until("waiting")
    victim.do("read")
    for (agent, _), handover in zip(writers, given, strict=True):
        wait_until(lambda a=agent, h=handover: h.granted() is not None, seconds=20, what="decode's pages")
    os.kill(victim.process.pid, how)
    wait_until(
        lambda: all(handover.state is SenderState.LOST for handover in given),
        seconds=FREED_SECONDS,
        what="the ends",
    )
    for agent, planes in writers:
        assert_nothing_is_held(Scene(agent, victim, bootstrap.address, number, planes))
