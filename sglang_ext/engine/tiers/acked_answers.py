"""Which answers are durable: what ``--kv-durability acked`` waits for before it tells an answer's end.

An answer is acknowledged when the whole blocks of its prompt and of itself are on disk on every rank, and the
disk's index names each of them (Symphony, section 3.3: always a copy on disk). Until then it is pending: what
of it has not begun to go down, because DRAM was full or the writer behind, is tried again. What the disk
refuses is not waited for.

Answers of a conversation are known by their names: a block's name depends on all blocks before it, so an
earlier turn's last name stands among a later turn's. `behind` is how many answers of one conversation may be
pending when the end of the newest is told.

All methods run in the scheduler's thread. Which answers are pending is alike on all ranks; when an end is
told is not, because only one rank tells it.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.retention import path_of
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Node, RadixTree
from sglang_ext.tiered_store.tier import BlockTier, Outcome

DETAIL_PREFIX: Final = "durability_"
"""Of what an answer's ``cached_tokens_details`` tell of this."""
_MOST_PENDING: Final = 1024
"""Answers that are looked after; the oldest is given up for a newer one."""
_LOOK_AGAIN_PASSES: Final = 64
"""Passes after which a pending answer is looked at though no copy and no write has ended: DRAM may have
room."""
_MOST_WAITS: Final = 4096
"""Waits that metrics have not taken yet."""

_NEVER: Final = 0
_NOT_YET: Final = 1
_DURABLE: Final = 2


class AckEnd(enum.Enum):
    """What an answer's end was told with."""

    DURABLE = "durable"
    BEHIND = "behind"
    """Not durable yet, as the flag allows."""
    LATE = "late"
    """Not durable after ``--kv-durability-timeout``."""
    REFUSED = "refused"
    """The disk does not take it: full, read-only or faulty."""
    LOST = "lost"
    """It left memory before it was written, or the disk before its end was told."""
    UNCACHED = "uncached"
    """Its KV is nobody's, as when the weights changed meanwhile."""


@dataclass(eq=False)
class Acked:
    """One answer. tokens: of its prompt and itself that are whole blocks; all other are nobody's to keep."""

    namespace: Hashable
    key: bytes
    names: list[bytes]
    tokens: int
    since: float
    outcome: AckEnd | None = None
    """What became of it; None while it is pending."""
    told: AckEnd | None = None
    """With what its end was told."""
    waited: float = 0.0
    """Seconds from its end until that was told."""
    refused: bool = False
    """This rank's disk has refused some of it."""
    seen: int = _NOT_YET

    def follows(self, other: Acked) -> bool:
        """Whether it is a later turn of the conversation of ``other``."""
        at = len(other.names)
        return at < len(self.names) and other.names[-1] == self.names[at - 1]

    def details(self) -> dict[str, int | str]:
        """As entries of ``cached_tokens_details``."""
        if self.told is None:
            return {}
        return {
            f"{DETAIL_PREFIX}end": self.told.value,
            f"{DETAIL_PREFIX}tokens": self.tokens if self.told is AckEnd.DURABLE else 0,
            f"{DETAIL_PREFIX}wait_us": round(self.waited * 1e6),
        }


class AckedAnswers:
    """See the module's docstring.

    Args:
        tree, write_down, writes, tier: of this rank; ``tier`` is what ``writes`` go to.
        ranks: agree on what is durable.
        behind: answers of a conversation that need not be durable when the end of the newest is told.
        timeout: seconds after which an end is told though too little is durable.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tree: RadixTree,
        write_down: WriteDown,
        writes: DiskWrites,
        tier: BlockTier,
        ranks: Ranks,
        *,
        behind: int = 0,
        timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self._tree = tree
        self._write_down = write_down
        self._writes = writes
        self._tier = tier
        self._behind = behind
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._pending: dict[Acked, None] = {}
        """In the order in which they ended."""
        self._held: dict[Acked, int] = {}
        """Answers whose end is held back -> how many pending ones they follow, as those come and go."""
        self._passes = 0
        self._looked_at = (-1, -1)
        self._look = False
        self.counters: Counter[AckEnd] = Counter()
        """Answers by how their end was told, since the start."""
        self.waits: deque[float] = deque(maxlen=_MOST_WAITS)
        """Seconds that ends were held back, for whoever takes them."""
        writes.tell_refused(self._refused)
        ranks.add(self)

    def __repr__(self) -> str:
        return f"AckedAnswers(pending={len(self._pending)}, held={len(self._held)}, {dict(self.counters)})"

    @property
    def holding(self) -> bool:
        """Whether ends are held back."""
        return bool(self._held)

    # -- an answer ------------------------------------------------------------------------------

    def ended(self, namespace: Hashable, key: bytes) -> Acked:
        """The KV of an answer is in the tree. key: its prompt and itself, encoded, as far as it is cached."""
        step = self._tree.block_size * TOKEN_BYTES
        blocks = len(key) // step
        key = key[: blocks * step]
        names = self._writes.names.following(namespace, b"", key)
        answer = Acked(namespace, key, names, blocks * self._tree.block_size, self._clock.monotonic())
        if not blocks:
            answer.outcome = AckEnd.DURABLE
            return answer
        if len(self._pending) >= _MOST_PENDING:
            oldest = next(iter(self._pending))
            self._resolve(oldest, AckEnd.LOST)
            self._count_without([oldest])
        self._pending[answer] = None
        if self._behind:
            for other in self._held:
                self._held[other] += other.follows(answer)
        self._look = True
        return answer

    def uncached(self) -> Acked:
        """An answer has ended whose KV is not kept."""
        return Acked(None, b"", [], 0, self._clock.monotonic(), outcome=AckEnd.UNCACHED)

    def may_tell(self, answer: Acked) -> bool:
        """Whether its end may be told now; if so, it counts as told. Otherwise it is held back."""
        if answer.told is not None:
            return True
        now = self._clock.monotonic()
        if answer.outcome is not None:
            end = answer.outcome
        elif self._behind and self._turns_behind(answer) <= self._behind:
            end = AckEnd.BEHIND
        elif now - answer.since >= self._timeout:
            end = AckEnd.LATE
        else:
            self._held.setdefault(answer, 0)
            return False
        self._held.pop(answer, None)
        answer.told, answer.waited = end, now - answer.since
        self.counters[end] += 1
        self.waits.append(answer.waited)
        return True

    def _turns_behind(self, answer: Acked) -> int:
        if answer not in self._held:
            self._held[answer] = sum(answer.follows(other) for other in self._pending)
        return 1 + self._held[answer]

    # -- in every pass --------------------------------------------------------------------------

    def propose(self) -> Sequence[int]:
        """Of each pending answer, whether it is durable here, will never be, or neither."""
        self._passes += 1
        version = (self._write_down.dram.copies.writes_ended, self._writes.ended)
        self._look = (
            self._look or version != self._looked_at or self._passes % _LOOK_AGAIN_PASSES == 0
        ) and bool(self._pending)
        self._looked_at = version
        if self._look:
            for answer in self._pending:
                answer.seen = self._state(answer)
        return [min(answer.seen, _NEVER) if answer.refused else answer.seen for answer in self._pending]

    def _state(self, answer: Acked) -> int:
        end, last = self._end_in_memory(answer)
        if end == len(answer.names) and last is not None and not self._writes.durable(last):
            return _NOT_YET
        # What the tree knows of the disk it may have given up since; its index is what a restart reads.
        found = self._tier.match(self._writes.names.digest(answer.namespace), answer.names)
        return _DURABLE if found == len(answer.names) else _NEVER

    def _end_in_memory(self, answer: Acked) -> tuple[int, Node | None]:
        end, last = 0, None
        for end, last in path_of(self._tree, answer.namespace, answer.key):  # noqa: B007
            pass
        return end, last

    def act(self, agreed: Sequence[int]) -> None:
        """Take note of what is durable on every rank, and push on what has not begun."""
        resolved: list[Acked] = []
        for answer, state in zip(list(self._pending), agreed, strict=False):
            if state == _DURABLE:
                self._resolve(answer, AckEnd.DURABLE)
                resolved.append(answer)
            elif state == _NEVER:
                self._resolve(answer, AckEnd.REFUSED if answer.refused else AckEnd.LOST)
                resolved.append(answer)
            elif self._look:
                self._write_down.push([node for _, node in path_of(self._tree, answer.namespace, answer.key)])
        self._look = False
        self._count_without(resolved)

    def _count_without(self, resolved: Sequence[Acked]) -> None:
        """Have held answers follow none of these, which are not pending any more."""
        if not self._behind or not resolved:
            return
        for answer in self._held:
            if len(resolved) < len(self._pending):
                self._held[answer] -= sum(answer.follows(other) for other in resolved)
            else:
                self._held[answer] = sum(answer.follows(other) for other in self._pending)

    def _resolve(self, answer: Acked, outcome: AckEnd) -> None:
        del self._pending[answer]
        answer.outcome = outcome

    def _refused(self, names: Sequence[bytes], durable: int, outcome: Outcome) -> None:
        """A write has ended of which a rank has so many blocks only."""
        if outcome is Outcome.DONE or outcome is Outcome.BEHIND:
            return
        gone = names[durable]
        for answer in self._pending:
            if gone in answer.names:
                answer.refused = True
