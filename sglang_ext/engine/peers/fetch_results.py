"""How fetches ended: the results, and counters of them."""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

MOST_RESULTS: Final = 1000
"""Limit on results that wait for ``FetchResults.take``."""


class FetchEnd(enum.Enum):
    """How a fetch ended."""

    DONE = "done"
    NEEDLESS = "needless"
    """There was nothing to fetch: it is here, or the peer has no more."""
    JOINED = "joined"
    """Another fetch of the same prompt was under way already."""
    BUSY = "busy"
    """Too many were under way."""
    NO_ROOM = "no_room"
    LATE = "late"
    STALE = "stale"
    """The peer's blocks changed while they were read."""
    REFUSED = "refused"
    """The peer is of another namespace, or exports nothing."""
    TOO_SLOW = "too_slow"
    """The peer would read it from its disk, which takes longer than the fetch may take."""
    GONE = "gone"
    """The peer died, or cannot be reached."""
    CANCELLED = "cancelled"

    @classmethod
    def of(cls, why: str) -> FetchEnd:
        """The end that a job's ``why`` names; ``GONE`` for any other word."""
        return next((end for end in cls if end.value == why), cls.GONE)


@dataclass
class FetchCounters:
    """Since the start."""

    fetched_blocks: int = 0
    not_waited: int = 0
    """Requests that went on without the fetched KV, because the fetch took too long."""
    fetch_streamed: int = 0
    """Of the blocks fetched, those that a peer computed while our forward pass waited for its layers."""
    ends: Counter[FetchEnd] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class SpanResult:
    """The end of a span: tokens that came, and seconds since it was begun, without those for connecting."""

    how: FetchEnd
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The end of a fetch. how: of its last span that was begun."""

    id: str
    ahead: bool
    how: FetchEnd
    spans: tuple[SpanResult, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(span.tokens for span in self.spans)


class FetchResults:
    """Results that wait to be sent to routers, and counters of all. In the scheduler's thread."""

    def __init__(self) -> None:
        self._waiting: deque[FetchResult] = deque(maxlen=MOST_RESULTS)
        self.counters = FetchCounters()

    def add(self, id: str, ahead: bool, how: FetchEnd, spans: tuple[SpanResult, ...] = ()) -> None:
        """The fetch of a message has ended; ahead: the message was a hint."""
        self.counters.ends[how] += 1
        self._waiting.append(FetchResult(id, ahead, how, spans))

    def take(self) -> list[FetchResult]:
        """Return the results since the last call, in order."""
        if not self._waiting:
            return []
        results = list(self._waiting)
        self._waiting.clear()
        return results

    def counts(self) -> dict[str, int]:
        """All counters, by name."""
        return {
            "fetched_blocks": self.counters.fetched_blocks,
            "not_waited": self.counters.not_waited,
            "fetch_streamed": self.counters.fetch_streamed,
            **{end.value: self.counters.ends[end] for end in FetchEnd},
        }
