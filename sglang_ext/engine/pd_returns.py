"""The return: what decode has of a request that has ended goes back to prefill (MemServe, PD-Caching-3).

    decode's scheduler     request ended: its blocks are locked and leased, within a budget
    decode's agent         says `Return`
    prefill's scheduler    looks what it lacks, sets a place aside for that (`pd_places`), or says why not
    prefill's agent        reads one-sidedly, COMPLETE
    prefill's scheduler    inserts what has not come to be there meanwhile
    decode's scheduler     unlocks

Nobody waits for a return: not the request, which has its answer, nor another one; what does not fit is
skipped, and counted with its reason. Servers of several ranks skip it: their trees have to change in step.
An emptied cache ends the returns from and to it at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.instance import Instance
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.runs import Ids
from sglang_ext.engine.pd_leases import POOL
from sglang_ext.engine.pd_messages import Return, Returned
from sglang_ext.engine.pd_peers import PrefillPeer
from sglang_ext.engine.pd_places import BUDGET, Blocks, Place, Places
from sglang_ext.engine.pd_taking import Wanted, after_skip
from sglang_ext.errors import SglangExtError
from sglang_ext.keys import Tier, encode_tokens
from sglang_ext.radix_global import Node

if TYPE_CHECKING:
    from sglang_ext.engine.pd_agent import Agent

log = logging.getLogger(__name__)

RETURN_SECONDS = 10.0
READ_SECONDS = 5.0
STOP_SECONDS = 30.0


@dataclass(eq=False)
class _Going:
    """One request on its way back, on decode. void: the cache was emptied meanwhile."""

    address: str
    node: Node
    pages: Ids
    offer: Offer
    message: Return
    outcome: str = "failed"
    tokens: int = 0
    void: bool = False


class ReturnGiver:
    """Decode's side."""

    def __init__(self, blocks: Blocks, agent: Agent) -> None:
        self._blocks = blocks
        self._agent = agent
        self._going: set[_Going] = set()
        self._done: deque[_Going] = deque()
        self._pinned = 0
        self.outcomes: Counter[str] = Counter()
        """Requests that ended, by what came of their return: `returned`, or why it was skipped."""
        self.tokens = 0
        """Tokens that prefill servers have got by returns."""

    def ended(self, req: Any, tokens: Any) -> None:
        """A request has ended, and its KV is in the tree. In the scheduler's thread."""
        reason = self._start(req, tokens)
        if reason:
            self.outcomes[reason] += 1

    def each_pass(self) -> None:
        """Unlock what has been read. In the scheduler's thread."""
        while self._done:
            going = self._done.popleft()
            self._release(going)
            self.outcomes[going.outcome] += 1
            self.tokens += going.tokens

    def clear(self) -> None:
        """The cache is about to be emptied: nobody may take later bytes for these. In its thread."""
        for going in list(self._going):
            self._agent.book.withdraw(going.offer.lease)
            self._release(going)

    def _release(self, going: _Going) -> None:
        if not going.void:
            going.void = True
            self._going.discard(going)
            self._blocks.unlock(going.node)
            self._pinned -= len(going.pages)

    def _start(self, req: Any, tokens: Any) -> str:
        address = f"{req.bootstrap_host}:{req.bootstrap_port}"
        peer = self._agent.peer(address)
        if peer is None:
            return "prefill_gone"
        if len(peer.ranks) > 1 or self._agent.config.local.ranks > 1:
            return "ranks"
        cache = self._blocks.cache
        namespace = cache._namespace_of(req)
        if namespace != cache.namespace(req.extra_key, req.cache_salt):
            return "weights"
        key = encode_tokens(tokens)
        node, slots, count = self._blocks.held(namespace, key)
        if not count:
            return "short"
        pages = np.concatenate([self._blocks.pages(each) for each in slots])
        if (self._pinned + len(pages)) * BUDGET > self._agent.endpoint.pools[POOL].blocks:
            return "budget"
        key = key[: count * self._blocks.cache.tree.block_bytes]
        try:
            offer = self._agent.book.lease(
                "return", pages, RETURN_SECONDS, peer.ranks[0].epoch, lambda _: None
            )
        except RefusedError:
            return "budget"
        message = Return(offer, self._agent.endpoint.address, key, req.extra_key, req.cache_salt)
        going = _Going(address, node, pages, offer, message)
        self._blocks.lock(node)
        self._pinned += len(pages)
        self._going.add(going)
        self._agent.start(self._give(going, peer))
        return ""

    async def _give(self, going: _Going, peer: PrefillPeer) -> None:
        try:
            answer = await peer.give_back(going.message, RETURN_SECONDS)
            going.outcome, going.tokens = answer.skipped or "returned", answer.tokens
        except SglangExtError as error:
            log.debug("a return to %s: %s", going.address, error)
        finally:
            self._agent.book.withdraw(going.offer.lease)
            self._done.append(going)
            self._agent.wake()


@dataclass(eq=False)
class _Coming:
    """One request on its way back, on prefill. skipped: why its KV is not wanted. over: its place is kept or
    given up.
    """

    message: Return
    planned: asyncio.Future[None]
    inserted: asyncio.Future[None]
    skipped: str = ""
    place: Place | None = None
    reading: asyncio.Task[None] | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    """Nothing writes to its place any more."""
    unwanted: bool = False
    """The cache was emptied before it was read."""
    good: bool = False
    over: bool = False
    fresh: int = 0


class ReturnTaker:
    """Prefill's side."""

    def __init__(self, places: Places, agent: Agent, busy: Callable[[], bool]) -> None:
        """busy: whether requests wait for memory."""
        self._places = places
        self._agent = agent
        self._busy = busy
        self._new: deque[_Coming] = deque()
        self._placed: set[_Coming] = set()
        self._read: deque[_Coming] = deque()
        self.outcomes: Counter[str] = Counter()
        """Returns that were offered, by what came of them: `returned` to HBM, `dram`, or why not."""
        self.tokens = 0

    @property
    def set_aside(self) -> dict[str, int]:
        """Tokens of places that are to be filled, by tier. From any thread."""
        places = self._places
        return {
            Tier.HBM.name.lower(): places.slots_aside,
            Tier.DRAM.name.lower(): places.blocks_aside * places.blocks.step,
        }

    async def take(self, message: Return) -> Returned:
        """Decode offers a request's KV. On the event loop."""
        loop = asyncio.get_running_loop()
        instance = await self._agent.back(message.control)
        coming = _Coming(message, loop.create_future(), loop.create_future())
        self._new.append(coming)
        self._agent.wake()
        await coming.planned
        if coming.place is None:
            return Returned(0, coming.skipped)
        try:
            if not coming.unwanted:
                coming.reading = asyncio.ensure_future(self._fill(coming, coming.place, instance))
                await asyncio.wait({coming.reading})
        finally:
            if coming.reading is not None and not coming.reading.done():
                coming.reading.cancel()
                await asyncio.wait({coming.reading})
            coming.stopped.set()
            self._read.append(coming)
            self._agent.wake()
        await coming.inserted
        return Returned(coming.fresh, "" if coming.good else "unread")

    async def _fill(self, coming: _Coming, place: Place, instance: Instance) -> None:
        """Read into a place; when this ends, however it does, nothing writes there."""
        message, blocks = coming.message, self._places.blocks
        skip = place.start * blocks.step // blocks.page
        lacking = np.empty(blocks.pages_of(message.tokens) - skip, np.int64)
        name = f"return-{message.offer.lease}"
        try:
            offer = after_skip(message.offer, Wanted(lacking, skip, 0))
            instance.transfer(name, [offer], place.pool, place.ids)
            await instance.complete(name, READ_SECONDS)
            coming.good = True
        except SglangExtError as error:
            log.debug("a return: %s", error)
        except Exception:
            # Nobody asks for the result of this task; it must not end silently.
            log.exception("a return could not be read")
        finally:
            await instance.drop(name)

    def each_pass(self) -> None:
        """Set places aside for what is offered, insert what has been read. In the scheduler's thread."""
        while self._read:
            self._finish(self._read.popleft())
        while self._new:
            coming = self._new.popleft()
            self._plan(coming)
            self._agent.settle(coming.planned)

    def clear(self) -> None:
        """The cache is about to be emptied: stop reading into it. In its thread."""
        for coming in list(self._placed):
            self._agent.start(self._stop(coming))
            if not coming.stopped.wait(STOP_SECONDS):
                raise RuntimeError(f"a return did not stop within {STOP_SECONDS:.0f} s")
            coming.good = False
            self._finish(coming)

    async def _stop(self, coming: _Coming) -> None:
        coming.unwanted = True
        if coming.reading is not None:
            coming.reading.cancel()

    def _plan(self, coming: _Coming) -> None:
        message = coming.message
        namespace = self._places.blocks.cache.namespace(message.extra_key, message.cache_salt)
        found = self._places.take(namespace, message.tokens, busy=self._busy())
        if isinstance(found, str):
            coming.skipped = found
            self.outcomes[found] += 1
            return
        coming.place = found
        self._placed.add(coming)

    def _finish(self, coming: _Coming) -> None:
        place = coming.place
        assert place is not None
        if coming.over:
            return
        coming.over = True
        self._placed.discard(coming)
        if coming.good:
            coming.fresh = place.keep()
            self.tokens += coming.fresh
            self.outcomes["returned" if place.pool == POOL else "dram"] += 1
        else:
            place.give_up()
            self.outcomes["unread"] += 1
        self._agent.settle(coming.inserted)


def refused(_message: Return) -> RefusedError:
    """The answer of a server that takes nothing back."""
    return RefusedError("return", "this server takes no KV back; set --kv-pd-caching 3 alike")
