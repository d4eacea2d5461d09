"""Memory below HBM as a dictionary behind SGLang's linker, which brings each layer only when it is read."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from engine_hybrid_pools import FULL, MAMBA, SWA, HybridPools
from engine_hybrids import HybridRank, MakeBelow
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

COMPONENTS = {PoolName.KV: FULL, PoolName.SWA: SWA, PoolName.MAMBA: MAMBA}

Page = list[list[torch.Tensor]]
"""The saved bytes of a page, or of a state: tensors by local layer."""


class DictLinker(UnifiedCacheLinker):
    """Keeps pages and states of every component by SGLang's keys.

    A row is saved as late as SGLang's lock on its node allows, and a layer is loaded when the model reads it,
    not before: a read that does not wait finds the former bytes of the slot.

    Args:
        pools: of the rank.
        is_short: whether few states are free or can be evicted; no offload is late then, because SGLang's
            scheduler ends where offloads lock all states.
        seed: draws late offloads, failing loads, and pages that are given up.
        most: entries that are kept.
        failing: the share of loads that fail.
    """

    def __init__(
        self,
        pools: HybridPools,
        is_short: Callable[[], bool],
        *,
        seed: int = 0,
        most: int = 4000,
        failing: float = 0.0,
    ) -> None:
        self.pools = {name: part for name, part in COMPONENTS.items() if part in pools.planes}
        self.store: dict[tuple[PoolName, str], Page] = {}
        self.layer_done_counter = self
        self.offloaded = 0
        self._pools = pools
        self._is_short = is_short
        self._page = pools.kind.page
        self._random = random.Random(seed)
        self._most = most
        self._failing = failing
        self._offloads: deque[list[PoolTransfer]] = deque()
        self._done: deque[bool] = deque()
        self._queued: dict[str, list[PoolTransfer]] = {}
        self._loading: dict[int, tuple[list[PoolTransfer], set[int]]] = {}
        self._failed: set[int] = set()
        self._index = -1
        self.consumer_index = -1

    def _entries(self, transfer: PoolTransfer) -> list[tuple[tuple[PoolName, str], torch.Tensor]]:
        """The keys of a transfer, and the slots of each."""
        tokens = 1 if transfer.name == PoolName.MAMBA else self._page
        assert len(transfer.device_indices) == tokens * len(transfer.keys)
        return [
            ((transfer.name, key), slots)
            for key, slots in zip(transfer.keys, transfer.device_indices.split(tokens), strict=True)
        ]

    # -- saving -----------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        self._offloads.append(transfers)
        return True

    def num_completed_offloads(self) -> int:
        while self._offloads and (self._is_short() or self._random.random() < 0.5):
            self._save(self._offloads.popleft())
            self._done.append(True)
        return len(self._done)

    def _save(self, transfers: list[PoolTransfer]) -> None:
        for transfer in transfers:
            planes = self._pools.planes[COMPONENTS[transfer.name]]
            for key, slots in self._entries(transfer):
                self.store[key] = [[plane[slots].clone() for plane in layer] for layer in planes]
                self.offloaded += 1
        while len(self.store) > self._most:
            del self.store[self._random.choice(list(self.store))]

    def pop_completed_offload(self) -> bool:
        return self._done.popleft()

    # -- finding and loading ------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        keys = next(each.keys for each in transfers if each.name == PoolName.KV)
        lengths = {each.name: len(each.keys) for each in transfers}
        window = lengths.get(PoolName.SWA, 0)
        found = []
        for end in range(1, len(keys) + 1):
            if (PoolName.KV, keys[end - 1]) not in self.store:
                break
            needed = [(PoolName.SWA, key) for key in keys[max(0, end - window) : end] if window]
            needed += [(PoolName.MAMBA, keys[end - 1])] if PoolName.MAMBA in lengths else []
            if all(each in self.store for each in needed):
                found.append(end)
        return found

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        self._queued[rid] = transfers
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        self._index += 1
        self._loading[self._index] = ([each for of in self._queued.values() for each in of], set())
        self._queued.clear()
        if self._random.random() < self._failing:
            self._failed.add(self._index)
        return self._index

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """A model reads a layer."""
        if self.consumer_index in self._loading:
            self._bring(self.consumer_index, layer)

    def _bring(self, index: int, layer: int) -> None:
        transfers, there = self._loading[index]
        if layer in there or index in self._failed:
            return
        there.add(layer)
        for transfer in transfers:
            part = COMPONENTS[transfer.name]
            for at, of, local in self._pools.layers:
                if at != layer or of is not part:
                    continue
                for key, slots in self._entries(transfer):
                    for plane, rows in zip(
                        self._pools.planes[part][local], self.store[key][local], strict=True
                    ):
                        plane[slots] = rows

    def finish_layer_wise_loading(self, index: int) -> bool:
        if index not in self._loading:
            return True
        for layer, _, _ in self._pools.layers:
            self._bring(index, layer)
        del self._loading[index]
        return index not in self._failed

    def reset(self) -> None:
        """Ends all transfers; saved pages stay."""
        self._offloads.clear()
        self._done.clear()
        self._queued.clear()
        self._loading.clear()

    def close(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        kept: dict[str, int] = {}
        for name, _ in self.store:
            kept[name.value] = kept.get(name.value, 0) + 1
        return f"DictLinker({kept}, {len(self._offloads)} to save, {len(self._loading)} loading)"


class DictBelow:
    """A `DictLinker` below a cache."""

    def __init__(self, pools: HybridPools, cache: UnifiedRadixCache, **options: Any) -> None:
        def is_short() -> bool:
            states = pools.kind.states
            free = pools.requests.mamba_allocator.available_size() if states else 0
            return bool(states) and free + cache.mamba_evictable_size() < pools.rows

        self.linker = DictLinker(pools, is_short, **options)
        cache.init_cache_linker(self.linker)

    def settle(self) -> None:
        """The cache waits for its offloads."""

    def close(self) -> None:
        """The cache closes its linker."""

    def check(self, rank: HybridRank) -> None:
        """Saved pages are compared when they are loaded."""


def dictionary(**options: Any) -> MakeBelow:
    """Puts a `DictLinker` below a cache."""
    return lambda pools, cache: DictBelow(pools, cache, **options)
