"""SGLang 0.5.21: a matched prefix is a tensor of slots; a request's chunks and its end enter by two calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, InitLoadBackParams, MatchResult
from sglang.srt.mem_cache.common import release_kv_cache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.radix_global import Node


def prefix_tokens(req: Req) -> int:
    """How many tokens at a request's beginning need not be computed in this pass."""
    return len(req.prefix_indices)


def computed_end(req: Req) -> int:
    """The end of the part of a request that this pass computes, in tokens from the request's beginning."""
    return int(req.extend_range.end)


def release(req: Req, cache: Any, *, keep: bool) -> None:
    """Free a request's slots. keep: the tree takes over its whole blocks first."""
    release_kv_cache(req, cache, is_insert=keep)


class CacheSeam(BasePrefixCache):  # type: ignore[misc]
    """SGLang's interface of a cache, mapped to the methods of ours."""

    def found(self, slots: Sequence[Any], device_node: Node, best: Node, below: int) -> MatchResult:
        """A match: the slots of the part in HBM, the last node there, the last in memory, tokens below
        HBM."""
        return MatchResult(
            device_indices=self.slot_ops.join(list(slots)),
            last_device_node=device_node,
            last_host_node=best,
            best_match_node=best,
            host_hit_length=below,
        )

    def insert_req(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        self.keep_ended_req(req, up_to=up_to)

    def cache_unfinished_req(self, req: Req, chunked: bool = False, **kwargs: Any) -> None:
        tokens = req.get_fill_ids()
        self.keep_computed(req, tokens)
        # The tail that is shorter than a block stays the request's, at the end of its prefix.
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(tokens)]
        req.prefix_indices = row.to(dtype=torch.int64, copy=True)

    def move_lock(self, req: Req, node: Node) -> None:
        """A request's lock goes from the node that it had to another."""
        self.dec_lock_ref(req.last_node)
        self.inc_lock_ref(node)
        req.last_node = node

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, Node]:
        slots, node = self.start_load(params.best_match_node, params.host_hit_length, params.req)
        return (self.slot_ops.join([]) if slots is None else slots), node
