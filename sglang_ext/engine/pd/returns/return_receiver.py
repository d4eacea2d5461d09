"""Prefill's side of returns: memory is reserved for the missing blocks, and they are read into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.disagg.handover import LEASE_SECONDS, moving_seconds
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.forward_fence import Passed, nothing_runs, until_passed
from sglang_ext.engine.moves.move import Move, MovePlanner, State
from sglang_ext.engine.moves.sources import FromTask
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.landing import after_skip
from sglang_ext.engine.pd.messages import Return, Returned, ReturnEnd
from sglang_ext.engine.pd.returns.gathering import Gathering, GathersReturns
from sglang_ext.engine.pd.returns.reservations import Reservations
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.mempool.ledger import Committed, Reservation
from sglang_ext.mempool.store import Refusal
from sglang_ext.tiers import Tier

READ_SECONDS = 5.0
"""For a small return to be read; `moving_seconds` adds the time for the bytes of a large one."""
_REFUSED: Final = {
    Refusal.KNOWN: ReturnEnd.KNOWN,
    Refusal.BUDGET: ReturnEnd.BUDGET,
    Refusal.NO_PARENT: ReturnEnd.MEMORY,
    Refusal.NO_ROOM: ReturnEnd.MEMORY,
}


@dataclass(eq=False, kw_only=True)
class _ReturnMove(Move):
    """One request on its way back. gathering: at the first rank, while decode waits for the answer."""

    gathering: Gathering | None


class ReturnReceiver(GathersReturns, MovePlanner):
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
        super().__init__(agent, commands)
        self._places = places
        self._moves = places.blocks.cache.moves
        self._busy = busy
        self._fence = fence

    @property
    def set_aside(self) -> dict[str, int]:
        """Tokens of memory that is to be filled, by tier. From any thread."""
        return self._places.tokens

    def _refusal(self, parts: Sequence[Return]) -> ReturnEnd | None:
        return None if all(part.offers for part in parts) else ReturnEnd.BUDGET

    # -- in the schedulers' threads -----------------------------------------------------------------

    def _take_back(self, parts: Sequence[Return], gathering: Gathering | None) -> None:
        """Reserve memory for the KV, and read it."""
        first = parts[0]
        namespace = self._places.blocks.cache.namespace(first.extra_key, first.cache_salt)
        found = self._places.take(namespace, first.tokens, busy=self._busy())
        if isinstance(found, Refusal):
            self._ended(gathering, _REFUSED[found])
            return
        reading = self._read(parts, found, self._fence())
        source = FromTask(self._agent.transfers, reading, "return", found.blocks, self._agent.alarm.ring)
        self._moves.fill(_ReturnMove(planner=self, whole=True, gathering=gathering), found, source)

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
        pages = self._places.blocks.pages_of(message.tokens)
        return pages * self._agent.endpoint.pools[HBM_POOL].block_bytes
