"""Leases on the engine's pages: sealed while a peer may read them, open before the engine may reuse them.

SGLang's pool has no generations. So a page has an even one (`disagg.generations`) exactly as long as a lease
holds it, and a later reader finds another generation and discards the bytes that it read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.leases import Ended, LeaseEnd
from sglang_ext.disagg.transfer.pools import OwnedPool

POOL = "hbm"

OnEnd = Callable[[LeaseEnd], None]


class Publisher(Protocol):
    """The methods of an `Endpoint` that leases use."""

    def publish(self, pool: str, request: str, blocks: Ids, ttl: float | None, reader: bytes | None) -> Offer:
        """Lease sealed blocks."""

    def withdraw(self, pool: str, lease: int) -> bool:
        """End a lease; `LeaseBook.ended` is called before this returns."""


class LeaseBook:
    """All leases of one rank. Thread-safe; `lock` is held in every call, callbacks included.

    pool: the pages, whose generations this opens and seals. The caller sees to it that the bytes of leased
    pages stay as they are.
    """

    def __init__(self, pool: OwnedPool, publisher: Publisher, lock: threading.RLock | None = None) -> None:
        """lock: of another book, with which this one shares it."""
        self.pool = pool
        self.lock = lock or threading.RLock()
        self._publisher = publisher
        self._on_end: dict[int, OnEnd] = {}

    def __repr__(self) -> str:
        return f"<LeaseBook leases={len(self._on_end)}>"

    def __len__(self) -> int:
        return len(self._on_end)

    def lease(self, name: str, pages: Ids, seconds: float, reader: bytes, on_end: OnEnd) -> Offer:
        """Let a reader take pages. `on_end` is called when the lease ends by itself, not by `withdraw`.

        Raises:
            RefusedError: the lease budget is spent.
        """
        with self.lock:
            opened = ~self.pool.is_sealed(pages)
            self.pool.seal(pages[opened])
            try:
                offer = self._publisher.publish(self.pool.name, name, pages, seconds, reader)
            except BaseException:
                self.pool.open(pages[opened])
                raise
            self._on_end[offer.lease] = on_end
            return offer

    def withdraw(self, lease: int) -> None:
        """End a lease, if it still lives; no reader takes later bytes of its pages for the leased ones."""
        with self.lock:
            self._on_end.pop(lease, None)
            self._publisher.withdraw(self.pool.name, lease)

    def ended(self, ended: Ended) -> None:
        """A lease is over, in whatever way: open the pages without a reader, then call its `on_end`."""
        with self.lock:
            freed = ended.freed[self.pool.may_reuse(ended.freed) & self.pool.is_sealed(ended.freed)]
            self.pool.open(freed)
            on_end = self._on_end.pop(ended.lease.number, None)
            if on_end is not None:
                on_end(ended.how)

    def check(self) -> None:
        """Verify that exactly the leased pages are sealed."""
        with self.lock:
            every = np.arange(self.pool.blocks)
            sealed = self.pool.is_sealed(every)
            assert not (sealed & self.pool.may_reuse(every)).any(), "a page is sealed without a lease"
