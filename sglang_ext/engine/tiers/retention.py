"""Retention of KV for announced requests, and the order of its eviction under pressure.

KV of a prompt with a live hint is evicted after all other cached KV, in HBM and in DRAM, until the hint
expires (Symphony, section 3.3: memory is shared cooperatively with the engine). It is never locked: a running
request that needs the room gets it at once. When only announced KV is left to evict, a policy
(``--kv-eviction-policy``, pressure) orders the sessions, and of a prompt the end goes first. A slot of
SGLang's pool spans all layers. Of sessions that are held by layer, later layers go first, before any
session as a whole, and of equal layers the same policy decides.

Times are rank 0's, as they come with its commands (``engine/commands.py``), so that all ranks hold back the
same. No I/O; the scheduler's thread only.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.own_functions import SortKey, order_named
from sglang_ext.radix_global import Evicted, Holder, Node, RadixTree
from sglang_ext.radix_global.edges import walk

MOST_HINTS = 1024
"""Hints at a time; beyond that, the weakest hint of the tenant with the most hints is dropped. So a tenant
alone may have all places, and hints that live long take no other tenant's share."""

MOST_DEFERRED = 32
"""Deferred sessions that one eviction looks at, which bounds its time."""

MayGo = Callable[[Node], bool]


def path_of(tree: RadixTree, namespace: Hashable, key: bytes) -> Iterator[tuple[int, Node]]:
    """The nodes that lie wholly on a prompt's path, each with the block at which it ends. Changes nothing."""
    end = 0
    for blocks, node in walk(tree.roots.get(namespace), key, tree.block_size * TOKEN_BYTES):
        end += node.blocks
        if blocks < end:
            return
        yield end, node


def _upwards(node: Node | None) -> list[Node]:
    """The nodes of the path that ends at ``node``, from the top, without those that have left the tree.

    No tokens are compared: with a thousand long prompts that would take a scheduler's pass.
    """
    found: list[Node] = []
    while node is not None and node.parent is not None:
        if node.placements:
            found.append(node)
        node = node.parent
    return found[::-1]


def owner_of(namespace: Hashable) -> Hashable:
    """The tenant of a namespace: its ``cache_salt``. The ``extra_key`` is the tenant's own choice."""
    return namespace[-1] if isinstance(namespace, tuple) and namespace else namespace


def most_of(namespaces: Iterable[Hashable]) -> Hashable:
    """The tenant to which most of the namespaces belong; among equals, the first."""
    return Counter(map(owner_of, namespaces)).most_common(1)[0][0]


def from_most(owned: Sequence[tuple[Hashable, int]]) -> list[int]:
    """Indices of (tenant, blocks), in the order in which they are given up: each time the first entry of the
    tenant with the most blocks left. With one tenant, the given order.
    """
    left: Counter[Hashable] = Counter()
    waiting: dict[Hashable, deque[int]] = {}
    for index, (owner, blocks) in enumerate(owned):
        left[owner] += blocks
        waiting.setdefault(owner, deque()).append(index)
    # Among equals the first tenant, so that all ranks choose alike.
    heap = [(-left[owner], number, owner) for number, owner in enumerate(waiting)]
    heapq.heapify(heap)
    found: list[int] = []
    while heap:
        negative, number, owner = heap[0]
        index = waiting[owner].popleft()
        found.append(index)
        if waiting[owner]:
            heapq.heapreplace(heap, (negative + owned[index][1], number, owner))
        else:
            heapq.heappop(heap)
    return found


@dataclass(frozen=True, slots=True)
class Announced:
    """An announced session, as a policy for the order under pressure sees it."""

    priority: int
    """The hint's."""
    until: float
    """When the hint ends, in rank 0's seconds."""
    number: int
    """Counts hints, the older the smaller."""
    blocks: int
    """Blocks of the session's prompt in the tier that gives way."""


def weakest_first(session: Announced) -> SortKey:
    """Lowest priority, then the hint that expires soonest."""
    return (session.priority, session.until, session.number)


def smallest_first(session: Announced) -> SortKey:
    """Lowest priority, then the least KV (Symphony, section 3.3): it costs less to fetch again."""
    return (session.priority, session.blocks, session.until, session.number)


PRESSURE_POLICIES: dict[str, Callable[[Announced], SortKey]] = {
    "weakest-first": weakest_first,
    "smallest-first": smallest_first,
}


def pressure_policy_by_name(name: str) -> Callable[[Announced], SortKey]:
    """The policy of that name, or a user's own by ``package.module:function``.

    Raises:
        ConfigError: no policy has that name.
    """
    return order_named(
        name, PRESSURE_POLICIES, "(session) -> tuple of numbers", field="--kv-eviction-policy pressure"
    )


@dataclass(frozen=True, eq=False)
class Session:
    """An announced session with the nodes of its prompt, from the top.

    since: when it was announced, in the tree's time. order: the policy's.
    """

    id: str
    priority: int
    since: float
    order: SortKey
    nodes: list[Node]


@dataclass(eq=False)
class _Hint:
    """until: in rank 0's time. number: counts hints, the older the smaller."""

    id: str
    namespace: Hashable
    key: bytes
    priority: int
    until: float
    number: int
    since: float
    """Its arrival, in the tree's time."""
    deferred: float = -math.inf
    """Its request is not expected soon, but at this time of rank 0's at the earliest."""
    spent: bool = False
    """It was deferred, and has given up all blocks that it can."""
    marked: Node | None = None
    """The last known node of the prompt, from which the marks go up."""

    @property
    def strength(self) -> tuple[int, float, int]:
        return (self.priority, self.until, self.number)


class Retention:
    """See the module's docstring.

    Marks are locks of a holder without placements: they stay on the right nodes when nodes are split, and
    are counted where prompts share a beginning.

    Args:
        marker: the holder of the marks; it has no placements.
        order: the policy; the session with the smallest key gives way first.
    """

    def __init__(
        self, tree: RadixTree, marker: Holder, order: Callable[[Announced], SortKey] = weakest_first
    ) -> None:
        self._tree = tree
        self._marker = marker
        self._order = order
        self._hints: dict[str, _Hint] = {}
        self._numbers = 0
        self.given_up = 0
        """Announced blocks that were evicted under pressure, in any tier, since the start."""

    # -- hints ------------------------------------------------------------------------------------

    def expect(
        self, id: str, namespace: Hashable, key: bytes, *, priority: int = 0, until: float = math.inf
    ) -> None:
        """Hold back the cached KV of a prompt. There is one prompt for each ``id``."""
        known = self._hints.get(id)
        if known is not None and (known.namespace, known.key) == (namespace, key):
            known.priority, known.until = priority, max(known.until, until)
        else:
            self.forget(id)
            self._numbers += 1
            self._hints[id] = _Hint(id, namespace, key, priority, until, self._numbers, self._tree.now())
            if len(self._hints) > MOST_HINTS:
                most = most_of(each.namespace for each in self._hints.values())
                theirs = (each for each in self._hints.values() if owner_of(each.namespace) == most)
                self.forget(min(theirs, key=lambda each: each.strength).id)
        self.look(id)

    def look(self, id: str) -> None:
        """Match the prompt again and move the mark: more of its KV may have been cached. Counts as a use."""
        hint = self._hints.get(id)
        if hint is None:
            return
        path = self._tree.match(hint.namespace, hint.key).path
        last = path[-1] if path else None
        if last is hint.marked:
            return
        if last is not None:
            self._tree.lock(last, self._marker)
        if hint.marked is not None:
            self._tree.unlock(hint.marked, self._marker)
        hint.marked, hint.spent = last, False

    def forget(self, id: str) -> None:
        """Stop holding KV back for ``id``. Its KV counts as used now."""
        hint = self._hints.pop(id, None)
        if hint is None or hint.marked is None:
            return
        self._tree.unlock(hint.marked, self._marker)
        self._tree.match(hint.namespace, hint.key)

    def defer(self, id: str, earliest: float) -> None:
        """Set when the request of ``id`` comes at the earliest, while that is far off; else minus infinity.
        Deferred sessions lose HBM before others."""
        hint = self._hints.get(id)
        if hint is not None and hint.deferred != earliest:
            hint.deferred, hint.spent = earliest, False

    def deferred_since(self) -> float:
        """When the first of the deferred sessions that have blocks to give was announced, in the tree's time;
        infinite without any."""
        if not self._hints:
            return math.inf
        return min((hint.since for hint in self._deferred()), default=math.inf)

    def _deferred(self) -> Iterator[_Hint]:
        return (hint for hint in self._hints.values() if hint.deferred > -math.inf and not hint.spent)

    def expire(self, now: float) -> None:
        """End expired hints. now: rank 0's time."""
        if now < self.next_expiry:
            return
        for id in [id for id, hint in self._hints.items() if hint.until <= now]:
            hint = self._hints.pop(id)
            if hint.marked is not None:  # no request came: the KV keeps its old place in the order of uses
                self._tree.unlock(hint.marked, self._marker)

    def knows(self, id: str) -> bool:
        """Whether the hint is live."""
        return id in self._hints

    @property
    def next_expiry(self) -> float:
        """When the next hint ends; infinite without hints."""
        return min([hint.until for hint in self._hints.values()]) if self._hints else math.inf

    def clear(self) -> None:
        """Drop every hint: the cache is about to be emptied."""
        self.expire(math.inf)

    # -- order ------------------------------------------------------------------------------------

    def __contains__(self, node: object) -> bool:
        return isinstance(node, Node) and bool(node.locks.get(self._marker))

    def give_up(
        self,
        holder: Holder,
        blocks: int,
        may_go: MayGo,
        *,
        below: float = math.inf,
        deferred_first: bool = False,
    ) -> list[Evicted]:
        """Take up to ``blocks`` announced blocks from ``holder``, in the policy's order, ends first.

        Args:
            holder: the tier that gives the blocks up.
            blocks: most blocks to take.
            may_go: whether a node may be evicted.
            below: only hints of lower priority than this give way.
            deferred_first: hints whose requests are far off give way before all others, at any priority.

        Returns:
            The blocks that left the tree; the caller frees them.
        """
        gone: list[Evicted] = []
        if blocks <= 0 or not self._hints:
            return gone
        # A beginning that prompts share goes with the last of them, after all hints that mark it.
        turns: Counter[Node] = Counter()
        for hint in self._weakest_first(holder, deferred_first):
            if blocks <= 0:
                break
            nodes = _upwards(hint.marked)
            turns.update(nodes)
            if hint.priority >= below and not (deferred_first and hint.deferred > -math.inf):
                continue
            last = [node for node in nodes if turns[node] >= node.locks.get(self._marker, 0)]
            taken = self._take(holder, last, blocks, may_go)
            blocks -= sum(evicted.blocks for evicted in taken)
            gone += taken
        self.given_up += sum(evicted.blocks for evicted in gone)
        return gone

    def give_up_deferred(self, holder: Holder, blocks: int, may_go: MayGo) -> list[Evicted]:
        """Take up to ``blocks`` blocks of deferred sessions, beginning with those that are due last.

        A beginning that a prompt shares with others stays. At most `MOST_DEFERRED` sessions are looked at.
        """
        gone: list[Evicted] = []
        latest = sorted(self._deferred(), key=lambda hint: (-hint.deferred, hint.number))
        for hint in latest[:MOST_DEFERRED]:
            if blocks <= 0:
                break
            own = [node for node in _upwards(hint.marked) if node.locks.get(self._marker, 0) == 1]
            taken = self._take(holder, own, blocks, may_go)
            blocks -= sum(evicted.blocks for evicted in taken)
            hint.spent = blocks > 0
            gone += taken
        self.given_up += sum(evicted.blocks for evicted in gone)
        return gone

    def strongest_first(self, holder: Holder) -> list[Session]:
        """Every announced session, in the policy's order for ``holder``, the strongest first."""
        return [
            Session(hint.id, hint.priority, hint.since, order, nodes)
            for order, hint, nodes in reversed(self._in_order(holder))
        ]

    def _weakest_first(self, holder: Holder, deferred_first: bool) -> list[_Hint]:
        """Every hint, in the order in which they give way."""
        if self._order is weakest_first:  # this policy does not depend on a session's blocks
            found = sorted(self._hints.values(), key=lambda hint: hint.strength)
        else:
            found = [hint for _, hint, _ in self._in_order(holder)]
        if deferred_first:
            found.sort(key=lambda hint: -hint.deferred)
        return found

    def _in_order(self, holder: Holder) -> list[tuple[SortKey, _Hint, list[Node]]]:
        """Every hint with its policy key and the cached nodes of its prompt, in the order in which they give
        way.
        """
        found: list[tuple[SortKey, _Hint, list[Node]]] = []
        for hint in self._hints.values():
            nodes = _upwards(hint.marked)
            held = sum(node.blocks for node in nodes if holder in node.placements)
            found.append((self._order(Announced(hint.priority, hint.until, hint.number, held)), hint, nodes))
        found.sort(key=lambda each: (each[0], each[1].number))
        return found

    def _take(self, holder: Holder, nodes: list[Node], blocks: int, may_go: MayGo) -> list[Evicted]:
        gone: list[Evicted] = []
        for node in reversed(nodes):
            if holder not in node.placements:
                continue
            if blocks <= 0 or not node.can_go(holder) or not may_go(node):
                break
            if node.blocks > blocks:
                self._tree.split(node, node.blocks - blocks)
            blocks -= node.blocks
            gone += self._tree.remove(node, holder)
        return gone

    # -- whole ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._hints)

    def __repr__(self) -> str:
        return f"Retention({len(self._hints)} prompts, given up {self.given_up} blocks)"
