"""Throw a prefill batch away, and run its requests again, when damaged KV has streamed into it.

Change: a request may be admitted while its KV still comes from disk, layer by layer in front of the forward
pass (``engine/tiers/disk_reads.py``). A damaged or unreadable layer is detected only when the pass has run.
Then every request of the batch goes back to the queue the way SGLang retracts requests: nothing of it enters
the tree, its slots are freed, and its result is skipped. Three hooks:

- after ``run_batch``: ask the cache whether everything held; if not, release and mark the requests. The whole
  batch, because SGLang skips retracted requests without skipping their part of the input log probabilities;
- after ``process_batch_result`` of that very batch (``forward_iter`` names it): put its requests back into
  the queue. Not before: a request that is prefilled again counts as live, and would take the old result for
  its own. With overlap, the result of an earlier batch, a chunk of the same request, comes first;
- before the last batch is merged into the running one: take them out of it.

A prefill server does not skip results of retracted requests, and treats a request whose chunk it does not
continue as one giving way. There the result of the whole batch is skipped, its requests are taken back when
the next batch is chosen, after the results before it were processed, and the parts collected of them for
decode are forgotten (nothing is offered before the last chunk). Requests aborted meanwhile end as always.
Decode computes nothing of a prompt: blocks that fail to verify there are found before slots are set aside,
and come from prefill.

Why no extension point serves: SGLang's caches load only complete entries.

Can go: when SGLang can run a batch again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_PENDING = "_sglang_ext_restarts"
"""Attribute of the scheduler: the requests that wait for their old result to be skipped, by batch."""
_THROWN = "_sglang_ext_thrown"
"""Attribute of a prefill server's scheduler: batches whose requests are to be taken back."""
_TAKEN = "_sglang_ext_taken_back"
"""Attribute of the scheduler: the requests that have to leave the last batch."""


def take_back(reqs: Sequence[Any], tree_cache: Any) -> list[Any]:
    """Give back everything that requests of a batch hold, as if they had not been admitted; returns the
    requests given back.

    A request that has not generated anything yet is accounted for anew when it runs again.
    """
    from sglang_ext.patches.seams import current

    taken = []
    for req in reqs:
        if req.finished() or not req.kv.holds_kv:
            continue
        current.release(req, tree_cache, keep=False)
        req.reset_for_retract()
        if not req.output_ids:
            req.retracted_stain = False
            req.cached_tokens = 0
            req._cache_breakdown_computed = False
            req.storage_hit_length, req.storage_hit_start = 0, None
        taken.append(req)
    return taken


def after_run_batch(_result: Any, scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``run_batch``: the forward pass has asked for every layer, so all that streams is decided."""
    cache = called_cache(scheduler)
    if cache is None or not batch.forward_mode.is_extend() or cache.streams_hold():
        return
    logger.warning(
        "KV that was streaming from disk could not be read or did not verify; %d requests run again",
        len(batch.reqs),
    )
    if _prefills(scheduler):
        setattr(scheduler, _THROWN, [*getattr(scheduler, _THROWN, ()), batch])
    else:
        _take_back(scheduler, batch)


def _take_back(scheduler: Any, batch: Any) -> None:
    """Give back everything that a batch's requests hold; they wait for its result to be skipped."""
    if scheduler.chunked_req in batch.reqs:
        scheduler.chunked_req = None
    taken = take_back(batch.reqs, scheduler.tree_cache)
    setattr(scheduler, _PENDING, {**getattr(scheduler, _PENDING, {}), batch.forward_iter: taken})
    setattr(scheduler, _TAKEN, taken)


def _take_back_thrown(scheduler: Any) -> None:
    for batch in getattr(scheduler, _THROWN, ()):
        _take_back(scheduler, batch)
    setattr(scheduler, _THROWN, [])


def _prefills(scheduler: Any) -> bool:
    return bool(scheduler.disaggregation_mode.value == "prefill")


def around_prefill_result(stock: Callable[..., None], scheduler: Any, batch: Any, result: Any) -> None:
    """Around a prefill server's ``process_batch_result_disagg_prefill``."""
    from sglang.srt.disaggregation.utils import is_aborted

    thrown = {each.forward_iter for each in getattr(scheduler, _THROWN, ())}
    if batch.forward_iter not in thrown | getattr(scheduler, _PENDING, {}).keys():
        stock(scheduler, batch, result)
        return
    aborted = [req for req in batch.reqs if is_aborted(req) and scheduler._retire_aborted_prefill_result(req)]
    if aborted:
        scheduler.output_streamer.stream_output(aborted, any(req.return_logprob for req in aborted))


def after_batch_result(_result: None, scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``process_batch_result``."""
    if any(each.forward_iter == batch.forward_iter for each in getattr(scheduler, _THROWN, ())):
        _take_back_thrown(scheduler)  # without overlap, its result comes first
    pending = getattr(scheduler, _PENDING, None)
    if pending:
        for req in pending.pop(batch.forward_iter, ()):
            if _prefills(scheduler):
                queue_again(scheduler, req)
            else:
                scheduler._add_request_to_queue(req, is_retracted=True)


def queue_again(scheduler: Any, req: Any) -> None:
    """Let a request whose hand-over is open already wait to be prefilled from its beginning."""
    req.start_send_idx = req.disagg_decode_prefix_len
    req.tmp_end_idx = -1
    req.early_send_prefix_end = None
    scheduler.clear_pending_chunk_send(req)
    req.disagg_kv_sender.begin_again()
    req.storage_prefetch_retry_attempts = 0
    req.storage_prefetch_last_match_len = None
    req.staged_prefetch_plan = None
    scheduler._prefetch_kvcache(req)
    req.time_stats.set_wait_queue_entry_time()
    req.arrival_processed_tokens = scheduler.processed_tokens_counter
    scheduler.waiting_queue.append(req)


def after_events(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``_process_hicache_events``, the beginning of the choice of the next batch."""
    if getattr(scheduler, _THROWN, None):
        _take_back_thrown(scheduler)
    taken = getattr(scheduler, _TAKEN, None)
    if not taken:
        return
    setattr(scheduler, _TAKEN, [])
    last = scheduler.last_batch
    if last is not None:  # a pause may have drained it
        last.filter_batch(keep_indices=[i for i, req in enumerate(last.reqs) if req not in taken])


PATCH = hook_patch(
    "restarts",
    "a prefill batch into which damaged KV has streamed is thrown away and runs again",
    Hook(f"{_SCHEDULER}.run_batch", "after", after_run_batch),
    Hook(f"{_SCHEDULER}.process_batch_result", "after", after_batch_result),
    Hook(f"{_PREFILL}.process_batch_result_disagg_prefill", "around", around_prefill_result),
    Hook(f"{_SCHEDULER}._process_hicache_events", "after", after_events),
)
