"""Push: prefill writes a request's KV into pages that decode has set aside, whole or layer by layer.

Whole, it may be packed first (`disagg/transfer/staging.py`), and is then written as one range.

By layer (MemServe, section 5.2), a layer of the pages that a forward pass completes is sent while the next
layers are computed; the rest (cached prefixes, the last page of a chunk) goes at the end. A device computes
a layer some time after its launch: the layer is sent behind a fence that is set then. SGLang may give a
request other slots for the same tokens when another request has inserted them first: pages that were sent
from other slots than the request's last ones are sent again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sglang_ext.disagg import reshard
from sglang_ext.disagg.errors import PeerProtocolError, SessionEndedError, TransferError
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.staging import STAGING, Staging
from sglang_ext.engine.forward_fence import Passed, until_passed
from sglang_ext.engine.pd.messages import Push
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.errors import SglangExtError
from sglang_ext.mempool.ledger import Call
from sglang_ext.mempool.remote import RemoteMemory
from sglang_ext.tasks import Tasks
from sglang_ext.wire import unpack_ids

NOT_SENT = -1
AHEAD: Final = "ahead"
"""Sent before the whole request was computed, layer by layer."""
AFTER: Final = "after"
"""Sent when the whole request was computed."""


class Writing:
    """One decode rank's pages, while they are being filled. Made by `begin`; ended by `finish` or `stop`.

    target: decode's pages, in the order of the prompt's pages that decode lacks. part, packed: how to write
    there from our pages, and from staging. pushed: counts pages times layers of writings that are finished,
    by when they were sent: `AHEAD` or `AFTER`.
    """

    def __init__(
        self,
        memory: RemoteMemory,
        part: reshard.RankPlan,
        target: Ids,
        pushed: Counter[str],
        packed: tuple[Staging, reshard.RankPlan] | None = None,
    ) -> None:
        self._memory = memory
        self._part = part
        self._pushed = pushed
        self._packed = packed
        self.target = target
        self.sent: Ids = np.full(target.size, NOT_SENT, np.int64)
        """Page of ours from which all layers of each page were sent."""
        self.layers_ahead = 0
        """Pages times layers that were sent before their request was computed."""
        self.ahead: asyncio.Event | None = None
        """Set once the newest of its launched layers are sent; None before the first."""
        self.refused: TransferError | None = None
        """Why a layer could not be sent ahead; `finish` raises it."""

    @classmethod
    async def begin(
        cls,
        endpoint: Endpoint,
        instance: Instance,
        name: str,
        target: Ids,
        calls: Counter[Call],
        pushed: Counter[str],
        pool: str = HBM_POOL,
        staging: Staging | None = None,
    ) -> Writing:
        """Have the pages granted, in a pool of decode's. staging: where to pack first.

        Raises:
            RefusedError: decode has not set them aside, or would need more than this rank holds.
        """
        (link,) = instance.links

        def part_from(source: str) -> reshard.RankPlan:
            plan = reshard.push_plan(
                endpoint.pools[source].meta, endpoint.regions.locate, [link.pools.get(pool)], [link.locate]
            )
            if len(plan.ranks) != 1:
                raise PeerProtocolError("nothing of this rank belongs there")
            return plan.ranks[0]

        part = part_from(HBM_POOL)
        packed = (staging, part_from(STAGING)) if staging is not None else None
        return cls(
            await RemoteMemory.alloc_mem(link, name, pool, target, calls), part, target, pushed, packed
        )

    def write(self, places: Ids, pages: Ids, layers: Sequence[int] | None = None) -> None:
        """Queue pages of ours for places in `target`; layers of the whole model, None for all."""
        if not places.size:
            return
        self._memory.transfer(self._part.runs(self.target[places], pages, layers))

    async def finish(self, pages: Ids) -> None:
        """Send the pages that were not sent from their present place, and give the grant back."""
        if self.ahead is not None:
            await self.ahead.wait()
        if self.refused is not None:
            raise self.refused
        places = np.flatnonzero(self.sent != pages)
        if (self.sent[places] != NOT_SENT).any():
            # Two writes to one place might overtake each other.
            await self._memory.landed()
        if not await self._write_packed(places, pages[places]):
            self.write(places, pages[places])
            await self._memory.landed()
        await self._memory.end()
        self._pushed[AHEAD] += self.layers_ahead
        self._pushed[AFTER] += places.size * len(self._part.layers)

    async def _write_packed(self, places: Ids, pages: Ids) -> bool:
        """Pack pages of ours and write them from there; False when there is no room for that."""
        if self._packed is None:
            return False
        staging, part = self._packed
        blocks = staging.take(pages.size)
        if blocks is None:
            return False
        try:
            await staging.pack(pages, blocks)
            self._memory.transfer(part.runs(self.target[places], blocks))
            await self._memory.landed()
        finally:
            # If the writing was given up, decode discards the bytes that are still written from here.
            staging.give(blocks)
        return True

    async def stop(self) -> None:
        """Give up: returns when nothing of ours writes there any more."""
        await self._memory.free_mem()


class Pusher:
    """Claims decode's pages for one prefill rank.

    Args:
        staging: where pages are packed first.
        calls, pushed: see `Writing`.
    """

    def __init__(
        self, endpoint: Endpoint, staging: Staging | None, calls: Counter[Call], pushed: Counter[str]
    ) -> None:
        self._endpoint = endpoint
        self._staging = staging
        self._calls = calls
        self._pushed = pushed

    async def claim(self, handover: int, target: Push) -> Writing | None:
        """Claim a decode rank's pages, for this rank to write; None when it lacks none."""
        wanted = unpack_ids(target.pages)
        if not wanted.size:
            return None
        try:
            return await self._begin(handover, target, wanted)
        except SessionEndedError:
            # While we stood still decode took us for dead, which we had not noticed when it named them.
            return await self._begin(handover, target, wanted)

    async def _begin(self, handover: int, target: Push, wanted: Ids) -> Writing:
        instance = await self._endpoint.reach(target.control)
        return await Writing.begin(
            self._endpoint,
            instance,
            f"{handover:x}",
            wanted,
            self._calls,
            self._pushed,
            target.pool,
            self._staging,
        )


class Filling:
    """All of one request's pages at decode: named by its decode ranks, claimed, then filled.

    Args:
        stopping: runs the end of writings that are given up.
    """

    def __init__(self, stopping: Tasks) -> None:
        self._stopping = stopping
        self._named: dict[bytes, int] = {}
        """By decode rank that has named pages: how many it has already, at the request's beginning."""
        self._claimed = 0
        self.writings: list[Writing] = []
        """Claimed pages, in one writing per decode rank, but for ranks of which this one fills no page."""
        self._task: asyncio.Task[None] | None = None

    def name(self, reader: bytes, skip: int) -> None:
        """A decode rank has named its pages."""
        self._named[reader] = skip

    def named_by(self, reader: bytes) -> bool:
        """Whether this decode rank has named its pages."""
        return reader in self._named

    @property
    def named(self) -> bool:
        """Whether a decode rank has named its pages."""
        return bool(self._named)

    def claimed(self, writing: Writing | None) -> None:
        """The pages that a decode rank has named are claimed; None when this rank fills none of them."""
        self._claimed += 1
        if writing is not None:
            self.writings.append(writing)

    def granted(self, expected: int) -> int | None:
        """How many pages decode has already, once so many decode ranks have named pages that are claimed."""
        if not expected or self._claimed < expected:
            return None
        return min(self._named.values(), default=0)

    def begin(self, pages: Ids, filled: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Write to every decode rank, then call `filled`. On the event loop."""
        self._task = asyncio.create_task(self._fill(pages, filled, failed))

    async def _fill(self, pages: Ids, filled: Callable[[], None], failed: Callable[[str], None]) -> None:
        try:
            for writing in list(self.writings):
                await writing.finish(pages)
        except SglangExtError as error:
            failed(f"writing to decode failed: {error}")
            return
        filled()

    def stop(self, writings: Sequence[Writing]) -> None:
        """Give writings up. On the event loop."""
        if self._task is not None:
            self._task.cancel()
        for writing in writings:
            self._stopping.start(writing.stop())


@dataclass(frozen=True, slots=True)
class Computing:
    """Pages of one request that the forward pass under way completes.

    places: of those that decode lacks, by number. pages: gives ours, once a fence behind a layer has passed.
    writings: gives the request's `Writing`s.
    """

    places: Ids
    pages: Callable[[], Ids]
    writings: Callable[[], list[Writing]]


@dataclass(frozen=True, slots=True)
class _Launched:
    """Layers of a pass, computed once `passed`. sent: set when they are sent, or never will be."""

    computing: list[Computing]
    layers: range
    passed: Passed
    sent: asyncio.Event = field(default_factory=asyncio.Event)


class LayerFeed:
    """Sends layers of a forward pass as they are computed. The scheduler's thread calls the public methods,
    which wait for no device; the event loop sends each layer behind its fence.

    first, layers: of this pipeline stage, in the whole model. fence: sets one behind all that is launched.
    start: runs something on the event loop, in its thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        first: int,
        layers: int,
        fence: Callable[[], Passed],
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._loop = loop
        self._first = first
        self._layers = layers
        self._fence = fence
        self._start = start
        self._now: list[Computing] = []
        self._next = 0
        self._waiting: deque[_Launched] = deque()
        """In the order of their launches, which is that of their ends."""

    def forward_begins(self, computing: list[Computing]) -> None:
        """A batch is about to run."""
        self._now, self._next = computing, 0

    def layer_begins(self, layer: int) -> None:
        """The KV of a layer is about to be written: all before it is complete, or launched."""
        self._launch(layer - self._first)

    def forward_ended(self) -> None:
        """The batch has run, or is launched: its last layer too, and all of those that called no Python."""
        self._launch(self._layers)
        self._now = []

    def _launch(self, layers: int) -> None:
        """So many layers of the pass are launched."""
        if not self._now or self._next >= layers:
            return
        launched = _Launched(self._now, range(self._next, layers), self._fence())
        self._next = layers
        self._loop.call_soon_threadsafe(self._add, launched)

    def _add(self, launched: _Launched) -> None:
        for each in launched.computing:
            for writing in each.writings():
                writing.ahead = launched.sent
        self._waiting.append(launched)
        if len(self._waiting) == 1:
            self._start(self._send_waiting())

    async def _send_waiting(self) -> None:
        while self._waiting:
            launched = self._waiting[0]
            try:
                await until_passed(launched.passed)
                self._send(launched.computing, launched.layers)
            except Exception as error:  # noqa: BLE001 - ends these requests; layers of others go on
                self._refuse(launched.computing, f"layers cannot be sent: {error}")
            self._waiting.popleft()
            launched.sent.set()

    def _refuse(self, computing: list[Computing], reason: str) -> None:
        for each in computing:
            for writing in each.writings():
                writing.refused = writing.refused or TransferError(reason)

    def _send(self, computing: list[Computing], layers: range) -> None:
        model = [self._first + layer for layer in layers]
        for each in computing:
            pages = each.pages()
            for writing in each.writings():
                try:
                    writing.write(each.places, pages, model)
                except TransferError as error:  # of this request alone
                    writing.refused = writing.refused or error
                    continue
                writing.layers_ahead += each.places.size * len(model)
                if layers.stop == self._layers:
                    writing.sent[each.places] = pages
