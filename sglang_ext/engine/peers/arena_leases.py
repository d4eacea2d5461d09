"""Leases of blocks of a rank's DRAM arena, which peers read.

Blocks are exported as a ``borrowed`` pool's: the arena's allocator has no generation counters, so a lease
seals the blocks that it exports, and its end opens them again. The publisher keeps a lock on the tree's nodes
until ``over`` is true, and a reader that comes later finds another generation (``docs/transfer.md``).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Final

from sglang_ext.disagg.errors import TransferError
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.leases import Ended
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.geometry import Geometry
from sglang_ext.tiered_store.dram.arena import DramArena

log = logging.getLogger(__name__)

DRAM_POOL: Final = "dram"
"""Pool of a rank's endpoint: the DRAM arena, in blocks of the cache."""


def arena_pool(arena: DramArena, geometry: Geometry, namespace: str = "") -> PoolSpec:
    """The arena of the plain cache as a pool of an endpoint.

    Args:
        geometry: of the engine's pool, in blocks of the cache.
        namespace: differs wherever KV is not interchangeable.
    """
    return dataclasses.replace(PoolSpec.of_arena(DRAM_POOL, geometry, arena), namespace=namespace)


class ArenaLeases:
    """See the module's docstring. The thread's endpoint has the arena as a pool of this name."""

    def __init__(self, transfers: TransferThread, pool: str = DRAM_POOL) -> None:
        self._over: set[int] = set()
        self._transfers = transfers
        self._pool = pool
        transfers.watch_leases(pool, self._lease_ended)

    def publish(self, export: str, ids: Ids, seconds: float, names: bytes = b"") -> int | None:
        """Lease blocks to the peer that asks for ``export``. names: see `Offer`.

        Returns:
            the lease; ``None`` where the budget is spent.
        """
        try:
            return self._transfers.endpoint.publish(self._pool, export, ids, seconds, names=names).lease
        except TransferError as error:  # the budget is spent
            log.debug("%s is not exported: %s", export, error)
        return None

    def expect(self, export: str, seconds: float) -> None:
        """``export`` is expected to be published after so many seconds."""
        self._transfers.endpoint.expect(self._pool, export, seconds)

    def give_up(self, export: str, seconds: float) -> None:
        """``export`` will not be published: readers that ask within so many seconds need not wait."""
        self._transfers.endpoint.give_up(self._pool, export, seconds)

    def withdraw(self, lease: int) -> None:
        """Take a lease back. When this returns, its blocks have another generation."""
        self._transfers.endpoint.withdraw(self._pool, lease)
        self._over.discard(lease)

    def forget(self, lease: int) -> None:
        """Drop the record of a lease's end: the caller no longer asks for it."""
        self._over.discard(lease)

    def over(self, lease: int) -> bool:
        """Whether a lease has ended, however."""
        return lease in self._over

    def _lease_ended(self, ended: Ended) -> None:
        self._over.add(ended.lease.number)

    def close(self) -> None:
        """Export no more."""
        self._transfers.watch_leases(self._pool, None)

    def __repr__(self) -> str:
        return f"ArenaLeases({len(self._over)} ended)"
