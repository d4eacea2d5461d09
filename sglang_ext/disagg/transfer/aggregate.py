"""By-request aggregated (MemServe, section 5.2): a block's planes packed into one unit, and unpacked again.

Moving a block plane by plane takes two ranges per layer. Packed into a block-first arena (the layout of the
DRAM tier) it is one range, on both sides, and runs of blocks are one range altogether. Packing is a copy at
memory speed, off the network; blocks that lie in the DRAM tier are packed already.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.compiled import STREAM_BYTES
from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.reshard import RankPlan, plan
from sglang_ext.disagg.runs import Ids, copy_runs
from sglang_ext.disagg.tensors import PoolMeta


class Packer:
    """Copies between a plane-first pool and a block-first arena of the same shard, both registered here.

    The caller owns both sides' blocks: the target's must be open (`OwnedPool.open`). Runs without the GIL.
    """

    def __init__(self, pool: PoolMeta, arena: PoolMeta, regions: RegionTable) -> None:
        """Raises RefusedError when the two do not hold the same layers and heads."""
        self._regions = regions
        self._pack = self._only(arena, pool)
        self._unpack = self._only(pool, arena)
        self._flag = np.zeros(1, np.int64)

    def pack(self, blocks: Ids, into: Ids) -> None:
        """Gather `blocks` of the pool into blocks `into` of the arena.

        Raises:
            RangeError: an id is out of range, or the two lists do not hold the same tokens.
        """
        self._copy(self._pack, blocks, into)

    def unpack(self, blocks: Ids, into: Ids) -> None:
        """Scatter `blocks` of the arena into blocks `into` of the pool."""
        self._copy(self._unpack, blocks, into)

    def _only(self, target: PoolMeta, source: PoolMeta) -> RankPlan:
        return plan(target, self._regions.locate, [source], [self._regions.locate]).ranks[0]

    def _copy(self, part: RankPlan, source: Ids, target: Ids) -> None:
        runs = part.runs(source, target)
        copy_runs(runs, self._regions.bases, 2, self._regions.bases, 0, STREAM_BYTES, self._flag)
