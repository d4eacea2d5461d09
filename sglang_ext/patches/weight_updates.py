"""Tell our cache when the model's weights or the KV pool's memory change under it.

What: before any call that changes weights the cache starts a new namespace (``weights_changed()``), so that
KV of other weights never matches, also where the caller asked SGLang not to flush its cache. Before memory is
released the cache waits for copies that read or write the pool (``settle()``), because SGLang unmaps the pool
before it flushes the cache. A session of updates (``begin`` to ``end``) may change weights from outside at
any time in between, so both ends count.

Why no extension point serves: SGLang tells a cache of weight updates only by ``reset()``, and only when the
caller asks for it.

For: SGLang 0.5.21.
Can go: when SGLang has such calls in its cache interface.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.patches.base import Target
from sglang_ext.patches.hooks import Hook, hook_patch
from sglang_ext.patches.scheduler_calls import called_cache

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def before_weights_change(manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before every call that changes weights. Also when it will fail: half an update changes weights too."""
    cache = called_cache(manager.scheduler)
    if cache is not None:
        cache.weights_changed()


def before_memory_release(manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before ``release_memory_occupation``."""
    cache = called_cache(manager.scheduler)
    if cache is not None:
        cache.settle()


def _weights(method: str, source: str) -> Hook:
    return Hook(Target(f"{_MANAGER}.{method}", "(self, recv_req)", source), "before", before_weights_change)


PATCH = hook_patch(
    "weight_updates",
    "our cache is told of weight updates and of the release of the pool's memory",
    _weights("update_weights_from_disk", "78f28ebcb9c0"),
    _weights("update_weights_from_distributed", "54e7194fec00"),
    _weights("update_weights_from_tensor", "b6ce83124299"),
    _weights("update_weights_from_ipc", "b723b5e6f9fd"),
    _weights("begin_weight_update", "fd496cbc2ddb"),
    _weights("end_weight_update", "c977f83bb344"),
    Hook(
        Target(f"{_MANAGER}.release_memory_occupation", "(self, recv_req)", "cda5d3de6816"),
        "before",
        before_memory_release,
    ),
)
