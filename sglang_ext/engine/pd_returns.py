"""The return: what decode has of a request that has ended goes back to prefill (MemServe, PD-Caching-3).

    decode's scheduler     request ended: its blocks are locked, within a budget
    decode's agent         leases their pages, says `Return`
    prefill's scheduler    looks what it lacks, sets slots aside for that, or says why not
    prefill's agent        reads them one-sidedly, COMPLETE
    prefill's scheduler    inserts them, unless they have come to be there meanwhile; frees the slots if not
    decode's scheduler     unlocks

Nobody waits for a return: not the request, which has its answer, nor another one; what does not fit is
skipped, and counted with its reason. Servers of several ranks skip it: their trees have to change in step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.runs import Ids
from sglang_ext.engine.pd_leases import POOL
from sglang_ext.engine.pd_messages import Return, Returned
from sglang_ext.engine.pd_peers import PrefillPeer
from sglang_ext.engine.pd_taking import Wanted, after_skip
from sglang_ext.errors import SglangExtError
from sglang_ext.keys import Tier, encode_tokens
from sglang_ext.radix_global import Holder, Node

if TYPE_CHECKING:
    from sglang_ext.engine.pd_agent import Agent
    from sglang_ext.engine.radix_cache import GlobalRadixCache

log = logging.getLogger(__name__)

RETURN_SECONDS = 10.0
READ_SECONDS = 5.0
BUDGET = 4
"""At most one part of so many of the pool is locked on decode, and set aside on prefill, by returns."""


class Blocks:
    """A rank's cache, as returns use it. In the scheduler's thread only."""

    def __init__(self, cache: GlobalRadixCache, hbm: Holder) -> None:
        self.cache = cache
        self._hbm = hbm
        self.step = cache.block_size
        self.page = cache.page_size

    def held(self, namespace: Hashable, key: bytes) -> tuple[Node, list[Any], int]:
        """What HBM has of a prompt: the last node, the slots of each node, and how many blocks."""
        _, path, _ = self.cache.tree.match(namespace, key)
        path = [node for node in path if self._hbm in node.placements]
        node = path[-1] if path else self.cache.tree.root
        return node, [each.placements[self._hbm] for each in path], sum(each.blocks for each in path)

    def lock(self, node: Node) -> None:
        self.cache.tree.lock(node, self._hbm)

    def unlock(self, node: Node) -> None:
        self.cache.tree.unlock(node, self._hbm)

    def pages(self, slots: Any) -> Ids:
        """Pages of slots, which are whole pages."""
        found: Ids = np.asarray(slots.tolist() if hasattr(slots, "tolist") else slots, np.int64)
        pages: Ids = found[:: self.page] // self.page
        return pages

    def insert(self, namespace: Hashable, key: bytes, slots: Any, skip: int) -> int:
        """Insert a prompt whose blocks after the first `skip` are in `slots`; how many tokens are new.

        What of it has come to be there meanwhile is freed.
        """
        ops = self.cache.room
        _, parts, held = self.held(namespace, key)
        kept = self.cache._slots.keep(slots)
        if held > skip:
            gone = min(held - skip, len(kept) // self.step) * self.step
            ops.free_slots([kept[:gone]])
            kept = kept[gone:]
        fresh = len(kept)
        if fresh:
            whole = self.cache._slots.keep(self.cache._slots.join([*parts, kept]))
            result = self.cache.tree.insert(namespace, key, self._hbm, whole)
            if self.cache.dram is not None:
                self.cache.dram.write_through(result.node)
        return fresh


@dataclass(eq=False)
class _Going:
    """One request on its way back, on decode."""

    address: str
    node: Node
    pages: Ids
    message: Callable[[Any], Return]
    outcome: str = ""
    tokens: int = 0


class ReturnGiver:
    """Decode's side."""

    def __init__(self, blocks: Blocks, agent: Agent) -> None:
        self._blocks = blocks
        self._agent = agent
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
            self._blocks.unlock(going.node)
            self._pinned -= len(going.pages)
            self.outcomes[going.outcome] += 1
            self.tokens += going.tokens

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
        self._blocks.lock(node)
        self._pinned += len(pages)
        going = _Going(
            address,
            node,
            pages,
            lambda offer: Return(offer, self._agent.endpoint.address, key, req.extra_key, req.cache_salt),
        )
        self._agent.start(self._give(going, peer))
        return ""

    async def _give(self, going: _Going, peer: PrefillPeer) -> None:
        lease = 0
        try:
            offer = self._agent.book.lease(
                "return", going.pages, RETURN_SECONDS, peer.ranks[0].epoch, lambda _: None
            )
            lease = offer.lease
            answer = await peer.give_back(going.message(offer), RETURN_SECONDS)
            going.outcome, going.tokens = answer.skipped or "returned", answer.tokens
        except SglangExtError as error:
            log.debug("a return to %s: %s", going.address, error)
            going.outcome = "failed"
        except BaseException:
            going.outcome = "failed"
            raise
        finally:
            if lease:
                self._agent.book.withdraw(lease)
            self._done.append(going)
            self._agent.wake()


@dataclass(eq=False)
class _Coming:
    """One request on its way back, on prefill. skipped: why its KV is not wanted."""

    message: Return
    planned: asyncio.Future[None]
    inserted: asyncio.Future[None]
    skipped: str = ""
    namespace: Hashable = None
    node: Node | None = None
    skip: int = 0
    slots: Any = None
    good: bool = False
    fresh: int = 0


class ReturnTaker:
    """Prefill's side."""

    def __init__(self, blocks: Blocks, agent: Agent, busy: Callable[[], bool]) -> None:
        """busy: whether requests wait for memory."""
        self._blocks = blocks
        self._agent = agent
        self._busy = busy
        self._new: deque[_Coming] = deque()
        self._read: deque[_Coming] = deque()
        self._aside = 0
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        room = blocks.cache.room
        others = room.owned
        room.owned = lambda: others() + self._aside

    async def take(self, message: Return) -> Returned:
        """Decode offers a request's KV. On the event loop."""
        loop = asyncio.get_running_loop()
        instance = await self._agent.back(message.control)
        coming = _Coming(message, loop.create_future(), loop.create_future())
        self._new.append(coming)
        self._agent.wake()
        await coming.planned
        if coming.skipped:
            return Returned(0, coming.skipped)
        pages = self._blocks.pages(coming.slots)
        skip = coming.skip * self._blocks.step // self._blocks.page
        name = f"return-{message.offer.lease}"
        try:
            instance.transfer(name, [after_skip(message.offer, Wanted(pages, skip, 0))], POOL, pages)
            await instance.complete(name, READ_SECONDS)
            coming.good = True
        except SglangExtError as error:
            log.debug("a return: %s", error)
        finally:
            await instance.drop(name)
            self._read.append(coming)
            self._agent.wake()
        await coming.inserted
        return Returned(coming.fresh, "" if coming.good else "unread")

    def each_pass(self) -> None:
        """Set slots aside for what is offered, insert what has been read. In the scheduler's thread."""
        while self._read:
            self._finish(self._read.popleft())
        while self._new:
            coming = self._new.popleft()
            coming.skipped = self._plan(coming)
            if coming.skipped:
                self.outcomes[coming.skipped] += 1
            self._agent.settle(coming.planned)

    def _plan(self, coming: _Coming) -> str:
        """Why this KV is not wanted, or empty when slots are set aside for what is missing."""
        cache, message = self._blocks.cache, coming.message
        total = len(message.tokens) // cache.tree.block_bytes
        coming.namespace = cache.namespace(message.extra_key, message.cache_salt)
        node, _, coming.skip = self._blocks.held(coming.namespace, message.tokens)
        missing = (total - coming.skip) * self._blocks.step
        if missing <= 0:
            return "known"
        if (self._aside + missing) * BUDGET > cache.token_to_kv_pool_allocator.size:
            return "budget"
        if self._busy() and cache.room.free < missing:
            return "memory"
        self._blocks.lock(node)
        coming.slots = cache.room.allocate(missing)
        if coming.slots is None:
            self._blocks.unlock(node)
            return "memory"
        coming.node = node
        self._aside += missing
        return ""

    def _finish(self, coming: _Coming) -> None:
        assert coming.node is not None
        self._aside -= len(coming.slots)
        if coming.good:
            coming.fresh = self._blocks.insert(
                coming.namespace, coming.message.tokens, coming.slots, coming.skip
            )
            self.tokens += coming.fresh
        else:
            self._blocks.cache.room.free_slots([self._blocks.cache._slots.keep(coming.slots)])
        self._blocks.unlock(coming.node)
        self.outcomes["returned" if coming.good else "unread"] += 1
        self._agent.settle(coming.inserted)


def hbm_holder(cache: GlobalRadixCache) -> Holder:
    """The holder that stands for a cache's pool."""
    holder = cache._hbm
    assert holder.tier is Tier.HBM
    return holder


def refused(_message: Return) -> RefusedError:
    """The answer of a server that takes nothing back."""
    return RefusedError("return", "this server takes no KV back; set --kv-pd-caching 3 alike")
