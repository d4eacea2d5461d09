"""The parts of returns at prefill: collected at the first rank, taken back by all ranks in one pass."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.disagg.handover import moving_seconds
from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.messages import (
    RANK_COMMANDS,
    RETURN_SECONDS,
    Return,
    Returned,
    ReturnEnd,
    TakeBack,
    alike,
)
from sglang_ext.wire import Message


@dataclass(eq=False)
class Gathering:
    """Parts of a return, at prefill's first rank. answered: when there is an answer."""

    answered: asyncio.Future[None]
    parts: dict[int, Return] = field(default_factory=dict)
    answer: Returned = field(default_factory=lambda: Returned(0, ReturnEnd.FAILED))


class GathersReturns(Listener):
    """Prefill's side of one rank, without the way in which KV is read.

    Args:
        commands: to the schedulers of all ranks, at the first one.
    """

    def __init__(self, agent: Agent, commands: RankCommandQueue | None) -> None:
        self._agent = agent
        self._commands = commands
        self._gathering: dict[str, Gathering] = {}
        self.outcomes: Counter[ReturnEnd] = Counter()
        """Returns that were offered, by outcome: `returned` to HBM, `dram`, or why not."""
        self.tokens = 0

    # -- the first rank, on its event loop ----------------------------------------------------------

    async def take(self, message: Return) -> Returned:
        """A decode rank offers its part."""
        gathering = self._gathering.get(message.name)
        if gathering is None:
            gathering = Gathering(asyncio.get_running_loop().create_future())
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

    def _order(self, name: str, gathering: Gathering) -> None:
        """Order all ranks to take a return, once all its parts are there."""
        parts = tuple(gathering.parts[rank] for rank in sorted(gathering.parts))
        skipped = self._refusal(parts)
        if skipped is None:
            if self._commands is not None and self._commands.put(RANK_COMMANDS.encode(TakeBack(parts))):
                return  # found by its name when the command comes
            skipped = ReturnEnd.BUSY
        del self._gathering[name]
        self._answer(gathering, Returned(0, skipped))

    def _refusal(self, parts: Sequence[Return]) -> ReturnEnd | None:
        """Why a return of these parts is not taken; None when it is."""
        raise NotImplementedError

    def _nbytes(self, message: Return) -> int:
        """Bytes of this rank's part of the offer, if it lacks all of it."""
        raise NotImplementedError

    # -- in the schedulers' threads -----------------------------------------------------------------

    def takes_command(self, message: Message) -> bool:
        """Read the KV that decode's ranks offer."""
        if not isinstance(message, TakeBack):
            return False
        gathering = self._gathering.pop(message.parts[0].name, None)
        if not alike(message.parts[0].weights, self._agent.weights):
            self._ended(gathering, ReturnEnd.WEIGHTS)
        else:
            self._take_back(message.parts, gathering)
        return True

    def _take_back(self, parts: Sequence[Return], gathering: Gathering | None) -> None:
        """Begin to read. gathering: at the first rank, while decode waits for the answer."""
        raise NotImplementedError

    def _ended(self, gathering: Gathering | None, skipped: ReturnEnd) -> None:
        """Nothing of a return was inserted."""
        self.outcomes[skipped] += 1
        self._answer(gathering, Returned(0, skipped))

    def _answer(self, gathering: Gathering | None, answer: Returned) -> None:
        if gathering is not None:
            gathering.answer = answer
            self._agent.settle(gathering.answered)
