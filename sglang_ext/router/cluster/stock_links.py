"""Following the KV events of stock SGLang servers: a subscription each, and replay of missed batches.

    batch 0 on, from the replay socket    the copy is complete, and the instance is trusted once it is read
    a number left out                     the copy is not trusted until the replay socket has sent it again
    it is not sent again, or there is     the copy is dropped; later events build a partial one, beside which
    no replay socket                      requests count, too (`index.stock_replica`: partial)
    every `KEEP_UP_S`                     the last batch is requested again: a server that lacks it, or has
                                          another, was restarted; lost batches come with the answer

Only probes decide whether the server is alive. Everything runs on the event loop, a batch at a time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from zmq import constants as zmq
from zmq.asyncio import Context

from sglang_ext.radix_global.sync.replica import Outcome, State
from sglang_ext.router.fleet.facts import EventSource
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.fleet.instance_record import InstanceRecord
from sglang_ext.router.fleet.lifecycle import Event
from sglang_ext.router.fleet.lifecycle import State as Life
from sglang_ext.router.index.index import Index
from sglang_ext.router.index.stock_replica import StockReplica
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.tasks import Tasks

logger = logging.getLogger("router.stock")

KEEP_UP_S: Final = 2.0
PATIENCE_S: Final = 3.0
"""For an answer of the replay socket, from one message to the next; SGLang looks at it ten times a second."""
MAX_BATCH_BYTES: Final = 64 << 20
MAX_WAITING: Final = 10_000
"""Batches that are kept while those before them are asked for again: as many as SGLang remembers."""
END: Final = (-1).to_bytes(8, "big", signed=True)


class StockLinks:
    """Subscribes to the events of every instance of a fleet that publishes them and has no agent.

    Args:
        index: receives the changes.
    """

    def __init__(self, index: Index, fleet: Fleet) -> None:
        self._index = index
        self._links: dict[str, StockLink] = {}
        self._ending = Tasks()
        self._context: Any = None
        if index.mode != "approximate":
            fleet.happened.subscribe(self._on_event)

    def _on_event(self, row: InstanceRecord, event: Event, before: Life) -> None:
        if row.state is Life.LEFT:
            self._disconnect(row.name)
        elif event is Event.LEARNT and row.facts is not None:
            facts = row.facts
            if facts.events is None or facts.reports or (row.registration and row.registration.agent):
                self._disconnect(row.name)
                return
            link = self._links.get(row.name)
            if link is not None and (link.source, link.identity) == (facts.events, facts.identity):
                return
            self._disconnect(row.name)
            if self._context is None:
                self._context = Context()
            replica = self._index.attach_stock(row.name, row.role)
            self._links[row.name] = StockLink(
                self._context, self._index, row.name, facts.events, facts.identity, replica
            )

    def _disconnect(self, name: str) -> None:
        if (link := self._links.pop(name, None)) is not None:
            link.task.cancel()
            self._ending.keep(link.task)
            if self._index.stock(name) is link.replica:
                self._index.detach(name)

    def measure(self, metrics: RouterMetrics) -> None:
        """Show what each instance's events brought."""
        gauges = {
            "batches": metrics.gauge("kv_event_batches"),
            "lost_count": metrics.gauge("kv_event_losses"),
        }

        def refresh() -> None:
            for what, gauge in gauges.items():
                gauge.clear()
                for name, link in self._links.items():
                    gauge.labels(name).set(getattr(link.replica, what))

        metrics.refreshing.subscribe(refresh)

    async def close(self) -> None:
        """End every subscription."""
        for name in list(self._links):
            self._disconnect(name)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._context is not None:
            self._context.term()
            self._context = None


class StockLink:
    """The subscription to one instance's events.

    Args:
        context: of ZeroMQ.
        index: is notified when the copy has changed.
        identity: of the server's process, as its facts give it.
        keep_up_s: see ``KEEP_UP_S``.
    """

    def __init__(
        self,
        context: Any,
        index: Index,
        name: str,
        source: EventSource,
        identity: str,
        replica: StockReplica,
        *,
        keep_up_s: float = KEEP_UP_S,
    ) -> None:
        self.source = source
        self.identity = identity
        self.replica = replica
        self._context = context
        self._index = index
        self._name = name
        self._keep_up_s = keep_up_s
        self._live = -1
        """Number of the last batch that was published."""
        self._waiting: dict[int, bytes] = {}
        self._due = asyncio.Event()
        """Something is to be asked for at once."""
        index.on_heartbeat(name, alive=True)
        if source.replay is not None:
            index.expect(name)
        self.task = asyncio.create_task(self._run(), name=f"KV events of {name}")

    async def _run(self) -> None:
        if self.source.replay is None:
            logger.warning(
                "%s publishes KV events without a replay_endpoint: its earlier KV, and lost events, are "
                "inferred from requests",
                self._name,
            )
            self._go_on_from(0, partial=True)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._receive(), name=f"receive KV events of {self._name}")
                both.create_task(self._keep_up(), name=f"keep up with KV events of {self._name}")
        except* _Unwanted:
            if not self._index.reports(self._name):
                logger.warning(
                    "%s has so many pages that their names do not fit into the index: its KV is "
                    "inferred from requests. Give it larger pages, or the router more --memory-limits tree",
                    self._name,
                )
        except* Exception:
            # A fault of this router: the instance's cached tokens are inferred from requests from now on.
            logger.exception("the KV events of %s cannot be taken in", self._name)
            self._index.detach(self._name)

    def _socket(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
        socket.connect(address)
        return socket

    # -- published batches ---------------------------------------------------------------------------

    async def _receive(self) -> None:
        socket = self._socket(zmq.SUB, self.source.endpoint)
        try:
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    self._published(int.from_bytes(frames[1], "big"), frames[2])
                # Requests go between two batches, however many there are.
                await asyncio.sleep(0)
        finally:
            socket.close(linger=0)

    def _published(self, number: int, payload: bytes) -> None:
        if number <= self._live:
            logger.info("%s numbers its KV events anew: it was restarted", self._name)
            self._waiting.clear()
            self.replica.restart()
            if self.source.replay is None:
                self._go_on_from(number, partial=number > 0)
            self._due.set()
        elif self._live < 0 and self.source.replay is None:
            self._go_on_from(number, partial=number > 0)
        self._live = number
        if self._take(number, payload) is not Outcome.BROKEN:
            if not self.replica.trusted:
                self._due.set()
            return
        if self.source.replay is None:
            self._go_on_from(number, partial=True)
            self._take(number, payload)
            return
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
        self._waiting[number] = payload
        self._due.set()

    def _take(self, number: int, payload: bytes) -> Outcome:
        outcome = self.replica.take(number, payload)
        if outcome is Outcome.APPLIED and self.source.replay is None:
            self.replica.caught_up()
        self._changed()
        return outcome

    def _go_on_from(self, number: int, *, partial: bool) -> None:
        """Nothing before this batch will come."""
        if partial:
            self.replica.lost(number)
        else:
            self.replica.began()
        self.replica.caught_up()
        self._changed()

    def _changed(self) -> None:
        if not self._index.stock_changed(self._name, self.replica):
            raise _Unwanted

    # -- missed batches ------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        """Request the last batch and those after it, every ``keep_up_s``."""
        if self.source.replay is None:
            return
        while True:
            socket = self._socket(zmq.DEALER, self.source.replay)
            try:
                while True:
                    self._due.clear()
                    await self._ask(socket)
                    try:
                        async with asyncio.timeout(self._keep_up_s):
                            await self._due.wait()
                    except TimeoutError:
                        pass
            except TimeoutError:
                # Late answers go with the socket. The missing batches will not come.
                if self._waiting or self.replica.state is State.BLANK:
                    self.replica.lost(min(self._waiting, default=self._live + 1))
                    self._drain()
            finally:
                socket.close(linger=0)

    async def _ask(self, socket: Any) -> None:
        """Request the last batch and those after it.

        Raises:
            TimeoutError: no answer.
        """
        replica = self.replica
        first, last = max(0, replica.next - 1), replica.last
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        same: bool | None = None
        while True:
            async with asyncio.timeout(PATIENCE_S):
                frames = await socket.recv_multipart()
            # A topic stands before them from SGLang 0.5.23 on.
            if len(frames) not in (3, 4) or len(frames[-2]) != 8:
                continue
            if frames[-2] == END:
                break
            number, payload = int.from_bytes(frames[-2], "big"), frames[-1]
            if same is None:
                same = number > first or not last or payload == last
            if not same:
                continue
            if replica.state is State.BLANK and number == 0:
                replica.began()
            if replica.take(number, payload) is Outcome.BROKEN:
                replica.lost(number)  # it does not remember those before
                replica.take(number, payload)
            await asyncio.sleep(0)
        if last and not same:
            # A server without our last batch is another process, whose cache was empty at its start.
            self._waiting.clear()
            replica.restart()
            self._due.set()
            return
        if replica.state is State.BLANK:
            replica.began()
        self._drain()

    def _drain(self) -> None:
        """Apply the batches published meanwhile; request missing ones at once."""
        for number in sorted(self._waiting):
            if self.replica.take(number, self._waiting[number]) is Outcome.BROKEN:
                self._due.set()
                break
            del self._waiting[number]
        else:
            self.replica.caught_up()
        self._changed()


class _Unwanted(Exception):
    """The index does not want an instance's events."""
