"""One promotion from disk to DRAM: what it is made of, and how the disk is looked at for it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sglang_ext.engine.tiers.block_names import Names
from sglang_ext.engine.tiers.disk_writes import DiskWrites, MinOverRanks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.load_report import LoadReport
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.store import Reservation
from sglang_ext.radix_global import Node, RadixTree
from sglang_ext.tiered_store.loading.layers import AHEAD
from sglang_ext.tiered_store.loading.loader import Load
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiers import Tier


@dataclass
class PromotionCounters:
    """Blocks, since the start."""

    promoted: int = 0
    recomputed: int = 0
    """Found on disk and left there, because computing is expected to be faster."""
    no_room: int = 0
    """Found on disk and left there, because DRAM is full of blocks in use."""
    read_failed: int = 0
    """Chosen and not read: damaged, unreadable, gone meanwhile; the disk tier counts them by reason."""
    late: int = 0
    """Given up, because reading took longer than computing would have."""
    streamed: int = 0
    """Of those promoted, the ones that a forward pass did not wait for."""
    straight: int = 0
    """Not promoted but brought straight to HBM, because DRAM is full of blocks in use."""


@dataclass(frozen=True)
class Wanted:
    """What a request looks for: its namespace in the tree, and its encoded prompt as far as it may match."""

    namespace: Hashable
    key: bytes
    priority: int = 0
    request: Hashable = None
    """Whose it is, however often it is tried."""
    rank: int = 0
    """Of what nobody waits for yet: its priority among announced prompts."""
    report: LoadReport = field(default_factory=lambda: LoadReport(Tier.DISK), compare=False)
    """Is told what becomes of it."""

    @property
    def ahead(self) -> bool:
        """Whether nobody waits for it yet."""
        return self.priority == AHEAD


@dataclass(eq=False)
class Promotion:
    wanted: Wanted
    room: Reservation
    """The blocks of DRAM that it fills, behind what they continue."""
    names: Names
    load: Load
    deadline: float
    handles: dict[Hashable, Wanted] = field(default_factory=dict)
    late: bool = False
    streams_to: Hashable = None
    """The request that was admitted before all layers were in."""
    ahead: bool = False
    """Nobody waits for it yet: it gives way to all other reads, and may take its time."""
    streaming: bool = False
    """Its forward pass is reading the blocks, which must not be given back before it has ended."""


@dataclass(frozen=True)
class Promoted:
    """What a promotion brought for a request: ``tokens`` from position ``start`` on."""

    start: int
    tokens: int
    node: Node
    """At which they end; holds one DRAM lock for the request."""


class DiskLook:
    """Finds where DRAM ends on the way of a prompt and the disk goes on.

    Args:
        tree: the rank's tree.
        room: DRAM, which what is found must continue.
        writes: knows the blocks' names.
        tier: the disk.
        min_over_ranks: the ranks' consensus: the smallest of their numbers.
    """

    def __init__(
        self,
        tree: RadixTree,
        room: DramTier,
        writes: DiskWrites,
        tier: BlockTier,
        min_over_ranks: MinOverRanks,
    ) -> None:
        self._tree = tree
        self._room = room
        self._names = writes.names
        self._tier = tier
        self._min_over_ranks = min_over_ranks

    def look(self, wanted: Wanted) -> tuple[Node, int, list[bytes]] | None:
        """The node at which DRAM ends, the blocks before that, and names of what may follow.

        None when the disk has not even the first of those.
        """
        match = self._tree.match(wanted.namespace, wanted.key)
        step = self._tree.block_size * TOKEN_BYTES
        key = wanted.key[match.blocks * step :]
        if len(key) < step:
            return None
        digest = self._names.digest(wanted.namespace)
        before = self._names.last(match.node)
        # Most prompts are not on disk at all: one name is enough to know.
        first = self._names.following(wanted.namespace, before, key[:step])
        if not self._min_over_ranks(self._tier.match(digest, first)):
            return None
        # What comes from disk can only continue what DRAM has, so DRAM gets what HBM has beyond that.
        reached = self._room.reach(match)
        if reached is None:
            return None
        return *reached, self._names.following(wanted.namespace, before, key)
