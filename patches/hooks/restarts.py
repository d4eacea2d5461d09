"""Throw a prefill batch away, and run its requests again, when damaged KV has streamed into it.

What: a request may be admitted while its KV still comes from disk, layer by layer in front of the forward
pass (``engine/tiers/promotions.py``). That a layer is damaged or unreadable is known only when the pass has
run. Then every request of the batch goes back to the queue the way SGLang retracts requests: nothing of it
enters the tree, its slots are freed, and its result is skipped. Three hooks:

- after ``run_batch``: ask the cache whether everything held; if not, release and mark the requests. The whole
  batch, because SGLang skips retracted requests without skipping their part of the input log probabilities;
- after ``process_batch_result`` of that very batch (``forward_iter`` names it): put its requests back into
  the queue. Not before: a request that is prefilled again counts as live, and would take the old result for
  its own. With overlap, the result of an earlier batch, a chunk of the same request, comes first;
- before the last batch is merged into the running one: take them out of it.

Why no extension point serves: SGLang's caches load only what is complete.

For: SGLang 0.5.21.
Can go: when SGLang can run a batch again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang_ext.patches.base import Target
from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PENDING = "_sglang_ext_restarts"
"""Attribute of the scheduler: the requests that wait for their old result to be skipped, by batch."""
_TAKEN = "_sglang_ext_taken_back"
"""Attribute of the scheduler: the requests that have to leave the last batch."""


def take_back(reqs: Sequence[Any], tree_cache: Any) -> list[Any]:
    """Give back everything that requests of a batch hold, as if they had not been admitted; which those are.

    A request that has not generated anything yet is accounted for anew when it runs again.
    """
    from sglang.srt.mem_cache.common import release_kv_cache

    taken = []
    for req in reqs:
        if req.finished() or not req.kv.holds_kv:
            continue
        release_kv_cache(req, tree_cache, is_insert=False)
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
    if scheduler.chunked_req in batch.reqs:
        scheduler.chunked_req = None
    taken = take_back(batch.reqs, scheduler.tree_cache)
    setattr(scheduler, _PENDING, {**getattr(scheduler, _PENDING, {}), batch.forward_iter: taken})
    setattr(scheduler, _TAKEN, taken)
    logger.warning(
        "KV that was streaming from disk could not be read or did not verify; %d requests run again",
        len(taken),
    )


def after_batch_result(_result: None, scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``process_batch_result``."""
    pending = getattr(scheduler, _PENDING, None)
    if pending:
        for req in pending.pop(batch.forward_iter, ()):
            scheduler._add_request_to_queue(req, is_retracted=True)


def after_events(_result: None, scheduler: Any) -> None:
    """After ``_process_hicache_events``, the beginning of the choice of the next batch."""
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
    Hook(
        Target(f"{_SCHEDULER}.run_batch", "(self, batch, pp_proxy_tensors=None)", "8c6ed80ef5c4"),
        "after",
        after_run_batch,
    ),
    Hook(
        Target(f"{_SCHEDULER}.process_batch_result", "(self, batch, result)", "726305f46a97"),
        "after",
        after_batch_result,
    ),
    Hook(Target(f"{_SCHEDULER}._process_hicache_events", "(self)", "0d245d43ba85"), "after", after_events),
)
