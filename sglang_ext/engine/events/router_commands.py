"""Commands of routers on their way to the schedulers of all ranks, and the replies to them.

The agent of rank 0 receives a router's message and passes it here; here it is put into the command queue
(``engine/commands.py``), and the router is remembered for as long as a reply is due to it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.peers.fetch_results import FetchResult
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, PrefetchResult
from sglang_ext.protocol.agent import (
    TO_AGENT,
    Advise,
    Advised,
    Expecting,
    Export,
    Fetch,
    Fetched,
    FetchedSpan,
    FromAgent,
    Park,
    Parked,
    PeerDead,
    PrefillServers,
    Running,
    ToAgent,
    Unpark,
    Watch,
    Withdraw,
)

MOST_SENDERS = 10_000
"""Commands per kind whose router is remembered; beyond that the oldest are dropped."""


class _Senders:
    """The router that sent each command of one kind, by the command's id. Thread-safe."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, id: str, reader: bytes) -> None:
        with self._lock:
            self._readers[id] = reader
            while len(self._readers) > MOST_SENDERS:
                self._readers.popitem(last=False)

    def get(self, id: str, *, last: bool) -> bytes | None:
        """The router to which a reply goes. last: no further reply follows, and the entry is dropped."""
        with self._lock:
            return self._readers.pop(id, None) if last else self._readers.get(id)


class Replies:
    """A rank's replies to routers, and the commands that it queues for all ranks. Those of this class are
    dropped: routers are connected to rank 0 alone.
    """

    epoch = b""

    def enqueue(self, message: ToAgent) -> bool:
        """Queue a command for every rank. False when it was not queued."""
        return False

    def reply_to_hint(self, result: PrefetchResult) -> None:
        """Send the result of a hint to its router."""

    def reply_to_fetch(self, result: FetchResult) -> None:
        """Send the result of a fetch to its router."""

    def reply_to_move(self, message: Parked | Running) -> None:
        """Send the state of a request that is moved to the router that moves it."""


class RouterCommands(Replies):
    """See the module's docstring. ``receive`` runs in the agent's thread, the other methods in any.

    Args:
        queue: of this process's scheduler.
        post: sends a message to a router, from any thread.
    """

    def __init__(
        self, queue: RankCommandQueue, epoch: bytes, post: Callable[[bytes, FromAgent], None]
    ) -> None:
        self.epoch = epoch
        self._queue = queue
        self._post = post
        self._hints = _Senders()
        self._fetches = _Senders()
        self._moves = _Senders()

    def receive(self, reader: bytes, message: ToAgent) -> None:
        """Queue a router's command; messages that are not for the schedulers are ignored.

        A router that sends a ``Fetch`` or a ``Watch`` then sends the request that depends on it:
        ``Expecting`` confirms that the command is in the queue, in front of every later request.
        """
        match message:
            case Advise():
                self._hints.put(message.id, reader)
                if not self.enqueue(message):
                    self.reply_to_hint(PrefetchResult(message.id, PrefetchEnd.DROPPED, 0, 0))
            case Fetch():
                self._fetches.put(message.id, reader)
                self.enqueue(message)
                self._post(reader, Expecting(self.epoch, message.id))
            case Park():
                self._moves.put(message.id, reader)
                self.enqueue(message)
            case Watch():
                self._moves.put(message.id, reader)
                if self.enqueue(message):  # without its state the request could not be resumed here
                    self._post(reader, Expecting(self.epoch, message.ticket))
            case Export() | PeerDead() | PrefillServers() | Unpark() | Withdraw():
                self.enqueue(message)

    def enqueue(self, message: ToAgent) -> bool:
        """Queue a command for every rank. False when the queue is full because the scheduler hangs."""
        return self._queue.put(TO_AGENT.encode(message))

    def reply_to_hint(self, result: PrefetchResult) -> None:
        reader = self._hints.get(result.id, last=result.end is not PrefetchEnd.COMPUTING)
        if reader is not None:
            end = result.end.value
            self._post(
                reader, Advised(self.epoch, result.id, end, result.tokens, result.brought, result.computed)
            )

    def reply_to_fetch(self, result: FetchResult) -> None:
        # After a fetch for a hint the result of the hint itself follows.
        senders = self._hints if result.ahead else self._fetches
        reader = senders.get(result.id, last=not result.ahead)
        if reader is not None:
            spans = tuple(FetchedSpan(span.how.value, span.tokens, span.seconds) for span in result.spans)
            self._post(reader, Fetched(self.epoch, result.id, result.ahead, result.how.value, spans))

    def reply_to_move(self, message: Parked | Running) -> None:
        if (reader := self._moves.get(message.id, last=False)) is not None:
            self._post(reader, message)
