"""Rows of SGLang's request table: the slots of each request, and how its whole blocks become the tree's.

A request owns the slots of its row from ``kv.cache_protected_len`` on; the tree owns those before.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from sglang_ext.engine.cache.rank_cache import RankCache
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.seams import current
from sglang_ext.radix_global import Node
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_NAMESPACE = "sglang_ext_namespace"
"""Attribute of a request: the namespace it was matched in, which is where its KV belongs."""
_RECEIVED = "sglang_ext_received"
"""Attribute of a request: the KV that a prefill server has computed of it is in the tree."""
_FAULTED = "sglang_ext_faulted"
"""Attribute of a request: the cache failed on it, and keeps nothing more of it."""


class RequestRows:
    """See the module's docstring. In the scheduler's thread.

    Args:
        cache: takes over the blocks.
        table: SGLang's ``ReqToTokenPool``; None for an index alone.
    """

    def __init__(self, cache: RankCache, table: Any) -> None:
        self._cache = cache
        self._table = table

    # -- where a request's KV belongs -----------------------------------------------------------

    def set_namespace(self, req: Req, namespace: Hashable) -> None:
        """File the request's KV under the namespace in which it was matched."""
        setattr(req, _NAMESPACE, namespace)

    def exclude(self, req: Req) -> None:
        """Keep nothing more of a request on which the cache has failed."""
        setattr(req, _FAULTED, True)

    def namespace_of(self, req: Req) -> Hashable | None:
        """Where the request's KV belongs; ``None`` when no other request may have it.

        A request that was matched before the weights changed has KV of both, or KV of one set of weights that
        attends to KV of the other. From then on nothing of it is inserted, not even KV that was computed
        before: a pass may have been under way.
        """
        weights = self._cache.weights
        found = getattr(req, _NAMESPACE, (0, req.extra_key, req.cache_salt))
        is_current = found[0] == weights.generation and not weights.moving
        return found if is_current and not is_private(req) else None

    # -- reading --------------------------------------------------------------------------------

    def computed_end(self, req: Req) -> int:
        """The token up to which the batch that is about to run computes a request."""
        return current.computed_end(req)

    def slots_of(self, req: Req, start: int, end: int) -> Any:
        """Where tokens of a request are."""
        return self._cache.slot_ops.keep(self._table.req_to_token[req.kv.req_pool_idx, start:end])

    def slots_to(self, node: Node) -> torch.Tensor:
        """The slots from the top to the end of a node that HBM has."""
        parts: list[Any] = []
        while node.parent is not None:
            parts.append(node.placements[self._cache.hbm])
            node = node.parent
        return self._cache.slot_ops.join(parts[::-1])

    # -- keeping --------------------------------------------------------------------------------

    def keep_computed(self, req: Req, tokens: Any) -> Node | None:
        """A prefill or a part of it is done: others may use its whole blocks from now on. Returns the node at
        which they end, to which the request's lock must go; None where nothing was kept.
        """
        before = req.kv.cache_protected_len
        kept = self.keep(req, tokens)
        if kept is None:
            return None
        node, held = kept
        if held > before:
            # Another request inserted the same tokens first. This one goes on with those slots; its own
            # were freed.
            theirs = self.slots_to(node)
            assert len(theirs) == req.kv.cache_protected_len, "the path and the request disagree"
            self._table.write((req.kv.req_pool_idx, slice(before, held)), theirs[before:held])
        return node

    def keep(self, req: Req, tokens: Any) -> tuple[Node, int] | None:
        """Insert the whole blocks of a request's first tokens; frees the slots of blocks that the tree had.

        Returns the node at which they end, and how many leading tokens the tree had before. None where no
        other request may have them, and after a fault that left all slots with the request.
        """
        cache, namespace = self._cache, self.namespace_of(req)
        if namespace is None:
            return None
        row = self._table.req_to_token[req.kv.req_pool_idx, : len(tokens)]
        whole = len(tokens) // cache.block_size * cache.block_size
        protected = req.kv.cache_protected_len
        key, done = b"", None
        with cache.faults.guard("insert"):
            key = encode_tokens(tokens)
            result = (cache.store.transfer_with_insert if _comes_over(req) else cache.store.insert)(
                Tier.HBM,
                namespace,
                key,
                cache.slot_ops.keep(row)[:whole],  # a slice of the kept slots: torch's is slow
                priority=req.priority or 0,
            )
            done = result.node, result.held_blocks * cache.block_size, whole
        if done is None:
            done = self._taken_over(req, cache.tree.match(namespace, key).path, row)
            self.exclude(req)
        if done is None:
            return None
        node, held, whole = done
        if held > protected:
            # A copy: the row is about to be rewritten.
            duplicates = row[protected:held].to(dtype=torch.int64, copy=True)
            cache.token_to_kv_pool_allocator.free_segment(duplicates, start_pos=protected)
        # Never less than before: of a retracted request that comes back the tree may own output too, which
        # --strip-thinking-cache leaves out here.
        req.kv.cache_protected_len = max(protected, whole)
        return node, held

    def _taken_over(self, req: Req, path: list[Node], row: torch.Tensor) -> tuple[Node, int, int] | None:
        """The part of a request's row that the tree has after an insertion that failed: the last node, tokens
        that the tree had before, and tokens that it has now. None when the request owns all slots as before.
        """
        path = [node for node in path if self._cache.hbm in node.placements]
        if not path:
            return None
        slots = self.slots_to(path[-1])
        protected = req.kv.cache_protected_len
        ours = torch.nonzero(slots[protected:] == row[protected : len(slots)].to(slots.dtype))
        return None if not len(ours) else (path[-1], protected + int(ours[0]), len(slots))


def _comes_over(req: Req) -> bool:
    """Whether this is the first insertion of a request whose KV another instance has computed and decode
    has received.
    """
    received = req.bootstrap_host not in (None, FAKE_BOOTSTRAP_HOST) and req.disagg_kv_sender is None
    first = received and not getattr(req, _RECEIVED, False)
    if first:
        setattr(req, _RECEIVED, True)
    return first


def is_private(req: Req) -> bool:
    """Whether the request's KV does not follow from its tokens, so that no other request may have it.

    SGLang does not match requests whose embeddings are overridden; inserting them would hand their KV to
    others that have the same tokens. After a fault of the cache nothing more is inserted.
    """
    return req.positional_embed_overrides is not None or getattr(req, _FAULTED, False)
