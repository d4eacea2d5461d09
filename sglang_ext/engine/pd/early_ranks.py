"""Decode ranks that ask prefill for a hand-over before its request has come there.

Decode sends `Join` or `Meet` as soon as it has the request, and prefill may get the request later. The decode
rank waits, for `JOIN_SECONDS` at most. If all that wait for a hand-over give the request up, the number is
kept for a while, so that the request is lost at once when it comes.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from sglang_ext.clock import Clock
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import JOIN_SECONDS

MOST_EARLY: Final = 4096
"""Hand-overs that may be waited for, or given up, before their request has come."""


class EarlyRanks:
    """Decode ranks that wait at one prefill rank, by hand-over. Under the sender's lock, but for `wait`."""

    def __init__(self, lock: threading.RLock, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._lock = lock
        self._clock = clock
        self._loop = loop
        self._waiting: dict[int, list[tuple[bytes, asyncio.Future[None]]]] = {}
        """By hand-over: the epochs of decode ranks, and what each awaits."""
        self._given_up: dict[int, tuple[str, float]] = {}
        """Hand-overs that all waiting decode ranks have aborted: the reason, and since when."""

    def __repr__(self) -> str:
        return f"<EarlyRanks waiting={len(self)} given_up={len(self._given_up)}>"

    def __len__(self) -> int:
        """Hand-overs that decode ranks wait for."""
        return len(self._waiting)

    def waiting(self, number: int) -> int:
        """How many decode ranks wait for this hand-over."""
        return len(self._waiting.get(number, ()))

    def given_up(self, number: int) -> bool:
        """Whether all decode ranks that waited for this hand-over have aborted it."""
        return number in self._given_up

    def enter(self, number: int, reader: bytes) -> asyncio.Future[None]:
        """A decode rank begins to wait: see `wait`. On the event loop.

        Raises:
            RefusedError: too many wait.
        """
        if len(self._waiting) + len(self._given_up) >= MOST_EARLY:
            raise RefusedError(
                "handover", f"hand-over {number} is unknown, and too many others are waited for"
            )
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(number, []).append((reader, future))
        return future

    async def wait(self, number: int, future: asyncio.Future[None]) -> None:
        """Wait until the request of a hand-over has come. On the event loop, without the lock.

        Args:
            future: from `enter`.

        Raises:
            RefusedError: the request has not come in time, or the decode rank has aborted it.
        """
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await future
        except TimeoutError:
            raise RefusedError("handover", f"hand-over {number} is unknown here") from None
        finally:
            with self._lock:
                left = [each for each in self._waiting.pop(number, []) if each[1] is not future]
                if left:
                    self._waiting[number] = left

    def request_came(self, number: int) -> str:
        """Let the decode ranks that wait for a request go on. Returns why decode has given it up, or ""."""
        for _, future in self._waiting.pop(number, []):
            self._loop.call_soon_threadsafe(_settle, future)
        reason, _ = self._given_up.pop(number, ("", 0.0))
        return reason

    def leave(self, number: int, reader: bytes, reason: str, *, rejoins: bool) -> bool:
        """A decode rank waits no longer. The last one gives the hand-over up, unless it rejoins. Returns
        whether it waited. On the event loop."""
        waiting = self._waiting.get(number, [])
        left = [each for each in waiting if each[0] != reader]
        if len(left) == len(waiting):
            return False
        for epoch, future in waiting:
            if epoch == reader and not future.done():
                future.set_exception(RefusedError("handover", reason))
        if left:
            self._waiting[number] = left
        else:
            del self._waiting[number]
            if not rejoins:
                self._given_up[number] = reason, self._clock.monotonic()
        return True

    def forget_old(self) -> None:
        """Forget hand-overs that were given up long ago."""
        now = self._clock.monotonic()
        for number in [n for n, (_, since) in self._given_up.items() if now - since > JOIN_SECONDS]:
            del self._given_up[number]


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
