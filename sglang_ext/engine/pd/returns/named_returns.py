"""Returns of models with windows or states: decode exports its blocks by name, and prefill fetches it.

Decode's tree copies a request's blocks of each component to DRAM when the request ends (`hybrid/store.py`).
From there they are exported, as to a peer (`hybrid/exports.py`). Prefill's ranks read into their own DRAM the
blocks that let the conversation be resumed later than without them (`hybrid/fetches.py`), or none.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from sglang_ext.disagg.handover import moving_seconds
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.hybrid.exports import NamedExports
from sglang_ext.engine.hybrid.fetches import NamedFetches
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.messages import RETURN_SECONDS, Return, Returned, ReturnEnd
from sglang_ext.engine.pd.peers import PrefillPeer
from sglang_ext.engine.pd.returns.gathering import Gathering, GathersReturns
from sglang_ext.engine.pd.returns.return_sender import home_of
from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.engine.peers.fetches import SpanWish, Wish
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.errors import SglangExtError
from sglang_ext.keys import TOKEN_BYTES, encode_tokens
from sglang_ext.mempool.ledger import Call

log = logging.getLogger(__name__)

Namespaces = Callable[[str | None, str | None], Hashable]
"""Where the KV of a tenant's prompts belongs, from its ``extra_key`` and ``cache_salt``."""

_ENDS: Final = {
    FetchEnd.DONE: ReturnEnd.DRAM,
    FetchEnd.NEEDLESS: ReturnEnd.KNOWN,
    FetchEnd.JOINED: ReturnEnd.KNOWN,
    FetchEnd.BUSY: ReturnEnd.BUDGET,
    FetchEnd.NO_ROOM: ReturnEnd.MEMORY,
}


class ReturnFetches(Planner):
    """The fetches of a `NamedReturnReceiver`, as a mechanism of its cache."""

    def __init__(self, fetches: NamedFetches) -> None:
        self._fetches = fetches

    @property
    def busy(self) -> bool:
        return self._fetches.busy

    def drop_in_flight(self) -> None:
        self._fetches.settle()

    def close(self) -> None:
        self._fetches.settle()


class NamedReturnReceiver(GathersReturns):
    """Prefill's side of one rank.

    Args:
        fetches: for returns alone.
        namespace: of this rank's blocks.
        fresh: whether the weights are those of the start, by which blocks in DRAM are exported.
        block_tokens: tokens of a block.
        commands: to the schedulers of all ranks, at the first one.
    """

    def __init__(
        self,
        fetches: NamedFetches,
        namespace: Namespaces,
        fresh: Callable[[], bool],
        block_tokens: int,
        agent: Agent,
        commands: RankCommandQueue | None,
    ) -> None:
        super().__init__(agent, commands)
        self._fetches = fetches
        self._namespace = namespace
        self._fresh = fresh
        self._block_tokens = block_tokens
        self._going: dict[str, Gathering | None] = {}

    @property
    def set_aside(self) -> dict[str, int]:
        """Nothing but blocks of DRAM, which are counted there."""
        return {}

    def _refusal(self, parts: Sequence[Return]) -> ReturnEnd | None:
        # Each rank reads from decode's same rank.
        return None if parts[0].ranks == self._agent.config.local.ranks else ReturnEnd.FAILED

    def _take_back(self, parts: Sequence[Return], gathering: Gathering | None) -> None:
        first = parts[0]
        if not self._fresh():
            self._ended(gathering, ReturnEnd.WEIGHTS)
            return
        # Whole: with EAGLE, the name of the last page takes the token behind it.
        key, step = first.tokens, self._block_tokens * TOKEN_BYTES
        own = parts[self._agent.config.local.rank]
        span = SpanWish(own.control, first.name, len(key) // step)
        self._going[first.name] = gathering
        self._fetches.begin(
            Wish(
                self._namespace(first.extra_key, first.cache_salt),
                key,
                (span,),
                RETURN_SECONDS,
                then=self._look,
                id=first.name,
            )
        )

    def _look(self) -> None:
        """Fetches have ended."""
        for result in self._fetches.results.take():
            gathering, end = self._going.pop(result.id, None), _ENDS.get(result.how, ReturnEnd.UNREAD)
            if end is not ReturnEnd.DRAM:
                self._ended(gathering, end)
                continue
            self.tokens += result.tokens
            self.outcomes[end] += 1
            self._answer(gathering, Returned(result.tokens))

    def _nbytes(self, message: Return) -> int:
        return len(message.tokens) // TOKEN_BYTES * _token_bytes(self._agent)


class NamedReturnSender:
    """Decode's side of one rank.

    Args:
        exports: of this rank's blocks.
        namespace, fresh, block_tokens: as for `NamedReturnReceiver`.
    """

    def __init__(
        self,
        exports: NamedExports,
        namespace: Namespaces,
        fresh: Callable[[], bool],
        block_tokens: int,
        agent: Agent,
    ) -> None:
        self._exports = exports
        self._namespace = namespace
        self._fresh = fresh
        self._block_tokens = block_tokens
        self._agent = agent
        self._begun = 0
        self.outcomes: Counter[ReturnEnd] = Counter()
        """Requests that ended, by the outcome of their return: `returned`, or why it was skipped."""
        self.tokens = 0
        """Tokens that prefill servers have got by returns."""

    def ended(self, req: Any, tokens: Any) -> None:
        """A request has ended, and its KV is in the tree. In the scheduler's thread, on all ranks alike."""
        key = encode_tokens(tokens)
        if len(tokens) < self._block_tokens:
            self.outcomes[ReturnEnd.SHORT] += 1
            return
        if not self._fresh():
            self.outcomes[ReturnEnd.WEIGHTS] += 1
            return
        self._begun += 1
        name = f"{self._agent.endpoint.config.instance}/{req.bootstrap_room}/{self._begun}"
        namespace = self._namespace(req.extra_key, req.cache_salt)
        seconds = moving_seconds(RETURN_SECONDS, len(tokens) * _token_bytes(self._agent))
        # Where this rank has lost prefill too: exports are alike on all ranks. A lease that is not read ends.
        self._exports.export(name, namespace, key, seconds)
        peer = self._agent.peer(home_of(req))
        if peer is None:
            self.outcomes[ReturnEnd.PREFILL_GONE] += 1
            return
        local = self._agent.config.local
        message = Return(
            name,
            local.rank,
            local.ranks,
            (),
            self._agent.endpoint.address,
            key,
            self._agent.weights,
            req.extra_key,
            req.cache_salt,
        )
        self._agent.start(self._give(message, peer, seconds))

    def clear(self) -> None:
        """The cache is about to be emptied; its exports end with it."""

    async def _give(self, message: Return, peer: PrefillPeer, seconds: float) -> None:
        outcome, tokens = ReturnEnd.FAILED, 0
        try:
            answer = await peer.give_back(message, seconds)
            outcome, tokens = answer.skipped or ReturnEnd.RETURNED, answer.tokens
            if answer.skipped is None:  # else prefill has neither read nor entered anything
                self._agent.calls[Call.TRANSFER_WITH_INSERT] += 1
        except SglangExtError as error:
            log.debug("a return to %s: %s", peer, error)
        finally:
            self.outcomes[outcome] += 1
            self.tokens += tokens


def _token_bytes(agent: Agent) -> int:
    """Bytes of a token's KV in this rank."""
    return agent.endpoint.pools[HBM_POOL].block_bytes // agent.config.local.page_tokens
