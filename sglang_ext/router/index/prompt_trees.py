"""Inferred contents of the instances' caches: a radix tree, updated when responses pass.

This is MemServe's own method (section 6): instances report no placements; the router infers them from the
requests that it has routed, and drops them after a time to live. It serves instances without our
extension, and it is approximate, because such an instance does not report evictions.

All entries belong to *generations*: a holder of the tree stands for (instance, span of time), and an
entry that is used again is inserted again under the present generation. A generation expires as a whole, so
no entry needs a timer of its own, and the time to live holds per instance even if many instances hold
the same prefix. Guesses, made when a request is routed and not yet answered, have generations of their
own that live 2 s.

Expired generations stop matching at once, and are removed from the tree in slices, so that a large one does
not block the event loop.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from sglang_ext.clock import Clock
from sglang_ext.errors import InternalError
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.router.policies import Match
from sglang_ext.router.policies.base import NOTHING
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.tiers import Tier

BEGINNING: Final = "beginning"
"""Kind of the namespace of a prompt with pictures. Its key begins with the tokens before the first picture,
which instances report as they report those of any prompt. Behind them, the key has the text of the messages
with digests of their pictures: only the server knows the tokens of a picture."""
GUESS_TTL_S = 2.0
GUESS_SPAN_S = 0.5
"""A guess lives at least ``GUESS_TTL_S`` and at most this much longer."""
SPANS_PER_TTL = 8
"""A confirmed entry lives at least its time to live, and at most an eighth longer."""
SLICE_BLOCKS = 512
"""Blocks taken out of the tree in one go; about half a millisecond."""

MANY_CHILDREN = 64
"""A node with more continuations than this is a common beginning, without looking at each."""

NODE_BYTES = 1200
"""Memory of a node with one holder, its key left out; measured, see the test of the bound."""
PLACEMENT_BYTES = 250
"""Memory of each further holder of a node."""
NAMESPACE_BYTES = 2500
"""Memory of a namespace: of the longest ``extra_key``, as clients choose how long it is."""


@dataclass(eq=False, slots=True)
class _Generation:
    holder: Holder
    instance: str
    closes: float
    """When the next generation begins to take new entries."""
    expires: float
    is_guess: bool


class PromptTrees:
    """The index of one router, for one model. Lives on the event loop's thread.

    Args:
        clock: seconds.
        block_size: tokens per block; a common prefix is seen in whole blocks.
        ttl_s: seconds after which an unused entry expires.
        max_bytes: estimated memory above which the oldest entries are dropped.
    """

    def __init__(
        self, clock: Clock, *, block_size: int = 16, ttl_s: float = 600.0, max_bytes: int = 1 << 28
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self.block_size = block_size
        """Tokens per block."""
        self._tree = RadixTree(block_size, clock=clock.monotonic)
        self._serial = itertools.count(1)
        self._open: dict[tuple[str, bool], _Generation] = {}
        """(instance, whether guesses) -> the generation that takes new entries."""
        self._live: dict[Holder, _Generation] = {}
        """Generations that are matched, in the order in which they were opened."""
        self._ageing: tuple[deque[_Generation], deque[_Generation]] = (deque(), deque())
        """Confirmed ones and guesses, each in the order in which they expire; killed ones among them."""
        self._dead: deque[Holder] = deque()
        """Holders whose entries are still to be removed from the tree."""
        self._counted: dict[Holder, str] = {}
        """Holder -> instance, of generations that are live, or have expired and are still in the tree, except
        generations of forgotten instances."""
        self._holders: dict[str, dict[Holder, None]] = {}
        """The holders of ``_counted``, by instance."""
        self._blocks: dict[str, int] = {}
        """Instance -> different blocks that its counted generations hold."""
        self._dirty: set[str] = set()
        """Instances whose index may have changed since the last ``take_changed``."""
        self._next_expiry = math.inf
        self._placed_blocks = 0
        self._unique_blocks = 0
        self.evicted_blocks = 0
        """Blocks forgotten because the memory was full, since the start."""

    def measure(self, metrics: RouterMetrics) -> None:
        """Show the size of the tree as metrics."""
        gauges = {
            name: metrics.gauge(f"tree_{name}") for name in ("blocks", "nodes", "bytes", "evicted_blocks")
        }

        def refresh() -> None:
            gauges["blocks"].set(self.blocks)
            gauges["nodes"].set(self.nodes)
            gauges["bytes"].set(self.size_bytes)
            gauges["evicted_blocks"].set(self.evicted_blocks)

        metrics.refreshing.subscribe(refresh)

    # -- updates by requests and responses --------------------------------------------------------

    def guess(self, namespace: Hashable, key: bytes, instance: str) -> None:
        """Record that ``instance`` was just chosen for this prompt, and will soon hold it."""
        self._insert(namespace, key, instance, is_guess=True)

    def confirm(self, namespace: Hashable, key: bytes, instance: str) -> None:
        """Record that ``instance`` has computed these tokens."""
        self._insert(namespace, key, instance, is_guess=False)

    def learns_of(self, namespace: Hashable, instance: str) -> bool:
        """Whether ``confirm`` is of any use for such prompts at an instance."""
        return True

    def forget(self, instance: str) -> None:
        """Drop all entries of ``instance``: it restarted, or was flushed."""
        for generation in list(self._live.values()):
            if generation.instance == instance:
                self._kill(generation)
        for holder in self._holders.pop(instance, {}):
            del self._counted[holder]
        self._blocks.pop(instance, None)
        self._dirty.add(instance)

    def clear(self) -> None:
        """Drop the entries of all instances: the fleet serves another model."""
        for instance in list(self._blocks):
            self.forget(instance)

    # -- queries of routing -----------------------------------------------------------------------

    def match(self, namespace: Hashable, key: bytes) -> dict[str, Match]:
        """Each instance's inferred match with ``key``; instances without a match are left out."""
        found: dict[str, Match] = {}
        self._add_inferred(namespace, key, found)
        return found

    def _add_inferred(self, namespace: Hashable, key: bytes, found: dict[str, Match]) -> None:
        """Add inferred matches to those found, in the place of shorter ones."""
        self._expire()
        path = self._tree.match(namespace, key)
        live, size = self._live, self._tree.block_size
        whole = len(key) // (size * TOKEN_BYTES)
        blocks, deeper = path.blocks, 0
        for node in reversed(path.path):
            # A holder of a node holds all nodes before it. So if this node has no more holders than the
            # deeper one, no holder's prefix ends here.
            if len(node.placements) > deeper:
                deeper = len(node.placements)
                further: set[str] | None = None
                match = NOTHING
                tokens = blocks * size
                seen, longer = NOTHING, True
                for holder in node.placements:
                    name = holder.instance
                    known = found.get(name)
                    if known is not None:
                        if known is not seen:  # instances that hold the same part share one object
                            seen, longer = known, tokens > known.tokens
                        if not longer:
                            continue
                    if holder not in live:
                        continue
                    own = blocks == whole
                    if not own and len(node.children) <= MANY_CHILDREN:
                        if further is None:
                            further = self._further(node)
                        own = name not in further
                    if match is NOTHING or match.own is not own:
                        match = Match(tokens, own)
                    found[name] = match
            blocks -= node.blocks

    def _further(self, node: Node) -> set[str]:
        """Instances that hold a continuation of ``node``."""
        return {
            self._live[holder].instance
            for child in node.children.values()
            for holder in child.placements
            if holder in self._live
        }

    def tokens_of(self, instance: str) -> int:
        """Tokens that ``instance`` holds by inference, including expired ones that are still in the tree."""
        return self._blocks.get(instance, 0) * self._tree.block_size

    def take_changed(self) -> set[str]:
        """Instances whose index may have changed since the last call."""
        found, self._dirty = self._dirty, set()
        return found

    # -- memory and time --------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Different blocks in the tree."""
        return self._unique_blocks

    @property
    def nodes(self) -> int:
        return self._tree.node_count

    @property
    def size_bytes(self) -> int:
        """Estimated memory of the tree: keys, nodes, and further holders of nodes."""
        if not self._unique_blocks:
            return 0
        nodes = self._tree.node_count
        # Every node is taken to have the average number of holders, because a split multiplies them.
        further = int(nodes * (self._placed_blocks / self._unique_blocks - 1.0))
        keys = self._unique_blocks * self._tree.block_size * TOKEN_BYTES
        namespaces = NAMESPACE_BYTES * len(self._tree.roots)
        return keys + NODE_BYTES * nodes + PLACEMENT_BYTES * further + namespaces

    def tidy(self) -> bool:
        """Remove a slice of the expired entries from the tree. Returns whether there is more to do."""
        self._expire()
        if self._dead and not self._evict(self._dead[0], SLICE_BLOCKS):
            holder = self._dead.popleft()
            if (instance := self._counted.pop(holder, None)) is not None:
                del self._holders[instance][holder]
            self._tree.drop_holder(holder)
        return bool(self._dead)

    def _insert(self, namespace: Hashable, key: bytes, instance: str, *, is_guess: bool) -> None:
        now = self._expire()
        holder = self._holder(instance, is_guess, now)
        result = self._tree.insert(namespace, key, holder)
        if not result.added:
            return
        self._placed_blocks += result.new_blocks
        self._unique_blocks += sum(node.blocks for node in result.added if len(node.placements) == 1)
        new = sum(node.blocks for node in result.added if not self._held_otherwise(node, instance, holder))
        self._blocks[instance] = self._blocks.get(instance, 0) + new
        self._dirty.add(instance)
        while self.size_bytes > self._max_bytes and self._make_room():
            pass

    def _make_room(self) -> bool:
        """Forget some of the oldest entries. Returns whether there was anything to forget."""
        if self._dead:
            self.tidy()
            return True
        for generation in self._live.values():
            evicted = self._evict(generation.holder, SLICE_BLOCKS)
            if evicted:
                self.evicted_blocks += evicted
                return True
        return False

    def _held_otherwise(self, node: Node, instance: str, holder: Holder) -> bool:
        """Whether another counted generation of ``instance`` holds ``node``."""
        placements = node.placements  # of a popular beginning, there are far more than one instance has
        counted = self._holders.get(instance, {})
        return any([other in placements for other in counted if other is not holder])

    def _evict(self, holder: Holder, blocks: int) -> int:
        taken = 0
        instance = self._counted.get(holder)
        for evicted in self._tree.evict(holder, blocks):
            taken += evicted.blocks
            if not evicted.node.placements:
                self._unique_blocks -= evicted.blocks
            if instance is not None and not self._held_otherwise(evicted.node, instance, holder):
                self._blocks[instance] -= evicted.blocks
        self._placed_blocks -= taken
        if instance is not None:
            self._dirty.add(instance)
        return taken

    def _holder(self, instance: str, is_guess: bool, now: float) -> Holder:
        """The holder of the generation that takes new entries."""
        current = self._open.get((instance, is_guess))
        if current is not None and now < current.closes:
            return current.holder
        ttl = GUESS_TTL_S if is_guess else self._ttl_s
        span = GUESS_SPAN_S if is_guess else self._ttl_s / SPANS_PER_TTL
        holder = Holder.of(instance, next(self._serial), Tier.HBM)
        current = _Generation(holder, instance, now + span, now + span + ttl, is_guess)
        self._open[instance, is_guess] = current
        self._live[holder] = current
        self._ageing[is_guess].append(current)
        self._counted[holder] = instance
        self._holders.setdefault(instance, {})[holder] = None
        self._next_expiry = min(self._next_expiry, current.expires)
        return holder

    def _expire(self) -> float:
        """Stop matching expired generations. Returns the present time."""
        now = self._clock.monotonic()
        if now < self._next_expiry:
            return now
        self._next_expiry = math.inf
        for ageing in self._ageing:
            while ageing and (ageing[0].expires <= now or ageing[0].holder not in self._live):
                generation = ageing.popleft()
                if generation.holder in self._live:
                    self._kill(generation)
            if ageing:
                self._next_expiry = min(self._next_expiry, ageing[0].expires)
        return now

    def _kill(self, generation: _Generation) -> None:
        del self._live[generation.holder]
        if self._open.get((generation.instance, generation.is_guess)) is generation:
            del self._open[generation.instance, generation.is_guess]
        self._dead.append(generation.holder)

    # -- seeing -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"PromptTrees(blocks={self.blocks}, nodes={self._tree.node_count}, bytes={self.size_bytes}, "
            f"live={len(self._live)}, dead={len(self._dead)})"
        )

    def check(self) -> None:
        """Verify every invariant, the tree's included.

        Raises:
            InternalError: names the first violated invariant.
        """
        self._tree.check()
        nodes = list(self._tree.nodes())
        unique = sum(node.blocks for node in nodes)
        placed = sum(node.blocks * len(node.placements) for node in nodes)
        if (unique, placed) != (self._unique_blocks, self._placed_blocks):
            raise InternalError(
                f"counted {unique} blocks in {placed} placements, "
                f"kept {self._unique_blocks} and {self._placed_blocks}"
            )
        known = {*self._live, *self._dead}
        if strays := {holder for node in nodes for holder in node.placements} - known:
            raise InternalError(f"entries of no generation: {strays}")
        counted: dict[str, int] = {}
        for node in nodes:
            for instance in {self._counted[holder] for holder in node.placements if holder in self._counted}:
                counted[instance] = counted.get(instance, 0) + node.blocks
        if counted != {instance: blocks for instance, blocks in self._blocks.items() if blocks}:
            raise InternalError(f"instances have {counted} blocks, {self._blocks} were kept")
        if {holder: name for name, each in self._holders.items() for holder in each} != self._counted:
            raise InternalError("the holders of an instance are not those that are counted")
        if set(self._live) - set(self._counted):
            raise InternalError("a generation is matched and not counted")
        if set(self._open.values()) - set(self._live.values()):
            raise InternalError("a generation takes entries and is not matched")
