"""Prefill's side of returns: memory is reserved for the missing blocks, and they are read into it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.disagg.handover import LEASE_SECONDS, moving_seconds
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.engine.forward_fence import Passed, nothing_runs, until_passed
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.landing import Wanted, after_skip
from sglang_ext.engine.pd.messages import (
    RANK_COMMANDS,
    RETURN_SECONDS,
    Return,
    Returned,
    ReturnEnd,
    TakeBack,
    alike,
)
from sglang_ext.engine.pd.returns.reservations import Reservations
from sglang_ext.engine.ranks import NOT_YET
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.errors import SglangExtError
from sglang_ext.mempool.ledger import Reservation
from sglang_ext.mempool.store import Refusal
from sglang_ext.tiers import Tier

log = logging.getLogger(__name__)

READ_SECONDS = 5.0
"""For a small return to be read; `moving_seconds` adds the time for the bytes of a large one."""
STOP_SECONDS = 30.0
_REFUSED = {
    Refusal.KNOWN: ReturnEnd.KNOWN,
    Refusal.BUDGET: ReturnEnd.BUDGET,
    Refusal.NO_PARENT: ReturnEnd.MEMORY,
    Refusal.NO_ROOM: ReturnEnd.MEMORY,
}


@dataclass(eq=False)
class _Gathering:
    """Parts of a return, at prefill's first rank. answered: when there is an answer."""

    answered: asyncio.Future[None]
    parts: dict[int, Return] = field(default_factory=dict)
    answer: Returned = field(default_factory=lambda: Returned(0, ReturnEnd.FAILED))


@dataclass(eq=False)
class _Coming:
    """One request on its way back, on prefill."""

    parts: tuple[Return, ...]
    gathering: _Gathering | None = None
    """At the first rank."""
    reservation: Reservation | None = None
    reading: asyncio.Task[None] | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when no task writes to its reservation any more."""
    unwanted: bool = False
    """The cache was emptied before it was read."""
    good: bool = False


class ReturnReceiver:
    """Prefill's side of one rank.

    Args:
        busy: whether requests wait for memory.
        tell_all: sends a command to the schedulers of all ranks, this one included; false where that cannot
            be. None where there is one rank.
        fence: makes a check for the end of the passes under way, which may store into slots reserved now.
    """

    def __init__(
        self,
        places: Reservations,
        agent: Agent,
        busy: Callable[[], bool],
        tell_all: Callable[[bytes], bool] | None = None,
        fence: Callable[[], Passed] = lambda: nothing_runs,
    ) -> None:
        self._places = places
        self._agent = agent
        self._busy = busy
        self._tell_all = tell_all
        self._fence = fence
        self._gathering: dict[str, _Gathering] = {}
        self._new: deque[_Coming] = deque()
        self._placed: list[_Coming] = []
        self.outcomes: Counter[ReturnEnd] = Counter()
        """Returns that were offered, by outcome: `returned` to HBM, `dram`, or why not."""
        self.tokens = 0

    @property
    def set_aside(self) -> dict[str, int]:
        """Tokens of memory that is to be filled, by tier. From any thread."""
        return self._places.tokens

    # -- the first rank, on its event loop ----------------------------------------------------------

    async def take(self, message: Return) -> Returned:
        """A decode rank offers its part."""
        gathering = self._gathering.get(message.name)
        if gathering is None:
            gathering = _Gathering(asyncio.get_running_loop().create_future())
            self._gathering[message.name] = gathering
        gathering.parts[message.rank] = message
        if len(gathering.parts) == message.ranks:
            self._order(message.name, gathering)
        seconds = moving_seconds(RETURN_SECONDS, self._nbytes(message))
        try:
            await asyncio.wait_for(asyncio.shield(gathering.answered), seconds)
        except TimeoutError:
            self._gathering.pop(message.name, None)
        return gathering.answer

    def _order(self, name: str, gathering: _Gathering) -> None:
        """Order all ranks to take a return, once all its parts are there."""
        parts = tuple(gathering.parts[rank] for rank in sorted(gathering.parts))
        if not all(part.offers for part in parts):
            self._skip(gathering, ReturnEnd.BUDGET)
        elif self._tell_all is None:
            self._new.append(_Coming(parts, gathering))
            self._agent.alarm.ring()
        elif not self._tell_all(RANK_COMMANDS.encode(TakeBack(parts))):
            self._skip(gathering, ReturnEnd.BUSY)
        else:
            return  # found by its name when the command comes
        del self._gathering[name]

    def _skip(self, gathering: _Gathering, why: ReturnEnd) -> None:
        gathering.answer = Returned(0, why)
        self._agent.settle(gathering.answered)

    # -- in the schedulers' threads -----------------------------------------------------------------

    def take_back(self, message: TakeBack) -> None:
        """Take what decode's ranks offer; called on all ranks between the same two passes."""
        parts = message.parts
        self._new.append(_Coming(parts, self._gathering.pop(parts[0].name, None)))

    def propose(self) -> Sequence[int]:
        """For each return: `NOT_YET` while it is read, 0 if it could not be read here, 1 if it is there."""
        return [int(coming.good) if coming.stopped.is_set() else NOT_YET for coming in self._placed]

    def act(self, agreed: Sequence[int]) -> None:
        """Insert the returns that have been read on every rank, and reserve memory for new offers."""
        for coming, good in zip(list(self._placed), agreed, strict=False):
            if good != NOT_YET:
                self._placed.remove(coming)
                self._finish(coming, good=bool(good))
        while self._new:
            self._plan(self._new.popleft())

    def clear(self) -> None:
        """The cache is about to be emptied: stop reading into it."""
        for coming in self._placed:
            self._agent.start(self._stop(coming))
            if not coming.stopped.wait(STOP_SECONDS):
                raise RuntimeError(f"a return did not stop within {STOP_SECONDS:.0f} s")
            self._finish(coming, good=False)
        self._placed.clear()

    def _plan(self, coming: _Coming) -> None:
        first = coming.parts[0]
        if not alike(first.weights, self._agent.weights):
            self.outcomes[ReturnEnd.WEIGHTS] += 1
            self._answer(coming, Returned(0, ReturnEnd.WEIGHTS))
            return
        namespace = self._places.blocks.cache.namespace(first.extra_key, first.cache_salt)
        found = self._places.take(namespace, first.tokens, busy=self._busy())
        if isinstance(found, Refusal):
            why = _REFUSED[found]
            self.outcomes[why] += 1
            self._answer(coming, Returned(0, why))
            return
        coming.reservation = found
        self._placed.append(coming)
        self._agent.start(self._read(coming, found, self._fence()))

    def _finish(self, coming: _Coming, *, good: bool) -> None:
        reservation = coming.reservation
        assert reservation is not None
        if good:
            done = reservation.commit()
            fresh = 0 if done is None else done.fresh * self._places.blocks.step
            self.tokens += fresh
            self.outcomes[ReturnEnd.RETURNED if reservation.tier is Tier.HBM else ReturnEnd.DRAM] += 1
            self._answer(coming, Returned(fresh))
        else:
            reservation.abort()
            self.outcomes[ReturnEnd.UNREAD] += 1
            self._answer(coming, Returned(0, ReturnEnd.UNREAD))

    def _answer(self, coming: _Coming, answer: Returned) -> None:
        if coming.gathering is not None:
            coming.gathering.answer = answer
            self._agent.settle(coming.gathering.answered)

    # -- reading, on the event loop -----------------------------------------------------------------

    async def _read(self, coming: _Coming, reservation: Reservation, passed: Passed) -> None:
        """Fill a reservation. When this ends, however it does, no task writes there."""
        try:
            if not coming.unwanted:
                coming.reading = asyncio.ensure_future(self._fill(coming, reservation, passed))
                await asyncio.wait({coming.reading})
        finally:
            # However often it is cancelled: a scheduler waits for the end of the writing.
            while coming.reading is not None and not coming.reading.done():
                coming.reading.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({coming.reading})
            coming.stopped.set()
            self._agent.alarm.ring()

    async def _fill(self, coming: _Coming, reservation: Reservation, passed: Passed) -> None:
        blocks, name = self._places.blocks, f"return {coming.parts[0].name}"
        skip = reservation.start * blocks.step // blocks.page
        lacking = np.empty(blocks.pages_of(coming.parts[0].tokens) - skip, np.int64)
        instance: Instance | None = None
        try:
            instance = await self._agent.endpoint.reach(*(part.control for part in coming.parts))
            mine = (part.offers[self._agent.config.local.rank] for part in coming.parts)
            offers = [after_skip(offer, Wanted(lacking, skip, 0)) for offer in mine]
            await until_passed(passed)
            instance.transfer(name, offers, *self._places.target(reservation))
            async with instance.keeping(offers, LEASE_SECONDS):
                await instance.finish(name, moving_seconds(READ_SECONDS, self._nbytes(coming.parts[0])))
            coming.good = True
        except SglangExtError as error:
            log.debug("a return: %s", error)
        except Exception:
            # No task awaits this one: its failure must not stay silent.
            log.exception("a return could not be read")
        finally:
            if instance is not None:
                await instance.drop(name)

    def _nbytes(self, message: Return) -> int:
        """Bytes of this rank's part of the offer, if it lacks all of it."""
        pages = self._places.blocks.pages_of(message.tokens)
        return pages * self._agent.endpoint.pools[HBM_POOL].block_bytes

    async def _stop(self, coming: _Coming) -> None:
        coming.unwanted = True
        if coming.reading is not None:
            coming.reading.cancel()
