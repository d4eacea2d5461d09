"""Hand-overs that take longer than a lease, and pushes that come when decode has given the request up."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from pd_rig import METADATA, Rig, rig

from sglang_ext.disagg import handover
from sglang_ext.disagg.handover import ReceiverState, SenderState, moving_seconds
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.leases import LeaseTable
from sglang_ext.disagg.transports import TransportName
from sglang_ext.disagg.transports._guard import GuardPages
from sglang_ext.engine.pd import offering, reading
from sglang_ext.engine.pd.granting import Claims
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.mempool import remote
from sglang_ext.testing.transfer.rig import Gate

ROWS = bytes(range(METADATA))
NUMBERS = itertools.count(1)
HERE, THERE = [5, 3, 9], [40, 2, 7]
ANOTHERS = 7.0
FIXED = 0.2


@pytest.mark.parametrize("renewed", [True, False], ids=["renewed", "twin"])
def test_a_read_may_take_longer_than_a_lease(renewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(reading, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(reading, "RENEW_SECONDS", 0.1)
    if not renewed:
        monkeypatch.setattr(Instance, "keeping", lambda *_: contextlib.nullcontext())
    with rig(transports=(TransportName.CMA,)) as servers:
        number = next(NUMBERS)
        prefill, decode = servers.prefill[0].agent, servers.decode[0].agent
        given, taken = prefill.sender.open(number), decode.receiver.open(servers.address, number)
        prefill.sender.complete(given, np.array(HERE), ROWS)
        servers.wait(lambda: taken.state is ReceiverState.READY, "an offer")
        (link,) = decode.endpoint.instances[0].links
        gate = Gate(link.peer, "read")
        table: LeaseTable = prefill.endpoint.pools[HBM_POOL]._leases
        (lease,) = table._leases
        granted = table._leases[lease].deadline
        decode.receiver.read(taken, Wanted(np.array(THERE), 0, 0))
        try:
            servers.wait(gate.reached.is_set, "the read")
            if renewed:
                # Longer than a lease lives, and it still does.
                servers.wait(lambda: table._leases[lease].deadline > granted + 3.0, "renewals")
            else:
                servers.wait(lambda: given.state is SenderState.LOST, "the end of the lease")
        finally:
            gate.go.set()
        end = ReceiverState.HELD if renewed else ReceiverState.FAILED
        servers.wait(lambda: taken.state is end, f"the end ({taken.state}, {taken.reason})")
        if renewed:
            given_kv = servers.prefill[0].kv(HERE, servers.page)
            assert np.array_equal(given_kv, servers.decode[0].kv(THERE, servers.page))
        servers.check()


def test_how_long_a_request_may_travel_grows_with_its_bytes() -> None:
    assert moving_seconds(30.0, 0) == 30.0
    assert moving_seconds(30.0, 32 << 30) > 300


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "twin"])
def test_a_large_request_has_longer(mode: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixed part of the deadline is over before the first byte moves; the part for the bytes is not."""
    for module in (reading, remote):
        monkeypatch.setattr(module, "moving_seconds", lambda _, nbytes: moving_seconds(FIXED, nbytes))
    monkeypatch.setattr(handover, "SLOWEST_BYTES_PER_SECOND", 100.0 if counted else 1e12)
    with rig(mode=mode, transports=(TransportName.CMA,)) as servers:
        number = next(NUMBERS)
        prefill, decode = servers.prefill[0].agent, servers.decode[0].agent
        given, taken = prefill.sender.open(number), decode.receiver.open(servers.address, number)
        wanted = Wanted(np.array(THERE), 0, 0)
        if mode == "pull":
            prefill.sender.complete(given, np.array(HERE), ROWS)
            servers.wait(lambda: taken.state is ReceiverState.READY, "an offer")
            mover = decode
        else:
            servers.wait(lambda: taken.state is ReceiverState.WAITING, "a connection")
            mover = prefill
            decode.receiver.read(taken, wanted)
            servers.wait(lambda: given.granted() is not None, "decode's pages")
        (link,) = mover.endpoint.instances[0].links
        gate, over = Gate(link.peer, "read" if mode == "pull" else "write"), threading.Event()
        end_it = link.peer._abort

        def ends(*how: Any) -> None:
            end_it(*how)
            over.set()

        monkeypatch.setattr(link.peer, "_abort", ends)
        try:
            if mode == "pull":
                decode.receiver.read(taken, wanted)
            else:
                prefill.sender.complete(given, np.array(HERE), ROWS)
            servers.wait(gate.reached.is_set, "the transfer")
            late = time.monotonic() + 3 * FIXED
            servers.wait(lambda: time.monotonic() > late, "the fixed part to be over")
            if not counted:
                servers.wait(over.is_set, "the end of its time")
            assert over.is_set() is not counted
        finally:
            gate.go.set()
        end = ReceiverState.HELD if counted else ReceiverState.FAILED
        servers.wait(lambda: taken.state is end, f"the end ({taken.state}, {taken.reason})")


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "twin"])
@pytest.mark.parametrize("transport", [TransportName.CMA, TransportName.TCP])
def test_a_push_that_comes_late_harms_no_other_request(
    transport: TransportName, fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill is held in front of its first byte, while decode gives the request up and reuses its slots."""
    if not fenced:
        stock = Claims.remove

        async def remove(self: Claims, name: str) -> None:
            self._named[name].writers = 0
            await stock(self, name)

        monkeypatch.setattr(Claims, "remove", remove)
        monkeypatch.setattr(GuardPages, "revoke_slot", lambda self, slot: None)
    with rig(mode="push", transports=(transport,)) as servers:
        number = next(NUMBERS)
        prefill, decode = servers.prefill[0].agent, servers.decode[0].agent
        given, taken = prefill.sender.open(number), decode.receiver.open(servers.address, number)
        servers.wait(lambda: taken.state is ReceiverState.WAITING, "a connection")
        decode.receiver.read(taken, Wanted(np.array(THERE), 0, 0))
        servers.wait(lambda: given.granted() is not None, "decode's pages")
        writes = [link for instance in prefill.endpoint.instances for link in instance.links]
        gate = Gate(writes[0].peer, "write")
        slots = (np.array(THERE)[:, None] * servers.page + np.arange(servers.page)).ravel()
        try:
            prefill.sender.complete(given, np.array(HERE), ROWS)
            servers.wait(gate.reached.is_set, "the push")
            decode.receiver.abort(taken, "the client is gone")
            if fenced:
                servers.wait(lambda: decode.state().unfenced_pages == 3, "the pages to be set aside")
                assert taken.state is ReceiverState.STOPPING
            if fenced and transport is TransportName.CMA:
                # For decode, the writer may still run: the pages stay unused until it reports its end.
                go_on(gate, servers)
                servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end, by the writer's word")
                reuse(servers, slots)
            else:
                # Over tcp decode has cut it off.
                servers.wait(lambda: taken.state is ReceiverState.FAILED, "the end")
                reuse(servers, slots)
        finally:
            gate.go.set()
        servers.wait(lambda: given.state is SenderState.LOST, "the end on prefill")
        servers.wait(lambda: not writes[0].peer._requests, "the late write")
        intact = all((plane[slots] == ANOTHERS).all() for plane in servers.decode[0].planes.values())
        assert intact is fenced
        assert decode.state().unfenced_pages == 0 or not fenced


def go_on(gate: Gate, servers: Rig) -> None:
    """Not before the owner has had time to fence it, were that possible: it has looked again and again."""
    owner = servers.decode[0].agent.endpoint.owner
    ticked = owner._last_tick
    servers.wait(lambda: owner._last_tick > ticked + 3.0, "the receiver's ticks")
    assert owner.set_aside == 3
    gate.go.set()


def reuse(servers: Rig, slots: Any) -> None:
    for plane in servers.decode[0].planes.values():
        plane[slots] = ANOTHERS
