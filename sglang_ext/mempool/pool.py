"""MemPool: the memory pool of MemServe (section 4, table 1) over index, tiers and transfer.

The calls by name, and what of table 1 is settled here:

    alloc_mem(size, type, id)            `size` blocks, given to the owner `id`
    free_mem(addrList)                   or everything that an owner has: free_mem(id=...)
    insert(tokenList, addrList)          the blocks become the index's; those it has already are freed
    match(tokenList)                     a hold: where each block is, locked until it is released
    delete(tokenList)                    what no other prompt needs
    swap_out(num_blocks)                 least recently used HBM blocks to DRAM, and from there to disk
    swap_in(addrList)                    into HBM, verified
    transfer, transfer_with_insert       to another instance, over an `Endpoint` (peers.py)

All calls are made in one thread, the one that made the pool (in an engine the scheduler's), and the
asynchronous ones on an event loop of that thread. What may wait: whatever evicts or swaps, for copies and for
the disk; `transfer`, for the peer. A cached block that fails to be read is a miss with an `Outcome`, never
wrong bytes and never an exception.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, overload

from sglang_ext.errors import ConfigError, InternalError, UserError
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import Namespace, TokenIds, encode_tokens
from sglang_ext.mempool import checks, holding, indexing, memory, peers
from sglang_ext.mempool.address import Address, AddressError, MemType, disk_names
from sglang_ext.mempool.grants import Allocation, Hold, Ledger
from sglang_ext.mempool.holding import Swapped
from sglang_ext.mempool.indexing import Inserted
from sglang_ext.mempool.memory import Memory
from sglang_ext.mempool.regions import ArenaRegion, Region, Rows
from sglang_ext.mempool.store import Store
from sglang_ext.mempool.tiers import Digest, Tiers
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiered_store.tier import BlockTier, Outcome
from sglang_ext.tiers import Tier, all_tiers

if TYPE_CHECKING:
    from sglang_ext.disagg.transfer.engine import Endpoint
    from sglang_ext.disagg.transfer.instance import Instance
    from sglang_ext.disagg.transfer.pool_transfer import TransferFlag
    from sglang_ext.mempool.peers import Transferred


def namespace_digest(namespace: Hashable) -> bytes:
    """The disk's name of a namespace."""
    if not isinstance(namespace, Namespace):
        raise UserError(f"{namespace!r} is not a keys.Namespace", field="namespace")
    return namespace.digest()


class MemPool:
    """See the module's docstring. The caller closes what it hands in (arenas, disk tier, endpoint).

    Args:
        instance: our id; part of every address.
        store: of the rank, whose blocks these are.
        regions: their bytes: HBM, and DRAM if there is any. An arena that is no tier of the store becomes
            one.
        disk: the tier below; None for none.
        namespace: where calls go that name none.
        epoch: of the instance.
        digest: the disk's name of a namespace.
        settle: called before bytes are read or blocks evicted: returns when nobody copies any.
    """

    def __init__(
        self,
        instance: str,
        store: Store,
        regions: Mapping[Tier, Region],
        disk: BlockTier | None = None,
        *,
        namespace: Hashable,
        epoch: int,
        digest: Digest = namespace_digest,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout: BlockLayout = regions[Tier.HBM].layout
        layouts = {tier.name: region.layout for tier, region in regions.items()}
        for name, layout in (*layouts.items(), ("disk", disk and disk.layout)):
            if isinstance(layout, BlockLayout) and layout != self.layout:
                text = f"{name} has layout {layout.facts()}, HBM {self.layout.facts()}"
                raise ConfigError(text, field=name)
        self.namespace = namespace
        self.store = store
        holders = {tier: Holder.of(instance, epoch, tier) for tier in all_tiers()}
        self.tiers = Tiers(store, holders, regions, disk, digest, settle)
        self.ledger = Ledger(instance, epoch)
        self.endpoint: Endpoint | None = None
        self._settle = settle
        self._thread = threading.get_ident()
        self.memory = Memory(self.tiers, self.ledger)
        self._doomed: set[Address] = set()
        self._ending: list[Hold] = []

    @staticmethod
    def create(
        instance: str,
        layout: BlockLayout,
        hbm_blocks: int,
        dram_blocks: int = 0,
        disk: BlockTier | None = None,
        *,
        namespace: Namespace,
    ) -> MemPool:
        """A pool without an engine, over private memory of this process."""
        sizes = {Tier.HBM: hbm_blocks} | ({Tier.DRAM: dram_blocks} if dram_blocks else {})
        return MemPool(
            instance,
            Store(RadixTree(layout.block_tokens)),
            {
                tier: ArenaRegion.of_blocks(layout, blocks, name=f"pool-{tier.name}")
                for tier, blocks in sizes.items()
            },
            disk,
            namespace=namespace,
            epoch=secrets.randbits(63),
        )

    @property
    def instance(self) -> str:
        return self.ledger.instance

    @property
    def epoch(self) -> int:
        return self.ledger.epoch

    # -- memory ---------------------------------------------------------------------------------

    @overload
    def alloc_mem(
        self, size: int, type: MemType = ..., *, id: str, instance: None = None
    ) -> list[Address]: ...

    @overload
    def alloc_mem(
        self, size: int, type: MemType = ..., *, id: str, instance: Instance, seconds: float = ...
    ) -> Awaitable[list[Address]]: ...

    def alloc_mem(
        self,
        size: int,
        type: MemType = MemType.HBM,
        *,
        id: str,
        instance: Instance | None = None,
        seconds: float = 10.0,
    ) -> list[Address] | Awaitable[list[Address]]:
        """Memory for `size` blocks, which `id` owns until it is freed or inserted. Its bytes are undefined.

        With a connected `instance`, memory there, to be awaited: its addresses are good as `destination` of
        transfers to it, and belong to the same `id` there.

        Evicts cached blocks that nobody holds: those with a copy in another tier first, then by copying down,
        then the least recently used for good. Room on disk is not set aside: `write` tells.

        Raises:
            OutOfBlocksError: there is not so much, whatever is evicted. Nothing was taken, nothing evicted.
            ConfigError: the pool has no such tier.
            RefusedError: the other instance has no room.
        """
        self._enter(settle=True)
        if instance is not None:
            return peers.alloc(self, instance, size, type, id, seconds)
        return self.memory.alloc(size, type, id)

    @overload
    def free_mem(
        self, addresses: Iterable[Address] = ..., *, id: str | None = None, instance: None = None
    ) -> int: ...

    @overload
    def free_mem(
        self, addresses: Iterable[Address], *, id: str, instance: Instance, seconds: float = ...
    ) -> Awaitable[int]: ...

    def free_mem(
        self,
        addresses: Iterable[Address] = (),
        *,
        id: str | None = None,
        instance: Instance | None = None,
        seconds: float = 10.0,
    ) -> int | Awaitable[int]:
        """Free allocated blocks, all or none, and with `id` everything that it owns, its holds included. With
        a connected `instance`, the blocks that `id` owns there, to be awaited.

        What a transfer is using is freed when that ends. Returns how many blocks were freed.

        Raises:
            AddressError: an address is not allocated here and now.
        """
        self._enter()
        if instance is not None:
            return peers.free(self, instance, list(addresses), id or "", seconds)
        given = dict.fromkeys(addresses)
        for address in given:
            self.ledger.allocation_of(address, "free")
        if id is not None:
            for grant in self.ledger.of_owner(id):
                if isinstance(grant, Allocation):
                    given |= dict.fromkeys(grant.addresses)
                else:
                    grant.release()
        self._doomed.update(address for address in given if self.ledger.busy[address])
        now = [address for address in given if not self.ledger.busy[address]]
        self.memory.give_back(now)
        return len(given)

    def write(self, addresses: Sequence[Address], rows: Rows) -> list[Outcome]:
        """Fill allocated blocks. rows: uint8, shape (blocks, block bytes). One outcome each.

        Raises:
            AddressError: an address is not allocated here and now.
        """
        self._enter()
        for address in addresses:
            self.ledger.allocation_of(address, "write to")
        return memory.write(self.tiers, addresses, rows)

    def read(self, addresses: Sequence[Address]) -> tuple[Rows, list[Outcome]]:
        """Copies of blocks, allocated or held, shape (blocks, block bytes), and how reading each went: a row
        that is not `DONE` is undefined.

        Raises:
            AddressError: an address is not granted here and now.
        """
        self._enter(settle=True)
        for address in addresses:
            self.ledger.grant_of(address)
        return memory.read(self.tiers, addresses)

    # -- index ----------------------------------------------------------------------------------

    def insert(
        self,
        tokens: TokenIds | bytes,
        addresses: Sequence[Address],
        *,
        namespace: Hashable = None,
        priority: int = 0,
        received: bool = False,
    ) -> Inserted:
        """Make blocks the index's, under the whole blocks of `tokens`: active KV becomes historical (4.1).

        Args:
            addresses: the last blocks of `tokens`, in order; those before must be cached in HBM or DRAM. What
                is cached already is freed; addresses of a hold on this prompt may stand in for it.
            priority: of the request, for the eviction policy `priority`.
            received: another instance has computed them, which counts as `transfer_with_insert`.

        Since a tier has whole prefixes only, blocks of an upper tier are copied down where blocks of a lower
        one continue them.

        Raises:
            AddressError: an address is not allocated here and now, or is being transferred.
            UserError: blocks between what is cached and `addresses` are missing, or there are too many.
            OutOfBlocksError: no room for the copies. Nothing has changed then.
        """
        self._enter(settle=True)
        space, key = self.named(namespace), encode_tokens(tokens)
        return indexing.insert(self, space, key, addresses, priority, received=received)

    def match(self, tokens: TokenIds | bytes, *, id: str, namespace: Hashable = None) -> Hold:
        """The longest cached prefix of whole blocks, kept for `id` until `Hold.release` (or `free_mem(id=)`).

        Each address is of the nearest tier that has the block. What is on disk counts as far as the disk's
        index knows; reading it may still turn out a miss.
        """
        self._enter(settle=True)
        space, key = self.named(namespace), encode_tokens(tokens)
        return holding.match(self, space, key, id, self._end_hold)

    def delete(
        self, tokens: TokenIds | bytes, *, namespace: Hashable = None, continuations: bool = False
    ) -> int:
        """Forget a prompt in every tier. Returns the blocks that are gone from HBM and DRAM.

        What longer prompts continue stays, unless `continuations` are deleted with it; what is held stays.
        """
        self._enter()
        space, key = self.named(namespace), encode_tokens(tokens)
        held = [address for hold in self.ledger.holds() for address in hold.positions]
        spared = {disk_names(address.place)[1] for address in held if address.tier is Tier.DISK}
        return indexing.delete(self.tiers, space, key, continuations=continuations, spared=spared)

    def named(self, namespace: Hashable) -> Hashable:
        """The namespace of a call."""
        return self.namespace if namespace is None else namespace

    # -- swap -----------------------------------------------------------------------------------

    def swap_out(self, num_blocks: int) -> int:
        """Move the least recently used HBM blocks that nobody holds to DRAM, or to disk where that is full.

        A block leaves HBM only once its copy is in the index. Returns how many did: fewer where there is no
        room below.
        """
        self._enter(settle=True)
        return self.tiers.move_down(Tier.HBM, num_blocks)

    def swap_in(self, addresses: Sequence[Address]) -> list[Swapped]:
        """Bring held blocks into HBM, together with what lies before them in their prompts.

        The new addresses belong to the same hold. Never drops a last copy to make room.

        Raises:
            AddressError: an address is not of a live hold.
        """
        self._enter(settle=True)
        return holding.swap_in(self, addresses)

    # -- transfer -------------------------------------------------------------------------------

    def attach(self, endpoint: Endpoint) -> None:
        """Transfer by this endpoint, whose pools are `hbm` and `dram` in blocks of the regions."""
        self.endpoint = endpoint
        peers.attach(self, endpoint)

    def detach(self) -> None:
        """Forget the endpoint, which is closed."""
        self.endpoint = None
        peers.detach(self)

    async def transfer(
        self,
        receiver: Instance,
        addresses: Sequence[Address],
        destination: Sequence[Address] | None = None,
        *,
        id: str,
        type: MemType = MemType.HBM,
        flags: TransferFlag | None = None,
        private: bytes = b"",
        seconds: float = 10.0,
    ) -> Transferred:
        """Transfer blocks to a connected instance (4.3), which owns them there under the same `id`.

        Args:
            destination: addresses allocated there; without them the receiver allocates memory of `type`.
            flags: `TransferFlag`; the bits from USER on reach the receiver, as `private` does.

        Raises:
            ConfigError: the pool has no endpoint. AddressError: a block is on disk, or not granted.
            Whatever `disagg.pool_transfer.transfer` raises.
        """
        return await peers.send(
            self, receiver, addresses, destination, None, id, type, flags, private, seconds
        )

    async def transfer_with_insert(
        self,
        receiver: Instance,
        tokens: TokenIds | bytes,
        addresses: Sequence[Address],
        destination: Sequence[Address] | None = None,
        *,
        id: str,
        type: MemType = MemType.HBM,
        flags: TransferFlag | None = None,
        private: bytes = b"",
        seconds: float = 10.0,
        namespace: Hashable = None,
    ) -> Transferred:
        """As `transfer`; the receiver inserts the blocks, the last ones of `tokens`, into its index.

        namespace: there; by default the one in which the blocks are held here.
        """
        key = encode_tokens(tokens)
        return await peers.send(
            self, receiver, addresses, destination, key, id, type, flags, private, seconds, namespace
        )

    # -- grants in use --------------------------------------------------------------------------

    def begin_use(self, addresses: Sequence[Address]) -> None:
        """A transfer uses these: they stay what they are until `end_use`."""
        self.ledger.busy.update(addresses)

    def end_use(self, addresses: Sequence[Address]) -> None:
        """A transfer has ended. Does what was asked for meanwhile."""
        self.ledger.busy -= Counter(addresses)
        free = [address for address in self._doomed if not self.ledger.busy[address]]
        self._doomed.difference_update(free)
        self.memory.give_back(free)
        ending, self._ending = self._ending, []
        for hold in ending:
            self._end_hold(hold)

    def _end_hold(self, hold: Hold) -> None:
        self._enter()
        if any(self.ledger.busy[address] for address in hold.positions):
            self._ending.append(hold)
            return
        for node, holder in hold.locks:
            self.tiers.tree.unlock(node, holder)
        for pin in hold.pins:
            assert self.tiers.disk is not None
            self.tiers.disk.complete_get(pin)
        self.ledger.close(hold)

    def is_granted(self, address: Address) -> bool:
        """Whether an address is good now."""
        try:
            self.ledger.grant_of(address)
        except AddressError:
            return False
        return True

    # -- whole ----------------------------------------------------------------------------------

    def owned_blocks(self, tier: Tier) -> int:
        """Blocks of a tier that are allocated and not in the index."""
        return sum(address.tier is tier for address in self.ledger.allocated())

    def reset(self) -> None:
        """End every grant: all owners' memory is freed, all holds are released. The index stays."""
        for owner in self.ledger.owners:
            self.free_mem(id=owner)

    def _enter(self, *, settle: bool = False) -> None:
        if threading.get_ident() != self._thread:
            raise InternalError(
                "a memory pool was called from another thread than the one that made it",
                hint="Hand the call over to that thread",
            )
        if settle:
            self._settle()

    def check(self) -> None:
        """Verify every invariant of index, grants and regions. Raises AssertionError naming what is wrong."""
        checks.check(self)

    def __repr__(self) -> str:
        tiers = sorted(self.store.tiers.items())
        free = ", ".join(f"{level.title} {tier.free_blocks}/{tier.n_blocks} free" for level, tier in tiers)
        return f"MemPool({self.instance}/{self.epoch:x}, {free}, {self.ledger!r}, {self.tiers.counters})"
