"""Decode's own tiers: the cached blocks of a waiting prompt come to HBM, and only that prompt waits for them.

    enters decode's queue   its prompt is looked for on disk, and blocks found there are read into DRAM
    prefill is done         no slots are set aside before that has ended, or for `PATIENCE_SECONDS`
    the disk is done        blocks in DRAM are copied to slots of HBM, which no request has before that ends
    it has arrived          the blocks enter the tree; slots are set aside, and prefill is asked for the rest

All methods run in the scheduler's thread. Every rank has the same queue, and takes the same steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.moves.move import Move, MovePlanner
from sglang_ext.engine.moves.sources import OwnCopy
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.engine.tiers.retention import path_of
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.store import Refusal, Use
from sglang_ext.tiered_store.loading.layers import AHEAD
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.engine.cache.rank_cache import RankCache
    from sglang_ext.radix_global import Node

PATIENCE_SECONDS = 1.0
"""How long a request whose KV prefill has ready waits for a disk. Blocks that are later come over the
network.
"""


@dataclass(eq=False)
class _Looked:
    """A request in the queue. since: when it could have been given slots; None before that."""

    namespace: Hashable
    key: bytes
    since: float | None = None
    given_up: bool = False
    """The disk was too slow."""
    copied: bool = False
    """The copy from DRAM has been started, or there is none."""
    copy: Move | None = None
    """From DRAM to HBM."""


class LocalAhead(Listener):
    """See the module's docstring.

    Args:
        cache: of a decode rank, with a DRAM tier.
        least_tokens: a shorter run is not worth a copy from DRAM.
    """

    def __init__(self, cache: RankCache, clock: Clock | None = None, *, least_tokens: int = 0) -> None:
        self._cache = cache
        self._promotions = cache.promotions
        self._clock = clock or SystemClock()
        self._least_tokens = least_tokens
        self._looked: dict[Hashable, _Looked] = {}
        self._held_back: list[tuple[Hashable, _Looked]] = []
        self._moves = cache.moves
        self._copies = MovePlanner()
        self.late = 0
        """Requests that went on without their blocks on disk, because reading took too long."""

    def __repr__(self) -> str:
        return f"LocalAhead(requests={len(self._looked)}, late={self.late})"

    def each_pass(self, queue: Sequence[Any]) -> None:
        """Look for new requests, and hold requests back (`waiting_for_input`) while their blocks are on their
        way.

        queue: SGLang's `DecodeRequest`s that have no slots yet.
        """
        there = {waiting.req.cache_request_handle for waiting in queue}
        for handle in [handle for handle in self._looked if handle not in there]:
            self.release(handle)
            del self._looked[handle]
        for waiting in queue:
            handle = waiting.req.cache_request_handle
            looked = self._looked.get(handle)
            if looked is None:
                looked = self._looked[handle] = self._begin(waiting.req)
            if waiting.waiting_for_input and not self._ready(handle, looked):
                waiting.waiting_for_input = False

    def _ready(self, handle: Hashable, looked: _Looked) -> bool:
        """Whether all blocks have arrived; begins the next step when it is time."""
        if not looked.given_up and self._promotions is not None and not self._promotions.ready(handle):
            if looked.since is None:
                looked.since = self._clock.monotonic()
            return False
        if not looked.copied:
            looked.copied = True
            looked.copy = self._copy(looked)
        return looked.copy is None or looked.copy.state.over

    def _copy(self, looked: _Looked) -> Move | None:
        """Start copying what DRAM has after HBM's part of a prompt, as much as there is room for."""
        store, tree, hbm, dram = self._cache.store, self._cache.tree, self._cache.hbm, self._cache.dram
        assert dram is not None
        parent, start = tree.root, 0
        below: list[Node] = []
        for end, node in path_of(tree, looked.namespace, looked.key):
            if hbm in node.placements:
                parent, start = node, end
            elif dram.holder in node.placements:
                below.append(node)
        blocks = sum(node.blocks for node in below)
        if not blocks or blocks * tree.block_size < self._least_tokens:
            return None
        # The blocks to copy must not leave DRAM to make room for themselves.
        tree.lock(below[-1], dram.holder)
        found = store.reserve_behind(
            Tier.HBM, looked.namespace, looked.key, Use.LOAD, parent, start, blocks, whole=True
        )
        tree.unlock(below[-1], dram.holder)
        if isinstance(found, Refusal):
            return None
        source = OwnCopy(found, dram.copies.settle)
        move = Move(planner=self._copies, onward=False)
        self._moves.fill(move, found, source)
        store.swap_in(Tier.DRAM, below, found.places, source.arrived)
        return move

    def release(self, handle: Hashable) -> None:
        """The request has been given slots, or is gone."""
        if self._promotions is not None:
            self._promotions.release(handle)

    def _begin(self, req: Any) -> _Looked:
        looked = _Looked(
            self._cache.namespace(req.extra_key, req.cache_salt), encode_tokens(req.origin_input_ids)
        )
        if self._promotions is not None:
            # As for an announced prompt: behind all reads that a forward pass waits for.
            wanted = Wanted(looked.namespace, looked.key, AHEAD, request=req.rid)
            self._promotions.begin(req.cache_request_handle, wanted)
        return looked

    def before_clear(self) -> None:
        """Give up the copies under way."""
        for move in self._moves.of(self._copies):
            self._moves.cancel(move)

    def propose(self) -> Sequence[int]:
        """For each request that the disk holds back, whether it has waited long enough."""
        now, said = self._clock.monotonic(), []
        self._held_back = []
        for handle, looked in self._looked.items():
            if looked.since is not None and not looked.given_up:
                self._held_back.append((handle, looked))
                said.append(int(now - looked.since > PATIENCE_SECONDS))
        return said

    def act(self, agreed: Sequence[int]) -> None:
        """Let requests go on that have waited long enough on every rank."""
        for (handle, looked), late in zip(self._held_back, agreed, strict=False):
            if late and self._promotions is not None and not self._promotions.ready(handle):
                self.release(handle)
                looked.given_up = True
                self.late += 1
