"""Early send of a cached prefix by a prefill server on a CPU.

Change: with overlap scheduling ``maybe_send_cached_prefix_chunk`` records a ``torch.cuda.Event``, on which
the transfer waits before it reads KV that the forward pass before may still be writing. Without CUDA that
raises and kills the prefill server at its first cached prefix. On a CPU a forward pass has ended when the
scheduler goes on, so there is nothing to wait for: the call is made as without overlap, which records no
event.

Why no extension point serves: the event's class is fixed in the method.

(``SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=0`` would avoid the call and the gain.)
Can go: when SGLang takes the event from ``torch.get_device_module()``.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang_ext.patches.base import Patch, Scope, is_in_place, put_in_place, resolve

_CLASS = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_NAME = "early_send"
_METHOD = "maybe_send_cached_prefix_chunk"


def apply() -> None:
    """Wrap the method on the class that defines it."""
    if applied():
        return
    mixin = resolve(_CLASS)
    stock = getattr(mixin, _METHOD)

    @functools.wraps(stock)
    def maybe_send_cached_prefix_chunk(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        overlap, scheduler.enable_overlap = scheduler.enable_overlap, False
        try:
            stock(scheduler, req, *args, **kwargs)
        finally:
            scheduler.enable_overlap = overlap

    put_in_place(mixin, _METHOD, maybe_send_cached_prefix_chunk, _NAME)


def applied() -> bool:
    """Whether SGLang calls our wrapper."""
    return is_in_place(resolve(_CLASS), _METHOD, _NAME)


PATCH = Patch(
    name=_NAME,
    summary="a CPU prefill server sends cached prefixes early without a CUDA event",
    scope=Scope.CPU,
    targets=(f"{_CLASS}.{_METHOD}",),
    apply=apply,
    applied=applied,
)
