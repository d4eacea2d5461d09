"""Advisory requests in the scheduler's thread of every rank (Symphony, section 3.2).

The agent puts a router's hint into the command queue (``engine/commands.py``); here it becomes a prefetch,
and its result goes back through the agent of rank 0. Fetches from peers and exports to them are passed on
(``peer_kv``). A hint never changes an answer, and a bad one never harms a server: it is logged and dropped.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Protocol, TypedDict

from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, PrefetchResult
from sglang_ext.protocol.agent import (
    Advise,
    Export,
    Fetch,
    PeerDead,
    PrefillServers,
    ToAgent,
    Withdraw,
)
from sglang_ext.wire import Message

logger = logging.getLogger(__name__)

OnResult = Callable[[PrefetchResult], None]
"""Receives the result of a hint; called in the scheduler's thread, must not block."""


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


class Computes(Protocol):
    """The methods of ``engine.compute_ahead.ComputeAhead`` that hints use."""

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


class Advice(Planner):
    """See the module's docstring.

    Args:
        brings: the rank's prefetcher.
        on_result: for rank 0; None on the others.
        peers: fetches and exports; None where that is not possible.
        computes: computes the tokens that no tier and no peer has; None where that is not wanted.
        priority_sign: -1 where a small number means a high priority.
    """

    def __init__(
        self,
        brings: Brings,
        on_result: OnResult | None = None,
        *,
        peers: PeerKv | None = None,
        computes: Computes | None = None,
        priority_sign: int = 1,
    ) -> None:
        self._brings = brings
        self.on_result = on_result
        self.priority_sign = priority_sign
        self.peers = peers
        self.computes = computes
        self._bringing: dict[str, Advise] = {}
        """Hints whose KV is being brought, where the rest may be computed."""
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
            case Withdraw():
                if self.computes is not None:
                    self.computes.cancel(message.id)
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
        if self.computes is not None:
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
        """Pass the results of ended prefetches on, and go on with the prompts to compute. Once per pass."""
        ended = self._brings.take_ended()
        if self.computes is not None:
            ended = [self._to_compute(self.computes, result) for result in ended]
            self.computes.drain()
            ended += self.computes.take_ended()
        if self.on_result is not None:
            for result in ended:
                self.on_result(result)

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

    def drop_in_flight(self) -> None:
        """Compute nothing more ahead."""
        if self.computes is not None:
            self.computes.clear()
