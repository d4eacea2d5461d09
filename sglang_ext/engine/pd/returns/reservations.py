"""Memory at prefill for returned KV: slots of HBM, or blocks of DRAM where HBM is short."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.disagg.runs import Ids
from sglang_ext.engine.forward_fence import Passed, on_host
from sglang_ext.engine.pd.returns.reserving import BUDGET, held, reserve
from sglang_ext.engine.peers.arena_leases import DRAM_POOL
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.mempool.store import Refusal
from sglang_ext.radix_global import Node
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.engine.cache.rank_cache import RankCache


class Blocks:
    """A rank's cache, as returns use it. In the scheduler's thread only."""

    def __init__(self, cache: RankCache) -> None:
        self.cache = cache
        self._hbm = cache.hbm
        self.step = cache.block_size
        self.page = cache.page_size

    def held(self, namespace: Hashable, key: bytes) -> tuple[Node, list[Any], int]:
        """The blocks of a prompt in HBM: the last node, the slots of each node, and how many blocks."""
        path = held(self.cache.tree, self._hbm, namespace, key)
        node = path[-1] if path else self.cache.tree.root
        return node, [each.placements[self._hbm] for each in path], sum(each.blocks for each in path)

    def lock(self, node: Node) -> None:
        self.cache.tree.lock(node, self._hbm)

    def unlock(self, node: Node) -> None:
        self.cache.tree.unlock(node, self._hbm)

    def pages(self, slots: Any) -> Ids:
        """Pages of slots, which are whole pages. Waits for the device that has the slots."""
        found: Ids = np.asarray(slots.tolist() if hasattr(slots, "tolist") else slots, np.int64)
        pages: Ids = found[:: self.page] // self.page
        return pages

    def reading(self, slots: Sequence[Any], fence: Callable[[], Passed]) -> Callable[[], Ids | None]:
        """Begin to read the pages of runs of slots, without waiting for the device that has them. Returns a
        function that gives the pages, or None as long as they are on their way, or passes under way may
        still write to them. From any thread.
        """
        if not isinstance(slots[0], torch.Tensor) or not slots[0].is_cuda:
            found = np.concatenate([self.pages(each) for each in slots])
            return lambda: found
        pages = on_host(torch.cat(list(slots))[:: self.page] // self.page)
        passed = fence()  # behind the copy too
        return lambda: pages() if passed() else None

    def pages_of(self, key: bytes) -> int:
        """The number of pages in the whole blocks of a prompt."""
        pages: int = len(key) // self.cache.tree.block_bytes * self.step // self.page
        return pages


class Reservations:
    """Reserves memory for returned KV, within a budget of each tier.

    into_dram: whether the endpoint has the DRAM arena as a pool.
    """

    def __init__(self, blocks: Blocks, *, into_dram: bool = False) -> None:
        self.blocks = blocks
        self._into_dram = into_dram
        self.dram_budget = BUDGET

    def take(self, namespace: Hashable, key: bytes, *, busy: bool) -> Reservation | Refusal:
        """Reserve memory for the missing whole blocks of a prompt: in HBM, or in DRAM where HBM is short.

        busy: whether requests wait for memory, which come first.
        """
        cache = self.blocks.cache
        into_dram = self._into_dram and cache.dram is not None
        return reserve(
            cache.store, namespace, key, busy=busy, into_dram=into_dram, dram_budget=self.dram_budget
        )

    def target(self, reservation: Reservation) -> tuple[str, Ids]:
        """The endpoint's pool that a reservation is in, and its blocks there."""
        if reservation.tier is Tier.DRAM:
            return DRAM_POOL, reservation.places
        return HBM_POOL, self.blocks.pages(reservation.places)

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens that are set aside, by tier."""
        store = self.blocks.cache.store
        return {
            tier.name: store.ledger.reserved(tier, Use.RETURN) * self.blocks.step
            for tier in (Tier.HBM, Tier.DRAM)
        }
