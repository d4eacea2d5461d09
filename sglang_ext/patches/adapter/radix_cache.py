"""SGLang's prefix cache over our tree: HBM, DRAM and disk of one rank, in whole blocks.

SGLang's device is HBM here, its host is DRAM, its storage is the disk. Only whole blocks enter the tree, so
up to ``block_size - 1`` tokens at the end of a prompt stay with their request and go when it ends, as
SGLang's own caches do with a partial page.

All methods run in the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)

from sglang_ext.engine.cache.rank_cache import CacheParts, RankCache
from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.movers.mover import NOTHING_TO_WAIT_FOR
from sglang_ext.engine.movers.slots import slot_ops
from sglang_ext.engine.retraction import Retraction
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.load_back import LoadBack
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.store import Store
from sglang_ext.patches.adapter.command import RankCommands
from sglang_ext.patches.adapter.migration.migration import Migration
from sglang_ext.patches.adapter.own_requests import SglangHost
from sglang_ext.patches.adapter.request_rows import RequestRows
from sglang_ext.patches.adapter.retracting import Retracting
from sglang_ext.patches.adapter.storage_prefetch import StoragePrefetch
from sglang_ext.patches.seams import current
from sglang_ext.radix_global import EvictionPolicy, Holder, Node, RadixTree
from sglang_ext.radix_global.eviction import lru
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey


class _RootView:
    """All namespaces under one root, for SGLang's walk over the tree (``dfs_weight_order``)."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree

    @property
    def children(self) -> dict[Hashable, Node]:
        return self._tree.roots


class GlobalRadixCache(RankCache, StoragePrefetch, current.CacheSeam):
    """See the module's docstring.

    Args:
        params: SGLang's; pools, page size and whether to collect metrics.
    """

    chunks = None
    """Of models with states."""

    def __init__(
        self,
        params: CacheInitParams,
        parts: CacheParts,
        host: SglangHost,
        replies: Replies,
    ) -> None:
        self.host = host
        RankCache.__init__(self, parts, params.token_to_kv_pool_allocator, params.page_size)
        StoragePrefetch.__init__(
            self,
            self.promotions,
            self.peers,
            parts.weights.namespace,
            self.faults,
            priority_sign=parts.priority_sign,
        )
        self.disable = False
        self.req_to_token_pool = params.req_to_token_pool
        self.rows = RequestRows(self, params.req_to_token_pool)
        self.scheduler: Any = None
        """SGLang's, once it is there: see `meet`."""
        self.migration = Migration(self, replies)
        """Stops requests that go on elsewhere, and goes on with such."""
        self.commands = RankCommands(self, self.migration)
        retraction = self.find(Retraction)
        self.retracting = None if retraction is None else Retracting(self, retraction)
        """Has running requests give way to others."""
        self.priority_sign = parts.priority_sign
        self._load_back = self.find(LoadBack)
        self._load_min_tokens = parts.load_min_tokens
        self.root_node = _RootView(self.tree)
        if params.enable_metrics:
            self.init_metrics_collector()

    @classmethod
    def create_simulated(
        cls, *, page_size: int = 1, block_size: int = 16, policy: EvictionPolicy = lru, allocator: Any = None
    ) -> GlobalRadixCache:
        """A cache without pools, to drive the index alone."""
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams

        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
        )
        store = Store(RadixTree(block_size, policy=policy))
        slots = slot_ops(torch.device("cpu" if allocator is None else allocator.device))
        hbm_tier = HbmTier(store.ledger, Holder.of("simulated", 0, Tier.HBM), allocator, slots, None)
        return cls(params, CacheParts(store, hbm_tier), SglangHost(allocator), Replies())

    def meet(self, scheduler: Any) -> None:
        """SGLang's scheduler is there, which it makes after its cache."""
        self.scheduler = scheduler
        self.host.meet(scheduler)

    # -- looking up -----------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix: its slots in HBM, and how many tokens more are in DRAM."""
        with self.faults.guard("match_prefix"):
            return self._match(params)
        if params.req is not None:
            self.rows.exclude(params.req)
        return self.found([], self.tree.root, self.tree.root, 0)

    def _match(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        namespace = self.namespace(key.extra_key, key.cache_salt)
        if params.req is not None:
            self.rows.set_namespace(params.req, namespace)
            self.matched(params.req)
        node, path, blocks = self.store.match(namespace, encode_tokens(key.token_ids, key.limit))
        hbm = self.hbm
        streamed = 0 if self._load_back is None else self._load_back.streamed(params.req, blocks)
        if hbm in node.placements and not streamed:
            # HBM that has the last node has all before it: the usual case, which has to be fast.
            return self.found([n.placements[hbm] for n in path], node, node, 0)
        return self._match_beyond_hbm(path, streamed)

    def _match_beyond_hbm(self, path: list[Node], streamed: int) -> MatchResult:
        """The result for a path that HBM holds a beginning of, or nothing, and blocks from disk after it."""
        hbm = self.hbm
        in_hbm = [node.placements[hbm] for node in path if hbm in node.placements]
        device_node = path[len(in_hbm) - 1] if in_hbm else self.tree.root
        best = path[-1] if path else device_node
        below = (sum(node.blocks for node in path[len(in_hbm) :]) + streamed) * self.block_size
        if below < self._load_min_tokens:
            best, below = device_node, 0
        return self.found(in_hbm, device_node, best, below)

    def touch_prefix(self, key: RadixKey) -> None:
        """Evict the cached KV of a request that waits last (SGLang from 0.5.22 on, with lru)."""
        with self.faults.guard("touch_prefix"):
            namespace = self.namespace(key.extra_key, key.cache_salt)
            self.tree.touch(namespace, encode_tokens(key.token_ids, key.limit))

    def resolve_node_handle(self, node_handle: Node) -> Any:
        return self.root_node if node_handle.is_root else node_handle

    def root_node_handle(self, extra_key: str | None = None) -> Node:
        return self.tree.root

    def is_root(self, node: Node) -> bool:
        return node.is_root

    # -- inserting ------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert ``key`` with the slots ``value``. The caller frees the part that was there before."""
        key, value = params.key, params.value
        if key is None:
            raise ValueError("insert needs a key")
        tokens = len(key) // self.block_size * self.block_size
        kept = self.slot_ops.keep(torch.arange(tokens) if value is None else value)[:tokens]
        result = self.store.insert(
            Tier.HBM,
            self.namespace(key.extra_key, key.cache_salt),
            encode_tokens(key.token_ids, key.limit),
            kept,
            priority=params.priority or 0,
        )
        return InsertResult(prefix_len=result.held_blocks * self.block_size, last_device_node=result.node)

    def keep_ended_req(self, req: Req, *, up_to: int) -> None:
        """A request has ended: the tree takes over its whole blocks before position ``up_to``."""
        tokens = (req.origin_input_ids + req.output_ids)[:up_to]
        if self.rows.keep(req, tokens) is not None:
            with self.faults.guard("request_ended"):
                self.listeners.request_ended(req, tokens)

    def keep_computed(self, req: Req, tokens: Any) -> None:
        """A prefill or a part of it is done: others may use its whole blocks from now on."""
        node = self.rows.keep_computed(req, tokens)
        if node is not None:
            self.move_lock(req, node)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Free ranges of a request's row, except slots that the tree owns."""
        protected = kv.cache_protected_len
        own = [(max(start, protected), end) for start, end in ranges if end > protected]
        super().free_kv_row(kv, own)

    # -- of requests that are moved -----------------------------------------------------------------

    def stop(self, req: Req) -> None:
        """The tree takes the whole blocks; the rest is computed again wherever the request goes on."""
        current.release(req, self, keep=True)

    def copied(self, req: Req, tokens: bytes) -> bool:
        """Whether DRAM has copies of a stopped request's blocks, if others can have them from there."""
        if self.write_down is None or self.peers is None:
            return True
        path = self.tree.match(self.rows.namespace_of(req), tokens).path
        return self.write_down.incomplete().isdisjoint(path)

    def of_weights_in_use(self, req: Req) -> bool:
        """See `RequestRows.namespace_of`."""
        return self.rows.namespace_of(req) is not None

    def tenant_of(self, req: Req) -> tuple[str | None, str | None]:
        """The ``extra_key`` and ``cache_salt`` with which a request came."""
        return req.extra_key, req.cache_salt

    # -- eviction and locks ---------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Give back slots, first those that lose nothing."""
        started = time.perf_counter()
        tokens = self.hbm_tier.evict(params.num_tokens)
        self.update_eviction_metrics(tokens, started)
        return EvictResult(num_tokens_evicted=tokens)

    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        return IncLockRefResult(delta=-self.tree.lock(node, self.hbm) * self.block_size)

    def dec_lock_ref(self, node: Node, params: DecLockRefParams | None = None) -> DecLockRefResult:
        return DecLockRefResult(delta=self.tree.unlock(node, self.hbm) * self.block_size)

    def drop_in_flight(self) -> None:
        super().drop_in_flight()
        self.forget_waiting()

    def evictable_size(self) -> int:
        return self.hbm_tier.evictable

    def protected_size(self) -> int:
        return self.hbm_tier.protected

    def total_size(self) -> int:
        return self.hbm_tier.total

    # -- DRAM -----------------------------------------------------------------------------------

    def start_load(self, node: Node, promised: int, req: Req) -> tuple[torch.Tensor | None, Node]:
        """Start loading what ``match_prefix`` found in DRAM. All of it, or nothing: then it is computed."""
        return (None, node) if self._load_back is None else self._load_back.start(node, promised, req)

    def leave_window(self, req: Req, chunk: int) -> None:
        """Nothing: these models have no windows."""

    def ready_to_load_host_cache(self) -> int:
        """The ticket of the loads that the next batch waits for, for ``LayerGate.set_consumer``."""
        return self._load_back.ready() if self._load_back is not None else NOTHING_TO_WAIT_FOR

    def pass_begins(self, reqs: Sequence[Req]) -> None:
        """A prefill batch is about to run."""
        with self.faults.guard("pass_begins"):
            for planner in self.planners:
                planner.pass_begins(reqs, self.rows)

    def check_hicache_events(self) -> None:
        """Called once per scheduler iteration, after requests came and before a batch is formed: complete the
        operations that have ended on every rank."""
        with self.faults.guard("each_pass"):
            self.each_pass()
        # `alarm` looks at every hint, so it is asked for only where this pass may have changed it.
        if any(planner.moves_alarm for planner in self.planners):
            self.commands.broadcast_time()

    def __repr__(self) -> str:
        return f"GlobalRadixCache(tree={self.tree!r}, dram={self.dram!r}, disk={self.promotions!r})"
