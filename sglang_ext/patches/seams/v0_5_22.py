"""SGLang from 0.5.22: a matched prefix is a number of tokens; a request's chunks and end enter by one call.

Its slots are read off the tree when they are written to the request's row. A request has its lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, InitLoadBackParams, MatchResult
from sglang.srt.mem_cache.common import release_kv_cache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.radix_global import Node

_LOADED: Final = "sglang_ext_loaded"
"""Attribute of a request: the slots that were loaded for it, also those that no tree has yet."""


def prefix_tokens(req: Req) -> int:
    """How many tokens at a request's beginning need not be computed in this pass."""
    return int(req.prefix_len)


def computed_end(req: Req) -> int:
    """The end of the part of a request that this pass computes, in tokens from the request's beginning."""
    return int(req.extend_end)


def release(req: Req, cache: Any, *, keep: bool) -> None:
    """Free a request's slots. keep: the tree takes over its whole blocks first."""
    release_kv_cache(req, cache, checkpoint=keep)


class CacheSeam(BasePrefixCache):  # type: ignore[misc]
    """SGLang's interface of a cache, mapped to the methods of ours."""

    def found(self, slots: Sequence[Any], device_node: Node, best: Node, below: int) -> MatchResult:
        """A match: the slots of the part in HBM, the last node there, the last in memory, tokens below
        HBM."""
        return MatchResult(
            device_prefix_len=sum(map(len, slots)),
            last_device_node=device_node,
            last_host_node=best,
            best_match_node=best,
            host_hit_length=below,
        )

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        # A request that SGLang releases is finished, also an aborted one: its reason is set before. So an
        # unfinished request is a chunk, or a prefill that is done, and has no end to report.
        if req.finished():
            self.keep_ended_req(req, up_to=up_to)
        else:
            self.keep_computed(req, req.full_untruncated_fill_ids[:up_to])

    def move_lock(self, req: Req, node: Node) -> None:
        """A request's lock goes from the node that it had to another."""
        self.unlock(req.lock)
        req.lock = self.lock(node)
        req.last_node = node

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Node]:
        slots, node = self.start_load(params.best_match_node, params.host_hit_length, params.req)
        setattr(params.req, _LOADED, slots)
        return 0 if slots is None else len(slots), node

    def path_device_indices(self, node: Node) -> torch.Tensor:
        return self.rows.slots_to(node)

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        """Includes slots that stream in ahead of the forward pass and are in no tree yet."""
        path = self.path_device_indices(req.last_node)
        lacking = req.prefix_len - len(path)
        if lacking > 0:
            path = torch.cat([path, getattr(req, _LOADED)[-lacking:]])
        return path[: req.prefix_len]
