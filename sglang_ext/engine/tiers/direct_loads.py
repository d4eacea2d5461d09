"""From disk straight to HBM, for blocks that find no room in DRAM on the way.

The read begins when the request is admitted and has its slots. Each layer goes through a staging buffer of
the loader to the slots, in front of the forward pass, lowest layer first. As for every stream, the slots are
the request's own until the pass has ended and all layers have verified.

A part of ``promotions.Promotions``; all methods run in the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.errors import InternalError
from sglang_ext.radix_global import Node
from sglang_ext.tiered_store.loading.loader import Load, Loader
from sglang_ext.tiered_store.tier import BlockTier, Get

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DirectLoad:
    """Blocks that were found on disk and are pinned there.

    parent: the node that they continue; the creator holds a DRAM lock on it.
    start, blocks: the number of blocks of the prompt before them, and of these blocks.
    """

    parent: Node
    request: Hashable
    start: int
    blocks: int
    get: Get
    load: Load | None = None


class DirectLoads:
    """The direct loads of waiting requests, and those that the next forward pass depends on.

    Args:
        tier: the disk.
        loader: reads from it.
        dram_tier: its mover copies, and makes the forward pass wait.
    """

    def __init__(self, tier: BlockTier, loader: Loader, dram_tier: DramTier) -> None:
        self._tier = tier
        self._loader = loader
        self._dram_tier = dram_tier
        self._of: dict[Hashable, DirectLoad] = {}
        self._streams: list[DirectLoad] = []

    @property
    def handles(self) -> list[Hashable]:
        """Requests that have a direct load and were not admitted yet."""
        return list(self._of)

    def add(self, handle: Hashable, direct: DirectLoad) -> None:
        """A request may take these blocks when it is admitted."""
        self._of[handle] = direct

    def get(self, handle: Hashable) -> DirectLoad | None:
        """The direct load that the request may take, or is taking; None for none."""
        return self._of.get(handle)

    def drop(self, handle: Hashable) -> DirectLoad | None:
        """The request was admitted or is gone. Unpins its blocks if it has not taken them."""
        direct = self._of.pop(handle, None)
        if direct is not None and direct.load is None:
            self._tier.complete_get(direct.get)
        return direct

    def stream(self, handle: Hashable, slots: Any) -> bool:
        """Start to bring the request's blocks to ``slots``. False when it has none."""
        direct = self._of.get(handle)
        if direct is None:
            return False
        put = self._dram_tier.copies.into(slots)
        direct.load = self._loader.load(self._tier, direct.get, None, np.arange(direct.blocks), on_layer=put)
        self._dram_tier.copies.follow(direct.load, direct.blocks)
        self._streams.append(direct)
        return True

    @property
    def streams(self) -> bool:
        """Whether the forward pass under way depends on any."""
        return bool(self._streams)

    def streamed(self) -> Iterator[tuple[DirectLoad, int]]:
        """After a forward pass: each direct load that streamed into it, with the number of leading blocks
        that arrived whole.
        """
        streams, self._streams = self._streams, []
        for direct in streams:
            assert direct.load is not None
            try:
                # Its end, not the last layer's: nothing may write to the slots any more.
                yield direct, direct.load.result().blocks
            except InternalError:
                logger.exception("reading from disk failed in a way that is not the disk's")
                yield direct, 0
