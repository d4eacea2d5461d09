"""Our store below SGLang's own tree: DRAM and a disk for each component of a model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from engine_hybrid_pools import FULL, MAMBA, SWA, HybridPools
from engine_hybrids import HybridRank, MakeBelow
from engine_movers import HandMover
from engine_pools import Oracle
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.hybrid.disk import ComponentDisk
from sglang_ext.engine.hybrid.memory import ComponentMemory, Dram
from sglang_ext.engine.hybrid.store import HybridStore, StoredComponent
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.mover import Mover, ThreadMover
from sglang_ext.engine.ranks import Least, Ranks
from sglang_ext.engine.weights import Weights
from sglang_ext.geometry import BlockLayout
from sglang_ext.patches.adapter.hybrid.build_cluster import hints_of
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.linker import StoreLinker, page_names
from sglang_ext.patches.adapter.hybrid.pools import ComponentPool, component_pools
from sglang_ext.testing.tiers import FaultyTier, MemoryTier
from sglang_ext.tiered_store.copy import PoolCopier
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.loading.write_behind import LagPolicy, WriteBehind
from sglang_ext.tiered_store.tier import BlockTier


@dataclass(frozen=True)
class Sizes:
    """How our store is built.

    Args:
        full, other: blocks for which DRAM has room, of the KV of all tokens and of each other component.
        disk: blocks of a disk of each component; 0 without.
        faults: the share of the disk's calls that fail.
        backlog: bytes that may wait to be written to the disk; blocks that do not fit are left out.
        threaded: copies by the real mover instead of a mover that copies when it has to.
        hints: prompts are announced to it.
    """

    full: int = 4000
    other: int = 4000
    disk: int = 0
    faults: float = 0.0
    backlog: int = 1 << 20
    threaded: bool = False
    hints: bool = False
    seed: int = 1
    """How late copies are, without the real mover."""


class StoreBelow:
    """Our store below `HybridRadixCache`.

    Args:
        least: see `Ranks`.
    """

    shared = True
    """Whether other processes could map its DRAM, as that of a server."""

    def __init__(
        self, pools: HybridPools, cache: UnifiedRadixCache, sizes: Sizes, least: Least | None = None
    ) -> None:
        assert isinstance(cache, HybridRadixCache)
        self._sizes = sizes
        self._ranks = Ranks(least, check=True)
        self._weights = Weights("weights", lambda: f"weights {self._weights.generation}")
        self._cache = cache
        self._loader = Loader(1 << 20)
        self.tiers: list[BlockTier] = []
        found = component_pools(pools.params(), cache.sliding_window_size, pools.drafts)
        blocks = [sizes.full, *(sizes.other for _ in found[1:])]
        size = sum(count * pool.layout.block_bytes for count, pool in zip(blocks, found, strict=True))
        layouts = {pool.component: pool.layout for pool in found}
        self.dram = Dram(layouts, size, pools.kind.page, shared=self.shared, pin=False)
        parts = [self._part(pool, self.dram.memories[pool.component]) for pool in found]
        self.store = HybridStore(self.dram, parts, pools.kind.page, self._ranks)
        cache.serve(StoreLinker(self.store, found), self._weights, check=True)
        if sizes.hints:
            cache.join(hints_of(cache, self.store, Replies(), None))
        self._of_names: dict[bytes, np.ndarray] = {}
        """The hashes of a page's tokens, and of a draft's rows of them. A name differs for each weights."""

    def _part(self, pool: ComponentPool, memory: ComponentMemory) -> StoredComponent:
        sizes, layout = self._sizes, pool.layout
        copier = PoolCopier(pool, memory.arena)
        mover: Mover = HandMover(copier, layout.n_layers, random.Random(sizes.seed))
        if sizes.threaded:
            mover = ThreadMover(copier, layout.n_layers)
        return StoredComponent(pool.component, memory, Copies(mover, Ranks()), self._disk(pool, memory))

    def _disk(self, pool: ComponentPool, memory: ComponentMemory) -> ComponentDisk | None:
        sizes = self._sizes
        if not sizes.disk:
            return None
        tier = self._tier(pool.layout)
        if sizes.faults:
            tier = FaultyTier(tier, seed=5, rate=sizes.faults)
        self.tiers.append(tier)
        writer = WriteBehind(tier, backlog_bytes=sizes.backlog, lag=LagPolicy.SKIP)
        return ComponentDisk(memory, tier, self._loader, self._namespace, writer)

    def _tier(self, layout: BlockLayout) -> BlockTier:
        return MemoryTier(layout, self._sizes.disk)

    def _namespace(self) -> bytes | None:
        return None if self._weights.moving else self._weights.generation.to_bytes(16, "big")

    def settle(self) -> None:
        self.store.settle()

    def close(self) -> None:
        """The store is closed by its cache."""
        self._loader.close()

    def check(self, rank: HybridRank) -> None:
        """All blocks in DRAM of prefixes that the tree has had are right."""
        self.store.check()
        page, known = rank.pools.kind.page, self._of_names
        for node, chain in rank.nodes():
            names, hashes = page_names(node.hash_value or ()), np.array(chain, np.uint64)
            both = np.stack([hashes, rank.draft_chain(node, hashes)])
            for back, name in enumerate(reversed(names)):
                end = len(chain) - back * page
                known[name] = both[:, end - page : end]
        for part in self.store.parts.values():
            component = _PARTS[part.component.name]
            names = [name for name in known if name in part.memory]
            if not names:
                continue
            ids = part.memory.take(names)
            assert ids is not None
            tokens = 1 if component is MAMBA else page
            chains = np.concatenate([known[name][:, -tokens:] for name in names], axis=1)
            first = 0
            for oracles, chain in zip((rank.pools.oracles, rank.pools.draft_oracles), chains, strict=True):
                if component in oracles:
                    self._compare(part, ids, oracles[component], chain, first)
                    first += oracles[component].layers
            assert first == part.memory.arena.layout.n_layers
            part.memory.unlock(ids)

    @staticmethod
    def _compare(
        part: StoredComponent, ids: np.ndarray, oracle: Oracle, chain: np.ndarray, first: int
    ) -> None:
        """Compare blocks from their layer ``first`` on."""
        arena = part.memory.arena
        for layer in range(oracle.layers):
            for i, plane in enumerate(arena.layout.planes_of(first + layer)):
                what = f"{part.component!r} in DRAM"
                oracle.compare_blocks(arena.plane(plane)[ids], chain, layer, i, what)


_PARTS = {"full": FULL, "window": SWA, "state": MAMBA}


def our_store(**sizes: Any) -> MakeBelow:
    """Puts our store below `HybridRadixCache`; see `Sizes`."""
    return lambda pools, cache: StoreBelow(pools, cache, Sizes(**sizes))
