"""Many hand-overs at once, with aborts at random on either side: held pages are right, and none is left."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from pd_rig import METADATA, PAGES, Rig, rig

from sglang_ext.disagg.handover import ReceiverState, SenderState, State, ended
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.engine.transfer_thread import HBM_POOL

pytestmark = pytest.mark.slow

AT_ONCE = 8
ABORTS: list[State] = [state for state in (*SenderState, *ReceiverState) if not ended(state)]
REQUEST_PAGES = 4
SECONDS = 120.0


@dataclass
class Request:
    number: int
    sending: list[SendingHandover]
    """At each of prefill's ranks."""
    receiving: ReceivingHandover
    here: list[int]
    skip: int
    abort_at: State | None = None
    """It is aborted when a side is seen in this state."""
    there: list[int] | None = None
    computed: set[int] = field(default_factory=set)
    """Ranks of prefill's that have."""

    @property
    def over(self) -> bool:
        return all(ended(each.state) for each in (*self.sending, self.receiving))


class Scheduler:
    """Both engines of a rig, in one loop; their moves are drawn from a seed."""

    def __init__(self, servers: Rig, seed: int, mode: str) -> None:
        self.servers = servers
        self.rng = random.Random(seed)
        self.mode = mode
        self.senders = [side.agent.sender for side in servers.prefill]
        self.receiver = servers.decode[0].agent.receiver
        self.free = list(range(PAGES))
        self.held = self.lost = 0

    def start(self, number: int) -> Request:
        handovers = [sender.open(number) for sender in self.senders]
        # Prefill's pages are shared, as cached prefixes are.
        here = self.rng.sample(range(PAGES), REQUEST_PAGES)
        skip = self.rng.randrange(REQUEST_PAGES)
        receiving = self.receiver.open(self.servers.address, number)
        abort_at = self.rng.choice(ABORTS) if self.rng.random() < 0.5 else None
        return Request(number, handovers, receiving, here, skip, abort_at)

    def step(self, request: Request) -> None:
        waits = ReceiverState.READY if self.mode == "pull" else ReceiverState.WAITING
        if request.receiving.state is waits and request.there is None and len(self.free) >= REQUEST_PAGES:
            request.there = [self.free.pop() for _ in range(REQUEST_PAGES - request.skip)]
            self.receiver.read(request.receiving, Wanted(np.array(request.there), request.skip, 0))
        for rank, (sender, sending) in enumerate(zip(self.senders, request.sending, strict=True)):
            may_compute = self.mode == "pull" or sending.granted() is not None
            if may_compute and rank not in request.computed and self.rng.random() < 0.3:
                request.computed.add(rank)
                pages = request.here if self.mode == "pull" else request.here[request.skip :]
                sender.complete(sending, np.array(pages), bytes(METADATA))
        rank = self.rng.randrange(len(self.senders))
        if request.abort_at is request.sending[rank].state:
            request.sending[rank].give_up("prefill's client is gone")
        elif request.abort_at is request.receiving.state:
            self.receiver.abort(request.receiving, "decode's client is gone")

    def give_up(self, request: Request, why: str) -> None:
        for sending in request.sending:
            sending.give_up(why)

    def finish(self, request: Request) -> None:
        if request.receiving.state is ReceiverState.HELD:
            self.held += 1
            pages, size = request.here[request.skip :], self.servers.page
            sent = np.concatenate([side.kv(pages, size) for side in self.servers.prefill], axis=2)
            assert request.there is not None
            assert np.array_equal(sent, self.servers.decode[0].kv(request.there, self.servers.page))
        else:
            self.lost += 1
        self.receiver.settle(request.receiving)
        for sender, sending in zip(self.senders, request.sending, strict=True):
            sender.forget(sending)
        if request.there is not None:
            # Another request's bytes come here next: a late write would damage them.
            self.servers.decode[0].planes[0, "k"][np.array(request.there) * self.servers.page] = 0
            self.free += request.there


@pytest.mark.parametrize(("mode", "ranks"), [("pull", 1), ("push", 1), ("push", 2)])
def test_random_aborts_leave_nothing_and_damage_nothing(mode: str, ranks: int, long_run: bool) -> None:
    """ranks: prefill's; each fills its heads of decode's pages."""
    count = 1000 if long_run else 200
    with rig(ranks, mode=mode) as servers:
        scheduler = Scheduler(servers, seed=11, mode=mode)
        active: list[Request] = []
        number, deadline = 0, time.monotonic() + SECONDS
        while number < count or active:
            assert time.monotonic() < deadline, [
                ([each.state for each in r.sending], r.receiving.state) for r in active
            ]
            if number < count and len(active) < AT_ONCE:
                number += 1
                active.append(scheduler.start(number))
            going: list[Request] = []
            for request in active:
                scheduler.step(request)
                if request.over:
                    scheduler.finish(request)
                    continue
                going.append(request)
                if any(each.state is SenderState.LOST for each in request.sending):
                    # The router aborts the other side, too, and prefill's ranks agree.
                    scheduler.receiver.abort(request.receiving, "prefill has lost it")
                    scheduler.give_up(request, "another rank has lost it")
                elif request.receiving.state is ReceiverState.FAILED:
                    scheduler.give_up(request, "decode has lost it")
            active = going
        assert scheduler.held > count / 4
        assert scheduler.lost > count / 50
        assert sorted(scheduler.free) == list(range(PAGES))
        servers.wait(
            lambda: scheduler.receiver.live == sum(each.live for each in scheduler.senders) == 0,
            "hand-overs to end",
        )
        for side in (*servers.prefill, *servers.decode):
            pages = side.agent.endpoint.pools[HBM_POOL]
            servers.wait(lambda pages=pages: pages.granted == 0, "grants to end")
            assert not pages.is_sealed(np.arange(PAGES)).any()
        servers.check()
