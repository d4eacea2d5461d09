"""The scheduler's calls for requests and matches where SGLang's versions differ: the other side of
`patches/seams/`, for tests that stand in for the scheduler."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache import common

if hasattr(common, "checkpoint_kv_cache"):
    from sglang.srt.mem_cache.common import checkpoint_kv_cache, match_kv_cache

    def publish(req: Any, cache: Any) -> None:
        """Publish the KV that a request has computed so far."""
        checkpoint_kv_cache(req, cache)

    def look_up(req: Any, cache: Any, tokens: Any) -> Any:
        """Match a request's tokens, and put the match on it."""
        return match_kv_cache(req, cache, tokens)

    def found_tokens(match: Any) -> int:
        """How many tokens are in HBM."""
        return int(match.device_prefix_len)

    def found_slots(match: Any, cache: Any) -> torch.Tensor:
        """Their slots."""
        slots = cache.path_device_indices(match.last_device_node)
        assert len(slots) == match.device_prefix_len
        return slots

    def with_prefix(tokens: int) -> dict[str, Any]:
        """The field of a request for the length of its cached prefix."""
        return {"prefix_len": tokens}

else:
    from sglang.srt.managers.schedule_policy import match_prefix_for_req
    from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

    def publish(req: Any, cache: Any) -> None:
        """Publish the KV that a request has computed so far."""
        maybe_cache_unfinished_req(req, cache)

    def look_up(req: Any, cache: Any, tokens: Any) -> Any:
        """Match a request's tokens, and put the match on it."""
        return match_prefix_for_req(cache, req, tokens, include_req=True)

    def found_tokens(match: Any) -> int:
        """How many tokens are in HBM."""
        return len(match.device_indices)

    def found_slots(match: Any, cache: Any) -> torch.Tensor:
        """Their slots."""
        return match.device_indices

    def with_prefix(tokens: int) -> dict[str, Any]:
        """The field of a request for the length of its cached prefix."""
        return {"prefix_indices": [0] * tokens}
