"""Notify our cache when the model's weights or the KV pool's memory change under it.

Change: around any call that changes weights, ``weights_changing()`` of the cache is called before the change,
and ``weights_changed()`` once they stand still, also when the call has failed: half an update changes weights
too. KV of other weights then never matches, also where the caller asked SGLang not to flush its cache. In
between, nothing is cached: in a session of updates (``begin`` to ``end``) weights may be changed from outside
at any time, and while their memory is released (``release_memory_occupation`` to
``resume_memory_occupation``) there are none. ``check_weights`` overwrites them when it is asked to reset
tensors. Before memory is released the cache waits for copies that read or write the pool (``settle()``),
because SGLang unmaps the pool before it flushes the cache.

LoRA adapters need no hook: SGLang gives each load of an adapter an id of its own, which is part of the extra
key of its requests.

Why no extension point serves: SGLang signals weight updates to a cache only by ``reset()``, and only when the
caller asks for it.

Can go: when SGLang has such calls in its cache interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sglang_ext.patches.adapter.admission import BACKEND
from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

WEIGHTS: Final = "weights"
"""SGLang's tag of the weights' memory."""
RESETS: Final = "reset_tensors"
"""The action of ``check_weights`` that overwrites weights."""
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def around_weights_change(change: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around every call that changes weights, or after which they may change."""
    _changing(manager.scheduler)
    try:
        return change(manager, *args, **kwargs)
    finally:
        _stand_still(manager)


def around_check(check: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Around ``check_weights``, which compares, sums, or overwrites."""
    if recv_req.action != RESETS:
        return check(manager, recv_req)
    return around_weights_change(check, manager, recv_req)


def around_release(release: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Around ``release_memory_occupation``."""
    cache = called_cache(manager.scheduler)
    if cache is not None:
        cache.settle()
    if _concerns_weights(recv_req):
        _changing(manager.scheduler)
    return release(manager, recv_req)


def around_resume(resume: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Around ``resume_memory_occupation``: the memory may have its former contents, or any other."""
    result = resume(manager, recv_req)
    if _concerns_weights(recv_req):
        _stand_still(manager)
    return result


def _changing(scheduler: Any) -> None:
    """Notify our parts in the scheduler's process, as far as they are there."""
    cache = called_cache(scheduler)
    if cache is not None:
        cache.weights_changing()
    if _transfers(scheduler):
        from sglang_ext.patches.adapter.pd import kv_hooks

        kv_hooks.weights_changing(scheduler)


def _stand_still(manager: Any) -> None:
    """A change is over; not while a session is open, or the weights have no memory to be read from."""
    if manager._session is not None or WEIGHTS in manager.offload_tags:
        return
    cache = called_cache(manager.scheduler)
    if cache is not None:
        cache.weights_changed()
    if _transfers(manager.scheduler):
        from sglang_ext.patches.adapter.pd import kv_hooks

        kv_hooks.weights_changed(manager.scheduler)


def _transfers(scheduler: Any) -> bool:
    """Whether KV goes to or comes from other servers, also without our cache."""
    args = getattr(scheduler, "server_args", None)
    return getattr(args, "disaggregation_transfer_backend", None) == BACKEND


def _concerns_weights(recv_req: Any) -> bool:
    return not recv_req.tags or WEIGHTS in recv_req.tags


PATCH = hook_patch(
    "weight_updates",
    "reports weight updates and the release of the pool's memory to our cache",
    Hook(f"{_MANAGER}.update_weights_from_disk", "around", around_weights_change),
    Hook(f"{_MANAGER}.update_weights_from_distributed", "around", around_weights_change),
    Hook(f"{_MANAGER}.update_weights_from_tensor", "around", around_weights_change),
    Hook(f"{_MANAGER}.update_weights_from_ipc", "around", around_weights_change),
    Hook(f"{_MANAGER}.begin_weight_update", "around", around_weights_change),
    Hook(f"{_MANAGER}.end_weight_update", "around", around_weights_change),
    Hook(f"{_MANAGER}.check_weights", "around", around_check),
    Hook(f"{_MANAGER}.release_memory_occupation", "around", around_release),
    Hook(f"{_MANAGER}.resume_memory_occupation", "around", around_resume),
)
