"""Around a promotion: the request for blocks that are not in memory, the look for them on the disk, and KV
that has arrived for a request.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sglang_ext.engine.tiers.block_names import BlockNames
from sglang_ext.engine.tiers.load_policy import DiskPolicy, Sources, first_blocks
from sglang_ext.engine.tiers.load_report import Decision, LoadReport
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiered_store.loading.layers import AHEAD
from sglang_ext.tiered_store.loading.loader import Loader
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


class Arrivals:
    """KV that was brought for requests, locked in DRAM until they are admitted or gone."""

    def __init__(self, tree: RadixTree, dram: Holder) -> None:
        self._tree = tree
        self._dram = dram
        self._of: dict[Hashable, Promoted] = {}

    def __len__(self) -> int:
        return len(self._of)

    @property
    def handles(self) -> list[Hashable]:
        """The requests."""
        return list(self._of)

    def get(self, handle: Hashable) -> Promoted | None:
        """The KV that was brought for a request; None for none."""
        return self._of.get(handle)

    def add(self, handle: Hashable, start: int, tokens: int, node: Node) -> None:
        """KV of a request has come, up to a node; it continues earlier KV of that request."""
        self._tree.lock(node, self._dram)
        before = self._of.get(handle)
        if before is not None:
            self._tree.unlock(before.node, self._dram)
            start, tokens = before.start, start - before.start + tokens
        self._of[handle] = Promoted(start, tokens, node)

    def release(self, handle: Hashable) -> None:
        """A request has been admitted or is gone."""
        arrived = self._of.pop(handle, None)
        if arrived is not None:
            self._tree.unlock(arrived.node, self._dram)
