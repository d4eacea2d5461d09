"""What routers tell each other of hints (a ``Speaker``), and ask of the sessions that hints name."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.router.cluster.broadcast import (
    HintRepeated,
    HintSaid,
    HintTaken,
    SessionAsked,
    SessionKnown,
    Word,
)
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.hint import Entry, State
from sglang_ext.router.hints.remote_hints import Copy
from sglang_ext.router.hints.session_memory import Known, SessionMemory
from sglang_ext.signals import Signal

NEW_S = 1.0
"""A hint that is older when it is heard of first was given before this router began."""
ASKING_S = 1.0
"""How long other routers may take to say what they know of a session."""
MAX_S = 1e6


class SharedHints:
    """Tells other routers of hints that were taken here, and the advisor of theirs.

    Args:
        advisor: has both.
        router: which router this is.
        clock: seconds.
    """

    def __init__(self, advisor: Advisor, router: str, clock: Clock) -> None:
        self._advisor = advisor
        self._router = router
        self._clock = clock
        self._stamps = itertools.count(1)
        self.said: Signal[[Word]] = Signal()
        advisor.happened.subscribe(self._happened)
        advisor.taken.subscribe(self._taken)
        advisor.repeated.subscribe(self._repeated)

    def __repr__(self) -> str:
        return f"SharedHints({self._advisor.elsewhere})"

    def _happened(self, entry: Entry) -> None:
        if self.said:
            self.said(self._word(entry))

    def _word(self, entry: Entry) -> HintSaid:
        hint, now = entry.hint, self._clock.monotonic()
        assert isinstance(hint.namespace, tuple)
        return HintSaid(
            self._router,
            entry.id,
            next(self._stamps),
            hint.tenant,
            hint.namespace,
            hint.tokens,
            entry.digest,
            entry.state.value,
            age_s=_seconds(now - entry.born),
            lives_s=_seconds(entry.expires - now),
            told=self._advisor.as_json(entry),
            session=hint.session,
            priority=hint.priority,
            instance=entry.instance,
            decode=None if entry.place is None else entry.place.decode,
        )

    def _taken(self, copy: Copy) -> None:
        why = str(copy.said.told.get("why") or "")
        self.said(HintTaken(self._router, copy.id, copy.state is State.USED, why))

    def _repeated(self, copy: Copy, earliest_s: float) -> None:
        lives_s = _seconds(copy.expires - self._clock.monotonic())
        self.said(HintRepeated(self._router, copy.id, _seconds(earliest_s), lives_s))

    def hear(self, word: Word) -> None:
        """Another router says something of a hint, its own or one of ours."""
        advisor, now = self._advisor, self._clock.monotonic()
        if word.router == self._router or not isinstance(word, HintSaid | HintTaken | HintRepeated):
            return
        if isinstance(word, HintSaid):
            if advisor.elsewhere.learn(word, now) and word.age_s < NEW_S:
                advisor.book.taken_elsewhere(word.tenant, now)
            return
        copy, entry = advisor.elsewhere.get(word.id), advisor.book.find(word.id)
        if isinstance(word, HintRepeated):
            if copy is not None:
                advisor.elsewhere.prolong(copy, now + word.lives_s)
            if entry is not None:
                advisor.repeat(entry, word.earliest_s, word.lives_s)
            return
        if copy is not None:
            advisor.elsewhere.end(copy, State.USED if word.used else State.CANCELLED, word.why, now)
        if entry is not None and word.used:
            advisor.use(entry)
        elif entry is not None:
            advisor.withdraw(entry, word.why)

    def words(self) -> Iterable[Word]:
        """Every live hint, of other routers too: one of those may be gone."""
        now = self._clock.monotonic()
        own = [self._word(entry) for entry in self._advisor.book.live()]
        return own + [
            msgspec.structs.replace(
                copy.said, lives_s=_seconds(copy.expires - now), state=copy.state.value, age_s=MAX_S
            )
            for copy in self._advisor.elsewhere.all()
            if copy.ended_at is None
        ]

    def on_routers(self, names: Collection[str]) -> None:
        """The hints of a router that is gone are good until they expire."""


class SharedSessions:
    """Asks other routers what a session sent last, and answers them.

    Args:
        sessions: what this router knows.
        queries: to other routers.
    """

    def __init__(self, sessions: SessionMemory, queries: Queries) -> None:
        self._sessions = sessions
        self._queries = queries
        queries.answer(SessionAsked, self._answer)

    def __repr__(self) -> str:
        return f"SharedSessions({self._queries})"

    async def ask(self, session: str) -> Known | None:
        """What a session sent last to another router; None if none of them knows, or says so in time."""
        query = SessionAsked("", self._queries.new_id(), session)
        for reply in await self._queries.ask(query, within_s=ASKING_S):
            if isinstance(reply, SessionKnown) and reply.key is not None:
                return reply.namespace, reply.key
        return None

    async def _answer(self, query: SessionAsked) -> SessionKnown:
        namespace, key = self._sessions.find(query.session) or ((), None)
        return SessionKnown("", query.id, namespace, key)


def _seconds(value: float) -> float:
    return min(max(0.0, value), MAX_S)
