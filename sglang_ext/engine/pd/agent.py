"""One rank's part in prefill-decode disaggregation: its hand-overs, and its answers to other ranks' messages.

Everything here runs on the rank's transfer thread; the scheduler only looks at the states of hand-overs.
`alarm` rings when a hand-over has moved, so that an idle scheduler need not spin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, get_args

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.disagg.transfer.staging import STAGING
from sglang_ext.engine.forward_fence import Passed, nothing_runs
from sglang_ext.engine.pd.answers import Answers, ReceivesReturns, Returns
from sglang_ext.engine.pd.bootstrap import Registry, keep_registered
from sglang_ext.engine.pd.decode_receiver import DecodeReceiver
from sglang_ext.engine.pd.granting import Claims, Granting
from sglang_ext.engine.pd.joins import PrefillJoins
from sglang_ext.engine.pd.landing import Landing, MetadataRows
from sglang_ext.engine.pd.messages import Ask, RankInfo, Weights
from sglang_ext.engine.pd.metrics import AgentMetrics, AgentState
from sglang_ext.engine.pd.peers import Local, PrefillPeer, PrefillPeers
from sglang_ext.engine.pd.prefill_sender import PrefillSender
from sglang_ext.engine.pd.pushing import LayerFeed, Pusher
from sglang_ext.engine.pd.reading import Reading
from sglang_ext.engine.pd.sending_handover import SendingRank
from sglang_ext.engine.transfer_thread import HBM_POOL, TransferThread
from sglang_ext.mempool.ledger import Call
from sglang_ext.protocol.agent import PrefillServers
from sglang_ext.tasks import Tasks

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25


@dataclass(frozen=True)
class AgentConfig:
    """A rank's configuration. weights: of the whole model, as in messages. bootstrap: host:port of the
    server's own bootstrap port, for prefill; replica: its number there. metrics: as which of the server's
    processes it publishes them; None: it does not.
    """

    local: Local
    weights: Weights
    bootstrap: str = ""
    replica: int = 0
    metrics: int | None = None


class Alarm:
    """Wakes a scheduler that waits for hand-overs to move: `fd` becomes readable."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """Make `fd` readable. From any thread."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget the wake-ups up to now."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1


class Agent:
    """Hand-overs and returns of one rank. `sender` on prefill, `receiver` on decode."""

    sender: PrefillSender
    receiver: DecodeReceiver

    def __init__(
        self,
        config: AgentConfig,
        transfers: TransferThread,
        rows: MetadataRows,
        clock: Clock | None = None,
        metadata_rows: Callable[[], int] = int,
    ) -> None:
        """Take part from now on. transfers: its endpoint has the pool `hbm`, with staging for the layout
        `aggregated`, and is asked `messages.MESSAGES`. metadata_rows: SGLang's metadata buffers in use.
        """
        self.config = config
        self.transfers = transfers
        self.endpoint = transfers.endpoint
        self._rows = rows
        staging = () if transfers.staging is None else (STAGING,)
        self._leasing = (HBM_POOL, *staging, *config.local.beside)
        """The pools that peers read hand-overs and returns from."""
        self._clock = clock or SystemClock()
        self.alarm = Alarm()
        self._tasks = Tasks()
        self._started = Tasks()
        self.calls: Counter[Call] = Counter()
        """Calls of the memory pool that named another instance (MemServe, table 1)."""
        self.pushed: Counter[str] = Counter()
        """Pages times layers that were pushed to decode, by when (`pushing.AHEAD`, `AFTER`)."""
        self._return_sender: Returns | None = None
        self.weights: Weights = ""
        """The weights with which this rank computes."""
        self._metadata_rows = metadata_rows
        try:
            transfers.run(self._start())
        except BaseException:
            self.alarm.close()
            raise
        self.weights_changed(config.weights)

    def receive_returns(self, return_receiver: ReceivesReturns) -> None:
        """Prefill takes KV back from now on."""
        self.answers.receive_returns(return_receiver)

    def send_returns(self, return_sender: Returns) -> None:
        """Decode gives KV back from now on."""
        self._return_sender = return_sender

    def weights_changed(self, weights: Weights) -> None:
        """From now on this rank computes with these; KV of other weights that is on its way is given up. On
        all ranks alike. By one thread at a time.
        """
        self.weights = weights
        self.sender.weights_changed(weights)
        self.receiver.weights_changed(weights)

    def __repr__(self) -> str:
        return f"<Agent {self.sender!r} {self.receiver!r} {self.endpoint!r}>"

    def state(self) -> AgentState:
        """Counts of hand-overs, leases, returns and transfers."""
        moved = self.endpoint.totals()
        return AgentState(
            live={"prefill": self.sender.live, "decode": self.receiver.live},
            ends={"prefill": dict(self.sender.ends), "decode": dict(self.receiver.ends)},
            leased_pages=sum(self.endpoint.pools[name].pinned for name in self._leasing),
            unfenced_pages=self.endpoint.owner.set_aside,
            returns={
                side: dict(part.outcomes)
                for side, part in (("prefill", self.answers.returns), ("decode", self._return_sender))
                if part is not None
            },
            returned_tokens=sum(
                part.tokens for part in (self.answers.returns, self._return_sender) if part is not None
            ),
            metadata_rows=self._metadata_rows(),
            set_aside=self.answers.returns.set_aside if self.answers.returns is not None else {},
            prefill_servers={
                "connected": len(self._peers.connected),
                "awaited": len(self.joins.awaited),
            },
            connects=dict(self._peers.connects),
            rail=self.endpoint.rail,
            transport_bytes={str(name): stats.bytes for name, stats in moved.items()},
            transactions={str(name): stats.transactions for name, stats in moved.items()},
            calls={call.value: count for call, count in self.calls.items()},
            pushed=dict(self.pushed),
        )

    def prefill_servers(self, message: PrefillServers) -> None:
        """Connect to these, beside what requests do. From any thread."""
        with contextlib.suppress(RuntimeError):  # the transfer thread has ended
            self.transfers.loop.call_soon_threadsafe(self.joins.on_server_list, message)

    def peer(self, address: str) -> PrefillPeer | None:
        """A connected prefill server, by its bootstrap address. From any thread."""
        return self._peers.known(address)

    @property
    def address(self) -> str:
        """``host:port`` where this rank is asked."""
        return self.endpoint.address

    def meet_at(self, first: str) -> None:
        """Have others find this server's ranks at its first rank, whose address it is: a decode server has no
        bootstrap port, and gives KV all the same when a request leaves it."""
        self.start(self._registering(first))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something on the transfer thread. From any thread."""
        self.transfers.loop.call_soon_threadsafe(self._started.start, work)

    def layer_feed(
        self, first: int, layers: int, fence: Callable[[], Passed] = lambda: nothing_runs
    ) -> LayerFeed:
        """Sends layers as a forward pass computes them. fence: see `LayerFeed`."""
        return LayerFeed(self.transfers.loop, first, layers, fence, self._started.start)

    def settle(self, future: asyncio.Future[None]) -> None:
        """Settle a future, so that its waiter goes on. From any thread."""

        def finish() -> None:
            if not future.done():
                future.set_result(None)

        self.transfers.loop.call_soon_threadsafe(finish)

    def close(self) -> None:
        """Leave: end hand-overs, leases and connections. The transfer thread goes on, and others may take
        part by it. Safe to call again."""
        if self.alarm.fd < 0:
            return
        self.transfers.run(self._stop())
        self.alarm.close()

    async def _start(self) -> None:
        config, loop, staging = self.config, asyncio.get_running_loop(), self.transfers.staging
        pushes = config.local.mode != "pull"
        self.claims = Claims(self.endpoint.owner.revoke)
        self.endpoint.owner.let_write(self.claims if pushes else None)
        self.sender = PrefillSender(
            SendingRank(
                endpoint=self.endpoint,
                clock=self._clock,
                loop=loop,
                connected=self.endpoint.owner.connected,
                wake=self.alarm.ring,
                claim=Pusher(self.endpoint, staging, self.calls, self.pushed).claim,
                pushes=pushes,
                staging=staging,
            )
        )
        for name in self._leasing:
            self.transfers.watch_leases(name, self.sender.lease_ended)
        self._peers = PrefillPeers(self.endpoint, config.local)
        self.joins = PrefillJoins(self._peers, self._clock)
        epoch, pools = self.endpoint.epoch, self.endpoint.pools
        landing = Landing(self._rows, staging, {name: pool.block_bytes for name, pool in pools.items()})
        self.receiver = DecodeReceiver(
            self._peers,
            epoch,
            loop,
            self.alarm.ring,
            Reading(landing, epoch, self._clock),
            Granting(landing, epoch, self.claims, self.endpoint.address) if pushes else None,
        )
        self.answers = Answers(self.sender, Registry(self._clock))
        self.endpoint.serve(get_args(Ask), self._answered)
        self._tasks.start(self._ticking(), name="kv-pd-tick")
        if config.bootstrap:
            work = self._registering(config.bootstrap, config.replica)
            self._tasks.start(work, name="kv-pd-register")

    async def _stop(self) -> None:
        await self._tasks.cancel()
        self.endpoint.serve(get_args(Ask), None)
        await self._started.cancel()
        await self.receiver.close()
        await self.joins.close()
        await self._peers.close()
        await self.endpoint.leave()
        self.endpoint.owner.let_write(None)
        for name in self._leasing:
            self.transfers.watch_leases(name, None)

    async def _answered(self, identity: bytes, message: Ask) -> Any:
        """The answer to another rank's message, for as long as this rank takes part."""
        return await self._started.start(self.answers.answer(identity, message))

    async def _ticking(self) -> None:
        metrics = None if self.config.metrics is None else AgentMetrics(self.config.metrics)
        while True:
            try:
                self.joins.tick()
                self.sender.tick()
                if metrics is not None:
                    metrics.update(self.state())
            except Exception:
                # Hand-overs must go on ending whatever one of them does.
                log.exception("a hand-over could not be ended")
            await self._clock.sleep(TICK_SECONDS)

    async def _registering(self, bootstrap: str, replica: int = 0) -> None:
        """Register this rank at a bootstrap port, again and again. replica: of those that register there."""
        local, endpoint = self.config.local, self.endpoint
        me = RankInfo(
            endpoint.config.instance,
            endpoint.epoch,
            local.rank,
            local.ranks,
            local.page_tokens,
            local.metadata_bytes,
            endpoint.address,
            local.mode,
            local.layout,
            dict(local.settings),
            dict(local.components),
            replica=replica,
        )
        await keep_registered(me, endpoint.client(bootstrap), self._clock)
