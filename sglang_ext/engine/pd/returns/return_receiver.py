"""Prefill's side of returns: memory is reserved for the missing blocks, and they are read into it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_ext.disagg.handover import LEASE_SECONDS, moving_seconds
from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.forward_fence import Passed, nothing_runs, until_passed
from sglang_ext.engine.moves.move import Move, MovePlanner, State
from sglang_ext.engine.moves.sources import FromTask
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.landing import after_skip
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
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.mempool.ledger import Committed, Reservation
from sglang_ext.mempool.store import Refusal
from sglang_ext.tiers import Tier
from sglang_ext.wire import Message

READ_SECONDS = 5.0
"""For a small return to be read; `moving_seconds` adds the time for the bytes of a large one."""
_REFUSED: Final = {
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


@dataclass(eq=False, kw_only=True)
class _ReturnMove(Move):
    """One request on its way back. gathering: at the first rank, while decode waits for the answer."""

    gathering: _Gathering | None


class ReturnReceiver(Listener, MovePlanner):
    """Prefill's side of one rank.

    Args:
        busy: whether requests wait for memory.
        commands: to the schedulers of all ranks, at the first one.
        fence: makes a check for the end of the passes under way, which may store into slots reserved now.
    """

    def __init__(
        self,
        places: Reservations,
        agent: Agent,
        busy: Callable[[], bool],
        commands: RankCommandQueue | None,
        fence: Callable[[], Passed] = lambda: nothing_runs,
    ) -> None:
        self._places = places
        self._moves = places.blocks.cache.moves
        self._agent = agent
        self._busy = busy
        self._commands = commands
        self._fence = fence
        self._gathering: dict[str, _Gathering] = {}
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
            skipped = ReturnEnd.BUDGET
        elif self._commands is None or not self._commands.put(RANK_COMMANDS.encode(TakeBack(parts))):
            skipped = ReturnEnd.BUSY
        else:
            return  # found by its name when the command comes
        del self._gathering[name]
        self._answer(gathering, Returned(0, skipped))

    # -- in the schedulers' threads -----------------------------------------------------------------

    def takes_command(self, message: Message) -> bool:
        """Reserve memory for the KV that decode's ranks offer, and read it."""
        if not isinstance(message, TakeBack):
            return False
        first = message.parts[0]
        gathering = self._gathering.pop(first.name, None)
        if not alike(first.weights, self._agent.weights):
            self._ended(gathering, ReturnEnd.WEIGHTS)
            return True
        namespace = self._places.blocks.cache.namespace(first.extra_key, first.cache_salt)
        found = self._places.take(namespace, first.tokens, busy=self._busy())
        if isinstance(found, Refusal):
            self._ended(gathering, _REFUSED[found])
            return True
        reading = self._read(message.parts, found, self._fence())
        source = FromTask(self._agent.transfers, reading, "return", found.blocks, self._agent.alarm.ring)
        self._moves.fill(_ReturnMove(planner=self, whole=True, gathering=gathering), found, source)
        return True

    def before_clear(self) -> None:
        """Give up the returns under way."""
        for move in self._moves.of(self):
            self._moves.cancel(move)

    def ended(self, move: _ReturnMove, blocks: int, done: Committed | None) -> None:
        if move.state is not State.LANDED:
            self._ended(move.gathering, ReturnEnd.UNREAD)
            return
        assert move.reservation is not None
        fresh = 0 if done is None else done.fresh * self._places.blocks.step
        self.tokens += fresh
        self.outcomes[ReturnEnd.RETURNED if move.reservation.tier is Tier.HBM else ReturnEnd.DRAM] += 1
        self._answer(move.gathering, Returned(fresh))

    def _ended(self, gathering: _Gathering | None, skipped: ReturnEnd) -> None:
        """Nothing of a return was inserted."""
        self.outcomes[skipped] += 1
        self._answer(gathering, Returned(0, skipped))

    def _answer(self, gathering: _Gathering | None, answer: Returned) -> None:
        if gathering is not None:
            gathering.answer = answer
            self._agent.settle(gathering.answered)

    # -- reading, on the event loop -----------------------------------------------------------------

    async def _read(self, parts: Sequence[Return], reservation: Reservation, passed: Passed) -> None:
        """Fill a reservation. When this ends, however it does, no task writes there."""
        blocks, name = self._places.blocks, f"return {parts[0].name}"
        skip = reservation.start * blocks.step // blocks.page
        lacking = blocks.pages_of(parts[0].tokens) - skip
        instance = await self._agent.endpoint.reach(*(part.control for part in parts))
        mine = (part.offers[self._agent.config.local.rank] for part in parts)
        offers = [after_skip(offer, skip, lacking) for offer in mine]
        await until_passed(passed)
        try:
            instance.transfer(name, offers, *self._places.target(reservation))
            async with instance.keeping(offers, LEASE_SECONDS):
                await instance.finish(name, moving_seconds(READ_SECONDS, self._nbytes(parts[0])))
        finally:
            await instance.drop(name)

    def _nbytes(self, message: Return) -> int:
        """Bytes of this rank's part of the offer, if it lacks all of it."""
        pages = self._places.blocks.pages_of(message.tokens)
        return pages * self._agent.endpoint.pools[HBM_POOL].block_bytes
