"""SGLang's own tree with our tiers below it, for models with windows or recurrent states.

In HBM, `UnifiedRadixCache` has the rules of windows and states. It reaches other memory by its linker
(`StoreLinker`): nodes go to our store as they are inserted, and come back into slots of the request that
needs them. This class adds the steps that SGLang's scheduler takes only for its own tiers: the protocol for
a disk, weight updates, and the calls of `patches/hooks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import _PendingOffload
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.engine.cache.faults import CacheFaults
from sglang_ext.engine.cache.listeners import Listeners
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.hybrid.components import FULL
from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.engine.movers.mover import NOTHING_TO_WAIT_FOR
from sglang_ext.engine.peers.peer_kv import Peers
from sglang_ext.engine.planners import P, Planner, find
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.engine.weights import Weights
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.command import RankCommands
from sglang_ext.patches.adapter.hybrid.announcing import Announcing
from sglang_ext.patches.adapter.hybrid.chunks import Chunks
from sglang_ext.patches.adapter.hybrid.linker import StoreLinker, page_name
from sglang_ext.patches.adapter.migration.migration import Migration
from sglang_ext.patches.seams import current
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey


Publish: TypeAlias = Callable[[HybridStore, Mapping[str, int], Sequence[Planner]], None]
"""Publishes the metrics of a store, of faults, and of planners."""
_BOUND = "_sglang_ext_weights"
"""Attribute of a request: its own extra key, and the weights to which its KV belongs."""
_LEAST_FREE = 4
"""Copies to DRAM lock their nodes in HBM. The scheduler waits for them while less than one slot in so many is
free or can be evicted."""


class HybridRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """See the module's docstring. All methods run in the scheduler's thread."""

    dram = None
    """Of the plain cache; beam search is refused by SGLang itself for these models."""
    migration: Migration | None = None
    """Stops requests that go on elsewhere, and goes on with such, where a router can ask for it."""
    retracting = None
    command_queue: RankCommandQueue | None = None
    uses_storage = False
    planners: Sequence[Planner] = ()
    announcing: Announcing | None = None
    """In rank 0 of an instance that routers know."""

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params)
        self.store: HybridStore | None = None
        self.weights = Weights()
        self.ranks = Ranks()
        self.faults = CacheFaults()
        self.listeners = Listeners()
        self.commands = RankCommands(self)
        self.scheduler: Any = None
        self.chunks = Chunks.of(params)
        self._check_when_idle = False
        self._weights_in_use = ""
        """Distinguishes the weights from those of the start; empty while they are the same."""
        self.peers: Peers | None = None
        self._behind_peers: dict[CacheRequestHandle, tuple[Hashable, bytes]] = {}
        """Requests that may wait for blocks from a peer, before the disk is queried for them, and their
        prompts."""
        self._promoted_from: dict[CacheRequestHandle, int] = {}
        """Tokens that a request had in memory when its promotion began."""

    def serve(
        self,
        linker: StoreLinker,
        weights: Weights,
        *,
        publish: Publish = lambda store, faults, planners: None,
        check: bool = False,
    ) -> None:
        """Reach a store below HBM. Once, before requests come."""
        self.init_cache_linker(linker)
        self.store, self.weights, self.ranks = linker.store, weights, linker.store.ranks
        self.uses_storage = linker.store.has_disk
        self.faults = CacheFaults(strict=check)
        self._check_when_idle = check
        self._publish = publish

    def join(
        self,
        planners: Sequence[Planner],
        announcing: Announcing | None = None,
        commands: RankCommandQueue | None = None,
        *,
        replies: Replies | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Be a member of a cluster. Once, before requests come.

        Args:
            planners: in the order in which they take commands and steps.
            announcing, commands: in rank 0.
            replies: to routers, which may have running requests moved; None without a router.
            ranks: of the instance; None for those of the store.
        """
        self.ranks = self.ranks if ranks is None else ranks
        if replies is not None:
            self.migration = Migration(self, replies)
            self.commands = RankCommands(self, self.migration)
        self.planners, self.announcing, self.command_queue = tuple(planners), announcing, commands
        self.peers = self.find(Peers)
        self.uses_storage = self.uses_storage or self.peers is not None

    def add(self, planner: Planner) -> None:
        """Have one more mechanism. Before requests come."""
        self.planners = (*self.planners, planner)

    def meet(self, scheduler: Any) -> None:
        """SGLang's scheduler is there."""
        self.scheduler = scheduler

    def find(self, kind: type[P]) -> P | None:
        """The planner of a kind; None where its mechanism is off."""
        return find(self.planners, kind)

    @property
    def transfers(self) -> TransferThread | None:
        """By which blocks, and requests of a prefill server, go to other servers."""
        return self.find(TransferThread)

    # -- looking up and making room --------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if params.req is not None:
            self._bind(params.req, params.key)
            if self.linker is not None:
                self._linker.looked_up.pop(params.req.rid, None)
        result = super().match_prefix(params)
        if params.req is not None and self.store is not None and not result.host_hit_length:
            end = self.get_last_hash_value(result.last_device_node)
            if end is not None:
                self.store.used_in_hbm(page_name(end), params.req.rid)
        if params.req is not None and self.chunks is not None:
            self.chunks.matched(params.req, max(result.full_kv_hit_length, self._below(params.req, result)))
        return result

    def _below(self, req: Req, result: MatchResult) -> int:
        """Up to where the KV of a prompt is in memory below HBM, on every rank."""
        names = None if self.linker is None else self._linker.looked_up.get(req.rid)
        if not names or self.store is None:
            return 0
        blocks = torch.tensor([self.store.leading(names)])
        self._all_reduce_attn_groups(blocks, torch.distributed.ReduceOp.MIN)
        return int(result.device_prefix_len + blocks.item() * self.page_size)

    def forget_below(self, req: Req) -> None:
        """A request takes nothing from memory below HBM, whatever its last match has found there."""
        if self.linker is not None:
            self.linker.release_request(req.rid)
            self._linker.looked_up.pop(req.rid, None)

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        self._checkpoint(req, up_to=up_to, **kwargs)
        if req.finished():
            with self.faults.guard("request_ended"):
                self.listeners.request_ended(req, (req.origin_input_ids + req.output_ids)[:up_to])

    def _checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        if self.chunks is None:
            super().checkpoint(req, up_to=up_to, **kwargs)
        elif not self.chunks.ends_behind_state(req, up_to):
            super().checkpoint(req, up_to=up_to, **kwargs)
            if self.linker is not None and up_to <= self.chunks.shared(req):
                self._save_state(req.last_node)

    def leave_window(self, req: Req, chunk: int) -> None:
        """Free a prompt's own rows that no window reaches any more, before its next chunk.

        SGLang does so for caches that share nothing. A prompt that enters no tree here, because the weights
        have changed since it began, would wait for ever for its next chunk where windows have room for less.

        Args:
            chunk: most tokens of a chunk; the last one may still be computed.
        """
        if req.skip_radix_cache_insert and self.supports_swa():
            self.evict_sliding_windows(req, max(current.prefix_tokens(req) - chunk, 0))

    def _save_state(self, node: Any) -> None:
        """Copy the state of a node to DRAM. SGLang does so only with the KV of a new node."""
        state = self.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        name = self.get_last_hash_value(node)
        if state is None or name is None:
            return
        lock = self.inc_lock_ref(node).to_dec_params()
        self._linker.offload([PoolTransfer(name=PoolName.MAMBA, device_indices=state, keys=[name])])
        self.linker.pending_offloads.append(_PendingOffload(node, lock, []))

    # -- of requests that are moved ---------------------------------------------------------------

    def stop(self, req: Req) -> None:
        """The tree takes over the whole pages, the window and the state of a running request; the rest is
        computed again wherever it goes on.

        SGLang hands a state over to the tree at the end of a request only, so this is such an end to it.
        """
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.finished_reason = FINISH_ABORT("stopped")
        try:
            current.release(req, self, keep=True)
        finally:
            req.finished_reason = None

    def copied(self, req: Req, tokens: bytes) -> bool:
        """An export waits for the copies of its blocks by itself."""
        return True

    def of_weights_in_use(self, req: Req) -> bool:
        """Whether the request began with the weights in use, which have not changed since."""
        _, weights = getattr(req, _BOUND, (None, ""))
        return weights == self._weights_in_use and not req.skip_radix_cache_insert

    def tenant_of(self, req: Req) -> tuple[str | None, str | None]:
        """The ``extra_key`` and ``cache_salt`` with which a request came."""
        own, _ = getattr(req, _BOUND, (req.extra_key, ""))
        return own, req.cache_salt

    def _bind(self, req: Req, key: RadixKey) -> None:
        """Have a request find and leave KV of the weights that compute it. A node that a running request
        holds stays in the tree when the weights change; its extra key is another one from then on."""
        own, weights = getattr(req, _BOUND, (req.extra_key, ""))
        if weights != self._weights_in_use and not (req.kv is not None and req.kv.holds_kv):
            weights = self._weights_in_use
            setattr(req, _BOUND, (own, weights))
            req.extra_key = _with_weights(own, weights)
        key.extra_key = req.extra_key

    def extra_key_of(self, own: str | None) -> str | None:
        """The extra key in SGLang's tree of a tenant's prompts under the weights in use."""
        return _with_weights(own, self._weights_in_use)

    def insert(self, params: InsertParams) -> InsertResult:
        result = super().insert(params)
        node = result.last_device_node
        if self.store is not None and node is not None:
            own, before = (
                get(node) for get in (self.tree_core.get_hash_values, self.tree_core.get_prefix_hash_values)
            )
            if own and before:
                self.store.follows(page_name(before[-1]), page_name(own[0]))
        if self.announcing is not None and params.key is not None and result.last_device_node is not None:
            with self.faults.guard("announce"):
                self._announce(params.key, result.last_device_node)
        return result

    def _announce(self, key: RadixKey, node_id: Any) -> None:
        """Tell routers of a path in the tree, if it belongs to the weights in use."""
        assert self.announcing is not None
        own, weights = key.extra_key, self._weights_in_use
        if weights:
            if own is None or not own.startswith(f"{weights}\0"):
                return
            rest = own[len(weights) + 1 :]
            own = rest[1:] if rest else None
        if not self.weights.moving:
            self.announcing.inserted(key, own, node_id)

    def _apply_cache_action(self, action: Any) -> None:
        if self.announcing is not None:
            self.announcing.freed(action)
        super()._apply_cache_action(action)

    def _evict(self, params: EvictParams, *args: Any, **options: Any) -> EvictResult:
        """Evict. Nodes whose copies to DRAM are under way are locked: where nothing else is left, their end
        is waited for."""
        result = super()._evict(params, *args, **options)
        lacking = EvictParams(
            num_tokens=max(0, params.num_tokens - result.num_tokens_evicted),
            swa_num_tokens=max(0, params.swa_num_tokens - result.swa_num_tokens_evicted),
            mamba_num=max(0, params.mamba_num - result.mamba_num_evicted),
        )
        lacks = lacking.num_tokens or lacking.swa_num_tokens or lacking.mamba_num
        if not lacks or not self._end_saves():
            return result
        more = super()._evict(lacking, *args, **options)
        return EvictResult(
            num_tokens_evicted=result.num_tokens_evicted + more.num_tokens_evicted,
            swa_num_tokens_evicted=result.swa_num_tokens_evicted + more.swa_num_tokens_evicted,
            mamba_num_evicted=result.mamba_num_evicted + more.mamba_num_evicted,
        )

    def _end_saves(self) -> bool:
        """Wait for all copies to DRAM; whether there were any."""
        if self.store is None or not self.store.saving:
            return False
        self.store.end_copies()
        self._take_note()
        return True

    @property
    def _is_short(self) -> bool:
        """Whether little of a pool is free or can be evicted."""
        allocator: Any = self.token_to_kv_pool_allocator  # of one pool or two
        if self.is_swa_enabled:
            pools = [
                (allocator.full_available_size() + self.full_evictable_size(), allocator.size_full),
                (allocator.swa_available_size() + self.swa_evictable_size(), allocator.size_swa),
            ]
        else:
            pools = [(allocator.available_size() + self.full_evictable_size(), allocator.size)]
        if self.is_mamba_enabled:
            states = self.req_to_token_pool.mamba_allocator
            pools.append((states.available_size() + self.mamba_evictable_size(), states.size))
        return any(_LEAST_FREE * free < size for free, size in pools)

    # -- each pass ------------------------------------------------------------------------------

    def check_hicache_events(self) -> None:
        """Once per pass of the scheduler: take note of copies and reads that have ended on every rank."""
        self._keep_newest_states()
        self.ranks.each_pass()
        if self.store is not None and self.linker is not None:
            self._take_note()
            if self.store.saving and self._is_short:
                self._end_saves()
            self._publish(self.store, self.faults.counts, self.planners)
        with self.faults.guard("each_pass"):
            for planner in self.planners:
                planner.each_pass()
        if any(planner.moves_alarm for planner in self.planners):
            self.commands.broadcast_time()

    def _keep_newest_states(self) -> None:
        """Have the next state of a request overwrite its older one.

        SGLang writes the states of ``extra_buffer`` into two slots in turn. With overlap, it does not take
        turns where a prefill runs between two decodes at such a place. It would then overwrite the newest
        state, which the tree takes when the request ends: by the pass that is under way at that time.
        """
        if self.scheduler is None or not self.is_mamba_enabled or _writes_one_slot():
            return
        pool: Any = self.req_to_token_pool
        for req in self.scheduler.running_batch.reqs:
            kv = req.kv
            if kv.mamba_next_track_idx is not None and kv.mamba_next_track_idx == kv.mamba_last_track_idx:
                kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(kv.mamba_last_track_idx)

    def _take_note(self) -> None:
        """Unlock the nodes whose copies to DRAM have ended."""
        assert self.linker is not None
        ended = self.linker.num_completed_offloads()
        self.linker.commit_completed_offloads(self.linker.take_completed_offloads(ended))

    def ready_to_load_host_cache(self) -> int:
        """Start the loads of a batch; the number that its forward pass waits for."""
        return NOTHING_TO_WAIT_FOR if self.linker is None else super().ready_to_load_host_cache()

    # Loads are not weighed against computing here, so the speed of prefills is not measured.

    def prefill_begins(self, lengths: Sequence[tuple[int, int]], *, loads: bool) -> None:
        pass

    def pass_begins(self, reqs: Sequence[Req]) -> None:
        pass

    def prefill_ended(self) -> None:
        pass

    def streams_hold(self) -> bool:
        """The forward pass has run: loaded slots belong to their requests as computed ones do."""
        if self.linker is not None:
            self.linker.finish_loads()
        return True

    def sanity_check(self) -> None:
        for planner in self.planners:
            planner.idle_pass()
        super().sanity_check()
        if self._check_when_idle:
            if self.store is not None:
                self.store.check()
            for planner in self.planners:
                planner.check()

    # -- in a cluster ---------------------------------------------------------------------------

    @property
    def keeps_awake(self) -> bool:
        """Whether the next passes have something to do though nothing runs and nothing waits."""
        return any(planner.busy for planner in self.planners)

    @property
    def alarm(self) -> float:
        """The time, by rank 0's clock, at which `expire` must be called; infinite for none."""
        return min((planner.alarm for planner in self.planners), default=math.inf)

    def expire(self, now: float) -> None:
        """Drop expired entries. now: rank 0's time."""
        for planner in self.planners:
            planner.expire(now)

    def blocks_by_tier(self) -> dict[Tier, tuple[int, int]]:
        """Blocks of the index with the KV of every token that each tier holds, and that fit; from any
        thread."""
        page = self.page_size
        block = page if self.announcing is None else self.announcing.announced.tree.block_size
        allocator: Any = self.token_to_kv_pool_allocator  # of one pool or two
        if self.is_swa_enabled:
            size, free = allocator.size_full, allocator.full_available_size()
        else:
            size, free = allocator.size, allocator.available_size()
        held = {Tier.HBM: ((size - free) // block, size // block)}
        if self.store is not None:
            part = self.store.parts[FULL]
            arena = part.memory.arena
            fitting = arena.used_blocks + arena.available  # beside the other components' blocks
            held[Tier.DRAM] = (len(part.memory) * page // block, fitting * page // block)
            if part.disk is not None:
                on_disk, fitting = part.disk.blocks()
                held[Tier.DISK] = (on_disk * page // block, fitting * page // block)
        return held

    def reset(self) -> None:
        for planner in self.planners:
            planner.drop_in_flight()
        if self.announcing is not None:
            self.announcing.forget()
        super().reset()

    def release_host_resources(self) -> None:
        self.listeners.before_end()
        # Peers read the store's memory until the endpoint is closed.
        for exchanging in (self.peers, self.transfers):
            if exchanging is not None:
                exchanging.close()
        super().release_host_resources()
        for planner in self.planners:
            planner.close()

    # -- from disk, before a request is admitted ------------------------------------------------

    def is_backuped(self, node_id: Any) -> bool:
        return True

    def prefetch_from_storage(
        self,
        request: CacheRequestHandle,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Any = (),
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """Bring blocks that a request lacks from a peer or the disk to DRAM. SGLang has just matched it."""
        if self.store is None or not self.uses_storage or self.weights.moving:
            return
        with self.faults.guard("prefetch_from_storage"):
            self.store.release(request)
            self._promoted_from[request] = len(matched_prefix_tokens)
            if self.peers is not None:
                key = encode_tokens(matched_prefix_tokens) + encode_tokens(new_input_tokens)
                self._behind_peers[request] = self.weights.namespace(extra_key, cache_salt), key
            self._go_on(request)

    def _go_on(self, request: CacheRequestHandle) -> bool:
        """Query the disk for a request, unless it waits for a peer; whether it does not."""
        prompt = self._behind_peers.get(request)
        if prompt is not None and self.peers is not None and self.peers.waits(*prompt):
            return False
        names = self._linker.looked_up.get(request.rid)
        assert self.store is not None
        if names and self.store.has_disk and self.store.promoted(request) is None:
            self.store.promote(request, names)
        return True

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        if self.store is None:
            return True
        with self.faults.guard("check_prefetch_progress"):
            return self._go_on(request) and self.store.ready(request)
        return True

    def pop_prefetch_loaded_span(self, request: CacheRequestHandle) -> tuple[int, int | None]:
        """Tokens that came from disk, and the position of the first."""
        promotion = None if self.store is None else self.store.promoted(request)
        if promotion is None or not promotion.blocks:
            return 0, None
        return promotion.blocks * self.page_size, self._promoted_from.get(request)

    def finish_storage_prefetch_admission(
        self, request: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        self._release(request)

    def discard_storage_prefetch_accounting(self, request: CacheRequestHandle) -> None:
        self._release(request)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        self._release(request)
        super().release_aborted_request(request)

    def _release(self, request: CacheRequestHandle) -> None:
        if self.store is not None:
            self.store.release(request)
            prompt = self._behind_peers.pop(request, None)
            if prompt is not None and self.peers is not None:
                self.peers.admitted(*prompt)
            self._promoted_from.pop(request, None)
            self._linker.looked_up.pop(request.rid, None)

    @property
    def _linker(self) -> StoreLinker:
        assert self.linker is not None
        linker = self.linker.cache_linker
        assert isinstance(linker, StoreLinker)
        return linker

    # -- weights --------------------------------------------------------------------------------

    def weights_changing(self) -> None:
        """The model's weights are about to change, and may until ``weights_changed``.

        Requests that have begun keep their KV to themselves; nodes that no request uses leave HBM at once.
        """
        if not self.weights.moving:
            self.weights.begin()
            self._weights_in_use = f"moving {self.weights.generation}"
            self._forget()

    def weights_changed(self) -> None:
        """The weights stay as they are now. Every rank is called at once."""
        self.weights.settle()
        generation = self.weights.generation
        self._weights_in_use = self.weights.version(generation) or f"{generation}"
        if self.weights.as_started:
            self._weights_in_use = ""
        self._forget()

    def _forget(self) -> None:
        for planner in self.planners:
            planner.drop_in_flight()
        if self.announcing is not None:
            self.announcing.forget(self.weights.generation)
        for req in _begun(self.scheduler):
            req.skip_radix_cache_insert = True
        if self.linker is not None and self.store is not None:
            self.store.forget()
            self.linker._release_pending_offloads()
            self.linker.hit_markers.clear()
        everything = self.token_to_kv_pool_allocator.size
        self.evict(EvictParams(num_tokens=everything, swa_num_tokens=everything, mamba_num=everything))

    def settle(self) -> None:
        """Wait until no copy reads or writes the pool, which is about to be unmapped."""
        if self.store is not None:
            self.store.settle()


def _with_weights(own: str | None, weights: str) -> str | None:
    """A tenant's extra key that differs for other weights."""
    return f"{weights}\0{'' if own is None else 'k' + own}" if weights else own


def _writes_one_slot() -> bool:
    """Whether a request's second slot exists only while it is needed (``extra_buffer_lazy``)."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().mamba.enable_mamba_extra_buffer_lazy)


def _begun(scheduler: Any) -> list[Any]:
    """The requests whose KV is in the pool."""
    if scheduler is None:
        return []
    found = list(scheduler.waiting_queue)
    for batch in (scheduler.running_batch, scheduler.last_batch):
        found += batch.reqs if batch is not None else []
    if scheduler.chunked_req is not None:
        found.append(scheduler.chunked_req)
    # Of a prefill server: those that decode has not got yet. Their KV enters the tree when it has.
    found += getattr(scheduler, "disagg_prefill_inflight_queue", None) or ()
    # Of a decode server: requests whose KV is on its way.
    coming = getattr(scheduler, "disagg_decode_transfer_queue", None)
    found += [] if coming is None else [entry.req for entry in coming.queue]
    return [req for req in found if req.kv is not None and req.kv.holds_kv]
