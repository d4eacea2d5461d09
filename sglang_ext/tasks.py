"""Tasks that run beside their starter.

An event loop holds its tasks only weakly: a task without another reference may vanish before it has ended.
And the exception of a task that is never awaited is logged when the task is collected, if at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES: Final = 10
WITHIN_S: Final = 60.0
"""More failed rounds than this within this time end the process: a new one begins without its state."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Pause after the first failed round, and the longest; each further failure in a row doubles it."""

Round = Callable[[], Awaitable[float | None]]
"""Does a piece of work once. Returns the pause until the next one in seconds, None when there is none."""


class Tasks(set[asyncio.Task[Any]]):
    """The running tasks of one owner.

    Args:
        on_error: called with the exception by which a task has ended.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        super().__init__()
        self._on_error = on_error

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run something on the event loop of this thread."""
        task = asyncio.create_task(work, name=name)
        self.keep(task)
        return task

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that runs already."""
        self.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        """Cancel all; returns when they have ended."""
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.discard(task)
        if self._on_error is not None and not task.cancelled():
            error = task.exception()
            if error is not None:
                self._on_error(error)


async def at_last(work: Coroutine[Any, Any, None]) -> None:
    """Run something to its end, however often we are cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


class Counts(Protocol):
    """A counter of a metrics library."""

    def inc(self) -> None:
        """One more."""


class _Uncounted:
    def inc(self) -> None:
        pass


def _log_end(error: BaseException) -> None:
    logger.critical("work beside the requests has ended", exc_info=error)


class Rounds:
    """Background work in rounds. A round that raises is logged and counted, and the next one follows. Work
    ends if it raises ``UserError``, or fails more than ``FAILURES`` times within ``WITHIN_S`` (unless it
    serves one peer of several).

    Args:
        clock: seconds.
        on_end: called with the error that ended work. A process must not go on without that work.
        counter: the metric of failed rounds of work of this name.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        on_end: Callable[[BaseException], None] = _log_end,
        counter: Callable[[str], Counts] = lambda name: _Uncounted(),
    ) -> None:
        self._clock = clock or SystemClock()
        self.on_end = on_end
        self._counter = counter
        self.names: set[str] = set()
        """Of all work that was started."""
        self.failures: Counter[str] = Counter()
        """Rounds that failed, by the work's name."""

    def start(
        self,
        name: str,
        each: Round,
        *,
        of_one_peer: bool = False,
        on_end: Callable[[asyncio.Task[None]], None] | None = None,
    ) -> asyncio.Task[None]:
        """Begin with the first round, on the event loop of this thread. The caller keeps the task, and
        cancels it in the end.

        Args:
            name: of the work, as metrics and the log have it; several pieces of work may have one name.
            of_one_peer: the work serves one peer, and no number of failures ends it; the caller goes on
                without that peer.
            on_end: called with the task when it has ended, in place of ``Rounds``' own.
        """
        self.names.add(name)
        task = asyncio.create_task(self._run(name, each, self._counter(name), of_one_peer), name=name)
        task.add_done_callback(on_end or self._ended)
        return task

    def failed(self, name: str, error: BaseException) -> None:
        """Log and count a failure of work that begins again by itself."""
        self._counter(name).inc()
        self.failures[name] += 1
        logger.error("%s: failed; it begins again", name, exc_info=error)

    async def once(self, name: str, each: Round) -> float | None:
        """One round. Tests replace this method to make rounds fail."""
        return await each()

    async def _run(self, name: str, each: Round, counter: Counts, of_one_peer: bool) -> None:
        failed: deque[float] = deque(maxlen=FAILURES)
        in_a_row = 0
        while True:
            try:
                pause = await self.once(name, each)
                in_a_row = 0
            except UserError:
                raise
            except Exception:
                counter.inc()
                self.failures[name] += 1
                now = self._clock.monotonic()
                if not of_one_peer and len(failed) == FAILURES and now - failed[0] < WITHIN_S:
                    raise
                failed.append(now)
                in_a_row += 1
                pause = min(FIRST_PAUSE_S * 2 ** (in_a_row - 1), LONGEST_PAUSE_S)
                logger.exception("%s: a round failed; the next one follows in %.1f s", name, pause)
            if pause is None:
                return
            await (self._clock.sleep(pause) if pause > 0.0 else asyncio.sleep(0))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_end(error)
