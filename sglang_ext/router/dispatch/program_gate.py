"""Admission by program: turns of sessions wait until the KV of their session fits into HBM beside others'.

``Programs`` decides; this is the asynchronous part around it. It is off without ``--max-concurrent-requests
program-share``. Requests that name no session pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sglang_ext.clock import Clock
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.dispatch.programs import IN_TIME, Ended, Programs
from sglang_ext.router.dispatch.queueing import RECHECK_S, QueueFull, QueueTimeout
from sglang_ext.router.telemetry.observability import RouterMetrics

IDLE_S = 600.0
"""A program that has sent nothing for so long is forgotten."""


class ProgramGate:
    """Lets turns of programs through.

    Args:
        capacity: tokens of KV that programs may have at a time before one was late; infinite where it is
            off, or where no instance reports its HBM.
        expected_s: the time to first token of a prompt at an idle instance that has the beginning in HBM:
            (instance, new tokens, tokens of the beginning).
        size: most requests that wait.
        patience_s: how long one waits.
    """

    def __init__(
        self,
        capacity: Callable[[], float],
        expected_s: Callable[[str, int, int], float],
        metrics: RouterMetrics,
        clock: Clock,
        *,
        size: int,
        patience_s: float,
        programs: Programs | None = None,
    ) -> None:
        self._capacity = capacity
        self._expected_s = expected_s
        self._clock = clock
        self._size = size
        self._patience_s = patience_s
        self.programs = programs or Programs()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """Program -> its waiting requests."""
        self._count = 0
        gauge, retired = metrics.gauge("programs"), metrics.counter("programs_retired")
        counted = 0

        def refresh() -> None:
            nonlocal counted
            gauge.labels("working").set(self.programs.working)
            gauge.labels("waiting").set(self.programs.waiting)
            retired.inc(self.programs.retired - counted)
            counted = self.programs.retired

        metrics.refreshing.subscribe(refresh)

    async def enter(self, flight: Flight) -> float:
        """Wait until the flight's program may work; returns the seconds that took.

        Raises:
            QueueFull, QueueTimeout: it may not.
        """
        name, capacity = flight.admitted.session, self._capacity()
        if name is None or capacity == float("inf"):
            return 0.0
        since = flight.began = self._clock.monotonic()
        self.programs.forget_idle(since, IDLE_S)
        self._grant()
        flight.goes_on = self.programs.known(name)
        if self.programs.arrives(name, flight.units, capacity):
            flight.works = True
            return 0.0
        if self._count >= self._size:
            self.programs.leaves(name)
            raise QueueFull(f"{self._count} turns of sessions wait already", field="--queue-size")
        await self._wait(name, flight.units, since)
        flight.works = True
        return self._clock.monotonic() - since

    async def _wait(self, name: str, tokens: int, since: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(turn)
        self._count += 1
        try:
            while not turn.done():
                self._grant()
                remaining = self._patience_s - (self._clock.monotonic() - since)
                if turn.done():
                    break
                if remaining <= 0:
                    raise QueueTimeout(f"no session has made room within {self._patience_s:g} s")
                # A check by each of those that wait grants to all of them.
                await self._until(turn, min(RECHECK_S * self._count, remaining))
        except BaseException:
            if turn.done() and not turn.cancelled():  # granted in the very moment in which it gave up
                self.programs.ends(name, Ended(tokens), self._clock.monotonic(), self._capacity())
            else:
                self._forget(name, turn)
                self.programs.leaves(name)
            self._grant()
            raise

    def _forget(self, name: str, turn: asyncio.Future[None]) -> None:
        self._count -= 1
        turns = self._waiting[name]
        turns.remove(turn)
        if not turns:
            del self._waiting[name]

    async def _until(self, turn: asyncio.Future[None], seconds: float) -> None:
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({turn, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def ends(self, flight: Flight, pause_s: float | None) -> bool:
        """A turn has ended, and the next is expected after ``pause_s``. Returns whether its program has given
        its place up."""
        name = flight.admitted.session
        if name is None or not flight.works:
            return False
        flight.works = False
        tokens = flight.units + (flight.record.completion_tokens or 0)
        ended = Ended(tokens, self._late(flight), pause_s)
        retired = self.programs.ends(name, ended, self._clock.monotonic(), self._capacity())
        self._grant()
        return retired

    def _late(self, flight: Flight) -> bool | None:
        """Whether a turn's first token was late. A turn shows that if it goes on with a conversation whose KV
        was in HBM when its last turn ended, and streams."""
        record, known = flight.record, flight.goes_on
        if known is None or record.first_byte is None or record.instance is None or not record.stream:
            return None
        took_s = record.first_byte - flight.began
        return took_s > IN_TIME * self._expected_s(record.instance, max(1, flight.units - known), known)

    def _grant(self) -> None:
        for name in self.programs.admissible(self._clock.monotonic(), self._capacity()):
            for turn in self._waiting.pop(name, []):
                self._count -= 1
                if not turn.done():
                    turn.set_result(None)

    def check(self) -> None:
        """Verify every counter.

        Raises:
            InternalError: one of them is wrong.
        """
        self.programs.check()

    def __repr__(self) -> str:
        return f"ProgramGate({self.programs})"
