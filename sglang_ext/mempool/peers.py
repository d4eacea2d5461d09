"""transfer and transfer_with_insert, and what a pool does at the receiving end (MemServe, section 4.3).

The endpoint has one pool for each tier in memory, `hbm` and `dram`, whose blocks are those of the region. A
block is opened when it is allocated or written, and sealed when it is sent or has been received: so a reader
that is late finds another generation, and discards what it read.

`id` names the owner at both ends: what arrives without being inserted belongs to that owner there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.disagg.config import EndpointConfig
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.pool_transfer import TransferFlag
from sglang_ext.disagg.pool_transfer import transfer as transfer_blocks
from sglang_ext.disagg.pools import MemoryRange, OwnedPool, PoolSpec
from sglang_ext.disagg.tensors import arena_tensors
from sglang_ext.disagg.transfer import Endpoint
from sglang_ext.errors import ConfigError, UserError
from sglang_ext.geometry import Geometry
from sglang_ext.keys import Tier
from sglang_ext.mempool.address import Address, AddressError, MemType
from sglang_ext.mempool.regions import ArenaRegion, Ids, OutOfBlocksError

if TYPE_CHECKING:
    from sglang_ext.disagg.instance import Instance
    from sglang_ext.mempool.pool import MemPool

_numbers = itertools.count(1)
_REQUEST = re.compile(r"(.*)#t\d+(?:#\d+)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Transferred:
    """Where a transfer ended.

    blocks: tier and block of the receiver, in order. inserted: whether its index has them.
    """

    instance: str
    blocks: tuple[tuple[Tier, int], ...]
    inserted: bool


@dataclass(frozen=True, slots=True)
class Received:
    """Blocks that a peer has transferred; `owner` owns them now. flags, private: the sender's."""

    owner: str
    addresses: tuple[Address, ...]
    flags: int
    private: bytes


async def serve(
    pool: MemPool,
    config: EndpointConfig,
    geometry: Geometry,
    *,
    on_received: Callable[[Received], None] = lambda received: None,
) -> Endpoint:
    """Start an endpoint for a pool over arenas, and attach it. The caller closes it, before the arenas,
    and then calls `MemPool.detach`.

    Args:
        geometry: what the bytes of a block mean; its addresses are not used.
        on_received: told of blocks that arrived and are not inserted.

    Raises:
        ConfigError: a region is no arena, or the geometry is not its layout. What `Endpoint.start` raises.
    """
    specs: list[PoolSpec] = []
    for tier, region in pool.tiers.regions.items():
        if not isinstance(region, ArenaRegion) or geometry.layout != region.layout:
            raise ConfigError(f"{tier.name} is not an arena of this geometry", field="geometry")
        arena = region.arena
        size = arena.n_blocks * arena.block_bytes
        specs.append(
            PoolSpec(
                tier.name.lower(),
                arena.n_blocks,
                geometry.block_tokens,
                arena_tensors(geometry, arena.address, arena.n_blocks),
                geometry.shard,
                (MemoryRange(arena.address, size, keep=arena),),
                lease_budget=arena.n_blocks,
            )
        )
    receiver = PoolReceiver(pool, on_received)
    endpoint = await Endpoint.start(config, specs, receiver=receiver)
    pool.attach(endpoint)
    return endpoint


def attach(pool: MemPool, endpoint: Endpoint) -> None:
    """Have the regions tell the endpoint's pools when bytes are about to change."""
    for tier, region in pool.tiers.regions.items():
        owned = endpoint.pools.get(tier.name.lower())
        if owned is not None:
            region.opening = _opener(owned)


def detach(pool: MemPool) -> None:
    """Let the regions tell nobody."""
    for region in pool.tiers.regions.values():
        region.opening = None


def _opener(owned: OwnedPool) -> Callable[[Ids], None]:
    def opening(ids: Ids) -> None:
        sealed = owned.is_sealed(ids)
        if sealed.any():
            owned.open(ids[sealed])

    return opening


async def send(
    pool: MemPool,
    receiver: Instance,
    addresses: Sequence[Address],
    destination: Sequence[Address] | None,
    tokens: bytes | None,
    id: str,
    type: MemType,
    flags: TransferFlag | None,
    private: bytes,
    seconds: float,
) -> Transferred:
    """See `MemPool.transfer` and `transfer_with_insert`."""
    endpoint = pool.endpoint
    if endpoint is None:
        raise ConfigError(
            "this pool has no endpoint to transfer with",
            field="endpoint",
            hint="Start one with sglang_ext.mempool.serve, or attach yours",
        )
    if type is MemType.DISK:
        raise ConfigError("transfers end in HBM or DRAM", field="type", hint="swap_out moves blocks to disk")
    _check_sent(pool, receiver, addresses, destination, tokens)
    pool.begin_use(addresses)
    try:
        blocks: list[tuple[Tier, int]] = []
        inserted = tokens is not None
        for start, end in _runs(addresses, destination):
            # The last blocks of so much of the prompt; those before have just arrived.
            step = pool.tiers.step
            first = 0 if tokens is None else len(tokens) // step - len(addresses)
            part = None if tokens is None else tokens[: (first + end) * step]
            tier, ids, done = await _send_run(
                pool,
                endpoint,
                receiver,
                addresses[start:end],
                None if destination is None else destination[start:end],
                part,
                id,
                type,
                flags or TransferFlag.PULL,
                private,
                seconds,
            )
            blocks += [(tier, block) for block in ids.tolist()]
            inserted = inserted and done
        return Transferred(receiver.name, tuple(blocks), inserted)
    finally:
        pool.end_use(addresses)


def _check_sent(
    pool: MemPool,
    receiver: Instance,
    addresses: Sequence[Address],
    destination: Sequence[Address] | None,
    tokens: bytes | None,
) -> None:
    for address in addresses:
        pool.ledger.grant_of(address)
        if address.tier is Tier.DISK:
            raise AddressError(
                f"{address} is on disk, where no peer reads it", hint="swap_in brings it to HBM"
            )
    if tokens is not None and len(tokens) // pool.tiers.step < len(addresses):
        raise UserError("there are more addresses than whole blocks of tokens", field="addresses")
    for address in destination or ():
        if address.instance != receiver.name or address.tier is Tier.DISK:
            raise AddressError(f"{address} is no memory of {receiver.name!r}", field="destination")
    if destination is not None and len(destination) != len(addresses):
        raise UserError("as many destinations as addresses are needed", field="destination")


def _runs(addresses: Sequence[Address], destination: Sequence[Address] | None) -> list[tuple[int, int]]:
    """Parts that lie in one tier at both ends: [start, end)."""
    tiers = [(a.tier, destination[i].tier if destination else a.tier) for i, a in enumerate(addresses)]
    cuts = [0, *(i for i in range(1, len(tiers)) if tiers[i] != tiers[i - 1]), len(tiers)]
    return [(start, end) for start, end in itertools.pairwise(cuts) if start < end]


async def _send_run(
    pool: MemPool,
    endpoint: Endpoint,
    receiver: Instance,
    addresses: Sequence[Address],
    destination: Sequence[Address] | None,
    tokens: bytes | None,
    id: str,
    type: MemType,
    flags: TransferFlag,
    private: bytes,
    seconds: float,
) -> tuple[Tier, Ids, bool]:
    """Transfer blocks of one tier; where they went."""
    tier = addresses[0].tier
    name = tier.name.lower()
    ids = pool.tiers.regions[tier].to_ids([address.place for address in addresses])
    owned = endpoint.pools[name]
    owned.seal(ids[~owned.is_sealed(ids)])
    if destination is not None:
        region = pool.tiers.regions[tier]
        tries, to = [destination[0].tier], region.to_ids([address.place for address in destination])
    else:
        tries = [Tier.HBM, Tier.DRAM] if type is MemType.MIXED else [Tier[type.name]]
        to = None
    for target in tries:
        try:
            placed = await transfer_blocks(
                endpoint,
                receiver,
                f"{id}#t{next(_numbers)}",
                name,
                ids,
                target.name.lower(),
                seconds=seconds,
                destination=to,
                flags=flags,
                private=private,
                tokens=tokens,
            )
            return target, placed.blocks, placed.inserted
        except RefusedError as error:
            if error.reason != "room" or target is tries[-1]:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


class PoolReceiver:
    """What a pool does when peers transfer to it: an `owner.Receiver`, on an event loop of the pool's thread.

    Args:
        on_received: told of blocks that are not inserted.
        namespace: where what comes with these private data is inserted; the pool's own by default.
    """

    def __init__(
        self,
        pool: MemPool,
        on_received: Callable[[Received], None] = lambda received: None,
        namespace: Callable[[bytes], Hashable] = lambda private: None,
    ) -> None:
        self._pool = pool
        self._on_received = on_received
        self._namespace = namespace
        self._coming: dict[tuple[str, int], Address] = {}

    async def allocate(self, pool: str, count: int, request: str, private: bytes) -> Ids:
        """Memory that belongs to the sender's `id`, in use until it is inserted or discarded."""
        try:
            found = self._pool.alloc_mem(count, MemType(pool), id=_owner(request))
        except (OutOfBlocksError, ConfigError) as error:
            raise RefusedError("room", error.message) from None
        self._pool.begin_use(found)
        ids = self._pool.tiers.regions[Tier[pool.upper()]].to_ids([a.place for a in found])
        self._coming.update(zip(((pool, block) for block in ids.tolist()), found, strict=True))
        return ids

    async def insert(
        self, pool: str, blocks: Ids, tokens: bytes, flags: int, request: str, private: bytes
    ) -> bool:
        """The blocks have arrived: index them, or hand them to their owner."""
        endpoint = self._pool.endpoint
        assert endpoint is not None
        addresses = self._arrived(pool, blocks)
        endpoint.pools[pool].seal(blocks)
        if not tokens:
            self._on_received(Received(_owner(request), tuple(addresses), flags, private))
            return False
        try:
            self._pool.insert(tokens, addresses, namespace=self._namespace(private))
        except (UserError, OutOfBlocksError):
            # What they continue is not here any more, or there is no room: they are of no use.
            self._pool.free_mem(addresses)
            return False
        return True

    async def discard(self, pool: str, blocks: Ids, request: str) -> None:
        """The transfer failed."""
        coming = [(pool, block) for block in blocks.tolist() if (pool, block) in self._coming]
        addresses = [self._coming.pop(each) for each in coming]
        self._pool.end_use(addresses)
        self._pool.free_mem([a for a in addresses if self._pool.is_granted(a)])

    def _arrived(self, pool: str, blocks: Ids) -> list[Address]:
        """The addresses of blocks that were allocated for this, or beforehand by somebody here."""
        found: list[Address] = []
        region = self._pool.tiers.regions[Tier[pool.upper()]]
        for block, place in zip(blocks.tolist(), region.from_ids(blocks), strict=True):
            address = self._coming.pop((pool, block), None)
            if address is not None:
                self._pool.end_use([address])
            else:
                address = self._pool.ledger.find(Tier[pool.upper()], place)
            if address is None or not self._pool.is_granted(address):
                raise RefusedError("blocks", f"block {block} of {pool} is not allocated here")
            found.append(address)
        return found


def _owner(request: str) -> str:
    """The sender's `id`: its request is `id#t<number>`, and `#<rank>` behind that where it is pulled."""
    found = _REQUEST.fullmatch(request)
    return found[1] if found else request
