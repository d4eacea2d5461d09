"""What routers say of coming requests, in the scheduler's thread of every rank (Symphony, section 3.2).

The agent puts it into the command queue (``engine/commands.py``); here a hint becomes a prefetch, and what
came of it goes back through the agent of rank 0. What is fetched from peers or exported to them is passed on
(``peer_kv``). A hint never changes an answer, and a bad one never harms a server: it is logged, and
forgotten.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Final, Protocol, TypedDict

from sglang_ext.engine.commands import Askers, RankCommandQueue
from sglang_ext.engine.peers.fetches import FetchResult
from sglang_ext.engine.peers.peer_kv import PeerKv
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
    PeerDead,
    PrefillServers,
    ToAgent,
    Withdraw,
)
from sglang_ext.wire import WireError

logger = logging.getLogger(__name__)

FETCH: Final = "fetch "
"""Before the id of a request, which may be any hint's."""

Tell = Callable[[PrefetchResult], None]
"""Takes what came of a hint; called in the scheduler's thread, must not block."""


class _Terms(TypedDict):
    extra_key: str | None
    cache_salt: str | None
    priority: int
    until: float


class Brings(Protocol):
    """What of ``engine.prefetch.Prefetcher`` is used here."""

    def expect(
        self,
        id: str,
        tokens: bytes,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        until: float = math.inf,
    ) -> object: ...

    def prefetch(
        self,
        id: str,
        tokens: bytes,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        until: float = math.inf,
        earliest: float = -math.inf,
    ) -> None: ...

    def cancel(self, id: str) -> bool: ...

    def expire(self, now: float) -> None: ...

    def take_ended(self) -> list[PrefetchResult]: ...


class Computes(Protocol):
    """What of ``engine.compute_ahead.ComputeAhead`` is used here."""

    def takes(
        self,
        result: PrefetchResult,
        tokens: bytes,
        extra_key: str | None,
        cache_salt: str | None,
        priority: int,
    ) -> bool: ...

    def cancel(self, id: str) -> None: ...

    def drain(self) -> None: ...

    def take_ended(self) -> list[PrefetchResult]: ...

    def clear(self) -> None: ...

    @property
    def busy(self) -> bool: ...

    @property
    def blocks(self) -> int: ...


class Advice:
    """See the module's docstring.

    Args:
        brings: the rank's prefetcher.
        tell: for rank 0; None on the others.
        peers: fetches and exports; None where that is not possible.
        computes: computes what nobody has; None where that is not wanted.
        priority_sign: -1 where a small number means a high priority.
    """

    def __init__(
        self,
        brings: Brings,
        tell: Tell | None = None,
        *,
        peers: PeerKv | None = None,
        computes: Computes | None = None,
        priority_sign: int = 1,
    ) -> None:
        self._brings = brings
        self.tell = tell
        self.priority_sign = priority_sign
        self.peers = peers
        self.computes = computes
        self._bringing: dict[str, Advise] = {}
        """Hints whose KV is being brought, where the rest may be computed."""
        self._fetching: dict[str, Advise] = {}
        """Hints for which a peer's KV is on its way."""

    def handle_command(self, payload: bytes, at: float = 0.0) -> None:
        """Do what a router's message says. What is none for us is left out.

        at: rank 0's time, by which hints expire.
        """
        self._brings.expire(at)
        if not payload:
            return
        try:
            message = TO_AGENT.decode(payload)
        except WireError as error:
            logger.warning("a command for the KV cache is left out: %s", error)
            return
        match message:
            case Advise() if message.spans and self.peers is not None:
                self._fetching[message.id] = message
                self._brings.expect(message.id, message.tokens, **self._terms(message, at))
                self.peers.fetch_ahead(message, lambda: self._fetched(message, at))
            case Advise():
                self._bring(message, at)
            case Export() if self.peers is not None:
                self.peers.export(message)
            case Fetch() if self.peers is not None:
                self.peers.fetch(message)
            case PeerDead() if self.peers is not None:
                self.peers.peer_dead(message)
            case PrefillServers():
                pass  # the server has just changed its role
            case Withdraw():
                if self.computes is not None:
                    self.computes.cancel(message.id)
                if not self._brings.cancel(message.id):
                    self._fetching.pop(message.id, None)
            case _:
                logger.warning("a %s is no command for the KV cache", type(message).__name__)

    def _fetched(self, message: Advise, at: float) -> None:
        """What a peer had is here, or will not be: bring up what there is, unless nobody asks any more."""
        if self._fetching.get(message.id) is message:
            del self._fetching[message.id]
            self._bring(message, at)

    def _bring(self, message: Advise, at: float) -> None:
        if self.computes is not None:
            self._bringing[message.id] = message
        earliest = at + message.earliest_s
        self._brings.prefetch(message.id, message.tokens, **self._terms(message, at), earliest=earliest)

    def _terms(self, message: Advise, at: float) -> _Terms:
        """On which terms: whose it is, how much it matters, and until when, in rank 0's time."""
        return {
            "extra_key": message.extra_key,
            "cache_salt": message.cache_salt,
            "priority": message.priority * self.priority_sign,
            "until": at + message.ttl_s,
        }

    def drain(self) -> None:
        """Tell what has ended, and go on with what is to be computed. Once per pass."""
        ended = self._brings.take_ended()
        if self.computes is not None:
            ended = [self._to_compute(self.computes, result) for result in ended]
            self.computes.drain()
            ended += self.computes.take_ended()
        if self.tell is not None:
            for result in ended:
                self.tell(result)

    def _to_compute(self, computes: Computes, result: PrefetchResult) -> PrefetchResult:
        """A prefetch has ended: perhaps the rest is computed now."""
        message = self._bringing.pop(result.id, None)
        if message is None:
            return result
        priority = message.priority * self.priority_sign
        if computes.takes(result, message.tokens, message.extra_key, message.cache_salt, priority):
            return dataclasses.replace(result, end=PrefetchEnd.COMPUTING)
        return result

    @property
    def busy(self) -> bool:
        """Whether the next passes of an idle scheduler have something to do."""
        return self.computes is not None and self.computes.busy

    def clear(self) -> None:
        """The cache is about to be emptied."""
        if self.computes is not None:
            self.computes.clear()


class HintDesk:
    """Between the agent of rank 0, which hears the routers, and the schedulers, which do what they say.

    Args:
        command_queue: of this process's scheduler.
        epoch: of the instance.
        post: sends a message to a router, from any thread.
    """

    def __init__(
        self, command_queue: RankCommandQueue, epoch: bytes, post: Callable[[bytes, FromAgent], None]
    ) -> None:
        self._command_queue = command_queue
        self._epoch = epoch
        self._post = post
        self._askers = Askers()

    def take(self, reader: bytes, message: ToAgent) -> None:
        """What a router says, in the agent's thread; what is not for the schedulers is left to others."""
        if isinstance(message, Fetch):
            self._askers.remember(FETCH + message.id, reader)
        if isinstance(message, Export | Fetch | PeerDead | PrefillServers):
            self._command_queue.put(TO_AGENT.encode(message))
        if isinstance(message, Fetch):
            self._post(reader, Expecting(self._epoch, message.id))
        if not isinstance(message, Advise | Withdraw):
            return
        if isinstance(message, Advise):
            self._askers.remember(message.id, reader)
        if not self._command_queue.put(TO_AGENT.encode(message)):
            self.tell(PrefetchResult(message.id, PrefetchEnd.DROPPED, 0, 0))

    def tell_fetched(self, result: FetchResult) -> None:
        """Say to the router that asked what became of a fetch; any thread."""
        # Of a hint more will be told.
        asked = result.id if result.ahead else FETCH + result.id
        reader = self._askers.reader(asked, last=not result.ahead)
        if reader is not None:
            self._post(
                reader,
                Fetched(
                    self._epoch,
                    result.id,
                    result.ahead,
                    result.how.value,
                    tuple(FetchedSpan(span.how.value, span.tokens, span.seconds) for span in result.spans),
                ),
            )

    def tell(self, result: PrefetchResult) -> None:
        """Say to the router that asked what came of a hint; any thread."""
        reader = self._askers.reader(result.id, last=result.end is not PrefetchEnd.COMPUTING)
        if reader is not None:
            end = result.end.value
            self._post(
                reader, Advised(self._epoch, result.id, end, result.tokens, result.brought, result.computed)
            )
