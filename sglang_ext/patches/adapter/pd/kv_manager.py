"""The transfer backend `global`: SGLang's manager, sender, receiver and bootstrap over `disagg`.

SGLang's schedulers, queues and retraction stay as they are; a sender says at once that it may compute, and a
receiver says only when prefill is done that it may allocate (KVDirect, section 4.3). In between,
`engine/pd/agent.py` works on a thread of its own, and SGLang polls.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
)
from sglang.srt.runtime_context import get_parallel
from zmq.constants import POLLIN

from sglang_ext.addresses import bracketed, connectable, listen_host, of_replica
from sglang_ext.engine.forward_fence import ForwardFence
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.landing import PoolRows, pages_of
from sglang_ext.engine.pd.peers import Local
from sglang_ext.engine.pd.pushing import LayerFeed
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.admission import BACKEND, TRANSFER_FLAG
from sglang_ext.patches.adapter.build_transfers import (
    components_of,
    dp_rank,
    instance_rank,
    instance_ranks,
    rank_on_server,
    transfers_of,
)
from sglang_ext.patches.adapter.hbm import Drafts
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.handed_over import REQUEST
from sglang_ext.patches.adapter.hybrid.pools import STATE, WINDOW
from sglang_ext.patches.adapter.pd.pd_setup import (
    InUse,
    MetadataBuffers,
    around_layers,
    instance_group,
    keys_of,
    on_all_ranks,
    settings_of,
    weights_of,
)
from sglang_ext.patches.adapter.pd.role_parts import RoleParts, role_parts
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.patches.adapter.support import require_movable
from sglang_ext.patches.process import PROCESS

logger = logging.getLogger(__name__)

_POOLS = {
    "swa": WINDOW,
    "mamba": STATE.name,
    "c128_state": REQUEST,
    "dsa_tail": REQUEST,
    "qsa_pending": REQUEST,
    "dsa": None,
    "qsa_compressed": None,
}
"""The pools that endpoints have for SGLang's lists of indices, by kind; None: the pages have these rows."""


def require_pools(kinds: Sequence[str], pools: Container[str]) -> None:
    """Refuse a model of which SGLang hands over something that endpoints have no pool for.

    Args:
        kinds: of SGLang's lists of indices beside the pages'.
        pools: their names in the endpoint.

    Raises:
        ConfigError: naming it.
    """
    unmoved = {kind for kind in kinds if (_POOLS.get(kind, kind) or HBM_POOL) not in pools}
    if unmoved:
        named = ", ".join(sorted(unmoved))
        raise ConfigError(f"{TRANSFER_FLAG} does not move this state of a model: {named}")


def rows_beside(kinds: Sequence[str], indices: Sequence[Any]) -> tuple[PoolRows, ...]:
    """The rows that SGLang names beside the pages: pages of a window, the slot of a state, or a row that it
    keeps by request. A draft model's window has the rows of the model's."""
    found: dict[str, PoolRows] = {}
    for kind, rows in zip(kinds, indices, strict=True):
        pool = _POOLS[kind]
        if pool is not None:
            # Of an unfinished group of index keys: the request's row, and which of its slots are in use.
            named = rows[:1] if kind == "dsa_tail" else rows
            found.setdefault(pool, PoolRows(pool, pages_of(named)))
    return tuple(found.values())


def running_indices(scheduler: Any, req: Any, kinds: Sequence[str]) -> list[Any]:
    """SGLang's lists of indices of a request that decodes, as prefill names those of a prompt that it has
    computed: the pages of the window before its next token, and the slot of its state.

    Args:
        kinds: of the lists.
    """
    table, allocator = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator

    def window() -> Any:
        tokens, page = req.kv.kv_committed_len, allocator.page_size
        first = max(0, tokens - scheduler.sliding_window_size) // page * page
        slots = table.req_to_token[req.kv.req_pool_idx, first:tokens:page]
        return allocator.get_kvcache().translate_loc_from_full_to_swa(slots).cpu().numpy() // page

    def state() -> Any:
        return table.req_index_to_mamba_index_mapping[req.kv.req_pool_idx].cpu().numpy()

    read = {"swa": window, "mamba": state}
    return [None if _POOLS[kind] is None else read[kind]() for kind in kinds]


class AnyPrefill:
    """SGLang asks here whether it knows a prefill server's layout; the agent finds out, without being waited
    for.
    """

    dp_size = 1
    follow_bootstrap_room = True

    def get(self, _address: str) -> AnyPrefill:
        return self


class GlobalKVManager(BaseKVManager):  # type: ignore[misc]
    """One rank's manager, on either side."""

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self.disaggregation_mode = disaggregation_mode
        self.server_args = server_args
        self.prefill_info_table = AnyPrefill()
        scheduler = PROCESS.scheduler
        if scheduler is None:
            raise RuntimeError(f"{TRANSFER_FLAG}: the hook before Scheduler.init_disaggregation did not take")
        config = of_replica(PROCESS.settings(), dp_rank())
        require_movable(scheduler.model_config, server_args, get_parallel(), config)
        self.buffers = MetadataBuffers(args.aux_data_ptrs, args.aux_item_lens)
        self.page_bytes = sum(args.kv_item_lens)
        self.fence = ForwardFence.of(scheduler)
        self.pushes = config.transfer_mode != "pull"
        prefill = disaggregation_mode.value == "prefill"
        cache = None
        if isinstance(scheduler.tree_cache, GlobalRadixCache | HybridRadixCache):
            cache = scheduler.tree_cache
        self.store = cache.store if isinstance(cache, GlobalRadixCache) else None
        """By which a request's slots are filled; None where SGLang's tree or nothing keeps KV."""
        self._components = components_of(scheduler, args.page_size)
        self._kinds = [kind.value for kind in args.state_types] if self._components else []
        require_pools(self._kinds, self._components)
        self.agent = self._take_part(scheduler, cache, config, prefill=prefill)
        staged = get_parallel().pp_size > 1
        # Of our own: a comparison in the background must not meet SGLang's collectives.
        group = torch.distributed.new_group(backend="gloo") if staged else None
        self.weights = InUse(scheduler, group, self.agent.weights_changed)
        self.feed: LayerFeed | None = None
        if config.transfer_mode == "push-by-layer" and prefill:
            first, layers, *_ = self.agent.endpoint.pools[HBM_POOL].meta.shard
            self.feed = self.agent.layer_feed(first, layers, self.fence)
            kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
            around_layers(kvcache, before=self.feed.layer_begins)
        PROCESS.manager = self
        self.meeting = ""
        """Where other decode servers find this one's ranks, to take requests over."""
        if not prefill:
            self.meeting = on_all_ranks(self.agent.address.encode(), instance_group(scheduler))[0].decode()
            self.agent.meet_at(self.meeting)
        self.migration = None if cache is None else cache.migration
        """By which requests leave for other decode servers, and come from them."""
        if self.migration is not None:
            self.migration.transfer_by(None if prefill else self)
        self.role: RoleParts | None = None
        """The listeners and parts of the cache while the server has this role; None without our cache."""
        if cache is not None:
            self.role = role_parts(cache, self.agent, self.teardown)
            if prefill:
                self.role.prefill(scheduler, self.fence, returns=config.pd_caching == "3")
            else:
                self.role.decode(self.fence, config.load_min_tokens, returns=config.pd_caching == "3")
            self.role.begin()
        if (poller := poller_of(scheduler)) is not None:
            poller.register(self.agent.alarm.fd, POLLIN)
        logger.info("KV transfer backend %s: %r", BACKEND, self.agent)

    def _take_part(
        self,
        scheduler: Any,
        cache: GlobalRadixCache | HybridRadixCache | None,
        config: Any,
        *,
        prefill: bool,
    ) -> Agent:
        """This rank's agent, which other ranks reach from now on."""
        server_args, parallel, page = self.server_args, get_parallel(), self.kv_args.page_size
        kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
        local = Local(
            instance_rank(),
            instance_ranks(),
            page,
            self.buffers.row_bytes,
            config.transfer_mode,
            config.transfer_layout,
            settings_of(scheduler.model_config, kvcache, Drafts(PROCESS.drafts)),
            {name: pool.described(parallel.attn_tp_size) for name, pool in self._components.items()},
        )
        listens = listen_host(server_args.host, keyed=config.cluster_key_file is not None)
        bootstrap = f"{bracketed(connectable(listens))}:{server_args.disaggregation_bootstrap_port}"
        rows = scheduler.req_to_metadata_buffer_idx_allocator
        return Agent(
            AgentConfig(
                local,
                "" if cache is not None and cache.weights.moving else weights_of(scheduler),
                bootstrap=bootstrap if prefill else "",
                replica=dp_rank() or 0,
                metrics=rank_on_server() if server_args.enable_metrics else None,
            ),
            transfers_of(scheduler, config, page, self._components),
            self.buffers,
            metadata_rows=lambda: rows.size - rows.available_size(),
        )

    def beside(self, state_indices: Sequence[Any] | None) -> tuple[PoolRows, ...]:
        """See `rows_beside`."""
        return rows_beside(self._kinds, state_indices or ()) if self._kinds else ()

    def beside_running(self, req: Any) -> tuple[PoolRows, ...]:
        """The rows beside the pages of a request that decodes here."""
        return rows_beside(self._kinds, running_indices(PROCESS.scheduler, req, self._kinds))

    @property
    def supports_role_switch(self) -> bool:
        """Whether the server can change between prefill and decode: the pool's layers are not watched,
        decode could keep what prefill has cached, and all ranks change at once, as stages do not."""
        watched = PROCESS.settings().transfer_mode == "push-by-layer"
        return not (watched or self._components or get_parallel().pp_size > 1)

    def teardown(self) -> None:
        """The server changes its role, and is idle, or ends: end connections and hand-overs. The cache stays
        as it is, and the transfer thread with it."""
        cache, scheduler = PROCESS.scheduler.tree_cache, PROCESS.scheduler
        if (poller := poller_of(scheduler)) is not None:
            poller.unregister(self.agent.alarm.fd)
        if self.role is not None:
            self.role.end()
        if self.migration is not None:
            self.migration.transfer_by(None)
        PROCESS.manager = None
        self.agent.close()
        if getattr(cache, "transfers", None) is not self.agent.transfers:
            self.agent.transfers.close()

    def register_to_bootstrap(self) -> None:
        """The agent does, again and again."""

    def try_ensure_parallel_info(self, _address: str) -> bool:
        return True

    def submit_prefill_recompute(self, receiver: Any, payload: Any) -> None:
        raise NotImplementedError(
            f"{TRANSFER_FLAG} does not support pause_generation(mode='retract') with requests"
        )


def poller_of(scheduler: Any) -> Any:
    """The sockets that an idle scheduler waits for; None when it does not sleep."""
    return getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)


class GlobalKVBootstrapServer(BaseKVBootstrapServer):  # type: ignore[misc]
    """The bootstrap port of a prefill server, in its HTTP process."""

    def __init__(self, host: str, port: int) -> None:
        self._service = BootstrapService(host, port, keys_of(PROCESS.settings()))

    def close(self) -> None:
        self._service.close()
