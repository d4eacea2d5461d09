"""Brings a prompt's KV to HBM before its request comes: disk to DRAM to HBM (Symphony, section 3.3).

The prompts have an order (``prompt_queue``). Blocks on disk are read when no request wants to read, for a few
prompts at once, their lowest layers first, and become DRAM blocks as for a waiting request. From there they
are copied in small pieces (``pieces``), and are ordinary cached blocks then. They are retained for their
request (``retention``), and yet go at once when SGLang needs them. Of prompts that do not fit as a whole, the
lowest layers may be brought instead. No batch ever waits for a prefetch, and a request that comes too early
loads and computes the rest by itself, as it would without a prefetch.

All methods run in the scheduler's thread. With several ranks, the caller makes the same calls on each between
the same two passes of the loop: every decision here follows from state that all ranks have alike, or agreed
upon.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.due_times import MoveRate
from sglang_ext.engine.prefetch.pieces import Pieces
from sglang_ext.engine.prefetch.prompt_queue import Prompt, PromptQueue
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.keys import TOKEN_BYTES, TokenIds, encode_tokens
from sglang_ext.mempool.store import Store
from sglang_ext.tiered_store.loading.layers import AHEAD

MOST_WAITING = 256


class PrefetchEnd(enum.Enum):
    """Why a prefetch has ended."""

    DONE = "done"
    """Every whole block of the prompt that is in any tier is in HBM."""
    NO_ROOM = "no_room"
    """The rest is in DRAM, if that had room: HBM is full of blocks that are in use or were used since."""
    GIVEN_UP = "given_up"
    """SGLang took memory back meanwhile."""
    CANCELLED = "cancelled"
    DROPPED = "dropped"
    """Too many waited, or the cache was emptied."""
    COMPUTING = "computing"
    """No end: all that there is was brought, and the rest will be computed when the instance is idle."""
    COMPUTED = "computed"
    """The tokens that no tier and no peer had were computed too (``compute_ahead``)."""


@dataclass(frozen=True)
class PrefetchResult:
    """How a prefetch has ended.

    tokens: of the prompt's beginning that are in HBM. brought: by it. computed: ahead of the request.
    """

    id: str
    end: PrefetchEnd
    tokens: int
    brought: int
    computed: int = 0


class Prefetcher(Planner):
    """See the module's docstring.

    Args:
        promotions: bring blocks on disk to DRAM; none without a disk.
        namespace: where the KV of a tenant's prompts belongs now, from its ``extra_key`` and ``cache_salt``.
        rate: learns how fast KV moves to HBM.
    """

    def __init__(
        self,
        store: Store,
        tier: DramTier,
        hbm_tier: HbmTier,
        promotions: Sequence[Promotions],
        moves: Moves,
        namespace: Callable[[str | None, str | None], Hashable],
        *,
        rate: MoveRate,
        clock: Clock | None = None,
    ) -> None:
        self._tree = store.tree
        self._block_bytes = tier.block_bytes
        self._promotions = promotions
        self._namespace = namespace
        self._rate = rate
        self._clock = clock or SystemClock()
        self.retention = tier.retention
        kv_per_byte = tier.block_bytes // (self._tree.block_size * TOKEN_BYTES)
        self.prompts = PromptQueue(rate, kv_per_byte, tier.retention)
        self.pieces = Pieces(store, tier, hbm_tier, moves, self._surrendered)
        self._ended: deque[PrefetchResult] = deque(maxlen=MOST_WAITING)
        self.counters: Counter[PrefetchEnd] = Counter()
        """Prefetches by how they ended, since the start."""

    # -- asking ---------------------------------------------------------------------------------

    def expect(
        self,
        id: str,
        tokens: TokenIds | Sequence[int],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        until: float = math.inf,
    ) -> Prompt:
        """Retain the cached blocks of an expected prompt, and bring nothing. See ``prefetch``."""
        key = encode_tokens(tokens)
        whole = len(key) // (self._tree.block_size * TOKEN_BYTES) * self._tree.block_size * TOKEN_BYTES
        wanted = Prompt(id, self._namespace(extra_key, cache_salt), key[:whole], priority)
        self.retention.expect(id, wanted.namespace, wanted.key, priority=priority, until=until)
        return wanted

    def prefetch(
        self,
        id: str,
        tokens: TokenIds | Sequence[int],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        until: float = math.inf,
        earliest: float = -math.inf,
    ) -> None:
        """Bring the cached blocks of a prompt to HBM, when its turn comes, and retain them for its request.

        There is one prompt for each ``id``: a newer one takes the older one's place. priority: the higher,
        the sooner it comes and the later it goes. until: how long it is retained, and earliest: before when
        its request does not come, in rank 0's time.
        """
        wanted = self.expect(
            id, tokens, extra_key=extra_key, cache_salt=cache_salt, priority=priority, until=until
        )
        known = self.prompts.find(id)
        if known is not None:
            if (known.namespace, known.key, known.priority) == (wanted.namespace, wanted.key, priority):
                known.earliest = earliest
                self.prompts.plan()
                return
            self._end(known, PrefetchEnd.CANCELLED)
        if len(self.prompts) >= MOST_WAITING:
            self._end(self.prompts.weakest(), PrefetchEnd.DROPPED)
        wanted.earliest = earliest
        self.prompts.put(wanted)

    def cancel(self, id: str) -> bool:
        """Stop the work for ``id``: its request has come, or will not. Blocks already brought stay, like all
        cached blocks.

        Returns:
            whether some of the work was still to be done.
        """
        self.retention.forget(id)
        waiting = self.prompts.find(id)
        if waiting is not None:
            self._end(waiting, PrefetchEnd.CANCELLED)
        return waiting is not None

    def expects(self, id: str) -> bool:
        """Whether the request of ``id`` is still expected."""
        return self.retention.knows(id)

    def expire(self, now: float) -> None:
        """Set rank 0's time to ``now``: release prompts whose retention has expired, and let prompts that are
        due use HBM.
        """
        self.retention.expire(now)
        self.prompts.expire(now)

    def take_ended(self) -> list[PrefetchResult]:
        """Prefetches that have ended since the last call, at most the newest ``MOST_WAITING``."""
        if not self._ended:
            return []
        ended = list(self._ended)
        self._ended.clear()
        return ended

    # -- going on -------------------------------------------------------------------------------

    def each_pass(self) -> None:
        """Take the next step, once per pass of the scheduler's loop. Does not wait."""
        if not self.prompts:
            return
        for prompt in self.prompts.first():
            if not prompt.begun:
                self._begin(prompt)
        ready = self._ready()
        for prompt in ready:
            if not prompt.due:
                self._rest(prompt)
        if not self.pieces and ready and ready[0].due:
            self._go_on(ready[0])

    def _ready(self) -> list[Prompt]:
        """The prompts to bring now of which no block is on its way from disk."""
        return [
            each
            for each in self.prompts.first()
            if each.begun and all(disk.ready(each) for disk in self._promotions)
        ]

    def _rest(self, prompt: Prompt) -> None:
        """Unlock its blocks in DRAM, where all that fit have arrived, until it is due and begins again."""
        self._release(prompt)
        prompt.rests = True
        self.retention.look(prompt.id)

    def _release(self, prompt: Prompt) -> None:
        if prompt.begun:
            prompt.begun = False
            for disk in self._promotions:
                disk.release(prompt)

    def _begin(self, prompt: Prompt) -> None:
        prompt.begun = True
        # Matching marks long unused blocks as used: eviction must not take them before they are brought.
        self._tree.match(prompt.namespace, prompt.key)
        prompt.since = self._tree.now()
        prompt.reached = self.pieces.reached(prompt)[0]
        for disk in self._promotions:
            wanted = Wanted(prompt.namespace, prompt.key, AHEAD, request=prompt, rank=prompt.priority)
            disk.begin(prompt, wanted)

    def _go_on(self, prompt: Prompt) -> None:
        """Start the next piece, or end."""
        self.retention.look(prompt.id)
        reached, below = self.pieces.reached(prompt)
        if reached < prompt.reached:
            self._end(prompt, PrefetchEnd.GIVEN_UP)
            return
        prompt.reached = reached
        if not below:
            self._end(prompt, PrefetchEnd.DONE)
            return
        if prompt.moving_since is None:
            prompt.moving_since = self._clock.monotonic()
        if not self.pieces.start(prompt, below):
            self._end(prompt, PrefetchEnd.NO_ROOM)

    def _surrendered(self, prompt: Prompt) -> None:
        if prompt in self.prompts:
            self._end(prompt, PrefetchEnd.GIVEN_UP)

    def _end(self, prompt: Prompt, end: PrefetchEnd) -> None:
        self.prompts.remove(prompt)
        if end is PrefetchEnd.DONE and prompt.moving_since is not None:
            moved = prompt.brought * self._block_bytes
            self._rate.observe(moved, self._clock.monotonic() - prompt.moving_since)
        self._release(prompt)
        block = self._tree.block_size
        reached = self.pieces.reached(prompt)[0]
        self._ended.append(PrefetchResult(prompt.id, end, reached * block, prompt.brought * block))
        self.counters[end] += 1

    # -- whole ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the next passes of an idle scheduler have something to do."""
        return bool(self.pieces) or self.prompts.busy(self._clock.monotonic())

    @property
    def goes_on(self) -> bool:
        """Whether the next pass begins or ends a piece, although nothing arrives or expires until then."""
        return bool(self.prompts) and not self.pieces and any(each.due for each in self._ready())

    @property
    def alarm(self) -> float:
        expiry, due = self.retention.next_expiry, self.prompts.next_due
        return expiry if expiry < due else due

    @property
    def moves_alarm(self) -> bool:
        return self.prompts.next_due < math.inf

    def drop_in_flight(self) -> None:
        """Drop every prompt."""
        for prompt in list(self.prompts):
            self._end(prompt, PrefetchEnd.DROPPED)
        self.pieces.cancel()
        self.retention.clear()

    def __repr__(self) -> str:
        state = f"{self.prompts!r}, arriving={self.pieces.arriving_tokens()}"
        return f"Prefetcher({state}, {self.counters}, {self.retention!r})"
