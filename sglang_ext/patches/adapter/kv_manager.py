"""The transfer backend `global`: SGLang's manager, sender, receiver and bootstrap over `disagg`.

SGLang's schedulers, queues and retraction stay as they are; a sender says at once that it may compute, and a
receiver says only when prefill is done that it may allocate (KVDirect, section 4.3). In between,
`engine/pd/agent.py` works on a thread of its own, and SGLang polls.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferDestination,
    KVTransferMetric,
)
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel
from zmq.constants import POLLIN

from sglang_ext.addresses import bracketed, connectable, listen_host
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import FACTS, ReceiverState, SenderState
from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.forward_fence import ForwardFence
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.disk_loads import LocalAhead
from sglang_ext.engine.pd.landing import Wanted, pages_of
from sglang_ext.engine.pd.leases import POOL
from sglang_ext.engine.pd.messages import TakeBack
from sglang_ext.engine.pd.peers import Local
from sglang_ext.engine.pd.prompt_logprobs import MAX_BYTES, PromptLogprobs, too_large
from sglang_ext.engine.pd.pushing import Computing, LayerFeed
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.pd.returns.reservations import Blocks, Reservations
from sglang_ext.engine.pd.returns.return_receiver import ReturnReceiver
from sglang_ext.engine.pd.returns.return_sender import ReturnSender
from sglang_ext.engine.pd.sending_handover import SendingHandover
from sglang_ext.engine.peers.fetch_link import DRAM_POOL
from sglang_ext.engine.ranks import Part
from sglang_ext.mempool.store import Incoming
from sglang_ext.patches.adapter import prompt_logprobs
from sglang_ext.patches.adapter.admission import BACKEND, TRANSFER_FLAG
from sglang_ext.patches.adapter.build_transfers import transfers_of
from sglang_ext.patches.adapter.pd_setup import (
    MetadataBuffers,
    keys_of,
    on_all_ranks,
    settings_of,
    watch_layers,
    weights_of,
)
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.patches.adapter.request_stages import request_stages
from sglang_ext.patches.adapter.support import require_movable
from sglang_ext.patches.process import PROCESS
from sglang_ext.patches.seams import current
from sglang_ext.protocol.agent import PrefillServers
from sglang_ext.stages import NO_STAGES, Handed
from sglang_ext.tiers import Tier
from sglang_ext.wire import Message

logger = logging.getLogger(__name__)

IDLE_MILLISECONDS = 5
"""How long a scheduler that only waits for transfers sleeps at most before it looks again."""

ABORTED = "the request was aborted on decode"
"""Why a request failed that decode's engine has given up."""

_SENDER_POLL = {
    SenderState.COMPUTING: KVPoll.WaitingForInput,
    SenderState.COMPLETE: KVPoll.Transferring,
    SenderState.OFFERED: KVPoll.Transferring,
    SenderState.WRITING: KVPoll.Transferring,
    SenderState.RELEASED: KVPoll.Success,
    SenderState.LOST: KVPoll.Failed,
}
_RECEIVER_POLL = {
    ReceiverState.JOINING: KVPoll.Bootstrapping,
    ReceiverState.WAITING: KVPoll.Bootstrapping,
    ReceiverState.READY: KVPoll.WaitingForInput,
    ReceiverState.GRANTED: KVPoll.Transferring,
    ReceiverState.READING: KVPoll.Transferring,
    # Its slots are in use until the transport has stopped, so SGLang must not take them back yet.
    ReceiverState.STOPPING: KVPoll.Transferring,
    ReceiverState.HELD: KVPoll.Success,
    ReceiverState.FAILED: KVPoll.Failed,
}


class AnyPrefill:
    """SGLang asks here whether it knows a prefill server's layout; the agent finds out, without being waited
    for.
    """

    dp_size = 1
    follow_bootstrap_room = True

    def get(self, _address: str) -> AnyPrefill:
        return self


class _ReturnsReceived(Listener):
    """On prefill: takes returned KV by command, and gives it up when the cache is emptied."""

    def __init__(self, return_receiver: ReturnReceiver) -> None:
        self._receiver = return_receiver

    def takes_command(self, message: Message) -> bool:
        if not isinstance(message, TakeBack):
            return False
        self._receiver.take_back(message)
        return True

    def before_clear(self) -> None:
        self._receiver.clear()


class _ReturnsSent(Listener):
    """On decode: returns the blocks of an ended request that are in the tree."""

    def __init__(self, return_sender: ReturnSender) -> None:
        self._sender = return_sender

    def request_ended(self, req: Any, tokens: Any) -> None:
        taken = req.finished() and not isinstance(req.finished_reason, FINISH_ABORT)
        if taken and req.bootstrap_host not in (None, FAKE_BOOTSTRAP_HOST):
            self._sender.ended(req, tokens)

    def before_clear(self) -> None:
        self._sender.clear()


class _PrefillServersListed(Listener):
    """On decode: connects to the prefill servers that routers list, before their requests come."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def takes_command(self, message: Message) -> bool:
        if not isinstance(message, PrefillServers):
            return False
        self._agent.prefill_servers(message)
        return True


class _UntilTheEnd(Listener):
    """Hand-overs end before the cache does."""

    def __init__(self, manager: GlobalKVManager) -> None:
        self._manager = manager

    def before_end(self) -> None:
        self._manager.teardown()


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
        config = PROCESS.settings()
        require_movable(scheduler.model_config, server_args, get_parallel(), config)
        self.buffers = MetadataBuffers(args.aux_data_ptrs, args.aux_item_lens)
        self.page_bytes = sum(args.kv_item_lens)
        self.fence = ForwardFence.of(scheduler)
        self.pushes = config.transfer_mode != "pull"
        parallel = get_parallel()
        prefill = disaggregation_mode.value == "prefill"
        port = server_args.disaggregation_bootstrap_port
        cache = scheduler.tree_cache
        self.store = cache.store if isinstance(cache, GlobalRadixCache) else None
        """By which a request's slots are filled; None where nothing is kept."""
        returns = config.pd_caching == "3" and isinstance(cache, GlobalRadixCache)
        transfers = transfers_of(scheduler, config, args.page_size)
        host = bracketed(
            connectable(listen_host(server_args.host, keyed=config.cluster_key_file is not None))
        )
        rows = scheduler.req_to_metadata_buffer_idx_allocator
        self.agent = Agent(
            AgentConfig(
                Local(
                    parallel.attn_tp_rank,
                    parallel.attn_tp_size,
                    args.page_size,
                    self.buffers.row_bytes,
                    config.transfer_mode,
                    config.transfer_layout,
                    settings_of(scheduler.model_config, scheduler.token_to_kv_pool_allocator.get_kvcache()),
                ),
                "" if isinstance(cache, GlobalRadixCache) and cache.weights.moving else weights_of(scheduler),
                bootstrap=f"{host}:{port}" if prefill else "",
                metrics=server_args.enable_metrics,
            ),
            transfers,
            self.buffers,
            metadata_rows=lambda: rows.size - rows.available_size(),
        )
        self.feed: LayerFeed | None = None
        if config.transfer_mode == "push-by-layer" and prefill:
            kvcache = scheduler.token_to_kv_pool_allocator.get_kvcache()
            first, layers, *_ = transfers.endpoint.pools[POOL].meta.shard
            self.feed = self.agent.layer_feed(first, layers)
            watch_layers(kvcache, self.feed)
        PROCESS.manager = self
        self._listeners: list[Listener] = [_UntilTheEnd(self)]
        self.meeting = ""
        """Where other decode servers find this one's ranks, to take requests over."""
        if not prefill:
            group = scheduler.attn_tp_cpu_group if parallel.attn_tp_size > 1 else None
            self.meeting = on_all_ranks(self.agent.address.encode(), group)[0].decode()
            self.agent.meet_at(self.meeting)
            self._listeners.append(_PrefillServersListed(self.agent))
        self.migration = cache.migration if isinstance(cache, GlobalRadixCache) else None
        """By which requests leave for other decode servers, and come from them."""
        if self.migration is not None:
            self.migration.transfer_by(None if prefill else self)
        self._parts: list[Part] = []
        """Of the cache's ranks, while the server has this role."""
        self.local: LocalAhead | None = None
        if not prefill and isinstance(cache, GlobalRadixCache) and cache.dram is not None:
            self.local = LocalAhead(cache, least_tokens=config.load_min_tokens)
            self._listeners.append(self.local)
        if returns:
            blocks = Blocks(cache)
            if prefill:
                places = Reservations(blocks, into_dram=DRAM_POOL in transfers.endpoint.pools)
                several = parallel.attn_tp_size > 1
                tell_all = cache.command_queue.put if several and cache.command_queue is not None else None
                return_receiver = ReturnReceiver(
                    places,
                    self.agent,
                    lambda: bool(scheduler.waiting_queue),
                    tell_all,
                    self.fence,
                )
                self.agent.receive_returns(return_receiver)
                self._listeners.append(_ReturnsReceived(return_receiver))
                self._parts.append(return_receiver)
            else:
                return_sender = ReturnSender(blocks, self.agent)
                self.agent.send_returns(return_sender)
                self._listeners.append(_ReturnsSent(return_sender))
                self._parts.append(return_sender)
        if isinstance(cache, GlobalRadixCache):
            for listener in self._listeners:
                cache.listeners.add(listener)
            for part in self._parts:
                cache.ranks.add(part)
        poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
        if poller is not None:
            poller.register(self.agent.alarm.fd, POLLIN)
        logger.info("KV transfer backend %s: %r", BACKEND, self.agent)

    def computing(self, scheduler: Any, batch: Any) -> list[Computing]:
        """The pages that a prefill batch will complete, of requests whose decode pages are claimed."""
        page = self.kv_args.page_size
        found: list[Computing] = []
        for req in batch.reqs:
            sender = req.disagg_kv_sender
            handover = getattr(sender, "_handover", None)
            if not isinstance(sender, GlobalKVSender) or handover is None:
                continue
            skip = handover.granted()
            first, last = -(-current.prefix_tokens(req) // page), current.computed_end(req) // page
            if skip is None or last <= max(first, skip):
                continue
            numbers = np.arange(max(first, skip), last)
            row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            pages = row[numbers * page].numpy().astype(np.int64) // page
            found.append(Computing(numbers - skip, pages, handover.writings))
        return found

    def computes(self, batch: Any) -> None:
        """A prefill batch is about to run: note the weights that its requests' KV is computed with."""
        for req in batch.reqs:
            sender = req.disagg_kv_sender
            if isinstance(sender, GlobalKVSender) and sender._handover is not None:
                self.agent.sender.computing(sender._handover)
                sender.req = req

    @property
    def supports_role_switch(self) -> bool:
        """Whether the server can change between prefill and decode: the pool's layers are not watched."""
        return PROCESS.settings().transfer_mode != "push-by-layer"

    def teardown(self) -> None:
        """The server changes its role, and is idle, or ends: end connections and hand-overs. The cache stays
        as it is, and the transfer thread with it."""
        cache, scheduler = PROCESS.scheduler.tree_cache, PROCESS.scheduler
        poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
        if poller is not None:
            poller.unregister(self.agent.alarm.fd)
        if isinstance(cache, GlobalRadixCache):
            for listener in self._listeners:
                listener.before_clear()
                cache.listeners.remove(listener)
            for part in self._parts:
                cache.ranks.remove(part)
            cache.migration.transfer_by(None)
        PROCESS.manager = None
        self.agent.close()
        if not isinstance(cache, GlobalRadixCache) or cache.transfers is not self.agent.transfers:
            self.agent.transfers.close()

    def register_to_bootstrap(self) -> None:
        """The agent does, again and again."""

    def try_ensure_parallel_info(self, _address: str) -> bool:
        return True

    def submit_prefill_recompute(self, receiver: Any, payload: Any) -> None:
        raise NotImplementedError(
            f"{TRANSFER_FLAG} does not support pause_generation(mode='retract') with requests"
        )


class GlobalKVSender(BaseKVSender):  # type: ignore[misc]
    """Prefill's end of one request."""

    def __init__(
        self,
        mgr: GlobalKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self._pages: list[Any] = []
        self._row: int | None = None
        self._last = False
        self._error = ""
        self._handover: SendingHandover | None = None
        self.req: Any = None
        """The request, once its KV is computed."""
        try:
            self._handover = mgr.agent.sender.open(bootstrap_room)
        except RefusedError as error:
            self._error = str(error)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._row = aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        self._last = last_chunk
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        """Pages of a chunk are computed; with the last one the request is offered."""
        self._pages.append(pages_of(kv_indices))
        if not self._last or self._handover is None:
            return
        assert self._row is not None
        logprobs = None if self.req is None else prompt_logprobs.of_request(self.req)
        if logprobs is not None and logprobs.nbytes > MAX_BYTES:
            self._handover.give_up(too_large(logprobs.nbytes))
            return
        self.kv_mgr.agent.sender.complete(
            self._handover,
            np.concatenate(self._pages),
            self.kv_mgr.buffers.read(self._row),
            NO_STAGES if self.req is None else request_stages(self.req),
            logprobs,
        )

    def begin_again(self) -> None:
        """Discard the computed pages, none of which has been offered."""
        self._pages.clear()
        self._last = False

    def poll(self) -> int:
        if self._handover is None:
            return int(KVPoll.Failed)
        if self._handover.state is SenderState.COMPUTING and self.kv_mgr.pushes:
            # Push: prefill has to know decode's slots before it computes.
            granted = self._handover.granted() is not None
            return int(KVPoll.WaitingForInput if granted else KVPoll.Bootstrapping)
        return int(_SENDER_POLL[self._handover.state])

    def pop_decode_prefix_len(self) -> int:
        """Tokens that decode has, which need not be sent. Pulling, decode leaves them out by itself."""
        if self._handover is None or not self.kv_mgr.pushes:
            return 0
        pages = self._handover.granted() or 0
        return int(pages * self.kv_mgr.kv_args.page_size)

    def get_transfer_metric(self) -> KVTransferMetric:
        pages = sum(len(part) for part in self._pages)
        return KVTransferMetric(transfer_total_bytes=pages * self.kv_mgr.page_bytes)

    def failure_exception(self) -> None:
        """Raise why it failed. SGLang frees the slots next, so no lease on them may be left."""
        self.clear()
        raise KVTransferError(
            self.bootstrap_room, self._error or (self._handover.reason if self._handover else "")
        )

    def clear(self) -> None:
        if self._handover is not None:
            self.kv_mgr.agent.sender.forget(self._handover)

    def abort(self) -> None:
        if self._handover is not None:
            self._handover.give_up("the request was aborted on prefill")


class GlobalKVReceiver(BaseKVReceiver):  # type: ignore[misc]
    """Decode's end of one request."""

    require_staging = False
    abort_notified = False

    def __init__(self, mgr: GlobalKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self._handover: ReceivingHandover | None = None
        self._incoming: Incoming | None = None
        self._aborted = False

    def init(self, prefill_dp_rank: int) -> None:
        assert self.bootstrap_room is not None
        migration = self.kv_mgr.migration
        comes_over = migration is not None and migration.target.comes_over(self.bootstrap_room)
        self._handover = self.kv_mgr.agent.receiver.open(
            self.bootstrap_addr, self.bootstrap_room, read=comes_over
        )

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        """Slots are there: read the KV after the prefix that is here already into them."""
        assert self._handover is not None
        assert aux_index is not None
        skip, rest = divmod(decode_prefix_len or 0, self.kv_mgr.kv_args.page_size)
        assert rest == 0, "a cached prefix is whole pages"
        wanted = Wanted(pages_of(kv_indices), skip, aux_index, self.kv_mgr.fence())
        if self.kv_mgr.store is not None:
            tokens = wanted.pages.size * self.kv_mgr.kv_args.page_size
            self._incoming = self.kv_mgr.store.transfer(Tier.HBM, tokens, self.bootstrap_addr)
        self.kv_mgr.agent.receiver.read(self._handover, wanted)

    def poll(self) -> int:
        if self._handover is None:
            return int(KVPoll.Bootstrapping)
        if self._handover.state is ReceiverState.WAITING and not self._handover.read:
            # Push: decode allocates before prefill computes.
            return int(KVPoll.WaitingForInput)
        if FACTS[self._handover.state].end and self._incoming is not None:
            self._incoming.end()
        if self._aborted and self._handover.state is ReceiverState.HELD:
            # The KV came before the abort, and SGLang has not asked since.
            return int(KVPoll.Failed)
        return int(_RECEIVER_POLL[self._handover.state])

    @property
    def handed(self) -> Handed:
        """Measured stages of a request whose KV has just come."""
        handover = self._handover
        now = time.perf_counter()
        return (
            Handed(now)
            if handover is None
            else Handed(now, handover.stages, handover.waited, handover.seconds)
        )

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's log probabilities, computed by prefill for decode's answer."""
        return None if self._handover is None else self._handover.logprobs

    def failure_exception(self) -> None:
        """Raise why it failed, when nothing uses the slots any more: SGLang frees them next."""
        self.clear()
        reason = self._handover.reason if self._handover else "not started"
        raise KVTransferError(self.bootstrap_room, reason or ABORTED)

    def clear(self) -> None:
        if self._handover is not None:
            self.kv_mgr.agent.receiver.settle(self._handover)
        if self._incoming is not None:
            self._incoming.end()

    def abort(self) -> None:
        if self._handover is None:
            # It never began; from now on it polls as failed.
            assert self.bootstrap_room is not None
            self._handover = ReceivingHandover(
                self.bootstrap_addr, self.bootstrap_room, state=ReceiverState.FAILED, reason="aborted"
            )
            return
        self._aborted = True
        self.kv_mgr.agent.receiver.abort(self._handover, ABORTED)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """The agent notifies prefill."""


class GlobalKVBootstrapServer(BaseKVBootstrapServer):  # type: ignore[misc]
    """The bootstrap port of a prefill server, in its HTTP process."""

    def __init__(self, host: str, port: int) -> None:
        self._service = BootstrapService(host, port, keys_of(PROCESS.settings()))

    def close(self) -> None:
        self._service.close()


def run_batch(stock: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler.run_batch``: notes the weights that KV is computed with; with push by layer, layers
    are sent while the next are computed."""
    manager = PROCESS.manager
    if manager is None or scheduler is not PROCESS.scheduler or not batch.forward_mode.is_extend():
        return stock(scheduler, batch, *args, **kwargs)
    manager.computes(batch)
    feed = manager.feed
    if feed is None:
        return stock(scheduler, batch, *args, **kwargs)
    feed.forward_begins(manager.computing(scheduler, batch))
    try:
        return stock(scheduler, batch, *args, **kwargs)
    finally:
        feed.forward_ended()


def weights_changing(scheduler: Any) -> None:
    """The weights are about to change, and may until ``weights_changed``: until then KV of ours is like no
    other."""
    if PROCESS.manager is not None and scheduler is PROCESS.scheduler:
        PROCESS.manager.agent.weights_changed("")


def weights_changed(scheduler: Any) -> None:
    """The weights stay as they are now. On all ranks at once."""
    if PROCESS.manager is not None and scheduler is PROCESS.scheduler:
        PROCESS.manager.agent.weights_changed(weights_of(scheduler))


def bring_ahead(queue: Any) -> None:
    """Decode has polled the requests that have no slots yet."""
    manager = PROCESS.manager
    if manager is not None and manager.local is not None and queue.kv_manager is manager:
        manager.local.each_pass(queue.queue)


def match_on_decode(stock: Any, queue: Any, req: Any) -> Any:
    """The prefix of a prompt that decode has in HBM; blocks from its other tiers are there by now."""
    cache = queue.tree_cache
    if not isinstance(cache, GlobalRadixCache):
        return stock(queue, req)
    if cache.promotions is not None:
        cache.promotions.release(req.cache_request_handle)
    match = stock(queue, req)
    # Blocks that are still in DRAM only will come from prefill: no forward pass would wait for them here.
    match.l2_host_hit_length = 0
    return match


def idle(scheduler: Any) -> None:
    """Nothing to compute: when only transfers are waited for, sleep until one moves or a request comes."""
    manager = PROCESS.manager
    if manager is None or scheduler is not PROCESS.scheduler:
        return
    poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    if poller is not None and not scheduler.is_fully_idle():
        poller.poll(IDLE_MILLISECONDS)
    manager.agent.alarm.clear()
