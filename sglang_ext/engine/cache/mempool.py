"""MemServe's memory pool over the engine's own memory: SGLang's slots, and the DRAM tier's arena.

The pool and SGLang's cache share one tree: the pool matches, swaps and transfers what SGLang has computed,
and requests hit what the pool inserts. All of it happens in the scheduler's thread. With several ranks, each
rank's pool has to be asked the same in the same order: their trees change in step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.engine.tiers.slots import slot_ops
from sglang_ext.errors import UserError
from sglang_ext.geometry import BlockLayout
from sglang_ext.mempool import ArenaRegion, MemPool, Region
from sglang_ext.mempool.address import Place
from sglang_ext.mempool.regions import Ids, Opening, Rows
from sglang_ext.radix_global import Holder
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.engine.cache.view import RankCache
    from sglang_ext.engine.tiers.dram_tier import DramTier
    from sglang_ext.tiered_store.dram.arena import DramArena


class SlotRegion:
    """SGLang's KV pool as a region. A place is a block's token slots.

    Args:
        allocator: SGLang's, of slots.
        planes: as `hbm.pool_planes` returns them.
        layout: of a block.
        page_tokens: the engine's page size, which is the block of an endpoint's pool.
        wait: returns when no forward pass writes to the pool any more; needed where it runs on a device, and
            called before places are handed out or copied from or to.
        owned: told how many blocks more, or fewer, are neither free nor in the index.
    """

    def __init__(
        self,
        allocator: Any,
        planes: Sequence[Sequence[torch.Tensor]],
        layout: BlockLayout,
        *,
        page_tokens: int = 1,
        wait: Callable[[], None] = lambda: None,
        owned: Callable[[int], None] = lambda blocks: None,
    ) -> None:
        self.layout = layout
        self.opening: Opening | None = None
        self._allocator = allocator
        # As bytes: indexing is not there for every dtype (float8).
        self._planes = [plane.view(torch.uint8) for layer in planes for plane in layer]
        self._page = page_tokens
        self._wait = wait
        self._owned = owned
        self._device = self._planes[0].device
        self._slots = slot_ops(self._device)

    @property
    def n_blocks(self) -> int:
        return int(self._allocator.size) // self.layout.block_tokens

    @property
    def free_blocks(self) -> int:
        return int(self._allocator.available_size()) // self.layout.block_tokens

    def alloc(self, n: int) -> list[Place] | None:
        if n == 0:
            return []
        slots = self._allocator.alloc(n * self.layout.block_tokens) if n <= self.free_blocks else None
        if slots is None:
            return None
        # A peer may write there as soon as it is told of them; a pass over their former owner may still run.
        self._wait()
        places = self.unpack(slots, n)
        self._owned(n)
        self._open(places)
        return places

    def free(self, places: Sequence[Place]) -> None:
        if places:
            self._owned(-len(places))
            self._allocator.free_segment(self._tensor(places), start_pos=0)

    def indexed(self, blocks: int) -> None:
        self._owned(-blocks)

    def pack(self, places: Sequence[Place]) -> Any:
        return self._slots.keep(self._tensor(places))

    def unpack(self, address: Any, blocks: int) -> list[Place]:
        step = self.layout.block_tokens
        slots = address.tolist()
        return [tuple(slots[i : i + step]) for i in range(0, len(slots), step)]

    @property
    def ids_per_block(self) -> int:
        return self.layout.block_tokens // self._page

    def to_ids(self, places: Sequence[Place]) -> Ids:
        return np.array([place[:: self._page] for place in places], dtype=np.int64).ravel() // self._page

    def from_ids(self, ids: Ids) -> list[Place]:
        slots = ids[:, None] * self._page + np.arange(self._page)
        return self.unpack(slots.ravel(), 0)

    def copy_out(self, places: Sequence[Place], rows: Rows) -> None:
        self._wait()
        slots = self._tensor(places)
        for plane, (start, stop) in zip(self._planes, self._offsets(), strict=True):
            rows[:, start:stop] = plane[slots].reshape(len(places), -1).cpu().numpy()

    def copy_in(self, places: Sequence[Place], rows: Rows) -> None:
        self._wait()
        self._open(places)
        slots = self._tensor(places)
        for plane, (start, stop) in zip(self._planes, self._offsets(), strict=True):
            part = torch.from_numpy(np.ascontiguousarray(rows[:, start:stop]))
            plane[slots] = part.reshape(len(slots), *plane.shape[1:]).to(self._device)

    def _offsets(self) -> list[tuple[int, int]]:
        offsets = self.layout.plane_offsets
        return list(itertools.pairwise(offsets))

    def _tensor(self, places: Sequence[Place]) -> torch.Tensor:
        slots = np.array(places, dtype=np.int64).ravel()
        return torch.from_numpy(slots).to(self._device)

    def _open(self, places: Sequence[Place]) -> None:
        if self.opening is not None:
            self.opening(self.to_ids(places))

    def __repr__(self) -> str:
        return f"<SlotRegion {self.free_blocks}/{self.n_blocks} blocks free>"


class TierRegion(ArenaRegion):
    """The arena of a DRAM tier as a region; the tier knows of every block that the pool has taken."""

    def __init__(self, arena: DramArena, tier: DramTier) -> None:
        super().__init__(arena)
        self._tier = tier

    def alloc(self, n: int) -> list[Place] | None:
        if n > self.free_blocks:
            return None
        ids = self._tier.take(n)
        self._tier.store.owns(Tier.DRAM, len(ids))
        if self.opening is not None:
            self.opening(ids)
        return self.from_ids(ids)

    def free(self, places: Sequence[Place]) -> None:
        self._tier.store.owns(Tier.DRAM, -len(places))
        self._tier.give_back(self.pack(places))

    def indexed(self, blocks: int) -> None:
        self._tier.store.owns(Tier.DRAM, -blocks)


def engine_mempool(
    cache: RankCache,
    hbm: Holder,
    planes: Sequence[Sequence[torch.Tensor]],
    layout: BlockLayout,
    *,
    namespace: Hashable,
    arena: DramArena | None = None,
    disk: BlockTier | None = None,
    digest: Callable[[Hashable], bytes] | None = None,
    wait: Callable[[], None] = lambda: None,
) -> MemPool:
    """The memory pool of one rank, over what its cache has.

    Args:
        hbm: the holder that stands for this rank's pool in the cache's tree.
        planes: as `hbm.pool_planes` returns them.
        layout: of a block, `Geometry.layout`.
        namespace: of calls that name none, in the form in which the cache names them.
        arena: of the cache's DRAM tier, if it has one.
        disk, digest: the disk tier below it, and the disk's name of a namespace (`BlockNames.digest`).
        wait: see `SlotRegion`.
    """
    dram: Region | None = None
    if cache.dram is not None and arena is not None:
        dram = TierRegion(arena, cache.dram)

    def unnamed(space: Hashable) -> bytes:
        raise UserError(f"no disk was given with a name for {space!r}", field="digest")

    def owned(blocks: int) -> None:
        cache.store.owns(Tier.HBM, blocks)

    allocator = cache.token_to_kv_pool_allocator
    return MemPool(
        hbm.instance,
        SlotRegion(allocator, planes, layout, page_tokens=cache.page_size, wait=wait, owned=owned),
        dram,
        disk,
        namespace=namespace,
        epoch=hbm.epoch,
        tree=cache.tree,
        digest=digest or unnamed,
        settle=cache.settle,
        exclusive=False,
    )
