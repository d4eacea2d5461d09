"""Decode's side of a rank's hand-overs: one task each, from the request's coming to the end.

The scheduler's thread calls `open`, `read`, `abort` and `settle`, and looks at `ReceivingHandover.state`; the
rest is one task per hand-over on the transfer thread's event loop. Slots and metadata row that `read` names
are used until the hand-over has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_ext.disagg.errors import PeerGoneError, RefusedError, SessionEndedError
from sglang_ext.disagg.handover import FACTS, Event, ReceiverState
from sglang_ext.engine.pd.granting import Granting
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.messages import Ready, Weights
from sglang_ext.engine.pd.peers import PrefillPeer, PrefillPeers
from sglang_ext.engine.pd.reading import Reading
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.errors import SglangExtError

SETTLE_SECONDS = 30.0


class Way(Protocol):
    """How KV comes from prefill: `Reading` (pull) or `Granting` (push)."""

    async def take_part(
        self, handover: ReceivingHandover, peer: PrefillPeer, weights: Weights
    ) -> list[Ready]:
        """Have prefill's ranks let this one take part, and move to `WAITING`; returns their offers.

        Raises:
            SessionEndedError: by another connection it may take part.
        """

    async def receive(self, handover: ReceivingHandover, peer: PrefillPeer, ready: Sequence[Ready]) -> None:
        """Wait for slots; returns when every byte is in place, and nothing of ours or of prefill's uses the
        slots."""


class DecodeReceiver:
    """All hand-overs of one decode rank.

    Args:
        wake: called when a hand-over has moved.
        granting: with push, how KV comes; pulling, None.
    """

    def __init__(
        self,
        peers: PrefillPeers,
        epoch: bytes,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        reading: Reading,
        granting: Granting | None,
    ) -> None:
        self.weights: Weights = ""
        """The weights with which requests will go on here. Set by the scheduler's thread."""
        self._peers = peers
        self._epoch = epoch
        self._loop = loop
        self._wake = wake
        self._reading = reading
        self._granting = granting
        self._live: set[ReceivingHandover] = set()
        self.ends: Counter[str] = Counter()
        """Hand-overs that have ended, by how: `held`, or the event by which they failed."""

    def __repr__(self) -> str:
        return f"<DecodeReceiver live={len(self._live)}>"

    @property
    def live(self) -> int:
        """Hand-overs that have a task."""
        return len(self._live)

    # -- the scheduler's thread -----------------------------------------------------------------

    def open(self, address: str, number: int, *, read: bool = False) -> ReceivingHandover:
        """A request has come, whose prefill server is found at a bootstrap address.

        Args:
            read: its KV is read also where servers push: it comes from another decode server.
        """
        handover = ReceivingHandover(address, number, read or self._granting is None, wake=self._wake)
        self._loop.call_soon_threadsafe(self._start, handover)
        return handover

    def read(self, handover: ReceivingHandover, wanted: Wanted) -> None:
        """Slots and row are set aside: have them filled. The hand-over is `ReceiverState.READY`, or `WAITING`
        where the other side writes.
        """
        if handover.allocated(wanted):
            self._loop.call_soon_threadsafe(handover.asked.set)

    def abort(self, handover: ReceivingHandover, reason: str) -> None:
        """The engine gives the request up; its slots are free once the hand-over has ended."""
        if handover.aborted(reason):
            self._loop.call_soon_threadsafe(_cancel, handover)

    def weights_changed(self, weights: Weights) -> None:
        """From now on requests go on with these weights; KV of others that is on its way is given up."""
        self.weights = weights
        for handover in list(self._live):
            self.abort(handover, "the weights of the decode server were changed during the hand-over")

    def settle(self, handover: ReceivingHandover) -> None:
        """Return when nothing of ours uses the hand-over's slots any more; give it up if it has not ended."""
        facts = FACTS[handover.state]
        busy = facts.pins and not facts.end
        self.abort(handover, "another rank has lost the request")
        if busy and not handover.stopped.wait(SETTLE_SECONDS):
            raise RuntimeError(
                f"hand-over {handover.number}: a read did not stop within {SETTLE_SECONDS:.0f} s"
            )

    # -- the event loop ---------------------------------------------------------------------------

    async def close(self) -> None:
        """End all hand-overs."""
        tasks = [handover.task for handover in self._live if handover.task is not None]
        for handover in list(self._live):
            self.abort(handover, "the server stops")
            _cancel(handover)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, handover: ReceivingHandover) -> None:
        if handover.over:
            handover.stopped.set()
            return
        self._live.add(handover)
        handover.task = asyncio.create_task(self._run(handover))
        # Also when it is cancelled before its first step.
        handover.task.add_done_callback(lambda _: self._leave(handover))

    def _leave(self, handover: ReceivingHandover) -> None:
        self._live.discard(handover)
        handover.stopped.set()
        self._wake()

    async def _run(self, handover: ReceivingHandover) -> None:
        way: Way = self._reading if handover.read or self._granting is None else self._granting
        peer: PrefillPeer | None = None
        refused = False
        try:
            peer = await self._peers.get(handover.address)
            try:
                ready = await way.take_part(handover, peer, self.weights)
            except SessionEndedError:
                # While we stood still prefill took us for dead, which we had not noticed when we asked.
                peer = await self._peers.get(handover.address)
                ready = await way.take_part(handover, peer, self.weights)
            await way.receive(handover, peer, ready)
            handover.moved(Event.ARRIVED)
            self.ends["held"] += 1
        except asyncio.CancelledError:
            self._failed(handover, Event.ABORT, "aborted")
        except PeerGoneError as error:
            self._failed(handover, Event.PEER_DEAD, str(error))
        except SglangExtError as error:
            refused = isinstance(error, RefusedError)
            self._failed(handover, Event.FAULT, str(error))
        except Exception as error:  # noqa: BLE001 - a hand-over that ends silently would keep its slots
            self._failed(handover, Event.FAULT, f"{type(error).__name__}: {error}")
        finally:
            self._leave(handover)
        # A hand-over that refused us may be another request's: leave it alone.
        if handover.state is ReceiverState.FAILED and not refused and peer is not None and not peer.gone:
            await peer.abort(handover.number, self._epoch, handover.reason)

    def _failed(self, handover: ReceivingHandover, event: Event, reason: str) -> None:
        self.ends[event.value] += 1
        handover.failed(event, reason)


def _cancel(handover: ReceivingHandover) -> None:
    if handover.task is not None:
        handover.task.cancel()
