"""One rank's part in prefill and decode apart: its endpoint, its rooms, and the sockets by which others ask.

Everything here runs on one thread beside the scheduler's; the scheduler only looks at the states of rooms.
`wake_fd` becomes readable when a room has moved, so that an idle scheduler need not spin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any

from zmq.asyncio import Context

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.disagg.config import EndpointConfig
from sglang_ext.disagg.control import ControlClient, ControlServer, CurveKeys
from sglang_ext.disagg.errors import PeerProtocolError, TransferError
from sglang_ext.disagg.handover import HEARTBEAT_SECONDS, LEASE_SECONDS, VERDICT_SECONDS
from sglang_ext.disagg.leases import Ended
from sglang_ext.disagg.pools import PoolSpec
from sglang_ext.disagg.transfer import Endpoint
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.pd_bootstrap import REGISTER_SECONDS
from sglang_ext.engine.pd_giving import POOL, GivingRooms
from sglang_ext.engine.pd_messages import ANSWERS, ASKS, Abort, Ask, Done, Join, Ok, RankInfo, Register
from sglang_ext.engine.pd_metrics import AgentMetrics, AgentState
from sglang_ext.engine.pd_peers import Local, PrefillPeers
from sglang_ext.engine.pd_taking import MetadataRows, TakingRooms
from sglang_ext.engine.pd_thread import LoopThread

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25


@dataclass(frozen=True)
class AgentConfig:
    """Who this rank is. host: where to listen. bootstrap: host:port of the server's own bootstrap port, for
    prefill. transports: see `EndpointConfig`. metrics: whether to publish them.
    """

    instance: str
    namespace: str
    local: Local
    host: str = "127.0.0.1"
    keys: CurveKeys | None = None
    bootstrap: str = ""
    transports: tuple[TransportName, ...] = ()
    metrics: bool = False


class Agent:
    """The transfer thread of one rank. `giving` on prefill, `taking` on decode."""

    giving: GivingRooms
    taking: TakingRooms
    endpoint: Endpoint

    def __init__(
        self, config: AgentConfig, pool: PoolSpec, rows: MetadataRows, clock: Clock | None = None
    ) -> None:
        """Start. What `Endpoint.start` raises."""
        self.config = config
        self._rows = rows
        self._clock = clock or SystemClock()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = LoopThread("kv-transfer")
        try:
            self._thread.run(self._start(pool))
        except BaseException:
            self._thread.close()
            os.close(self.wake_fd)
            raise

    def __repr__(self) -> str:
        return f"<Agent {self.config.instance} {self.giving!r} {self.taking!r} {self.endpoint!r}>"

    def state(self) -> AgentState:
        """What is going on, counted."""
        return AgentState(
            rooms={"prefill": self.giving.live, "decode": self.taking.live},
            ends={"prefill": dict(self.giving.ends), "decode": dict(self.taking.ends)},
            leased_pages=self.endpoint.pools[POOL].pinned,
            transport_bytes={str(name): stats.bytes for name, stats in self.endpoint.totals().items()},
        )

    def wake(self) -> None:
        """Make `wake_fd` readable. From any thread."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self.wake_fd, 1)

    def slept(self) -> None:
        """Take the wake-ups up to now as seen."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self.wake_fd)

    def close(self) -> None:
        """Leave: end rooms, leases and connections. Safe to call again."""
        if self.wake_fd < 0:
            return
        self._thread.run(self._stop())
        self._thread.close()
        os.close(self.wake_fd)
        self.wake_fd = -1

    async def _start(self, pool: PoolSpec) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        self._context = Context()
        self.endpoint = await Endpoint.start(
            EndpointConfig(
                config.instance,
                config.namespace,
                rank=config.local.rank,
                bind=config.host,
                keys=config.keys,
                transports=config.transports,
                lease_ttl=LEASE_SECONDS,
                heartbeat=HEARTBEAT_SECONDS,
                dead_after=VERDICT_SECONDS,
            ),
            [pool],
            clock=self._clock,
            on_ended=self._lease_ended,
        )
        pages = self.endpoint.pools[POOL]
        self.giving = GivingRooms(pages, self.endpoint, self._clock, loop, self.wake)
        self._peers = PrefillPeers(self.endpoint, self._context, config.keys, config.local)
        self.taking = TakingRooms(self._peers, self.endpoint.epoch, self._rows, self._clock, loop, self.wake)
        self._server = ControlServer(self._context, config.host, config.keys, self._answer, ASKS, ANSWERS)
        self._tasks.append(asyncio.create_task(self._ticking(), name="kv-pd-tick"))
        if config.bootstrap:
            self._tasks.append(asyncio.create_task(self._registering(), name="kv-pd-register"))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.taking.close()
        await self._server.close()
        await self._peers.close()
        await self.endpoint.close()
        self._context.destroy(linger=0)

    def _lease_ended(self, _pool: str, ended: Ended) -> None:
        self.giving.lease_ended(ended)

    async def _answer(self, _identity: bytes, message: Ask) -> Any:
        match message:
            case Join():
                return await self.giving.join(message)
            case Done():
                self.giving.done(message.room, message.reader)
                return Ok()
            case Abort():
                self.giving.peer_aborts(message.room, message.reader, message.reason)
                return Ok()
        raise PeerProtocolError(f"{type(message).__name__} is not for this port")

    async def _ticking(self) -> None:
        metrics = AgentMetrics(self.config.local.rank) if self.config.metrics else None
        while True:
            try:
                self.giving.tick([session.reader.epoch for session in self.endpoint.owner.sessions])
                if metrics is not None:
                    metrics.update(self.state())
            except Exception:
                # Rooms must go on ending whatever one of them does.
                log.exception("a room could not be ended")
            await self._clock.sleep(TICK_SECONDS)

    async def _registering(self) -> None:
        """Say again and again that this rank lives; the bootstrap port may start later, or anew."""
        me = RankInfo(
            self.config.instance,
            self.endpoint.epoch,
            self.config.local.rank,
            self.config.local.ranks,
            self.config.local.page_tokens,
            self.config.local.metadata_bytes,
            self.endpoint.address,
            self._server.address,
        )
        client = ControlClient(
            self._context, self.config.bootstrap, self.config.keys, lambda _: None, ASKS, ANSWERS
        )
        try:
            while True:
                try:
                    await client.ask(Register(me), REGISTER_SECONDS)
                except TransferError as error:
                    log.debug("bootstrap at %s: %s", self.config.bootstrap, error)
                await self._clock.sleep(REGISTER_SECONDS)
        finally:
            await client.close()
