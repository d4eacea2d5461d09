"""Brings a prompt's KV to HBM before its request comes: disk to DRAM to HBM (Symphony, section 3.3).

Prompts of high priority come first, then prompts whose requests may come first. Until shortly before a
request may come, its KV goes from disk to DRAM only (``due_times``). Blocks on disk are read when no request
wants to read, for a few prompts at once, their lowest layers first, and become DRAM blocks as for a waiting
request. From there they are copied in small pieces, behind all copies that a request waits for, to slots that
are free, or whose blocks have a copy elsewhere and were not used since the prefetch began, or were announced
with a lower priority. The slots of a piece belong to no request until it has arrived; then its blocks enter
the tree, and are ordinary cached blocks. They are retained for their request (``retention``), and yet go at
once when SGLang needs them. Of prompts that do not fit as a whole, the lowest layers may be brought
instead. No batch ever waits for a prefetch, and a request that comes too early loads and computes
the rest by itself, as it would without a prefetch.

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
from sglang_ext.engine.moves.move import Move, MovePlanner
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.moves.sources import OwnCopy
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.due_times import MoveRate, latest_starts
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.promotion import Wanted
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.retention import most_of, owner_of, path_of
from sglang_ext.keys import TOKEN_BYTES, TokenIds, encode_tokens
from sglang_ext.mempool.ledger import Committed, Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.radix_global import Node
from sglang_ext.tiered_store.loading.layers import AHEAD
from sglang_ext.tiers import Tier

MOST_WAITING = 256
READ_AHEAD = 4
"""Prompts that are read from disk at the same time."""
PIECE_BLOCKS = 64
"""Copied at a time; HBM cannot release these blocks for as long as the copy takes."""
AWAKE_S = 1.5
"""An idle scheduler, which sleeps for a second at a time, stays awake so long before a prompt is due."""


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


@dataclass(eq=False)
class _Prefetch:
    """A prompt to bring; also the handle of its promotions."""

    id: str
    namespace: Hashable
    key: bytes
    priority: int = 0
    earliest: float = -math.inf
    """The time before which its request does not come, by rank 0's clock."""
    due: bool = False
    """Whether it may use HBM."""
    starts: float = -math.inf
    """When it becomes due."""
    rests: bool = False
    """The blocks that DRAM lacked were read from disk, and the copy to HBM waits until it is due."""
    begun: bool = False
    since: float = 0.0
    """When it began, in the tree's time."""
    reached: int = 0
    """Blocks of the prompt that HBM had when it was last looked at."""
    brought: int = 0
    moving_since: float | None = None
    """When its first piece began, by this rank's clock."""


@dataclass(eq=False, kw_only=True)
class _Piece(Move):
    """The blocks of a prompt that are being copied to HBM."""

    prefetch: _Prefetch


class Prefetcher(Planner, MovePlanner):
    """See the module's docstring.

    Args:
        store: of the rank.
        tier: DRAM; copies to HBM.
        hbm_tier: slots.
        promotions: bring blocks on disk to DRAM; None without a disk.
        moves: of the rank.
        namespace: where the KV of a tenant's prompts belongs now, from its ``extra_key`` and ``cache_salt``.
        rate: learns how fast KV moves to HBM.
        piece_blocks: most blocks of a piece.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        tier: DramTier,
        hbm_tier: HbmTier,
        promotions: Promotions | None,
        moves: Moves,
        namespace: Callable[[str | None, str | None], Hashable],
        *,
        rate: MoveRate,
        piece_blocks: int = PIECE_BLOCKS,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._tree = store.tree
        self._tier = tier
        self._hbm_tier = hbm_tier
        self._promotions = promotions
        self._moves = moves
        self._namespace = namespace
        self._rate = rate
        self._clock = clock or SystemClock()
        self._now = -math.inf
        """Rank 0's time, as of the last ``expire``."""
        self.next_due = math.inf
        """When the next prompt becomes due, in rank 0's time; the caller calls ``expire`` then."""
        self._piece_blocks = piece_blocks
        self._waiting: list[_Prefetch] = []
        """In the order in which they are brought."""
        self._piece: _Piece | None = None
        self._ended: deque[PrefetchResult] = deque(maxlen=MOST_WAITING)
        self.counters: Counter[PrefetchEnd] = Counter()
        """Prefetches by how they ended, since the start."""
        self.retention = tier.retention

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
    ) -> _Prefetch:
        """Retain the cached blocks of an expected prompt, and bring nothing. See ``prefetch``."""
        key = encode_tokens(tokens)
        whole = len(key) // (self._tree.block_size * TOKEN_BYTES) * self._tree.block_size * TOKEN_BYTES
        wanted = _Prefetch(id, self._namespace(extra_key, cache_salt), key[:whole], priority)
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
        for known in self._waiting:
            if known.id != id:
                continue
            if (known.namespace, known.key, known.priority) == (wanted.namespace, wanted.key, priority):
                known.earliest = earliest
                self._plan()
                return
            self._end(known, PrefetchEnd.CANCELLED)
            break
        if len(self._waiting) >= MOST_WAITING:
            most = most_of(each.namespace for each in self._waiting)
            theirs = [each for each in self._waiting if owner_of(each.namespace) == most]
            weakest = [each for each in theirs if each.priority == theirs[-1].priority]
            self._end(weakest[0] if weakest[-1].due else weakest[-1], PrefetchEnd.DROPPED)
        wanted.earliest = earliest
        self._waiting.append(wanted)
        self._plan()

    def _plan(self) -> None:
        """Sort the prompts, and decide which may use HBM from now on, and when the next one may."""
        self._waiting.sort(key=lambda each: (-each.priority, each.earliest))
        resting = [each for each in self._waiting if not each.due]
        block_bytes = self._tier.block_bytes // (self._tree.block_size * TOKEN_BYTES)
        jobs = [(each.earliest, self._rate.seconds(len(each.key) * block_bytes)) for each in resting]
        for each, starts in zip(resting, latest_starts(jobs), strict=True):
            each.starts = starts
            each.due = each.starts <= self._now or each.earliest == -math.inf
            self.retention.defer(each.id, not each.due)
        self.next_due = min((each.starts for each in resting if not each.due), default=math.inf)

    def cancel(self, id: str) -> bool:
        """Stop the work for ``id``: its request has come, or will not. Blocks already brought stay, like all
        cached blocks.

        Returns:
            whether some of the work was still to be done.
        """
        self.retention.forget(id)
        for waiting in self._waiting:
            if waiting.id == id:
                self._end(waiting, PrefetchEnd.CANCELLED)
                return True
        return False

    def expects(self, id: str) -> bool:
        """Whether the request of ``id`` is still expected."""
        return self.retention.knows(id)

    def expire(self, now: float) -> None:
        """Set rank 0's time to ``now``: release prompts whose retention has expired, and let prompts that are
        due use HBM.
        """
        self._now = now
        self.retention.expire(now)
        if self.next_due < math.inf:
            self._plan()

    def take_ended(self) -> list[PrefetchResult]:
        """Prefetches that have ended since the last call, at most the newest ``MOST_WAITING``."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    # -- going on -------------------------------------------------------------------------------

    def each_pass(self) -> None:
        """Take the next step, once per pass of the scheduler's loop. Does not wait."""
        first = [each for each in self._waiting if each.due][:READ_AHEAD]
        first += [each for each in self._waiting if not (each.due or each.rests)][: READ_AHEAD - len(first)]
        for prefetch in first:
            if not prefetch.begun:
                self._begin(prefetch)
        ready = [each for each in first if self._promotions is None or self._promotions.ready(each)]
        for prefetch in ready:
            if not prefetch.due:
                self._rest(prefetch)
        if self._piece is None and ready and ready[0].due:
            self._go_on(ready[0])

    def _rest(self, prefetch: _Prefetch) -> None:
        """Unlock its blocks in DRAM, where all that fit have arrived, until it is due and begins again."""
        if self._promotions is not None:
            self._promotions.release(prefetch)
        prefetch.begun, prefetch.rests = False, True
        self.retention.look(prefetch.id)

    def _begin(self, prefetch: _Prefetch) -> None:
        prefetch.begun = True
        # Matching marks long unused blocks as used: eviction must not take them before they are brought.
        self._tree.match(prefetch.namespace, prefetch.key)
        prefetch.since = self._tree.now()
        prefetch.reached = self._reached(prefetch)[0]
        if self._promotions is not None:
            wanted = Wanted(prefetch.namespace, prefetch.key, AHEAD, request=prefetch, rank=prefetch.priority)
            self._promotions.begin(prefetch, wanted)

    def _reached(self, prefetch: _Prefetch) -> tuple[int, list[Node]]:
        """How many blocks HBM has, and the nodes after them that DRAM has."""
        path = path_of(self._tree, prefetch.namespace, prefetch.key)
        in_hbm, below = self._tier.split(node for _, node in path)
        return sum(node.blocks for node in in_hbm), below

    def _go_on(self, prefetch: _Prefetch) -> None:
        """Start the next piece, or end."""
        self.retention.look(prefetch.id)
        reached, below = self._reached(prefetch)
        if reached < prefetch.reached:
            self._end(prefetch, PrefetchEnd.GIVEN_UP)
            return
        prefetch.reached = reached
        if not below:
            self._end(prefetch, PrefetchEnd.DONE)
            return
        wanted = min(self._piece_blocks, sum(node.blocks for node in below))
        self._hbm_tier.make_room(wanted, unused_since=prefetch.since, priority=prefetch.priority)
        nodes = self._first(below, min(wanted, self._hbm_tier.free_blocks))
        blocks = sum(node.blocks for node in nodes)
        reservation = self._store.reserve_spare(
            Tier.HBM, prefetch.namespace, prefetch.key, Use.PREFETCH, reached, blocks
        )
        if isinstance(reservation, Refusal):
            self._end(prefetch, PrefetchEnd.NO_ROOM)
            return
        reservation.on_surrender = self._surrendered
        if prefetch.moving_since is None:
            prefetch.moving_since = self._clock.monotonic()
        copy = OwnCopy(reservation, self._tier.copies.settle)
        self._piece = _Piece(planner=self, prefetch=prefetch, onward=False)
        self._moves.fill(self._piece, reservation, copy)
        self._store.swap_in(Tier.DRAM, nodes, reservation.places, copy.arrived)

    def _first(self, nodes: list[Node], blocks: int) -> list[Node]:
        """The first ``blocks`` blocks of a path, splitting the node in which they end."""
        found: list[Node] = []
        for node in nodes:
            if blocks <= 0:
                break
            found.append(node if node.blocks <= blocks else self._tree.split(node, blocks))
            blocks -= found[-1].blocks
        return found

    def ended(self, move: _Piece, blocks: int, done: Committed | None) -> None:
        """The bytes of a piece are in its slots. Its blocks are in the tree now, except where a request had
        inserted them already, or where the blocks in front of them were given up meanwhile.
        """
        self._piece = None
        if done is not None:
            move.prefetch.brought += done.fresh

    def _end(self, prefetch: _Prefetch, end: PrefetchEnd) -> None:
        self._waiting.remove(prefetch)
        if not prefetch.due:
            self.retention.defer(prefetch.id, False)
            self._plan()
        if end is PrefetchEnd.DONE and prefetch.moving_since is not None:
            moved = prefetch.brought * self._tier.block_bytes
            self._rate.observe(moved, self._clock.monotonic() - prefetch.moving_since)
        if prefetch.begun and self._promotions is not None:
            self._promotions.release(prefetch)
        block = self._tree.block_size
        reached = self._reached(prefetch)[0]
        self._ended.append(PrefetchResult(prefetch.id, end, reached * block, prefetch.brought * block))
        self.counters[end] += 1

    # -- whole ----------------------------------------------------------------------------------

    def arriving_tokens(self) -> int:
        """Tokens of the piece under way."""
        return 0 if self._piece is None else self._piece.blocks * self._tree.block_size

    def _surrendered(self) -> None:
        """SGLang has taken back the slots of the piece under way, of which no copy was under way any more."""
        piece, self._piece = self._piece, None
        if piece is None:
            return
        self._moves.surrendered(piece)
        if piece.prefetch in self._waiting:
            self._end(piece.prefetch, PrefetchEnd.GIVEN_UP)

    @property
    def busy(self) -> bool:
        """Whether the next passes of an idle scheduler have something to do."""
        if self._piece is not None:
            return True
        if any(each.due or not each.rests for each in self._waiting):
            return True
        return self._clock.monotonic() >= self.next_due - AWAKE_S

    @property
    def alarm(self) -> float:
        return min(self.retention.next_expiry, self.next_due)

    @property
    def moves_alarm(self) -> bool:
        return self.next_due < math.inf

    @property
    def waiting(self) -> set[str]:
        """The ids of prompts that are still to be brought."""
        return {each.id for each in self._waiting}

    @property
    def resting(self) -> int:
        """Prompts that wait until they are due."""
        return sum(not each.due for each in self._waiting)

    def drop_in_flight(self) -> None:
        """Drop every prompt."""
        while self._waiting:
            self._end(self._waiting[0], PrefetchEnd.DROPPED)
        if self._piece is not None:
            self._moves.cancel(self._piece)
        self.retention.clear()

    def __repr__(self) -> str:
        state = f"waiting={len(self._waiting)}, resting={self.resting}, arriving={self.arriving_tokens()}"
        return f"Prefetcher({state}, {self.counters}, {self.retention!r})"
