"""Advisory requests in the scheduler's thread of every rank (Symphony, section 3.2).

The agent puts a router's hint into the command queue (``engine/commands.py``); here it becomes a prefetch,
and its result goes back through the agent of rank 0. A hint never changes an answer, and a bad one never
harms a server: it is logged and dropped.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, PrefetchResult
from sglang_ext.protocol.agent import (
    Advise,
    PrefillServers,
    ToAgent,
    Withdraw,
)
from sglang_ext.wire import Message

logger = logging.getLogger(__name__)

OnResult = Callable[[PrefetchResult], None]
"""Receives the result of a hint; called in the scheduler's thread, must not block."""
FetchAhead = Callable[[Advise, Callable[[], None]], None]
"""Fetches the KV that peers have for a hint, and then calls the function, however that ended."""


def fetch_nothing(message: Advise, then: Callable[[], None]) -> None:
    """A `FetchAhead` for a rank without peers."""
    then()


class _Terms(TypedDict):
    extra_key: str | None
    cache_salt: str | None
    priority: int
    until: float


class Brings(Protocol):
    """The methods of ``engine.prefetch.Prefetcher`` that hints use."""

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

    def take_ended(self) -> list[PrefetchResult]: ...


class TakesRest(Protocol):
    """Goes on with a prompt after its prefetch, of which tokens may be missing."""

    def takes(
        self,
        result: PrefetchResult,
        tokens: bytes,
        extra_key: str | None,
        cache_salt: str | None,
        priority: int,
    ) -> bool: ...

    def cancel(self, id: str) -> None: ...


class Advice(Planner):
    """See the module's docstring.

    Args:
        on_result: replies to routers, in rank 0.
        rest: asked in order to go on with a prompt after its prefetch.
        priority_sign: -1 where a small number means a high priority.
    """

    def __init__(
        self,
        brings: Brings,
        on_result: OnResult = lambda result: None,
        *,
        fetch_ahead: FetchAhead = fetch_nothing,
        rest: Sequence[TakesRest] = (),
        priority_sign: int = 1,
    ) -> None:
        self._brings = brings
        self.on_result = on_result
        self.priority_sign = priority_sign
        self._fetch_ahead = fetch_ahead
        self._rest = tuple(rest)
        self._bringing: dict[str, Advise] = {}
        """Hints whose KV is being brought."""
        self._fetching: dict[str, Advise] = {}
        """Hints for which a peer's KV is on its way."""

    def takes_command(self, message: Message, at: float) -> bool:
        """Carry out a router's command; see `handle_command`."""
        if isinstance(message, ToAgent):
            self.handle_command(message, at)
            return True
        return False

    def handle_command(self, message: ToAgent, at: float) -> None:
        """Carry out a command, unless no part that is configured here handles its kind.

        Args:
            at: rank 0's time, from which the hint's time to live counts.
        """
        match message:
            case Advise() if message.spans:
                self._fetching[message.id] = message
                self._brings.expect(message.id, message.tokens, **self._terms(message, at))
                self._fetch_ahead(message, lambda: self._fetched(message, at))
            case Advise():
                self._bring(message, at)
            case Withdraw():
                for each in self._rest:
                    each.cancel(message.id)
                if not self._brings.cancel(message.id):
                    self._fetching.pop(message.id, None)
            case PrefillServers():
                pass  # sent before the router received this server's change of role
            case _:
                logger.warning("ignored a command of the wrong kind: %s", type(message).__name__)

    def _fetched(self, message: Advise, at: float) -> None:
        """The fetch from a peer has ended, however: prefetch the blocks that are here, unless the hint was
        withdrawn or replaced.
        """
        if self._fetching.get(message.id) is message:
            del self._fetching[message.id]
            self._bring(message, at)

    def _bring(self, message: Advise, at: float) -> None:
        self._bringing[message.id] = message
        earliest = at + message.earliest_s
        self._brings.prefetch(message.id, message.tokens, **self._terms(message, at), earliest=earliest)

    def _terms(self, message: Advise, at: float) -> _Terms:
        """The terms of a hint: its tenant, its priority, and its expiry in rank 0's time."""
        return {
            "extra_key": message.extra_key,
            "cache_salt": message.cache_salt,
            "priority": message.priority * self.priority_sign,
            "until": at + message.ttl_s,
        }

    def each_pass(self) -> None:
        """Pass the results of ended prefetches on. Once per pass."""
        for result in self._brings.take_ended():
            self.on_result(self._with_rest(result))

    def _with_rest(self, result: PrefetchResult) -> PrefetchResult:
        """A prefetch has ended: perhaps the rest is computed now."""
        message = self._bringing.pop(result.id, None)
        if message is None:
            return result
        priority = message.priority * self.priority_sign
        for each in self._rest:
            if each.takes(result, message.tokens, message.extra_key, message.cache_salt, priority):
                return dataclasses.replace(result, end=PrefetchEnd.COMPUTING)
        return result
