"""Advisory requests to a model with windows or states: disk to DRAM, ahead of the request.

Slots of such a model are given to requests only, so that nothing is brought to HBM ahead. The blocks
that a prompt lacks for its longest resume are read when no request wants to read, for a few prompts at once.
They are ordinary blocks in DRAM then: given up last, and not locked. A request that comes too early waits for
the rest, as without a hint.

In the scheduler's thread; with several ranks, the same calls on each between the same two passes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, PrefetchResult
from sglang_ext.tiered_store.loading.layers import AHEAD

MOST_WAITING = 256
AT_ONCE = 4
"""Prompts whose blocks are read at a time; those in DRAM are locked meanwhile."""


class Known(NamedTuple):
    """A prompt, looked up. tokens: of its beginning in HBM. names: of the pages that follow."""

    tokens: int
    names: Sequence[Name]


Lookup = Callable[[bytes, str | None, str | None], Known]
"""From encoded tokens, ``extra_key`` and ``cache_salt``."""


@dataclass(eq=False)
class _Hint:
    """A prompt whose blocks are to be read. A hint is the handle of its promotion in the store."""

    id: str
    tokens: bytes
    extra_key: str | None
    cache_salt: str | None
    priority: int
    until: float
    in_hbm: int = 0
    begun: bool = False


class DiskHints(Planner):
    """See the module's docstring. ``engine/prefetch/advice.py`` passes prompts on to it (`Brings`)."""

    def __init__(self, store: HybridStore, lookup: Lookup) -> None:
        self._store = store
        self._lookup = lookup
        self._hints: dict[str, _Hint] = {}
        self._ended: deque[PrefetchResult] = deque(maxlen=MOST_WAITING)

    def expect(
        self,
        id: str,
        tokens: bytes,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        until: float = math.inf,
    ) -> None:
        """Nothing is retained for an expected prompt."""

    def prefetch(
        self,
        id: str,
        tokens: bytes,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        until: float = math.inf,
        earliest: float = -math.inf,
    ) -> None:
        """Read the blocks that a prompt lacks in DRAM when its turn comes; a newer prompt of an ``id``
        replaces the older. until: a prompt whose turn has not come is dropped. earliest: not used, DRAM is
        large.
        """
        self.cancel(id)
        if len(self._hints) >= MOST_WAITING:
            weakest = min(self._hints.values(), key=lambda hint: hint.priority)
            self._end(weakest, PrefetchEnd.DROPPED)
        self._hints[id] = _Hint(id, tokens, extra_key, cache_salt, priority, until)

    def cancel(self, id: str) -> bool:
        """Stop the work for ``id``; returns whether some was still to be done."""
        hint = self._hints.get(id)
        if hint is not None:
            self._end(hint, PrefetchEnd.CANCELLED)
        return hint is not None

    def take_ended(self) -> list[PrefetchResult]:
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def each_pass(self) -> None:
        begun = [hint for hint in self._hints.values() if hint.begun]
        for hint in begun:
            if self._store.ready(hint):
                promotion = self._store.promoted(hint)
                blocks = 0 if promotion is None else promotion.blocks
                self._end(hint, PrefetchEnd.DONE, blocks * self._store.block_tokens)
        waiting = [hint for hint in self._hints.values() if not hint.begun]
        waiting.sort(key=lambda hint: -hint.priority)  # of equal ones, the oldest first
        for hint in waiting[: max(0, AT_ONCE - len(begun))]:
            hint.begun = True
            hint.in_hbm, names = self._lookup(hint.tokens, hint.extra_key, hint.cache_salt)
            self._store.promote(hint, names, AHEAD)

    def _end(self, hint: _Hint, end: PrefetchEnd, brought: int = 0) -> None:
        del self._hints[hint.id]
        self._store.release(hint)
        self._ended.append(PrefetchResult(hint.id, end, hint.in_hbm, brought))

    @property
    def busy(self) -> bool:
        return bool(self._hints or self._ended)

    @property
    def alarm(self) -> float:
        return min((hint.until for hint in self._hints.values() if not hint.begun), default=math.inf)

    @property
    def moves_alarm(self) -> bool:
        return bool(self._hints)

    def expire(self, now: float) -> None:
        for hint in list(self._hints.values()):
            if hint.until <= now and not hint.begun:
                self._end(hint, PrefetchEnd.DROPPED)

    def drop_in_flight(self) -> None:
        for hint in list(self._hints.values()):
            self._end(hint, PrefetchEnd.DROPPED)

    def __repr__(self) -> str:
        return f"DiskHints({len(self._hints)})"
