"""Decode's disk: what it has of a waiting prompt comes to DRAM, while prefill computes.

    enters decode's queue   its prompt is looked for on disk, and what is there is read into DRAM
    prefill is done         no slots are set aside before that has ended, or for `PATIENCE_SECONDS`
    slots are set aside     what is in DRAM is brought to HBM; prefill is asked for the rest

All methods run in the scheduler's thread. Every rank has the same queue, and takes the same steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.keys import encode_tokens
from sglang_ext.tiered_store.loading.layers import AHEAD

if TYPE_CHECKING:
    from sglang_ext.engine.cache.rank_cache import RankCache
    from sglang_ext.engine.tiers.promotions import Promotions

PATIENCE_SECONDS = 1.0
"""How long a request whose KV prefill has ready waits for a disk. The network is there for what is late."""


@dataclass
class _Looked:
    """A request in the queue. since: when it could have been given slots; None before that."""

    since: float | None = None
    given_up: bool = False


class DiskAhead:
    """See the module's docstring.

    Args:
        cache: of a decode rank.
        promotions: its disk.
    """

    def __init__(self, cache: RankCache, promotions: Promotions, clock: Clock | None = None) -> None:
        self._cache = cache
        self._promotions = promotions
        self._clock = clock or SystemClock()
        self._looked: dict[Hashable, _Looked] = {}
        self._held_back: list[tuple[Hashable, _Looked]] = []
        self.late = 0
        """Requests that went on without what the disk had, because it took too long."""

    def __repr__(self) -> str:
        return f"DiskAhead(requests={len(self._looked)}, late={self.late})"

    def each_pass(self, queue: Sequence[Any]) -> None:
        """Look for new requests, and hold back (`waiting_for_input`) those whose blocks are on their way.

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
                looked = self._looked[handle] = _Looked()
                self._begin(waiting.req)
            if waiting.waiting_for_input and not looked.given_up and not self._promotions.ready(handle):
                waiting.waiting_for_input = False
                if looked.since is None:
                    looked.since = self._clock.monotonic()

    def release(self, handle: Hashable) -> None:
        """The request has been given slots, or is gone."""
        self._promotions.release(handle)

    def _begin(self, req: Any) -> None:
        namespace = self._cache.namespace(req.extra_key, req.cache_salt)
        # As for a prompt that somebody expects: behind what a forward pass waits for.
        wanted = Wanted(namespace, encode_tokens(req.origin_input_ids), AHEAD, request=req.rid)
        self._promotions.begin(req.cache_request_handle, wanted)

    def propose(self) -> Sequence[int]:
        """Of each request that is held back, whether it has waited long enough."""
        now, said = self._clock.monotonic(), []
        self._held_back = []
        for handle, looked in self._looked.items():
            if looked.since is not None and not looked.given_up:
                self._held_back.append((handle, looked))
                said.append(int(now - looked.since > PATIENCE_SECONDS))
        return said

    def act(self, agreed: Sequence[int]) -> None:
        """Let those go on that have waited long enough on every rank."""
        for (handle, looked), late in zip(self._held_back, agreed, strict=False):
            if late and not self._promotions.ready(handle):
                self.release(handle)
                looked.given_up = True
                self.late += 1
