"""From disk straight to HBM, for blocks that find no room in DRAM on the way.

The read begins when the request is admitted and has its slots. Each layer goes through a staging buffer of
the loader to the slots, in front of the forward pass, lowest layer first. As for every stream, the slots are
the request's own until the pass has ended and all layers have verified.

All methods run in the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_ext.engine.moves.move import Move, MovePlanner
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.moves.sources import FromDisk
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.mempool.ledger import Committed
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Node
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.tier import BlockTier, Get
from sglang_ext.tiers import Tier


@dataclass(eq=False, kw_only=True)
class DirectLoad(Move):
    """Blocks that go from disk to the slots of a request.

    parent: the node that they continue, locked for DRAM until the request is admitted or gone. get: the
    blocks, pinned on the disk until the read has ended.
    """

    request: Hashable
    parent: Node
    get: Get


class DirectLoads(MovePlanner):
    """The direct loads of a rank.

    Args:
        tier: the disk.
        dram_tier: its copies bring layers to slots, and make the forward pass wait.
        ended: called with each load that was read, and the leading blocks that arrived on every rank.
    """

    def __init__(
        self,
        tier: BlockTier,
        loader: Loader,
        store: Store,
        dram_tier: DramTier,
        moves: Moves,
        ended: Callable[[DirectLoad, int], None],
    ) -> None:
        self._tier = tier
        self._loader = loader
        self._store = store
        self._dram_tier = dram_tier
        self._moves = moves
        self._ended = ended

    def __repr__(self) -> str:
        return f"DirectLoads({len(self._moves.of(self))})"

    def add(
        self, handle: Hashable, request: Hashable, parent: Node, start: int, blocks: int, get: Get
    ) -> DirectLoad:
        """A request may read these blocks, which continue ``parent``, when it is admitted."""
        load = DirectLoad(planner=self, request=request, parent=parent, get=get, start=start, blocks=blocks)
        self._store.tree.lock(parent, self._dram_tier.holder)
        self._moves.fill(load, None, None)
        self._moves.admit(load, handle)
        return load

    def drop(self, load: DirectLoad) -> None:
        """The request was admitted or is gone. Unpins its blocks if it does not read them."""
        if load.streams_to is not None:
            self._moves.release(load.streams_to)
        if load.source is None:
            self._moves.cancel(load)
        self._store.tree.unlock(load.parent, self._dram_tier.holder)

    def stream(self, move: DirectLoad, slots: Any) -> None:
        self._store.swap_in(Tier.DISK, move, slots)

    def load(self, move: DirectLoad, slots: Any) -> None:
        """Read the blocks of a load into slots."""
        put = self._dram_tier.copies.mover.into(slots)
        read = self._loader.load(self._tier, move.get, None, np.arange(move.blocks), on_layer=put)
        move.source = FromDisk(self._loader, read)
        self._dram_tier.copies.follow(read, move.blocks)

    def ended(self, move: DirectLoad, blocks: int, done: Committed | None) -> None:
        if move.source is None:
            self._tier.complete_get(move.get)
        else:
            self._ended(move, blocks)
