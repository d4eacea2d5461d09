"""Hints over several routers: each router reports its hints to the others, and asks them for sessions."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.router.cluster.broadcast import (
    HintRepeated,
    HintStatus,
    HintTaken,
    RouterChannel,
    RouterMessage,
    SessionAsked,
    SessionKnown,
)
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.hint import Entry, State
from sglang_ext.router.hints.remote_hints import RemoteHint
from sglang_ext.router.hints.session_memory import Known, SessionMemory

NEW_S = 1.0
"""A hint that is older in its first message was given before this router started."""
ASKING_S = 1.0
"""Longest wait for other routers' replies about a session."""
MAX_S = 1e6


class SharedHints:
    """Sends the hints that this router has taken to the others, and takes in theirs. A ``Topic``.

    Args:
        advisor: has the hints of all routers.
        clock: seconds.
    """

    def __init__(self, channel: RouterChannel, advisor: Advisor, clock: Clock) -> None:
        self._channel = channel
        self._advisor = advisor
        self._clock = clock
        self._stamps = itertools.count(1)
        channel.subscribe(self, HintStatus, HintTaken, HintRepeated)
        advisor.happened.subscribe(self._publish)
        advisor.taken.subscribe(self._publish_taken)
        advisor.repeated.subscribe(self._publish_repeated)

    def __repr__(self) -> str:
        return f"SharedHints({self._advisor.remote})"

    def _publish(self, entry: Entry) -> None:
        if self._channel.is_open:
            self._channel.publish(self._status(entry))

    def _status(self, entry: Entry) -> HintStatus:
        hint, now = entry.hint, self._clock.monotonic()
        assert isinstance(hint.namespace, tuple)
        return HintStatus(
            self._channel.router,
            entry.id,
            next(self._stamps),
            hint.tenant,
            hint.namespace,
            hint.tokens,
            entry.digest,
            entry.state.value,
            age_s=_seconds(now - entry.born),
            lives_s=_seconds(entry.expires - now),
            view=self._advisor.as_json(entry),
            session=hint.session,
            priority=hint.priority,
            instance=entry.instance,
            decode=None if entry.place is None else entry.place.decode,
        )

    def _publish_taken(self, copy: RemoteHint) -> None:
        why = str(copy.status.view.get("why") or "")
        self._channel.publish(HintTaken(self._channel.router, copy.id, copy.state is State.USED, why))

    def _publish_repeated(self, copy: RemoteHint, earliest_s: float) -> None:
        lives_s = _seconds(copy.expires - self._clock.monotonic())
        message = HintRepeated(self._channel.router, copy.id, _seconds(earliest_s), lives_s)
        self._channel.publish(message)

    def on_message(self, message: HintStatus | HintTaken | HintRepeated) -> None:
        """Take in the status of another router's hint, or its use or repetition of a hint."""
        advisor, now = self._advisor, self._clock.monotonic()
        if isinstance(message, HintStatus):
            if advisor.remote.learn(message, now) and message.age_s < NEW_S:
                advisor.book.taken_elsewhere(message.tenant, now)
            return
        copy, entry = advisor.remote.get(message.id), advisor.book.find(message.id)
        if isinstance(message, HintRepeated):
            if copy is not None:
                advisor.remote.prolong(copy, now + message.lives_s)
            if entry is not None:
                advisor.repeat(entry, message.earliest_s, message.lives_s)
            return
        if copy is not None:
            advisor.remote.end(copy, State.USED if message.used else State.CANCELLED, message.why, now)
        if entry is not None and message.used:
            advisor.use(entry)
        elif entry is not None:
            advisor.withdraw(entry, message.why)

    def snapshot(self) -> Iterable[RouterMessage]:
        """Every live hint, of other routers too: one of those may be gone."""
        now = self._clock.monotonic()
        own = [self._status(entry) for entry in self._advisor.book.live()]
        return own + [
            msgspec.structs.replace(
                copy.status, lives_s=_seconds(copy.expires - now), state=copy.state.value, age_s=MAX_S
            )
            for copy in self._advisor.remote.all()
            if copy.ended_at is None
        ]

    def on_routers(self, names: Collection[str]) -> None:
        """The hints of a router that is gone are good until they expire."""


class SharedSessions:
    """Asks other routers for the last prompt of a session, and replies to their queries."""

    def __init__(self, sessions: SessionMemory, queries: Queries) -> None:
        self._sessions = sessions
        self._queries = queries
        queries.answer(SessionAsked, self._answer)

    def __repr__(self) -> str:
        return f"SharedSessions({self._queries})"

    async def ask(self, session: str) -> Known | None:
        """The last prompt of a session; None if no other router replies with it in time."""
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
