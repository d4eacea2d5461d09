"""Grants: who was given which addresses, until when.

An *allocation* gives memory to an owner (a request or session), who may write to it until it is freed or
inserted. A *hold* is what a match gives: blocks of the index, locked until it is released. Every grant has an
owner, and ends with it: nothing is pinned without one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from sglang_ext.mempool.address import Address, AddressError, Place
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiered_store.tier import Get
from sglang_ext.tiers import Tier


@dataclass(eq=False)
class Grant:
    """Addresses that belong together. number: never given out twice in an epoch."""

    number: int
    owner: str


@dataclass(eq=False)
class Allocation(Grant):
    """Memory of its owner. addresses: what of it is neither freed nor inserted yet."""

    addresses: set[Address] = field(default_factory=set)


@dataclass(eq=False)
class Hold(Grant):
    """The longest cached prefix of a prompt, kept until `release` (or the end of a `with` block).

    addresses: where each block is, the nearest copy; after `swap_in`, where it is then.
    key: the matched tokens, encoded. positions: every address that this hold is good for.
    """

    namespace: Hashable = None
    key: bytes = b""
    addresses: list[Address] = field(default_factory=list)
    positions: dict[Address, int] = field(default_factory=dict)
    locks: list[tuple[Node, Holder]] = field(default_factory=list)
    pins: list[Get] = field(default_factory=list)
    end: Callable[[Hold], None] = lambda hold: None
    released: bool = False

    @property
    def blocks(self) -> int:
        """How many leading blocks of the prompt are cached."""
        return len(self.addresses)

    @property
    def tiers(self) -> list[Tier]:
        """The tier of each block."""
        return [address.tier for address in self.addresses]

    def lock(self, tree: RadixTree, node: Node, holder: Holder) -> None:
        """Keep what `holder` has of the path to `node`, until the end."""
        tree.lock(node, holder)
        self.locks.append((node, holder))

    def release(self) -> None:
        """Let the blocks go; may be called twice. Their addresses are refused from now on."""
        if not self.released:
            self.released = True
            self.end(self)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Ledger:
    """All grants of one pool in one epoch."""

    def __init__(self, instance: str, epoch: int) -> None:
        self.instance = instance
        self.epoch = epoch
        self.busy: Counter[Address] = Counter()
        """Addresses that transfers read or fill now."""
        self._grants: dict[int, Allocation | Hold] = {}
        self._owners: defaultdict[str, set[int]] = defaultdict(set)
        self._last = 0

    def allocate(self, owner: str, places: Iterable[tuple[Tier, Place]]) -> list[Address]:
        """Give memory to an owner."""
        places = list(places)
        if not places:
            return []
        grant = Allocation(self._next(owner), owner)
        found = [self.address(tier, place, grant) for tier, place in places]
        grant.addresses.update(found)
        self._grants[grant.number] = grant
        return found

    def hold(self, owner: str, namespace: Hashable, end: Callable[[Hold], None]) -> Hold:
        """Begin a hold without blocks."""
        grant = Hold(self._next(owner), owner, namespace, end=end)
        self._grants[grant.number] = grant
        return grant

    def _next(self, owner: str) -> int:
        self._last += 1
        self._owners[owner].add(self._last)
        return self._last

    def address(self, tier: Tier, place: Place, grant: Grant) -> Address:
        return Address(self.instance, self.epoch, tier, place, grant.number)

    def grant_of(self, address: Address) -> Allocation | Hold:
        """The live grant of an address.

        Raises:
            AddressError: it is another instance's, of an earlier epoch, or its grant is over.
        """
        if address.instance != self.instance:
            raise AddressError(
                f"{address} is an address of instance {address.instance!r}, this is {self.instance!r}",
                hint="Transfer the block here, or ask that instance",
            )
        if address.epoch != self.epoch:
            raise AddressError(
                f"{address} is of epoch {address.epoch:x}, this is epoch {self.epoch:x}",
                hint="The instance was restarted: match the prompt again",
            )
        grant = self._grants.get(address.grant)
        known = grant.positions if isinstance(grant, Hold) else grant.addresses if grant else ()
        if grant is None or address not in known:
            raise AddressError(
                f"{address} is not granted any more",
                hint="It was freed, inserted or released: match the prompt again, or allocate",
            )
        return grant

    def allocation_of(self, address: Address, what: str) -> Allocation:
        """As `grant_of`, for memory that its owner may `what` ("free", "write to").

        Raises:
            AddressError: also when it is the index's.
        """
        grant = self.grant_of(address)
        if isinstance(grant, Hold):
            raise AddressError(
                f"cannot {what} {address}: it is the index's, held for {grant.owner!r}",
                hint="Release the hold, or delete the prompt",
            )
        return grant

    def take_back(self, addresses: Sequence[Address]) -> None:
        """End the grants of allocated addresses, which the caller has checked."""
        for address in addresses:
            grant = self.allocation_of(address, "free")
            grant.addresses.discard(address)
            if not grant.addresses:
                self.close(grant)

    def close(self, grant: Grant) -> None:
        """A grant is over."""
        del self._grants[grant.number]
        numbers = self._owners[grant.owner]
        numbers.discard(grant.number)
        if not numbers:
            del self._owners[grant.owner]

    def of_owner(self, owner: str) -> list[Allocation | Hold]:
        """The live grants of an owner, oldest first."""
        return [self._grants[number] for number in sorted(self._owners.get(owner, ()))]

    @property
    def owners(self) -> list[str]:
        """Whoever has been given something."""
        return list(self._owners)

    def allocated(self) -> list[Address]:
        """Every allocated address."""
        return [
            a for grant in self._grants.values() if isinstance(grant, Allocation) for a in grant.addresses
        ]

    def find(self, tier: Tier, place: Place) -> Address | None:
        """The allocated address of a place."""
        return next((a for a in self.allocated() if (a.tier, a.place) == (tier, place)), None)

    def holds(self) -> list[Hold]:
        """Every live hold."""
        return [grant for grant in self._grants.values() if isinstance(grant, Hold)]

    def check(self) -> None:
        """Verify the ledger. Raises AssertionError naming what is wrong."""
        owned = [number for numbers in self._owners.values() for number in numbers]
        if sorted(owned) != sorted(self._grants):
            raise AssertionError("grants and owners do not agree")
        places = [(address.tier, address.place) for address in self.allocated()]
        if len(set(places)) != len(places):
            raise AssertionError("a place is allocated twice")
        for address in self.busy:
            self.grant_of(address)

    def __repr__(self) -> str:
        allocated, holds = len(self.allocated()), len(self.holds())
        return f"Ledger(owners={len(self._owners)}, allocated={allocated}, holds={holds})"
