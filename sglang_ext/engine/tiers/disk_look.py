"""Looking on the disk for what follows the prefix that is in memory."""

from __future__ import annotations

from sglang_ext.engine.tiers.disk_writes import DiskWrites, MinOverRanks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiered_store.tier import BlockTier


class DiskLook:
    """Finds where DRAM ends on the way of a prompt and the disk goes on.

    Args:
        tree: the rank's tree.
        room: writes to DRAM.
        dram: the holder that stands for this rank's DRAM.
        writes: knows the blocks' names.
        tier: the disk.
        min_over_ranks: the ranks' consensus: the smallest of their numbers.
    """

    def __init__(
        self,
        tree: RadixTree,
        room: DramTier,
        dram: Holder,
        writes: DiskWrites,
        tier: BlockTier,
        min_over_ranks: MinOverRanks,
    ) -> None:
        self._tree = tree
        self._room = room
        self._dram = dram
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
        if self._dram not in match.node.placements and not match.node.is_root:
            # What comes from disk can only continue what DRAM has, so DRAM gets what HBM has beyond that,
            # also where nothing is written there by itself.
            self._room.write_through(match.node, always=True)
            if self._dram not in match.node.placements:
                return None
        return match.node, match.blocks, self._names.following(wanted.namespace, before, key)
