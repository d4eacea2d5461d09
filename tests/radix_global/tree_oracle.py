"""A tree's correct answers, worked out from a dictionary of token tuples.

The oracle knows no nodes and no edges. It keeps, per namespace and holder, every block by the whole prompt
that ends with it, and per block when it was used. Where the tree may refresh more than was asked for (a
``touch`` that ends inside an edge refreshes all of the edge), the oracle keeps the earliest and the latest
time that can be true, and demands an order of eviction only where these decide it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.keys import decode_tokens
from sglang_ext.radix_global import Evicted, Holder, InsertResult, Match, Node, RadixTree

Prefix = tuple[int, ...]
"""All tokens of a prompt up to the end of a block: the name of that block."""
Units = tuple[Any, ...] | None
"""The address entries of one block."""
Place = tuple[Hashable, Holder]
SortKey = tuple[float, ...]


@dataclass
class Use:
    """How a block was used: bounds where the tree has a choice."""

    first: int
    last: int
    least_hits: int = 0
    most_hits: int = 0
    priority: int = 0

    def bounds(self, policy: str) -> tuple[SortKey, SortKey]:
        """The smallest and the largest sort key that the policy may give the block."""
        if policy == "slru":
            return (self.least_hits >= 2, self.first), (self.most_hits >= 2, self.last)
        if policy == "priority":
            return (self.priority, self.first), (self.priority, self.last)
        return (self.first,), (self.last,)


@dataclass
class Lock:
    """A lock that was taken, and the blocks that it still covers."""

    namespace: Hashable
    holder: Holder
    node: Node
    covered: set[Prefix] = field(default_factory=set)


def full_key(node: Node) -> Prefix:
    """The whole prompt that ends with ``node``."""
    parts = []
    current: Node | None = node
    while current is not None:
        parts.append(current.key)
        current = current.parent
    return tuple(decode_tokens(b"".join(reversed(parts))).tolist())


def units_of(address: Any, blocks: int) -> list[Units]:
    """The address of a node, cut into its blocks."""
    if address is None:
        return [None] * blocks
    each, rest = divmod(len(address), blocks)
    assert rest == 0, f"{len(address)} entries for {blocks} blocks"
    return [tuple(address[i * each : (i + 1) * each]) for i in range(blocks)]


class Oracle:
    """See the module's docstring. The methods named after the tree's take its answer and judge it."""

    def __init__(self, block_size: int, policy: str) -> None:
        self.block_size = block_size
        self.policy = policy
        self.now = 0
        self.held: dict[Place, dict[Prefix, Units]] = {}
        self.uses: dict[tuple[Hashable, Prefix], Use] = {}
        self.locks: list[Lock] = []

    # -- lookups --------------------------------------------------------------------------------

    def prefixes(self, tokens: Sequence[int]) -> list[Prefix]:
        """The names of the whole blocks of a prompt."""
        size = self.block_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def known(self, namespace: Hashable, tokens: Sequence[int]) -> list[Prefix]:
        """The blocks of a prompt that any holder has."""
        return [prefix for prefix in self.prefixes(tokens) if (namespace, prefix) in self.uses]

    def _has(self, namespace: Hashable, holder: Holder) -> dict[Prefix, Units]:
        return self.held.get((namespace, holder), {})

    def _locked(self, namespace: Hashable, holder: Holder) -> Counter[Prefix]:
        counts: Counter[Prefix] = Counter()
        for lock in self.locks:
            if lock.namespace == namespace and lock.holder is holder:
                counts.update(lock.covered)
        return counts

    def locked_blocks(self, holder: Holder) -> int:
        return sum(
            len(blocks.keys() & self._locked(namespace, holder).keys())
            for (namespace, owner), blocks in self.held.items()
            if owner is holder
        )

    def _forget(self, namespace: Hashable, holder: Holder, prefix: Prefix) -> Units:
        blocks = self.held[namespace, holder]
        units = blocks.pop(prefix)
        if not blocks:
            del self.held[namespace, holder]
        if not any(prefix in other for (space, _), other in self.held.items() if space == namespace):
            del self.uses[namespace, prefix]
            for lock in self.locks:
                if lock.namespace == namespace:
                    lock.covered.discard(prefix)
        return units

    def _children(self, namespace: Hashable, holder: Holder, prefix: Prefix) -> list[Prefix]:
        length = len(prefix)
        return [
            other
            for other in self._has(namespace, holder)
            if len(other) == length + self.block_size and other[:length] == prefix
        ]

    # -- judging answers ------------------------------------------------------------------------

    def match(self, namespace: Hashable, tokens: Sequence[int], match: Match) -> None:
        self.now += 1
        known = self.known(namespace, tokens)
        assert match.blocks == len(known)
        assert sum(node.blocks for node in match.path) == match.blocks
        assert full_key(match.node) == (known[-1] if known else ())
        assert match.node is match.path[-1] if match.path else match.node.is_root
        for prefix in known:
            use = self.uses[namespace, prefix]
            use.first = use.last = self.now
        place = 0
        for node in match.path:
            for holder, address in node.placements.items():
                blocks = known[place : place + node.blocks]
                held = self._has(namespace, holder)
                assert units_of(address, node.blocks) == [held[prefix] for prefix in blocks]
            place += node.blocks

    def holders(self, namespace: Hashable, tokens: Sequence[int], found: dict[Holder, int]) -> None:
        expected: dict[Holder, int] = {}
        for (space, holder), blocks in self.held.items():
            count = sum(prefix in blocks for prefix in self.prefixes(tokens))
            if space == namespace and count:
                expected[holder] = count * self.block_size
        assert found == expected

    def touch(self, namespace: Hashable, tokens: Sequence[int]) -> None:
        self.now += 1
        known = self.known(namespace, tokens)
        for prefix in known:
            use = self.uses[namespace, prefix]
            use.first = use.last = self.now
        if not known:
            return
        for (space, prefix), use in self.uses.items():
            if space == namespace and len(prefix) > len(known[-1]) and prefix[: len(known[-1])] == known[-1]:
                use.last = self.now

    def insert(
        self,
        namespace: Hashable,
        tokens: Sequence[int],
        holder: Holder,
        units: list[Units],
        priority: int,
        same_request: bool,
        result: InsertResult,
    ) -> None:
        prefixes = self.prefixes(tokens)
        if prefixes:
            self.now += 1
        blocks = self.held.setdefault((namespace, holder), {}) if prefixes else {}
        held = sum(prefix in blocks for prefix in prefixes)
        assert (result.blocks, result.held_blocks) == (len(prefixes), held)
        assert result.new_blocks == len(prefixes) - held == sum(node.blocks for node in result.added)
        assert full_key(result.node) == (prefixes[-1] if prefixes else ())
        for prefix, unit in zip(prefixes, units, strict=True):
            blocks.setdefault(prefix, unit)
            new = (namespace, prefix) not in self.uses
            use = self.uses.setdefault((namespace, prefix), Use(self.now, self.now, priority=priority))
            use.first = use.last = self.now
            use.least_hits += new or not same_request
            use.most_hits += new or not same_request
            use.priority = max(use.priority, priority)

    def place(self, namespace: Hashable, node: Node, holder: Holder, units: list[Units]) -> None:
        names = self.prefixes(full_key(node))[-node.blocks :]
        self.held.setdefault((namespace, holder), {}).update(zip(names, units, strict=True))

    def remove(self, namespace: Hashable, names: list[Prefix], holder: Holder, gone: list[Evicted]) -> None:
        """``names``: the blocks of the removed node."""
        first = names[0]
        doomed = {p for p in self._has(namespace, holder) if p[: len(first)] == first}
        self._take(namespace, holder, gone)
        left = doomed & self._has(namespace, holder).keys()
        assert not left, "remove has left something behind"
        assert sum(evicted.blocks for evicted in gone) == len(doomed)

    def drop(self, holder: Holder, dropped: int) -> None:
        mine = [(space, owner) for space, owner in self.held if owner is holder]
        assert dropped == sum(len(self.held[place]) for place in mine)
        for namespace, _ in mine:
            for prefix in list(self.held[namespace, holder]):
                self._forget(namespace, holder, prefix)

    def _take(self, namespace: Hashable, holder: Holder, gone: Iterable[Evicted]) -> None:
        """Take evicted blocks out of the books, ends of prefixes first."""
        for evicted in gone:
            names = self.prefixes(full_key(evicted.node))[-evicted.blocks :]
            assert len(names) == evicted.blocks > 0
            assert not self._children(namespace, holder, names[-1]), "a prefix got a hole"
            expected = [self._has(namespace, holder)[prefix] for prefix in names]
            assert units_of(evicted.address, evicted.blocks) == expected
            for prefix in reversed(names):
                self._forget(namespace, holder, prefix)

    def may_go(self, holder: Holder, other: Holder | None) -> dict[tuple[Hashable, Prefix], bool]:
        """The blocks that can be evicted in time, each with whether it is the end of its prefix now.

        With ``other``, only where that holder has a copy of the block and of all that continues it.
        """
        found: dict[tuple[Hashable, Prefix], bool] = {}
        for (namespace, owner), blocks in self.held.items():
            if owner is not holder:
                continue
            locked = self._locked(namespace, holder)
            copied = self._has(namespace, other) if other else blocks
            stuck = [prefix for prefix in blocks if prefix in locked or prefix not in copied]
            inner = {prefix[: -self.block_size] for prefix in blocks}
            for prefix in blocks:
                if not any(other[: len(prefix)] == prefix for other in stuck):
                    found[namespace, prefix] = prefix not in inner
        return found

    def evict(
        self, holder: Holder, blocks: int, other: Holder | None, exhaustive: bool, gone: list[Evicted]
    ) -> None:
        """``exhaustive``: nothing but a lack of candidates was a reason to stop."""
        able = len(self.may_go(holder, other))
        took = sum(evicted.blocks for evicted in gone)
        assert took == min(blocks, able) if exhaustive else took <= min(blocks, able)
        for evicted in gone:
            namespace = evicted.node.namespace
            names = self.prefixes(full_key(evicted.node))[-evicted.blocks :]
            candidates = self.may_go(holder, other)
            assert all((namespace, prefix) in candidates for prefix in names), "a locked block went"
            lowest, _ = self.uses[namespace, names[-1]].bounds(self.policy)
            for name, is_end in candidates.items():
                _, highest = self.uses[name].bounds(self.policy)
                assert not (is_end and highest < lowest), f"{names[-1]} went before {name[1]}"
            self._take(namespace, holder, [evicted])

    def lock(self, lock: Lock, newly: int) -> None:
        before = self._locked(lock.namespace, lock.holder)
        lock.covered = set(self.prefixes(full_key(lock.node)))
        held = self._has(lock.namespace, lock.holder).keys()
        assert newly == len((lock.covered - before.keys()) & held)
        self.locks.append(lock)

    def unlock(self, lock: Lock, freed: int) -> None:
        self.locks.remove(lock)
        after = self._locked(lock.namespace, lock.holder)
        held = self._has(lock.namespace, lock.holder).keys()
        assert freed == len((lock.covered - after.keys()) & held)

    def move(self, lock: Lock, node: Node) -> None:
        """The lock is at another node now."""
        lock.node = node
        lock.covered = set(self.prefixes(full_key(node)))

    # -- the whole tree -------------------------------------------------------------------------

    def compare(self, tree: RadixTree, holders: Iterable[Holder]) -> None:
        """The tree has exactly the blocks in the books, and its counters agree."""
        found: dict[Place, dict[Prefix, Units]] = {}
        for node in tree.nodes():
            names = self.prefixes(full_key(node))[-node.blocks :]
            for holder, address in node.placements.items():
                units = units_of(address, node.blocks)
                found.setdefault((node.namespace, holder), {}).update(zip(names, units, strict=True))
        assert found == {place: blocks for place, blocks in self.held.items() if blocks}
        for holder in holders:
            mine = [blocks for (_, owner), blocks in self.held.items() if owner is holder]
            assert tree.blocks_of(holder) == sum(map(len, mine))
            assert tree.locked_blocks_of(holder) == self.locked_blocks(holder)
            assert (holder in tree.known_holders()) == bool(mine)
        assert set(tree.roots) == {namespace for namespace, _ in self.held}
