"""Eviction: per-holder usage, the policies that order nodes, and the queue that finds the next victim.

A policy maps a node to a sort key; the smallest goes first. The queue re-reads a key only when its node
comes up, so a node's key may grow over time but never shrink.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from sglang_ext.own_functions import SortKey, order_named
from sglang_ext.radix_global.node import Node
from sglang_ext.radix_global.placement import Holder


class Candidate(Protocol):
    """Fields of a node that a policy may read."""

    last_access: float
    hits: int
    priority: int


EvictionPolicy = Callable[[Candidate], SortKey]

PROTECTED_HITS = 2
"""Uses after which a node belongs to the protected segment of SLRU."""


def lru(node: Candidate) -> SortKey:
    """Least recently used first."""
    return (node.last_access,)


def slru(node: Candidate) -> SortKey:
    """Segmented LRU: nodes used only once go before nodes used again.

    A scan of one-off prompts then cannot evict shared prefixes.
    """
    return (float(node.hits >= PROTECTED_HITS), node.last_access)


def priority(node: Candidate) -> SortKey:
    """Lowest request priority first, then least recently used."""
    return (float(node.priority), node.last_access)


POLICIES: dict[str, EvictionPolicy] = {"lru": lru, "slru": slru, "priority": priority}


def policy_by_name(name: str) -> EvictionPolicy:
    """The policy of that name, or one's own by ``package.module:function``.

    Raises:
        ConfigError: there is none.
    """
    return order_named(name, POLICIES, "(node) -> tuple of numbers", field="--kv-eviction-policy")


SLACK: Final = 64
"""Entries of nodes gone from the holder are swept out once they outnumber its nodes by so many."""


class EvictionQueue:
    """The nodes of one holder in the order in which a policy gives them up.

    Lazy: any node may be offered at any time; its key and whether it can go are checked when it comes up. A
    node that cannot go then is dropped, and the operation that later makes it evictable offers it again.
    """

    __slots__ = ("_heap", "_holder", "_sequence", "policy")

    def __init__(self, holder: Holder, policy: EvictionPolicy) -> None:
        self._holder = holder
        self.policy = policy
        self._sequence = 0
        self._heap: list[tuple[SortKey, int, Node]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def entries(self) -> Iterator[tuple[SortKey, Node]]:
        """Every entry, in no order: the node and its sort key when it was last looked at."""
        return ((key, node) for key, _, node in self._heap)

    def offer(self, node: Node, held: int) -> None:
        """Put ``node`` into the queue, unless it is in there.

        Args:
            node: any node that the holder has.
            held: nodes that the holder has; the queue stays below twice that, plus ``SLACK``.
        """
        if self._holder in node.queued:
            return
        node.queued.add(self._holder)
        self._sequence += 1
        heapq.heappush(self._heap, (self.policy(node), self._sequence, node))
        if len(self._heap) > 2 * held + SLACK:
            self._sweep()

    def take(self) -> Node | None:
        """The next node that can go, out of the queue; ``None`` when there is none."""
        heap = self._heap
        while heap:
            key, _, node = heap[0]
            if node.can_go(self._holder):
                now = self.policy(node)
                if now != key:
                    self._sequence += 1
                    heapq.heapreplace(heap, (now, self._sequence, node))
                    continue
                heapq.heappop(heap)
                node.queued.discard(self._holder)
                return node
            heapq.heappop(heap)
            node.queued.discard(self._holder)
        return None

    def clear(self) -> None:
        """Forget every entry."""
        for _, _, node in self._heap:
            node.queued.discard(self._holder)
        self._heap.clear()

    def _sweep(self) -> None:
        """Drop the entries of nodes that the holder no longer has."""
        kept = []
        for entry in self._heap:
            node = entry[2]
            if self._holder in node.placements:
                kept.append(entry)
            else:
                node.queued.discard(self._holder)
        heapq.heapify(kept)
        self._heap = kept


@dataclass(slots=True)
class Usage:
    """Counters of one holder, kept in step with the tree's nodes."""

    queue: EvictionQueue
    nodes: int = 0
    blocks: int = 0
    locked: int = 0
    """Blocks it has that are locked for it."""
