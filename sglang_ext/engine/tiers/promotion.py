"""A promotion, the request that waits for it, and the look for its blocks on the disk."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sglang_ext.engine.moves.move import Move
from sglang_ext.engine.moves.sources import FromDisk
from sglang_ext.engine.tiers.block_names import NO_NAMES, BlockNames, Names
from sglang_ext.engine.tiers.direct_loads import DirectLoad
from sglang_ext.engine.tiers.load_policy import DiskPolicy, Sources, first_blocks
from sglang_ext.engine.tiers.load_report import Decision, LoadReport
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiered_store.loading.layers import AHEAD
from sglang_ext.tiered_store.loading.loader import Load, Loader
from sglang_ext.tiered_store.tier import BlockTier, Get
from sglang_ext.tiers import Tier


@dataclass(frozen=True)
class Wanted:
    """The KV that a request needs: its namespace in the tree, and the encoded part of its prompt that may
    match.
    """

    namespace: Hashable
    key: bytes
    priority: int = 0
    request: Hashable = None
    """The request, the same however often it is tried."""
    rank: int = 0
    """Of a prefetch: its priority among announced prompts."""
    report: LoadReport = field(default_factory=lambda: LoadReport(Tier.DISK), compare=False)
    """Records the decision and the result."""

    @property
    def ahead(self) -> bool:
        """Whether it is a prefetch: no request waits for it yet."""
        return self.priority == AHEAD


@dataclass(frozen=True)
class Promoted:
    """KV that a promotion brought for a request: ``tokens`` from position ``start`` on."""

    start: int
    tokens: int
    node: Node
    """The node at which they end; it has one DRAM lock for the request."""


@dataclass(eq=False)
class Look:
    """The blocks of a prompt that this rank's disk has, and how many of them are worth reading.

    blocks: leading blocks of the prompt that are in memory. names: names of the blocks after them. get: the
    found blocks, pinned on the disk; None for none. sources: the tiers of the found blocks. chosen: number of
    blocks that are worth reading.
    """

    blocks: int
    names: list[bytes]
    get: Get | None = None
    sources: Sources = ()
    chosen: int = 0
    decision: Decision | None = None

    @property
    def found(self) -> int:
        """Blocks that the disk has."""
        return 0 if self.get is None else self.get.blocks


@dataclass(eq=False)
class DiskWait:
    """A request that waits for its blocks on disk, until it is admitted or gone.

    move: its look, or the read that it waits for; None once that has ended. direct: a read straight to HBM,
    for which it does not wait. arrived: KV that has come for it, locked in DRAM.
    """

    handle: Hashable
    wanted: Wanted
    move: Promotion | None = None
    direct: DirectLoad | None = None
    arrived: Promoted | None = None

    @property
    def ready(self) -> bool:
        """Whether the request need not wait for the disk."""
        return self.move is None or self.move.streams_to == self.handle

    def brought(self, block: int) -> Promoted | None:
        """The KV that has arrived, or that streams to the request; None for none. block: in tokens."""
        if self.direct is not None:
            return Promoted(self.direct.start * block, self.direct.blocks * block, self.direct.parent)
        move = self.move
        if move is None or move.streams_to != self.handle:
            return self.arrived
        assert move.reservation is not None
        assert move.reservation.parent is not None
        return Promoted(move.start * block, move.blocks * block, move.reservation.parent)

    def lock(self, tree: RadixTree, dram: Holder, start: int, tokens: int, node: Node) -> None:
        """KV has arrived, up to a node; it continues earlier KV."""
        tree.lock(node, dram)
        before = self.arrived
        if before is not None:
            tree.unlock(before.node, dram)
            start, tokens = before.start, start - before.start + tokens
        self.arrived = Promoted(start, tokens, node)

    def unlock(self, tree: RadixTree, dram: Holder) -> None:
        """Give up the KV that has arrived."""
        if self.arrived is not None:
            tree.unlock(self.arrived.node, dram)
            self.arrived = None


@dataclass(eq=False, kw_only=True)
class Promotion(Move):
    """Blocks of a prompt that go from disk to DRAM; while it is wanted, the look for them.

    wanted: of the request that began it. waits: the requests that wait for it. look: of this pass; None after
    the ranks have agreed on it. sources: the tiers that have the blocks. ahead: a prefetch, for which no
    request waits yet: it gives way to all other reads, without a deadline.
    """

    wanted: Wanted
    waits: list[DiskWait]
    ahead: bool
    look: Look | None = None
    names: Names = field(default_factory=lambda: NO_NAMES)
    sources: Sources = ()

    @property
    def load(self) -> Load:
        """The read that fills it."""
        assert isinstance(self.source, FromDisk)
        return self.source.load


class DiskLook:
    """Finds the blocks of prompts on disk that continue their prefixes in memory.

    Args:
        tier: the disk.
        loader: reads from the disk; its reads under way come before those that a look may begin.
    """

    def __init__(
        self, tree: RadixTree, names: BlockNames, tier: BlockTier, policy: DiskPolicy, loader: Loader
    ) -> None:
        self._tree = tree
        self._names = names
        self._tier = tier
        self._policy = policy
        self._loader = loader
        self._worth_reading = 0
        """Bytes that earlier looks have found worth reading, and whose reads have not begun."""

    def look(self, wanted: Wanted) -> Look | None:
        """Look for a prompt's blocks on disk. None when memory has all its whole blocks. The caller ends the
        look (`end`, `drop`).
        """
        match = self._tree.match(wanted.namespace, wanted.key)
        block = self._tree.block_size
        key = wanted.key[match.blocks * block * TOKEN_BYTES :]
        if len(key) < block * TOKEN_BYTES:
            return None
        digest = self._names.digest(wanted.namespace)
        before = self._names.last(match.node)
        # Most prompts are not on disk at all: one name is enough to know.
        first = self._names.following(wanted.namespace, before, key[: block * TOKEN_BYTES])
        look = Look(match.blocks, first)
        if not self._tier.match(digest, first):
            return look
        look.names = self._names.following(wanted.namespace, before, key)
        look.get = self._tier.prepare_get(digest, look.names)
        look.sources = first_blocks(self._tier.sources(look.get), look.found)
        if wanted.ahead:
            look.chosen = look.found
        elif look.found:
            look.chosen = self._policy.blocks_to_read(
                look.sources,
                look.blocks,
                new_tokens=len(wanted.key) // TOKEN_BYTES + 1 - (look.blocks + look.found) * block,
                waiting_bytes=self._loader.waiting_bytes + self._worth_reading,
            )
            look.decision = self._policy.last
        self._worth_reading += self._bytes(look)
        return look

    def end(self, look: Look) -> None:
        """The caller reads or unpins the blocks of a look."""
        self._worth_reading -= self._bytes(look)

    def drop(self, look: Look) -> None:
        """Unpin the blocks of a look: they are not read."""
        self.end(look)
        if look.get is not None:
            self._tier.complete_get(look.get)

    def _bytes(self, look: Look) -> int:
        return look.chosen * self._tier.layout.block_bytes
