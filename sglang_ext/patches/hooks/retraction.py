"""Ask before a running request is retracted for one of a higher priority, and keep its KV.

Change: with ``--enable-priority-scheduling``, SGLang preempts running requests as soon as one of a higher
priority finds no place among them, frees their KV, and computes it again. Four hooks, for
``patches/adapter/retracting.py``:

- around ``PrefillAdder.preempt_to_schedule``, where no place is free: ours decides, and retracts;
- around ``PrefillAdder.add_one_req``: so it does where slots are lacking, for which SGLang retracts no
  request;
- after ``_get_new_batch_prefill_raw``: retracted requests wait; requests that run again are counted;
- before ``process_batch_result``: the duration of a decode step is measured.

Why no extension point serves: SGLang's scheduler decides by priority alone, and frees KV by itself.

Can go: when SGLang weighs the wait against the retraction, and inserts the KV of the requests that it
preempts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.adapter.retracting import Retracting
from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


def _retracting(part: Any) -> Retracting | None:
    """Of the cache of a scheduler or of a part of one; None where SGLang decides."""
    cache: Any = called_cache(part)
    return None if cache is None else cache.retracting


def around_preempt(stock: Callable[..., bool], adder: Any, req: Any) -> bool:
    """Around ``preempt_to_schedule``: every place is taken."""
    retracting = _retracting(adder)
    return stock(adder, req) if retracting is None else retracting.make_room(adder, req, rows=1)


def around_add(stock: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``add_one_req``: a place is free, and slots may be lacking."""
    retracting = _retracting(adder)
    if retracting is None:
        return stock(adder, req, *args, **kwargs)
    return retracting.add(stock, adder, req, *args, **kwargs)


def after_prefill_batch(result: tuple[Any, Any], scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``_get_new_batch_prefill_raw``."""
    retracting = _retracting(scheduler)
    if retracting is None:
        return
    retracting.queue()
    batch, _ = result
    if batch is not None:
        retracting.admitted(batch.reqs)


def before_batch_result(scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before ``process_batch_result``."""
    retracting = _retracting(scheduler)
    if retracting is None:
        return
    if batch.forward_mode.is_decode():
        retracting.retraction.decoded()
    else:
        retracting.retraction.interrupted()


PATCH = hook_patch(
    "retraction",
    "running requests give way to one of a higher priority only if it would wait, and go on from their KV",
    Hook(f"{_ADDER}.preempt_to_schedule", "around", around_preempt),
    Hook(f"{_ADDER}.add_one_req", "around", around_add),
    Hook(f"{_SCHEDULER}._get_new_batch_prefill_raw", "after", after_prefill_batch),
    Hook(f"{_SCHEDULER}.process_batch_result", "before", before_batch_result),
)
