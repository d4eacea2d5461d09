"""Queries to all other routers: another router may have the session, request or response that this one did
not find.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec

from sglang_ext.errors import UserError
from sglang_ext.ids import NewId, random_id
from sglang_ext.router.cluster.broadcast import Query, Reply, RouterChannel, RouterMessage, SyncAsked, Synced
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.tasks import Tasks

logger = logging.getLogger("router.queries")
T = TypeVar("T")
Answering: TypeAlias = Callable[[Any], Awaitable[Reply]]

REPLY_S = 10.0
"""Longest wait for replies. A router that dies is left out of the membership before, and not waited for."""


@dataclass(slots=True)
class _Asked:
    """A query under way: the routers that have not replied, and the replies."""

    waiting: set[str]
    every: bool
    replies: list[Reply] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def look(self) -> None:
        if not self.waiting or (not self.every and any(reply.found for reply in self.replies)):
            self.ended.set()


class Queries:
    """Sends queries to all other routers, and replies to theirs. A ``Topic``."""

    def __init__(self, channel: RouterChannel, new_id: NewId = random_id) -> None:
        self._channel = channel
        self.new_id = new_id
        """Names queries."""
        self._routers: frozenset[str] = frozenset()
        self._asked: dict[str, _Asked] = {}
        self._answering: dict[type[Query], Answering] = {SyncAsked: _sync}
        self._replying = Tasks(lambda error: logger.error("a router got no reply", exc_info=error))
        channel.subscribe(self, Query, Reply)

    def __repr__(self) -> str:
        return f"Queries({len(self._asked)} asked of {len(self._routers)} routers)"

    def answer(self, kind: type[Query], answering: Answering) -> None:
        """Reply to queries of a kind with what ``answering`` returns. Its ``router`` is set here."""
        self._answering[kind] = answering

    async def ask(self, query: Query, *, every: bool = False, within_s: float = REPLY_S) -> list[Reply]:
        """The replies of the other routers, those without a result included.

        Args:
            query: its ``router`` is set here.
            every: wait for all routers, not only for the first with a result.
            within_s: longest wait.
        """
        asked = _Asked(set(self._routers), every)
        self._asked[query.id] = asked
        try:
            # Also to routers that are not listed yet: they are not waited for.
            self._publish(query)
            asked.look()
            async with asyncio.timeout(within_s):
                await asked.ended.wait()
        except TimeoutError:
            logger.warning("no reply to %s within %g s from %s", query, within_s, sorted(asked.waiting))
        finally:
            del self._asked[query.id]
        return asked.replies

    async def found(self, look: Callable[[], T]) -> T:
        """The result of ``look``. If it finds nothing, it looks again once everything that other routers have
        sent so far is here.

        Raises:
            RequestRefused, UserError: raised by ``look``.
        """
        try:
            return look()
        except (RequestRefused, UserError) as refused:
            if not self._routers or (isinstance(refused, RequestRefused) and refused.status != 404):
                raise
        await self.ask(SyncAsked("", self.new_id()), every=True)
        return look()

    def on_message(self, message: Query | Reply) -> None:
        """Another router asks or replies."""
        if isinstance(message, Query):
            if (answering := self._answering.get(type(message))) is not None:
                self._replying.start(self._reply(message, answering), name=f"reply to {message.router}")
        elif (asked := self._asked.get(message.id)) is not None:
            asked.waiting.discard(message.router)
            asked.replies.append(message)
            asked.look()

    def _publish(self, message: Any) -> None:
        self._channel.publish(msgspec.structs.replace(message, router=self._channel.router))

    async def _reply(self, query: Query, answering: Answering) -> None:
        self._publish(await answering(query))

    def snapshot(self) -> Iterable[RouterMessage]:
        """Nothing: a router that begins asks."""
        return ()

    def on_routers(self, names: Collection[str]) -> None:
        """A router that is gone is not waited for."""
        self._routers = frozenset(names)
        for asked in self._asked.values():
            asked.waiting &= self._routers
            asked.look()

    async def stop(self) -> None:
        """End all replies in progress."""
        await self._replying.cancel()


async def _sync(query: SyncAsked) -> Synced:
    return Synced("", query.id)
