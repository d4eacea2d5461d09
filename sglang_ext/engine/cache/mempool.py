"""MemServe's memory pool over the engine's own memory: SGLang's slots, and the DRAM tier's arena.

The pool and SGLang's cache share one tree: the pool matches, swaps and transfers what SGLang has computed,
and requests hit what the pool inserts. All of it happens in the scheduler's thread. With several ranks, each
rank's pool has to be asked the same in the same order: their trees change in step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.engine.tiers.slots import slot_ops
from sglang_ext.errors import ConfigError, UserError
from sglang_ext.geometry import BlockLayout, Geometry
from sglang_ext.mempool import ArenaRegion, MemPool, Region
from sglang_ext.mempool.address import Place
from sglang_ext.mempool.regions import Ids, Opening, Rows
from sglang_ext.radix_global import Holder
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.engine.cache.rank_cache import RankCache
    from sglang_ext.tiered_store.dram.arena import DramArena


class SlotRegion:
    """SGLang's KV pool as a region, borrowed: a place is a block's token slots.

    Args:
        planes: as `hbm.pool_planes` returns them.
        layout: of a block.
        page_tokens: the engine's page size, which is the block of an endpoint's pool.
        wait: returns when no forward pass writes to the pool any more; needed where it runs on a device, and
            called before places are handed out or copied from or to.
    """

    borrowed = True

    def __init__(
        self,
        planes: Sequence[Sequence[torch.Tensor]],
        layout: BlockLayout,
        *,
        page_tokens: int = 1,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout = layout
        self.opening: Opening | None = None
        self._tensors = [plane for layer in planes for plane in layer]
        # As bytes: indexing is not there for every dtype (float8).
        self._planes = [plane.view(torch.uint8) for plane in self._tensors]
        self._page = page_tokens
        self._wait = wait
        self._device = self._planes[0].device
        self._slots = slot_ops(self._device)

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

    def spec(self, name: str, geometry: Geometry) -> PoolSpec:
        """In pages. Every block may be leased: owners hold what is sent."""
        pages = dataclasses.replace(geometry, block_tokens=self._page)
        if geometry.layout != self.layout or geometry.page_tokens != self._page:
            raise ConfigError(f"{name} is not of this geometry", field="geometry")
        kind = MemoryKind.HOST if self._device.type == "cpu" else MemoryKind.CUDA
        memory = [MemoryRange(each.data_ptr(), each.nbytes, kind, keep=each) for each in self._tensors]
        return PoolSpec.of_geometry(name, pages, memory, lease_budget=geometry.slots)

    def open(self, places: Sequence[Place]) -> None:
        # A peer may write there as soon as it is told of them; a pass over their former owner may still run.
        self._wait()

    def copy_out(self, places: Sequence[Place], rows: Rows) -> None:
        self._wait()
        slots = self._tensor(places)
        for plane, (start, stop) in zip(self._planes, self._offsets(), strict=True):
            rows[:, start:stop] = plane[slots].reshape(len(places), -1).cpu().numpy()

    def copy_in(self, places: Sequence[Place], rows: Rows) -> None:
        self._wait()
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

    def __repr__(self) -> str:
        return f"<SlotRegion of {len(self._planes)} planes>"


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
    regions: dict[Tier, Region] = {
        Tier.HBM: SlotRegion(planes, layout, page_tokens=cache.page_size, wait=wait)
    }
    if cache.dram is not None and arena is not None:
        regions[Tier.DRAM] = ArenaRegion(arena, borrowed=True)

    def unnamed(space: Hashable) -> bytes:
        raise UserError(f"no disk was given with a name for {space!r}", field="digest")

    return MemPool(
        hbm.instance,
        cache.store,
        regions,
        disk,
        namespace=namespace,
        epoch=hbm.epoch,
        digest=digest or unnamed,
        settle=cache.settle,
    )
