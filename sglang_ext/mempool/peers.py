"""transfer and transfer_with_insert at the sending end (MemServe, section 4.3), and a pool's endpoint.

The endpoint has one pool for each tier in memory, `hbm` and `dram`, whose blocks are those of the region. A
block is opened when it is allocated or written, and sealed when it is sent or has been received: so a reader
that is late finds another generation, and discards what it read.

`id` names the owner at both ends: what arrives without being inserted belongs to that owner there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.pool_transfer import TransferFlag
from sglang_ext.disagg.transfer.pool_transfer import transfer as transfer_blocks
from sglang_ext.disagg.transfer.pools import OwnedPool
from sglang_ext.errors import ConfigError, UserError
from sglang_ext.geometry import Geometry
from sglang_ext.mempool.address import Address, AddressError, MemType
from sglang_ext.mempool.envelope import request_of, seal
from sglang_ext.mempool.grants import Hold
from sglang_ext.mempool.receiving import PoolReceiver, Received
from sglang_ext.mempool.regions import Ids
from sglang_ext.mempool.store import Refusal
from sglang_ext.tiers import Tier, tier_named

if TYPE_CHECKING:
    from sglang_ext.disagg.transfer.instance import Instance
    from sglang_ext.mempool.pool import MemPool


@dataclass(frozen=True, slots=True)
class Transferred:
    """Where a transfer ended.

    blocks: tier, and block of the receiver's endpoint, in order. inserted: whether its index has them.
    """

    instance: str
    blocks: tuple[tuple[Tier, int], ...]
    inserted: bool


async def serve(
    pool: MemPool,
    config: EndpointConfig,
    geometry: Geometry,
    *,
    on_received: Callable[[Received], None] = lambda received: None,
) -> Endpoint:
    """Start an endpoint for a pool, and attach it. The caller closes it, before the memory, and then calls
    `MemPool.detach`.

    Args:
        geometry: what the bytes of a block mean; its addresses are used for an engine's slots.
        on_received: told of blocks that arrived and are not inserted.

    Raises:
        ConfigError: the geometry is not the layout of a region. What `Endpoint.start` raises.
    """
    specs = [region.spec(tier.name, geometry) for tier, region in pool.tiers.regions.items()]
    receiver = PoolReceiver(pool, on_received)
    endpoint = await Endpoint.start(config, specs, receiver=receiver)
    pool.attach(endpoint)
    return endpoint


def attach(pool: MemPool, endpoint: Endpoint) -> None:
    """Have the regions tell the endpoint's pools when bytes are about to change."""
    for tier, region in pool.tiers.regions.items():
        owned = endpoint.pools.get(tier.name)
        if owned is not None and not region.borrowed:
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


async def alloc(
    pool: MemPool, receiver: Instance, size: int, type: MemType, id: str, seconds: float
) -> list[Address]:
    """See `MemPool.alloc_mem`, of an instance."""
    epoch = int.from_bytes(receiver.links[0].who.epoch[:8], "big") >> 1
    tries = _targets(type)
    for target in tries:
        region = pool.tiers.regions[target]
        try:
            ids = await receiver.settle(
                request_of(id),
                target.name,
                seconds=seconds,
                flags=TransferFlag.ALLOCATE,
                count=size * region.ids_per_block,
                private=seal(pool, pool.namespace, b""),
            )
            places = region.from_ids(ids)
            return [Address(receiver.name, epoch, target, place) for place in places]
        except RefusedError as error:
            if error.reason != Refusal.NO_ROOM.value or target is tries[-1]:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


async def free(
    pool: MemPool, receiver: Instance, addresses: Sequence[Address], id: str, seconds: float
) -> int:
    """See `MemPool.free_mem`, of an instance."""
    for address in addresses:
        if address.instance != receiver.name or address.tier not in pool.tiers.regions:
            raise AddressError(f"{address} is no memory of {receiver.name!r}", field="addresses")
    for tier, region in pool.tiers.regions.items():
        places = [address.place for address in addresses if address.tier is tier]
        if places:
            await receiver.settle(
                request_of(id),
                tier.name,
                seconds=seconds,
                flags=TransferFlag.FREE,
                blocks=region.to_ids(places),
                private=seal(pool, pool.namespace, b""),
            )
    return len(addresses)


def _targets(type: MemType) -> list[Tier]:
    """Tiers of a peer in which memory of a type is looked for, in this order."""
    if type is MemType.DISK:
        raise ConfigError("transfers end in HBM or DRAM", field="type", hint="swap_out moves blocks to disk")
    return [Tier.HBM, Tier.DRAM] if type is MemType.MIXED else [tier_named(type.value)]


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
    namespace: Hashable = None,
) -> Transferred:
    """See `MemPool.transfer` and `transfer_with_insert`."""
    endpoint = pool.endpoint
    if endpoint is None:
        raise ConfigError(
            "this pool has no endpoint to transfer with",
            field="endpoint",
            hint="Start one with sglang_ext.mempool.serve, or attach yours",
        )
    _targets(type)
    _check_sent(pool, receiver, addresses, destination, tokens)
    sealed = seal(pool, _namespace_sent(pool, addresses, tokens, namespace), private)
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
                sealed,
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


def _namespace_sent(
    pool: MemPool, addresses: Sequence[Address], tokens: bytes | None, namespace: Hashable
) -> Hashable:
    """Where the receiver inserts: as the blocks are cached here, or as the caller says."""
    grants = [pool.ledger.grant_of(address) for address in addresses] if tokens is not None else []
    cached = {grant.namespace for grant in grants if isinstance(grant, Hold)}
    if namespace is not None:
        cached.add(namespace)
    if len(cached) > 1:
        raise UserError("the blocks are cached in another namespace", field="namespace")
    return cached.pop() if cached else pool.namespace


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
    name = tier.name
    ids = pool.tiers.regions[tier].to_ids([address.place for address in addresses])
    if not pool.tiers.regions[tier].borrowed:  # where a lease does that
        owned = endpoint.pools[name]
        owned.seal(ids[~owned.is_sealed(ids)])
    if destination is not None:
        region = pool.tiers.regions[tier]
        tries, to = [destination[0].tier], region.to_ids([address.place for address in destination])
    else:
        tries, to = _targets(type), None
    for target in tries:
        try:
            placed = await transfer_blocks(
                endpoint,
                receiver,
                request_of(id),
                name,
                ids,
                target.name,
                seconds=seconds,
                destination=to,
                flags=flags,
                private=private,
                tokens=tokens,
            )
            return target, placed.blocks, placed.inserted
        except RefusedError as error:
            if error.reason != Refusal.NO_ROOM.value or target is tries[-1]:
                raise
    raise AssertionError("unreachable: the last try returns or raises")
