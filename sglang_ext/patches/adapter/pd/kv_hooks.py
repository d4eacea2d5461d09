"""The calls of SGLang's scheduler around batches, weights and idle passes, for the transfer backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_ext.engine.forward_fence import on_host
from sglang_ext.engine.pd.pushing import Computing
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.pd.kv_manager import GlobalKVManager, poller_of
from sglang_ext.patches.adapter.pd.kv_requests import GlobalKVSender
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.patches.process import PROCESS
from sglang_ext.patches.seams import current

IDLE_MILLISECONDS = 5
"""How long a scheduler that only waits for transfers sleeps at most before it looks again."""


def run_batch(stock: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler.run_batch``: notes the weights that KV is computed with; with push by layer, layers
    are sent while the next are computed."""
    manager = PROCESS.manager
    if manager is None or scheduler is not PROCESS.scheduler or not batch.forward_mode.is_extend():
        return stock(scheduler, batch, *args, **kwargs)
    note_weights(manager, batch)
    feed = manager.feed
    if feed is None:
        return stock(scheduler, batch, *args, **kwargs)
    feed.forward_begins(computing(manager, scheduler, batch))
    try:
        return stock(scheduler, batch, *args, **kwargs)
    finally:
        feed.forward_ended()


def weights_changing(scheduler: Any) -> None:
    """The weights are about to change, and may until ``weights_changed``: until then KV of ours is like no
    other."""
    if PROCESS.manager is not None and scheduler is PROCESS.scheduler:
        PROCESS.manager.weights.changing()


def weights_changed(scheduler: Any) -> None:
    """The weights stay as they are now. On all ranks of a stage at once."""
    if PROCESS.manager is not None and scheduler is PROCESS.scheduler:
        PROCESS.manager.weights.changed()


def bring_ahead(queue: Any) -> None:
    """Decode has polled the requests that have no slots yet."""
    manager = PROCESS.manager
    if manager is not None and manager.role is not None and queue.kv_manager is manager:
        manager.role.bring_ahead(queue.queue)


def match_on_decode(stock: Any, queue: Any, req: Any) -> Any:
    """The prefix of a prompt that decode has in HBM; blocks from its other tiers are there by now."""
    cache = queue.tree_cache
    if not isinstance(cache, GlobalRadixCache | HybridRadixCache):
        return stock(queue, req)
    if isinstance(cache, GlobalRadixCache) and cache.promotions is not None:
        cache.promotions.release(req.cache_request_handle)
    match = stock(queue, req)
    if isinstance(cache, HybridRadixCache):
        cache.forget_below(req)
    # Blocks that are still in DRAM only will come from prefill: no forward pass would wait for them here.
    match.l2_host_hit_length = 0
    return match


def idle(scheduler: Any) -> None:
    """Nothing to compute: when only transfers are waited for, sleep until one moves or a request comes."""
    manager = PROCESS.manager
    if manager is None or scheduler is not PROCESS.scheduler:
        return
    poller = poller_of(scheduler)
    if poller is not None and not scheduler.is_fully_idle():
        poller.poll(IDLE_MILLISECONDS)
    manager.agent.alarm.clear()


def computing(manager: GlobalKVManager, scheduler: Any, batch: Any) -> list[Computing]:
    """The pages that a prefill batch will complete, of requests whose decode pages are claimed."""
    page = manager.kv_args.page_size
    found: list[Computing] = []
    for req in batch.reqs:
        sender = req.disagg_kv_sender
        if not isinstance(sender, GlobalKVSender) or sender.handover is None:
            continue
        skip = sender.handover.granted()
        first, last = -(-current.prefix_tokens(req) // page), current.computed_end(req) // page
        if skip is None or last <= max(first, skip):
            continue
        first = max(first, skip)
        row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        # The pass reads the row too, behind whatever has filled it.
        pages = on_host(row[first * page : last * page : page] // page)
        found.append(Computing(np.arange(first, last) - skip, pages, sender.handover.writings))
    return found


def note_weights(manager: GlobalKVManager, batch: Any) -> None:
    """A prefill batch is about to run: note the weights that its requests' KV is computed with."""
    for req in batch.reqs:
        sender = req.disagg_kv_sender
        if isinstance(sender, GlobalKVSender) and sender.handover is not None:
            manager.agent.sender.computing(sender.handover)
            sender.req = req
