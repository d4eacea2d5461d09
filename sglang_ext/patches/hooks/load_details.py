"""Put the decision about loading a request's KV into its answer, with the numbers.

Change: ``meta_info["cached_tokens_details"]`` says how many tokens came from which tier. Where our cache has
weighed loading against computing for the request, it says so there too (``engine/tiers/load_report.py``): for
``host`` and ``storage`` the decision, its reason, tokens found and read, bytes read, and the microseconds
that each way was expected to take; ``storage_backend`` names our disk. A request that was computed because
that is faster gets the entry as well.

Why no extension point serves: the entry is made from three attributes of the request. SGLang's IPC carries it
as a dictionary of whole numbers and texts, so nothing else has to change.

Can go: when a cache can add to a request's ``cached_tokens_details``.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.engine.tiers.load_report import answer_details
from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"


def after_details(details: dict[str, int | str] | None, streamer: Any, req: Any) -> Any:
    """After ``get_cached_tokens_details``."""
    if called_cache(streamer) is None:
        return None
    return answer_details(details, req)


PATCH = hook_patch(
    "load_details",
    "what was decided about loading a request's KV is in its answer",
    Hook(f"{_STREAMER}.get_cached_tokens_details", "after", after_details),
)
