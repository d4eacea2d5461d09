"""Abort the named request only.

Change: around ``Scheduler.abort_request``. SGLang compares names with ``startswith``, so that aborting
``job-1`` also aborts ``job-10``, and an empty name aborts everything. While SGLang looks for the request,
other requests whose names begin with the same characters are renamed; an empty name aborts nothing.

Why no extension point serves: the comparison is in the middle of ``abort_request`` and of
``GrammarManager.abort_requests``, once for each queue.

Can go: when SGLang compares whole names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

_HIDDEN = "\0"
"""In front of a name, it keeps the name from beginning like any that a client gives."""


def around_abort(stock: Callable[[Any, Any], None], scheduler: Any, recv_req: Any) -> None:
    """Around ``abort_request``."""
    if recv_req.abort_all or called_cache(scheduler) is None:
        stock(scheduler, recv_req)
    elif recv_req.rid:
        with _hidden([req for req in _requests(scheduler) if _is_namesake(req.rid, recv_req.rid)]):
            stock(scheduler, recv_req)


def _is_namesake(rid: str, named: str) -> bool:
    return rid != named and rid.startswith(named)


@contextmanager
def _hidden(reqs: list[Any]) -> Iterator[None]:
    names = {id(req): (req, req.rid) for req in reqs}
    try:
        for req, rid in names.values():
            req.rid = _HIDDEN + rid
        yield
    finally:
        for req, rid in names.values():
            req.rid = rid


def _requests(scheduler: Any) -> Iterator[Any]:
    """Every request that ``abort_request`` compares, some of them twice."""
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    yield from scheduler.collect_inflight_reqs()
    mode = scheduler.disaggregation_mode.value
    if mode == "prefill":
        yield from scheduler.disagg_prefill_bootstrap_queue.queue
        yield from scheduler.disagg_prefill_inflight_queue
    elif mode == "decode":
        for queue in (scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue):
            yield from [decode_req.req for decode_req in queue.queue]
        yield from scheduler.disagg_decode_prealloc_queue.retracted_queue


PATCH = hook_patch(
    "exact-abort",
    "an abort ends the request of exactly that name, and an empty name ends none",
    Hook("sglang.srt.managers.scheduler.Scheduler.abort_request", "around", around_abort),
)
