"""Keep the cache when a server changes between prefill and decode, and let its routers know.

Change: two hooks. Around the place where SGLang empties the cache between the two roles, ours is left as it
is: a token's KV does not depend on the role that computed it, and the tree's slots belong to the tree in both
roles. After the switch the cache receives the role, which the instance registers with from then on.

Why no extension point serves: SGLang empties any cache, and does not announce the new role.

Can go: when a cache may say that it outlives the switch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

_ROLES = "sglang.srt.disaggregation.role_switch"


def keep_cache(stock: Callable[[Any], None], scheduler: Any) -> None:
    """Around ``_release_prefix_cache_for_role_switch``."""
    if called_cache(scheduler) is None:
        stock(scheduler)


def after_switch(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``handle_pd_role_switch``, which may only have been asked whether it could."""
    cache: Any = called_cache(scheduler)
    if cache is not None and result.success and scheduler.disaggregation_mode.value == result.new_role:
        cache.listeners.role_changed(result.new_role)


PATCH = hook_patch(
    "role_switch",
    "a server that changes between prefill and decode keeps its cache, and registers in its new role",
    Hook(f"{_ROLES}._release_prefix_cache_for_role_switch", "around", keep_cache),
    Hook(f"{_ROLES}.handle_pd_role_switch", "after", after_switch),
)
