"""KV that other instances' requests left, kept in this instance's idle DRAM (KVDirect, section 7).

An instance whose DRAM is full is about to lose prefixes that may be needed again. Before that, the router has
an instance with free DRAM fetch them (``router/dispatch/spilling.py``), within ``--kv-dram-size for-others``.
They are spilled blocks there: found, exported and loaded like any others, and the first to be evicted. The
instance evicts none of its own blocks for them, and does not write them to its disk. When it needs DRAM, it
evicts spilled blocks before all others: those of the tenant with the most blocks first, of a tenant the
oldest, and of a prompt the end first.

A spilled block that a request of this instance uses, or that is announced to it, is its own from then on.

An entry names blocks by their prompt, so it refers to the right nodes also after nodes are split. All ranks
decide alike: decisions depend on the tree only. The scheduler's thread only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.clock import Clock
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.retention import from_most, owner_of, path_of
from sglang_ext.radix_global import Evicted, Node

SHOW_S: Final = 0.5
"""Interval at which the number of kept blocks is counted again."""


@dataclass
class SpilledCounters:
    """Blocks, since the start."""

    kept: int = 0
    """Fetched from other instances, to be kept for them."""
    used: int = 0
    """Kept blocks that requests of this instance used."""
    exported: int = 0
    """Kept blocks that were exported to other instances again."""
    given_up: int = 0
    """Kept blocks that were evicted because this instance needed the DRAM, or for newer ones."""


@dataclass(eq=False)
class _Entry:
    """The spilled blocks of a prompt: those from ``start`` on. The blocks before are not spilled."""

    namespace: Hashable
    key: bytes
    start: int
    returned: bool = False
    """Another instance has fetched some of it, so that giving it up loses nothing."""


class Spilled(Planner):
    """See the module's docstring.

    Args:
        tier: DRAM, whose blocks are kept. Blocks that it retains for announced requests are not spilled.
        limit: blocks that may be kept for others.
    """

    def __init__(self, tier: DramTier, limit: int, clock: Clock) -> None:
        self._tier = tier
        self._tree = tier.ledger.tree
        self._hbm = tier.source
        self._dram = tier.holder
        self._announced = tier.retention
        self.limit = limit
        self._clock = clock
        self._show_at = -math.inf
        tier.guests.append(self)
        self._entries: list[_Entry] = []
        """The oldest first."""
        self.counters = SpilledCounters()
        self.shown = 0
        """``kept_blocks`` as of the last change, or of up to `SHOW_S` ago; from any thread."""

    # -- contents -----------------------------------------------------------------------------------

    @property
    def kept_blocks(self) -> int:
        """Spilled blocks that are here now."""
        return sum(node.blocks for entry in self._entries for node in self._nodes(entry))

    def each_pass(self) -> None:
        """Requests of this instance may have used blocks since."""
        if self._entries and self._clock.monotonic() >= self._show_at:
            self._show_at = self._clock.monotonic() + SHOW_S
            self._show()

    def show(self, metrics: RankMetrics) -> None:
        metrics.count_events("spilled_blocks_events", dataclasses.asdict(self.counters))
        metrics.set("spilled_blocks", self.shown)
        metrics.set("spilled_bytes", self.shown * self._tier.block_bytes)

    def _show(self) -> None:
        """Update ``shown`` for other threads."""
        self.shown = self.kept_blocks if self._entries else 0

    def _nodes(self, entry: _Entry) -> list[Node]:
        """The spilled nodes of an entry, from the top."""
        return [node for end, node in self._held(entry) if not self._is_used(node)]

    def _held(self, entry: _Entry) -> Iterator[tuple[int, Node]]:
        for end, node in path_of(self._tree, entry.namespace, entry.key):
            if end > entry.start and self._dram in node.placements:
                yield end, node

    def _is_used(self, node: Node) -> bool:
        # The insertion itself counted as one hit.
        return node.hits > 1 or self._hbm in node.placements or node in self._announced

    def _look(self) -> None:
        """Remove blocks that requests of this instance have used, and blocks that have left DRAM."""
        entries: list[_Entry] = []
        for entry in self._entries:
            last = 0
            for end, node in list(self._held(entry)):
                last = end
                if self._is_used(node):
                    # The blocks before a used block were used with it.
                    self.counters.used += end - entry.start
                    entry.start = end
            if last > entry.start:
                # Blocks that are inserted behind these later are not spilled.
                entry.key = entry.key[: last * self._tree.block_bytes]
                entries.append(entry)
        self._entries = entries

    # -- coming and going ---------------------------------------------------------------------------

    def room_for(self, namespace: Hashable, key: bytes) -> int:
        """The number of leading blocks of a prompt, including those already here, that fit if only free
        blocks and older spilled blocks are used. 0 if no further block fits.
        """
        found = self._tree.match(namespace, key)
        if found.path and self._dram not in found.node.placements:
            return 0  # blocks in HBM only are this instance's own, and newer
        wanted = len(key) // self._tree.block_bytes - found.blocks
        # The prefix that the blocks continue must not be evicted for them.
        if found.path:
            self._tree.lock(found.node, self._dram)
        try:
            self._tier.delete(self.make_room(wanted, self._tier.free_blocks))
        finally:
            if found.path:
                self._tree.unlock(found.node, self._dram)
        fits = min(wanted, self._tier.free_blocks, self.limit - self.kept_blocks)
        return found.blocks + fits if fits > 0 else 0

    def make_room(self, blocks: int, free: int) -> list[Evicted]:
        """Give up older blocks until up to ``blocks`` more fit into the limit, and into DRAM, where ``free``
        blocks are free.

        Returns:
            The blocks that left the tree; the caller frees them.
        """
        self._look()
        blocks = min(blocks, self.limit)
        over = max(self.kept_blocks + blocks - self.limit, blocks - free)
        return self.give_up(over)

    def add(self, namespace: Hashable, key: bytes, start: int, blocks: int) -> None:
        """Register ``blocks`` blocks of a prompt's ``key`` from ``start`` on as spilled."""
        if blocks:
            self._entries.append(_Entry(namespace, key, start))
            self.counters.kept += blocks
            self._show()

    def give_up(self, blocks: int) -> list[Evicted]:
        """Take up to ``blocks`` spilled blocks from DRAM, by `_in_order`, of each prompt the end first.

        Returns:
            The blocks that left the tree; the caller frees them.
        """
        gone: list[Evicted] = []
        if blocks <= 0 or not self._entries:
            return gone
        self._look()
        before = -1
        while len(gone) > before:
            # The beginning of one may be free to go once the end of another has gone.
            before = len(gone)
            for entry in self._in_order():
                gone += self._take(entry, blocks - _sum(gone))
        self.counters.given_up += _sum(gone)
        self._look()
        self._show()
        return gone

    def _in_order(self) -> list[_Entry]:
        """Returned prompts first, then those of the tenant with the most blocks, the oldest first."""
        kept = [entry for entry in self._entries if not entry.returned]
        owned = [
            (owner_of(entry.namespace), sum(node.blocks for node in self._nodes(entry))) for entry in kept
        ]
        returned = [entry for entry in self._entries if entry.returned]
        return returned + [kept[index] for index in from_most(owned)]

    def _take(self, entry: _Entry, blocks: int) -> list[Evicted]:
        gone: list[Evicted] = []
        for node in reversed(self._nodes(entry)):
            if blocks <= 0 or not node.can_go(self._dram):
                break
            if node.blocks > blocks:
                self._tree.split(node, node.blocks - blocks)
            blocks -= node.blocks
            gone += self._tree.remove(node, self._dram)
        return gone

    def on_export(self, nodes: Sequence[Node]) -> None:
        """These nodes are exported to another instance. Entries that have a copy there go first."""
        exported = set(nodes)
        for entry in self._entries:
            blocks = sum(node.blocks for node in self._nodes(entry) if node in exported)
            self.counters.exported += blocks
            entry.returned = entry.returned or blocks > 0

    def before_clear(self) -> None:
        """Drop all entries: the cache is about to be emptied."""
        self._entries = []
        self.shown = 0

    def check(self) -> None:
        """Verify the limit. Raises AssertionError when it is exceeded."""
        if self.kept_blocks > self.limit:
            raise AssertionError(f"{self.kept_blocks} blocks are kept for others, {self.limit} may be")

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Spilled({self.kept_blocks}/{self.limit} blocks of {len(self)} prompts, {self.counters})"


def _sum(gone: Sequence[Evicted]) -> int:
    return sum(evicted.blocks for evicted in gone)
