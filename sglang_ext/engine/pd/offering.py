"""Pull, on prefill's side: the decode ranks of a hand-over, and the pages that they read under leases.

The pages are the engine's own, or copies in staging, where a request is packed first (aggregated).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import LEASE_SECONDS
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.staging import STAGING, Staging
from sglang_ext.engine.pd.landing import PoolRows
from sglang_ext.engine.pd.messages import Join, Meet, Ready, Weights, alike
from sglang_ext.engine.transfer_thread import HBM_POOL

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Reader:
    """A decode rank in a hand-over, by one connection: when that is over, decode has given the request up,
    however soon it connects again."""

    epoch: bytes
    session: bytes
    reads: bool
    """Whether it reads pages of this rank: pulling only, and where it lacks some that are here."""
    weights: Weights
    """The weights with which decode will go on."""
    done: bool = False
    """Whether it needs nothing more."""
    offers: dict[int, Offer] = field(default_factory=dict)
    """Its leases by their numbers, as long as they live."""
    answer: asyncio.Future[Ready] | None = None

    def expect(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Ready]:
        """The answer to the decode rank: see `answer_with` and `refuse`."""
        self.answer = loop.create_future()
        return self.answer

    def answer_with(self, ready: Ready) -> None:
        """The request is computed. From any thread."""
        if self.answer is not None:
            self.answer.get_loop().call_soon_threadsafe(_settle, self.answer, ready)

    def refuse(self, reason: str) -> None:
        """The decode rank gets no KV. From any thread."""
        if self.answer is not None:
            error = RefusedError("handover", reason)
            self.answer.get_loop().call_soon_threadsafe(_fail, self.answer, error)

    def withdraw(self, endpoint: Endpoint) -> None:
        """End the decode rank's leases; their blocks are open when this returns."""
        offers, self.offers = self.offers, {}
        for offer in offers.values():
            endpoint.withdraw(offer.pool, offer.lease)


class Readers(dict[bytes, Reader]):
    """The decode ranks that take part in one hand-over, by epoch. Under the sender's lock."""

    expected = 0
    """How many will take part; 0 until the first of them has joined."""

    def admit(self, message: Join | Meet, *, reads: bool) -> Reader:
        """Let one take part.

        Raises:
            RefusedError: all have joined already, or another number of ranks takes part.
        """
        other = self.expected not in (0, message.ranks)
        if other or message.reader in self or len(self) == message.ranks:
            raise RefusedError("handover", "another decode server takes part in this hand-over")
        self.expected = message.ranks
        reader = self[message.reader] = Reader(message.reader, message.session, reads, message.weights)
        return reader

    def part_of(self, epoch: bytes, number: int) -> Reader:
        """The part of a decode rank. number: of the hand-over.

        Raises:
            RefusedError: it has none.
        """
        if epoch not in self:
            raise RefusedError("handover", f"hand-over {number} is unknown here")
        return self[epoch]

    def others_than(self, weights: Weights) -> list[Weights]:
        """The weights of decode ranks that have others than these."""
        return [each.weights for each in list(self.values()) if not alike(weights, each.weights)]

    @property
    def done(self) -> bool:
        """Whether all have joined, and need nothing more."""
        return len(self) >= self.expected and all(reader.done for reader in self.values())


class Offering:
    """One computed request, as decode ranks read it. Under the sender's lock, but for `begin_packing`.

    Args:
        name: of its leases.
        lock: the sender's.
        staging: where the pages are packed first; None: they are not.
    """

    def __init__(self, name: str, endpoint: Endpoint, lock: threading.RLock, staging: Staging | None) -> None:
        self._name = name
        self._endpoint = endpoint
        self._lock = lock
        self._staging = staging
        self.pages: Ids = np.empty(0, np.int64)
        """Of the whole prompt."""
        self.beside: tuple[PoolRows, ...] = ()
        """Blocks of other pools."""
        self.ready = Ready((), b"")
        """The answer to decode ranks, without a lease."""
        self._staged: Ids | None = None
        """Where the pages are packed, block by page; None before that, and where there was no room."""
        self._packed = staging is None
        self._packing: asyncio.Task[None] | None = None

    def computed(self, pages: Ids, beside: tuple[PoolRows, ...], ready: Ready) -> None:
        """The KV of the whole prompt is in these pages, and other state of it in blocks beside them."""
        self.pages, self.beside, self.ready = pages, beside, ready

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in this rank."""
        return self.pages.size * self._endpoint.pools[HBM_POOL].block_bytes

    @property
    def to_be_packed(self) -> bool:
        """Whether the pages are still to be packed, or are being packed, before they are offered."""
        return not self._packed and self.pages.size > 0

    def begin_packing(self, lives: Callable[[], bool], then: Callable[[], None]) -> None:
        """Pack the pages if there is room, then call `then`, under the lock. On the event loop.

        Args:
            lives: whether the hand-over has not ended.
        """
        assert self._staging is not None
        self._packing = asyncio.create_task(self._pack(self._staging, lives, then))

    async def _pack(self, staging: Staging, lives: Callable[[], bool], then: Callable[[], None]) -> None:
        blocks = staging.take(self.pages.size)
        try:
            if blocks is not None:
                await staging.pack(self.pages, blocks)
                with self._lock:
                    if lives():
                        self._staged, blocks = blocks, None
        finally:
            if blocks is not None:
                staging.give(blocks)
            with self._lock:
                self._packed = True
                if lives():
                    then()

    def offer(self, reader: Reader) -> None:
        """Answer a decode rank, and lease the pages and the blocks beside them to it if it reads.

        Raises:
            RefusedError: the lease budget is spent.
        """
        staged = self._staged
        pages = PoolRows(HBM_POOL, self.pages) if staged is None else PoolRows(STAGING, staged)
        for each in (pages, *self.beside) if reader.reads else ():
            if each.rows.size:
                offer = self._endpoint.publish(each.pool, self._name, each.rows, LEASE_SECONDS, reader.epoch)
                reader.offers[offer.lease] = offer
        reader.answer_with(msgspec.structs.replace(self.ready, offers=tuple(reader.offers.values())))

    def give_back(self) -> None:
        """The hand-over has ended: free the blocks in staging."""
        if self._staged is not None and self._staging is not None:
            self._staging.give(self._staged)
            self._staged = None


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
