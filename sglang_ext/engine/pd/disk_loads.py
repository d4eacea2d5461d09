"""Decode's own tiers: the cached blocks of a waiting prompt come to HBM, and only that prompt waits for them.

    enters decode's queue   its prompt is looked for on disk, and blocks found there are read into DRAM
    prefill is done         no slots are set aside before that has ended, or for `PATIENCE_SECONDS`
    the disk is done        blocks in DRAM are copied to slots of HBM, which no request has before that ends
    it has arrived          the blocks enter the tree; slots are set aside, and prefill is asked for the rest

All methods run in the scheduler's thread. Every rank has the same queue, and takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.moves.move import Move, MovePlanner, State
from sglang_ext.engine.moves.sources import OwnCopy
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.engine.tiers.retention import path_of
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.mempool.store import Refusal
from sglang_ext.tiered_store.loading.layers import AHEAD
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.engine.cache.rank_cache import RankCache

PATIENCE_SECONDS = 1.0
"""How long a request whose KV prefill has ready waits for a disk. Blocks that are later come over the
network.
"""


@dataclass(eq=False, kw_only=True)
class _OwnLoad(Move):
    """The cached blocks of a request in decode's queue, from DRAM to HBM; WANTED while the disk reads those
    that DRAM lacks, until it is copied.
    """

    handle: Hashable
    namespace: Hashable
    key: bytes


class LocalAhead(Listener, MovePlanner):
    """See the module's docstring.

    Args:
        cache: of a decode rank, with a DRAM tier.
        least_tokens: a shorter run is not worth a copy from DRAM.
    """

    def __init__(self, cache: RankCache, *, least_tokens: int = 0) -> None:
        self._cache = cache
        self._promotions = cache.promotions
        self._moves = cache.moves
        self._least_tokens = least_tokens
        self._loads: dict[Hashable, _OwnLoad] = {}
        self.given_up = 0
        """Requests that went on without their blocks on disk, because reading took too long."""

    def __repr__(self) -> str:
        return f"LocalAhead(requests={len(self._loads)}, given_up={self.given_up})"

    def each_pass(self, queue: Sequence[Any]) -> None:
        """Look for new requests, and hold requests back (`waiting_for_input`) while their blocks are on their
        way.

        queue: SGLang's `DecodeRequest`s that have no slots yet.
        """
        there = {waiting.req.cache_request_handle for waiting in queue}
        for handle in [handle for handle in self._loads if handle not in there]:
            self.release(handle)
            load = self._loads.pop(handle)
            if load.state is State.WANTED:
                self._moves.cancel(load)
        for waiting in queue:
            handle = waiting.req.cache_request_handle
            load = self._loads.get(handle) or self._begin(waiting.req)
            if waiting.waiting_for_input and not self._ready(load):
                waiting.waiting_for_input = False

    def _begin(self, req: Any) -> _OwnLoad:
        namespace = self._cache.namespace(req.extra_key, req.cache_salt)
        key, handle = encode_tokens(req.origin_input_ids), req.cache_request_handle
        load = self._loads[handle] = _OwnLoad(
            planner=self, handle=handle, namespace=namespace, key=key, onward=False
        )
        self._moves.want(load)
        if self._promotions is not None:
            # As for an announced prompt: behind all reads that a forward pass waits for.
            self._promotions.begin(handle, Wanted(namespace, key, AHEAD, request=req.rid))
        return load

    def _ready(self, load: _OwnLoad) -> bool:
        """Whether all blocks have arrived; begins the next step when it is time."""
        if load.state is State.WANTED:
            if self._promotions is not None and not self._promotions.ready(load.handle):
                if load.deadline == math.inf:
                    load.deadline = self._moves.clock.monotonic() + PATIENCE_SECONDS
                return False
            self._copy(load)
        return load.state.over

    def offer(self, move: _OwnLoad) -> Sequence[int] | None:
        """Nothing but whether it is late, once its request could have been given slots."""
        return None if move.deadline == math.inf else ()

    def offered(self, move: _OwnLoad, agreed: Sequence[int]) -> None:
        """The disk reads on."""

    def late(self, move: _OwnLoad) -> None:
        """Let the request go on without its blocks on disk."""
        if self._promotions is not None and not self._promotions.ready(move.handle):
            self.release(move.handle)
            self.given_up += 1

    def _copy(self, load: _OwnLoad) -> None:
        """Start copying what DRAM has after HBM's part of a prompt, as much as there is room for."""
        store, tree, dram = self._cache.store, self._cache.tree, self._cache.dram
        assert dram is not None
        in_hbm, below = dram.split(node for _, node in path_of(tree, load.namespace, load.key))
        parent = in_hbm[-1] if in_hbm else tree.root
        start = sum(node.blocks for node in in_hbm)
        blocks = sum(node.blocks for node in below)
        found: Reservation | Refusal = Refusal.KNOWN
        if blocks and blocks * tree.block_size >= self._least_tokens:
            # The blocks to copy must not leave DRAM to make room for themselves.
            tree.lock(below[-1], dram.holder)
            found = store.reserve_behind(
                Tier.HBM, load.namespace, load.key, Use.LOAD, parent, start, blocks, whole=True
            )
            tree.unlock(below[-1], dram.holder)
        if isinstance(found, Refusal):
            self._moves.cancel(load)
            return
        source = OwnCopy(found, dram.copies.settle)
        self._moves.fill(load, found, source)
        store.swap_in(Tier.DRAM, below, found.places, source.arrived)

    def release(self, handle: Hashable) -> None:
        """The request has been given slots, or is gone."""
        if self._promotions is not None:
            self._promotions.release(handle)

    def before_clear(self) -> None:
        """Give up the copies under way."""
        for move in self._moves.of(self):
            self._moves.cancel(move)
