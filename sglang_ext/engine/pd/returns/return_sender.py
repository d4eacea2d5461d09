"""Decode's side of returns: blocks of ended requests stay locked and leased until prefill has read them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.addresses import bracketed
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import LEASE_SECONDS, moving_seconds
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.runs import Ids
from sglang_ext.engine.forward_fence import Passed, nothing_runs, until_passed
from sglang_ext.engine.pd.agent import Agent
from sglang_ext.engine.pd.messages import RETURN_SECONDS, Return, ReturnEnd
from sglang_ext.engine.pd.peers import PrefillPeer
from sglang_ext.engine.pd.returns.reservations import Blocks
from sglang_ext.engine.pd.returns.reserving import may_lock
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.errors import SglangExtError
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.ledger import Call
from sglang_ext.protocol.cluster import bootstrap_of_replica
from sglang_ext.radix_global import Node

log = logging.getLogger(__name__)


def home_of(req: Any) -> str:
    """Where the prefill server's replica is found that has computed a request's prompt."""
    host = bracketed(str(req.bootstrap_host).strip("[]"))
    return bootstrap_of_replica(f"{host}:{req.bootstrap_port}", req.disagg_prefill_dp_rank)


@dataclass(eq=False)
class _Going:
    """One request on its way back, on decode. void: its blocks are not locked any more. over: it has ended on
    this rank. reading: gives the numbers of its pages once the device has these and all of their KV; they are
    offered then.
    """

    name: str
    address: str
    node: Node
    pages: int
    reading: Callable[[], Ids | None]
    req: Any
    key: bytes
    offered: bool = False
    offers: list[Offer] = field(default_factory=list)
    outcome: ReturnEnd = ReturnEnd.FAILED
    tokens: int = 0
    void: bool = False
    over: bool = False


class ReturnSender:
    """Decode's side of one rank.

    fence: makes a check for the end of the passes under way, one of which computes the KV of the last token
    of a request that has ended.
    """

    def __init__(
        self, blocks: Blocks, agent: Agent, fence: Callable[[], Passed] = lambda: nothing_runs
    ) -> None:
        self._blocks = blocks
        self._agent = agent
        self._fence = fence
        self._going: list[_Going] = []
        """In the order in which they ended, as on all ranks."""
        self._begun = 0
        self._pinned = 0
        self.outcomes: Counter[ReturnEnd] = Counter()
        """Requests that ended, by the outcome of their return: `returned`, or why it was skipped."""
        self.tokens = 0
        """Tokens that prefill servers have got by returns."""

    def ended(self, req: Any, tokens: Any) -> None:
        """A request has ended, and its KV is in the tree. In the scheduler's thread."""
        skipped = self._start(req, tokens)
        if skipped is not None:
            self.outcomes[skipped] += 1

    def propose(self) -> Sequence[int]:
        """Of each return, whether it has ended on this rank. In the scheduler's thread, as `act`."""
        for going in self._going:
            self._try(going)
        return [int(going.over) for going in self._going]

    def act(self, agreed: Sequence[int]) -> None:
        """Unlock the blocks of returns that have ended on every rank."""
        for going, over in zip(list(self._going), agreed, strict=False):
            if over:
                self._going.remove(going)
                self._release(going)
                self.outcomes[going.outcome] += 1
                self.tokens += going.tokens

    def clear(self) -> None:
        """The cache is about to be emptied: withdraw the leases, so that no peer takes later bytes for these.
        In the scheduler's thread.
        """
        for going in self._going:
            self._withdraw(going)
            self._release(going)
            if not going.offered:
                going.over = True

    def _release(self, going: _Going) -> None:
        if not going.void:
            going.void = True
            self._blocks.unlock(going.node)
            self._pinned -= going.pages

    def _withdraw(self, going: _Going) -> None:
        for offer in going.offers:
            self._agent.endpoint.withdraw(HBM_POOL, offer.lease)

    def _start(self, req: Any, tokens: Any) -> ReturnEnd | None:
        """Why there is nothing to return; None when a return has begun, on all ranks alike."""
        cache = self._blocks.cache
        # KV that saw the weights change is not in the tree, and has not come here.
        namespace = cache.namespace(req.extra_key, req.cache_salt)
        key = encode_tokens(tokens)
        node, slots, count = self._blocks.held(namespace, key)
        if not count:
            return ReturnEnd.SHORT
        pages = count * self._blocks.step // self._blocks.page
        if not may_lock(self._pinned, pages, self._agent.endpoint.pools[HBM_POOL].blocks):
            return ReturnEnd.BUDGET
        self._begun += 1
        name = f"{self._agent.endpoint.config.instance}/{req.bootstrap_room}/{self._begun}"
        going = _Going(
            name,
            home_of(req),
            node,
            pages,
            self._blocks.reading(slots, self._fence),
            req,
            key[: count * cache.tree.block_bytes],
        )
        self._blocks.lock(node)
        self._pinned += pages
        self._going.append(going)
        if not self._try(going):
            self._agent.start(self._ring_once_read(going))
        return None

    def _try(self, going: _Going) -> bool:
        """Offer its pages if that was not done and their numbers are known; returns whether it was done."""
        if not (going.offered or going.void):
            pages = going.reading()
            if pages is not None:
                going.offered = True
                self._offer(going, pages)
        return going.offered

    async def _ring_once_read(self, going: _Going) -> None:
        """Have the scheduler make a pass, which offers the pages."""
        await until_passed(lambda: going.reading() is not None)
        self._agent.alarm.ring()

    def _offer(self, going: _Going, pages: Ids) -> None:
        """Lease its pages, and send `Return`."""
        req = going.req
        peer = self._agent.peer(going.address)
        if peer is None:
            going.outcome, going.over = ReturnEnd.PREFILL_GONE, True
            return
        try:
            for rank in peer.ranks:
                going.offers.append(
                    self._agent.endpoint.publish(HBM_POOL, "return", pages, LEASE_SECONDS, rank.epoch)
                )
        except RefusedError:
            self._withdraw(going)
            going.offers.clear()
        local = self._agent.config.local
        message = Return(
            going.name,
            local.rank,
            local.ranks,
            tuple(going.offers),
            self._agent.endpoint.address,
            going.key,
            self._agent.weights,
            req.extra_key,
            req.cache_salt,
        )
        self._agent.start(self._give(going, message, peer))

    async def _give(self, going: _Going, message: Return, peer: PrefillPeer) -> None:
        try:
            nbytes = going.pages * self._agent.endpoint.pools[HBM_POOL].block_bytes
            answer = await peer.give_back(message, moving_seconds(RETURN_SECONDS, nbytes))
            going.outcome, going.tokens = answer.skipped or ReturnEnd.RETURNED, answer.tokens
            if answer.skipped is None:  # else prefill has neither read nor inserted anything
                self._agent.calls[Call.TRANSFER_WITH_INSERT] += 1
        except SglangExtError as error:
            log.debug("a return to %s: %s", going.address, error)
        finally:
            self._withdraw(going)
            going.over = True
            self._agent.alarm.ring()
