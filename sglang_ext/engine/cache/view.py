"""What the engine's parts need of the cache that SGLang sees, without SGLang."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.prefetch.advice import Advice
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_room import HbmRoom
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.slots import SlotOps
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier


class Deciding(Protocol):
    """What loads, and counts how it decided."""

    decisions: Any


class RankCache(Protocol):
    """The cache of one rank, in the scheduler's thread. `patches.adapter.radix_cache` serves."""

    store: Store
    tree: RadixTree
    ranks: Ranks
    hbm: Holder
    """Stands for this rank's pool in the tree."""
    slot_ops: SlotOps
    room: HbmRoom
    page_size: int
    """Tokens of a page of SGLang's pool."""
    block_size: int
    """Tokens of a block, a multiple of a page."""
    token_to_kv_pool_allocator: Any
    """SGLang's."""
    dram: DramTier | None
    promotions: Promotions | None
    prefetcher: Prefetcher | None
    advice: Advice | None

    @property
    def load_back(self) -> Deciding | None: ...

    @property
    def peers(self) -> PeerKv | None: ...

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> Hashable:
        """Where the KV of a tenant's prompts belongs now."""

    def blocks_by_tier(self) -> dict[Tier, tuple[int, int]]:
        """Blocks in use, and in all."""

    def settle(self, seconds: float = ...) -> None:
        """Wait until the copies that are under way have arrived."""
