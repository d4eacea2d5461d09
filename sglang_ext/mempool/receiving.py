"""What a pool does when peers transfer to it: allocate, insert, or give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.transfer.pool_transfer import TransferFlag
from sglang_ext.errors import UserError
from sglang_ext.mempool.address import Address, MemType
from sglang_ext.mempool.envelope import owner_of, unseal
from sglang_ext.mempool.regions import Ids, OutOfBlocksError, Region
from sglang_ext.mempool.store import Refusal
from sglang_ext.tiers import tier_named

if TYPE_CHECKING:
    from sglang_ext.mempool.pool import MemPool


@dataclass(frozen=True, slots=True)
class Received:
    """Blocks that a peer has transferred; `owner` owns them now. flags, private: the sender's."""

    owner: str
    addresses: tuple[Address, ...]
    flags: int
    private: bytes


class PoolReceiver:
    """What a pool does when peers transfer to it: an `owner.Receiver`, on an event loop of the pool's thread.

    Args:
        on_received: told of blocks that are not inserted.
    """

    def __init__(
        self,
        pool: MemPool,
        on_received: Callable[[Received], None] = lambda received: None,
    ) -> None:
        self._pool = pool
        self._on_received = on_received
        self._coming: dict[tuple[str, int], Address] = {}
        self._claimed: dict[tuple[str, int], Address] = {}

    async def allocate(self, pool: str, count: int, request: str, private: bytes) -> Ids:
        """Memory that belongs to the sender's `id`, in use until it is inserted or discarded."""
        unseal(self._pool, private)
        region = self._region(pool)
        blocks, rest = divmod(count, region.ids_per_block)
        if rest:
            raise RefusedError(
                "count", f"{count} are not whole blocks of {region.layout.block_tokens} tokens"
            )
        try:
            found = self._pool.alloc_mem(blocks, MemType(pool), id=owner_of(request))
        except OutOfBlocksError as error:
            raise RefusedError(Refusal.NO_ROOM.value, error.message) from None
        self._pool.begin_use(found)
        ids = region.to_ids([address.place for address in found])
        firsts = ids[:: region.ids_per_block].tolist()
        self._coming.update(zip(((pool, first) for first in firsts), found, strict=True))
        return ids

    async def claim(self, pool: str, blocks: Ids, request: str, private: bytes) -> None:
        """Memory that somebody here has allocated, in use until the transfer has ended; it stays theirs."""
        unseal(self._pool, private)
        region = self._region(pool)
        firsts = blocks[:: region.ids_per_block].tolist()
        found: list[Address] = []
        for first, place in zip(firsts, region.from_ids(blocks), strict=True):
            address = self._pool.ledger.find(tier_named(pool), place)
            if address is None or not self._pool.is_granted(address):
                raise RefusedError("blocks", f"block {first} of {pool} is not allocated here")
            found.append(address)
        region.open([address.place for address in found])
        self._pool.begin_use(found)
        self._claimed.update(zip(((pool, first) for first in firsts), found, strict=True))

    def _region(self, pool: str) -> Region:
        region = next((held for tier, held in self._pool.tiers.regions.items() if tier.name == pool), None)
        if region is None:
            raise RefusedError(Refusal.NO_ROOM.value, f"there is no {pool} here")
        return region

    async def insert(
        self, pool: str, blocks: Ids, tokens: bytes, flags: int, request: str, private: bytes
    ) -> bool:
        """The blocks have arrived: index them, or hand them to their owner."""
        endpoint = self._pool.endpoint
        assert endpoint is not None
        namespace, private = unseal(self._pool, private)
        addresses = self._arrived(pool, blocks)
        if flags & TransferFlag.FREE:
            if any(self._pool.ledger.grant_of(each).owner != owner_of(request) for each in addresses):
                raise RefusedError("owner", f"these blocks are not {owner_of(request)!r}'s")
            self._pool.free_mem(addresses)
        if flags & (TransferFlag.FREE | TransferFlag.ALLOCATE):
            return False
        region = self._region(pool)
        if not region.borrowed:
            endpoint.pools[pool].seal(blocks)
        if not tokens:
            tokens_here = len(addresses) * region.layout.block_tokens
            self._pool.store.transfer(tier_named(pool), tokens_here, request).end()
            self._on_received(Received(owner_of(request), tuple(addresses), flags, private))
            return False
        try:
            self._pool.insert(tokens, addresses, namespace=namespace, received=True)
        except (UserError, OutOfBlocksError):
            # What they continue is not here any more, or there is no room: they are of no use.
            self._pool.free_mem(addresses)
            return False
        return True

    async def discard(self, pool: str, blocks: Ids, request: str) -> None:
        """The transfer failed."""
        claimed = [(pool, block) for block in blocks.tolist() if (pool, block) in self._claimed]
        self._pool.end_use([self._claimed.pop(each) for each in claimed])
        coming = [(pool, block) for block in blocks.tolist() if (pool, block) in self._coming]
        addresses = [self._coming.pop(each) for each in coming]
        self._pool.end_use(addresses)
        self._pool.free_mem([a for a in addresses if self._pool.is_granted(a)])

    def _arrived(self, pool: str, blocks: Ids) -> list[Address]:
        """The addresses of blocks that were allocated for this, or beforehand by somebody here."""
        found: list[Address] = []
        region = self._region(pool)
        firsts = blocks[:: region.ids_per_block].tolist()
        for first in firsts:
            address = self._coming.pop((pool, first), None) or self._claimed.pop((pool, first), None)
            if address is not None:
                self._pool.end_use([address])
            if address is None or not self._pool.is_granted(address):
                raise RefusedError("blocks", f"block {first} of {pool} is not allocated here")
            found.append(address)
        return found
