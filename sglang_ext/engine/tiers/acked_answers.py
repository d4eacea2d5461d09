"""Durability of answers: with ``--kv-durability acked``, an answer ends only once its KV is on disk.

An answer is acknowledged when the whole blocks of its prompt and of itself are on disk on every rank, and the
disk's index names each of them (Symphony, section 3.3: always a copy on disk). Until then it is pending:
copies of its blocks that have not started, because DRAM was full or the writer behind, are tried again.
Blocks that the disk refuses do not hold the answer back.

Block names identify the answers of a conversation: a block's name depends on all blocks before it, so an
earlier turn's last name stands among a later turn's. `behind` is the number of answers of one conversation
that may be pending when the end of the newest is reported.

All methods run in the scheduler's thread. All ranks have the same pending answers. Only one rank reports the
end of an answer, so the moment of the report is that rank's alone.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.retention import path_of
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Node, RadixTree
from sglang_ext.tiered_store.tier import BlockTier, Outcome

DETAIL_PREFIX: Final = "durability_"
"""Prefix of the durability entries in an answer's ``cached_tokens_details``."""
_MOST_PENDING: Final = 1024
"""Pending answers that are tracked; the oldest is given up for a newer one."""
_LOOK_AGAIN_PASSES: Final = 64
"""Passes after which pending answers are checked though no copy and no write has ended: DRAM may have room
by then."""
_MOST_WAITS: Final = 4096
"""Waits that are kept until metrics collect them."""

_NEVER: Final = 0
_NOT_YET: Final = 1
_DURABLE: Final = 2


class AckEnd(enum.Enum):
    """The durability with which an answer's end was reported."""

    DURABLE = "durable"
    BEHIND = "behind"
    """Not durable yet, as the flag allows."""
    LATE = "late"
    """Not durable after ``--kv-durability acked,timeout=SECONDS``."""
    REFUSED = "refused"
    """The disk does not take it: full, read-only or faulty."""
    LOST = "lost"
    """It left memory before it was written, or left the disk before its end was reported."""
    UNCACHED = "uncached"
    """Its KV was not cached, as when the weights changed meanwhile."""


@dataclass(eq=False)
class Acked:
    """One answer. tokens: those of its prompt and itself in whole blocks; the rest is not cached."""

    namespace: Hashable
    key: bytes
    names: list[bytes]
    tokens: int
    since: float
    outcome: AckEnd | None = None
    """The result; None while it is pending."""
    reported: AckEnd | None = None
    """The durability with which its end was reported; None before."""
    waited: float = 0.0
    """Seconds from its end until the end was reported."""
    refused: bool = False
    """This rank's disk has refused some of it."""
    seen: int = _NOT_YET

    def follows(self, other: Acked) -> bool:
        """Whether it is a later turn of the conversation of ``other``."""
        at = len(other.names)
        return at < len(self.names) and other.names[-1] == self.names[at - 1]

    def details(self) -> dict[str, int | str]:
        """As entries of ``cached_tokens_details``."""
        if self.reported is None:
            return {}
        return {
            f"{DETAIL_PREFIX}end": self.reported.value,
            f"{DETAIL_PREFIX}tokens": self.tokens if self.reported is AckEnd.DURABLE else 0,
            f"{DETAIL_PREFIX}wait_us": round(self.waited * 1e6),
        }


class AckedAnswers(Planner):
    """See the module's docstring.

    Args:
        tree, write_down, writes, tier: of this rank; ``writes`` go to ``tier``.
        ranks: agree on the durable blocks.
        behind: answers of a conversation that need not be durable when the end of the newest is reported.
        timeout: seconds after which an end is reported though too little is durable.
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
        """Answers by the durability with which their end was reported, since the start."""
        self.waits: deque[float] = deque(maxlen=_MOST_WAITS)
        """Seconds that ends were held back, until the metrics collect them."""
        writes.on_refused(self._refused)
        ranks.add(self)

    def __repr__(self) -> str:
        return f"AckedAnswers(pending={len(self._pending)}, held={len(self._held)}, {dict(self.counters)})"

    @property
    def busy(self) -> bool:
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

    def may_report(self, answer: Acked) -> bool:
        """Whether its end may be reported now; if so, it counts as reported. Otherwise it is held back."""
        if answer.reported is not None:
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
        answer.reported, answer.waited = end, now - answer.since
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
        # The disk may have evicted blocks that the tree still lists. A restart reads the disk's index.
        found = self._tier.match(self._writes.names.digest(answer.namespace), answer.names)
        return _DURABLE if found == len(answer.names) else _NEVER

    def _end_in_memory(self, answer: Acked) -> tuple[int, Node | None]:
        end, last = 0, None
        for end, last in path_of(self._tree, answer.namespace, answer.key):  # noqa: B007
            pass
        return end, last

    def act(self, agreed: Sequence[int]) -> None:
        """Record the answers that are durable on every rank, and start copies that have not started."""
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
        """Recount the pending answers before each held one, without these, which are no longer pending."""
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
        """A write has ended of which some rank has only the first ``durable`` blocks."""
        if outcome is Outcome.DONE or outcome is Outcome.BEHIND:
            return
        gone = names[durable]
        for answer in self._pending:
            if gone in answer.names:
                answer.refused = True
