"""Pull, on prefill's side: the decode ranks of a hand-over, and the pages that they read under leases.

The pages are the engine's own, or copies in staging, where a request is packed first (aggregated).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import LEASE_SECONDS
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.leases import LeaseEnd
from sglang_ext.disagg.transfer.staging import Staging
from sglang_ext.engine.pd.leases import LeaseBook
from sglang_ext.engine.pd.messages import Join, Meet, Ready, Weights, alike

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
    lease: int = 0
    book: LeaseBook | None = None
    """The lease's book: of the engine's pages, or of those in staging."""
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

    def withdraw(self) -> None:
        """End the decode rank's lease, if it has one; its pages are open when this returns."""
        if self.lease:
            lease, self.lease = self.lease, 0
            assert self.book is not None
            self.book.withdraw(lease)


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
        book: leases the engine's pages.
        staging: where the pages are packed first, with the book of its leases; None: they are not.
    """

    def __init__(self, name: str, book: LeaseBook, staging: tuple[Staging, LeaseBook] | None) -> None:
        self._name = name
        self._book = book
        self._staging = staging
        self.pages: Ids = np.empty(0, np.int64)
        """Of the whole prompt."""
        self.ready = Ready(None, b"")
        """The answer to decode ranks, without a lease."""
        self._staged: Ids | None = None
        """Where the pages are packed, block by page; None before that, and where there was no room."""
        self._packed = staging is None
        self._packing: asyncio.Task[None] | None = None

    def computed(self, pages: Ids, ready: Ready) -> None:
        """The KV of the whole prompt is in these pages."""
        self.pages, self.ready = pages, ready

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
        self._packing = asyncio.create_task(self._pack(self._staging[0], lives, then))

    async def _pack(self, staging: Staging, lives: Callable[[], bool], then: Callable[[], None]) -> None:
        blocks = staging.take(self.pages.size)
        try:
            if blocks is not None:
                await staging.pack(self.pages, blocks)
                with self._book.lock:
                    if lives():
                        self._staged, blocks = blocks, None
        finally:
            if blocks is not None:
                staging.give(blocks)
            with self._book.lock:
                self._packed = True
                if lives():
                    then()

    def offer(self, reader: Reader, on_end: Callable[[Reader, LeaseEnd], None]) -> None:
        """Answer a decode rank, and lease the pages to it if it reads. on_end: called when the lease ends by
        itself.

        Raises:
            RefusedError: the lease budget is spent.
        """
        offer = None
        if reader.reads and self.pages.size:
            pages, reader.book = self.pages, self._book
            if self._staged is not None and self._staging is not None:
                pages, reader.book = self._staged, self._staging[1]
            offer = reader.book.lease(
                self._name, pages, LEASE_SECONDS, reader.epoch, lambda how: on_end(reader, how)
            )
            reader.lease = offer.lease
        reader.answer_with(msgspec.structs.replace(self.ready, offer=offer))

    def give_back(self) -> None:
        """The hand-over has ended: free the blocks in staging."""
        if self._staged is not None and self._staging is not None:
            self._staging[0].give(self._staged)
            self._staged = None


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
