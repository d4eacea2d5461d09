"""Advisory requests: prefetching KV before a request arrives (Symphony, section 3.2).

A hint names a session, or carries the conversation so far. The router decides at once where the announced
request will run, has the KV brought up there (``preparing``), and remembers the place. When the request
arrives, it goes there, unless the instance has died or filled up; then it is routed like any other. So no
session sticks to an instance, and a wrong, late or repeated hint costs no more than the book
(``advisory_book``) allows.

A request may arrive at another router than its hint: every router has copies of the others' hints
(``remote_hints``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from sglang_ext.clock import Clock
from sglang_ext.ids import NewId, random_id
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.advisory_book import REPEATED, Answer, HintBook, Verdict
from sglang_ext.router.hints.hint import ENDED, Entry, Hint, Place, State
from sglang_ext.router.hints.preparing import Preparer
from sglang_ext.router.hints.remote_hints import RemoteHint, RemoteHints
from sglang_ext.router.policies import Fleet as Instances
from sglang_ext.router.policies import PolicyOptions, first_targets
from sglang_ext.router.policies.fleet_queries import decoders_for, named
from sglang_ext.router.policies.prompt_tree import is_ahead
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.signals import Signal

logger = logging.getLogger("router.advising")

TICK_S = 0.5
"""Interval of checks for expired hints."""


class Advisor:
    """Takes hints, and gives requests the places that were prepared for them.

    Args:
        thresholds: when an instance is too far ahead of others in load.
        clock: seconds.
        new_id: names hints.
    """

    def __init__(
        self,
        fleet: Fleet,
        thresholds: PolicyOptions,
        metrics: RouterMetrics,
        clock: Clock,
        book: HintBook,
        remote: RemoteHints,
        preparer: Preparer,
        *,
        new_id: NewId = random_id,
    ) -> None:
        self._fleet = fleet
        self._thresholds = thresholds
        self._hints = metrics.counter("hints")
        self._hints_used = metrics.counter("hints_used")
        self._clock = clock
        self._new_id = new_id
        self.book = book
        self.remote = remote
        self.preparer = preparer
        self.happened: Signal[[Entry]] = Signal()
        """A hint of this router has changed."""
        self.offered: Signal[[Hint, Answer]] = Signal()
        """A client has given a hint here, and the answer was this."""
        self.taken: Signal[[RemoteHint]] = Signal()
        """A hint of another router has ended here."""
        self.repeated: Signal[[RemoteHint, float]] = Signal()
        """A hint of another router was given here again; its request comes after so many seconds."""
        self._events: dict[str, asyncio.Event] = {}
        """Hint id -> set at its next change, and replaced."""
        preparer.changed.subscribe(self._changed)

    # -- hints ------------------------------------------------------------------------------------

    def too_fast(self, caller: Caller) -> Answer | None:
        """The refusal of a hint beyond the caller's rate, before it is encoded; None within the rate."""
        answer = self.book.refused(caller.scope, self._clock.monotonic())
        if answer is not None:
            self._hints.labels(answer.verdict.value).inc()
        return answer

    def offer(self, hint: Hint) -> tuple[Answer, dict[str, Any]]:
        """Take a hint. Returns the book's answer, and the client's as JSON."""
        now = self._clock.monotonic()
        self._expire(now)
        if (copy := self.remote.same(hint)) is not None:
            if copy.is_for(hint):
                return self._repeat(copy, hint, now)
            self._end_remote(copy, State.CANCELLED, "followed by a longer one of the same session")
        answer = self.book.offer(self._new_id(), hint, now)
        self._hints.labels(answer.verdict.value).inc()
        if answer.replaced is not None:
            self.preparer.end(answer.replaced)
        entry = answer.entry
        if entry is None:
            self.offered(hint, answer)
            return answer, {"verdict": answer.verdict.value, "reason": answer.reason, "id": None}
        self.preparer.add(entry, hint.tokens)
        if answer.start:
            try:
                self.preparer.start(entry)
            except BaseException:
                # Its share of the tenant's budget is free for other hints again.
                if entry.state not in ENDED:
                    self.book.cancel(entry, now)
                raise
        elif answer.reason == REPEATED:
            self.preparer.repeat(entry)
        self.happened(entry)
        self.offered(hint, answer)
        return answer, {"verdict": answer.verdict.value, "reason": answer.reason, **self.as_json(entry)}

    def _repeat(self, copy: RemoteHint, hint: Hint, now: float) -> tuple[Answer, dict[str, Any]]:
        """A client repeats here a hint that another router has taken."""
        refusal = self.book.too_fast(hint.tenant, now)
        answer = refusal or Answer(Verdict.ACCEPTED, REPEATED)
        self._hints.labels(answer.verdict.value).inc()
        state: dict[str, Any] = {"id": None}
        if refusal is None:
            _, expires = self.book.times(hint, now)
            self.remote.prolong(copy, expires)
            self.repeated(copy, hint.earliest_s)
            state = copy.as_json(now)
        return answer, {"verdict": answer.verdict.value, "reason": answer.reason, **state}

    def _end_remote(self, copy: RemoteHint, state: State, why: str) -> None:
        self.remote.end(copy, state, why, self._clock.monotonic())
        self.taken(copy)

    def as_json(self, entry: Entry | RemoteHint) -> dict[str, Any]:
        """The state of a hint for its client."""
        now = self._clock.monotonic()
        if isinstance(entry, RemoteHint):
            return entry.as_json(now)
        preparation, place = self.preparer.get(entry.id), entry.place
        assert preparation is not None
        part = preparation.part_of(entry.instance)
        decode = None if place is None or place.decode is None else preparation.parts.get(place.decode)
        return {
            "id": entry.id,
            "object": "advisory",
            "state": entry.state.value,
            "why": entry.why or None,
            "instance": entry.instance,
            "decode": None if place is None else place.decode,
            "session": entry.hint.session is not None,
            "tokens": part.where.as_json(),
            "moved_tokens": part.moved,
            "decode_moved_tokens": None if decode is None else decode.moved,
            "computed_tokens": part.computed,
            "earliest_in_s": round(max(0.0, entry.earliest - now), 3),
            "expires_in_s": round(max(0.0, entry.expires - now), 3),
            "ready_after_s": None if entry.ready_at is None else round(entry.ready_at - entry.born, 6),
        }

    def find(self, id: str, caller: Caller) -> Entry | RemoteHint | None:
        """A caller's hint by its id, of this router or of another."""
        entry = self.book.get(id, caller.scope)
        if entry is not None and self.preparer.get(entry.id) is not None:
            return entry
        return self.remote.get(id, caller.scope)

    def withdraw(self, entry: Entry | RemoteHint, why: str = "taken back") -> None:
        """Cancel a hint for its client."""
        if isinstance(entry, RemoteHint):
            self._end_remote(entry, State.CANCELLED, why)
        elif entry.state not in ENDED:
            started = self.book.cancel(entry, self._clock.monotonic(), why)
            self.preparer.end(entry)
            self.preparer.start_all(started)

    def use(self, entry: Entry) -> None:
        """End a hint whose request has arrived, here or at another router."""
        if entry.state not in ENDED:
            self.book.used(entry, self._clock.monotonic())
            self._hints_used.labels("early" if entry.ready_at is None else "ready").inc()
            self.preparer.end(entry)
            self.preparer.start_all(self.book.startable())

    def repeat(self, entry: Entry, earliest_s: float, lives_s: float) -> None:
        """Prolong a hint that its client has repeated at another router."""
        if entry.state not in ENDED:
            now = self._clock.monotonic()
            self.book.repeated(entry, now + earliest_s, now + lives_s)
            self.preparer.repeat(entry)
            self.happened(entry)

    # -- changes ----------------------------------------------------------------------------------

    async def changed(self, entry: Entry | RemoteHint) -> None:
        """Wait until the hint has changed. Returns at once if it has ended."""
        if isinstance(entry, RemoteHint):
            if entry.ended_at is None:
                await entry.changed.wait()
        elif entry.state not in ENDED and self.preparer.get(entry.id) is not None:
            await self._events.setdefault(entry.id, asyncio.Event()).wait()

    def _changed(self, entry: Entry) -> None:
        if (event := self._events.pop(entry.id, None)) is not None:
            event.set()
        self.happened(entry)

    # -- requests -----------------------------------------------------------------------------------

    def expected_at(
        self, scope: str, session: str | None, prompts: Sequence[Encoded], fleet: Instances
    ) -> Place | None:
        """End the hint that announced a request. Returns its place if the instances still can take the
        request, without the decode instance if only that one cannot."""
        if not (len(self.book) or len(self.remote)) or len(prompts) != 1:
            return None
        prompt = prompts[0].known
        self._expire(self._clock.monotonic())
        place = self._claimed(scope, prompt.namespace, prompt.key, session)
        if place is None or not self._can_take(place.instance, first_targets(fleet)):
            return None
        prefill = named(fleet, place.instance)
        decoders = () if prefill is None else tuple(decoders_for(fleet, prefill))
        decode = place.decode if place.decode and self._can_take(place.decode, decoders) else None
        return Place(place.instance, decode)

    def _claimed(
        self, scope: str, namespace: tuple[str | None, ...], key: bytes, session: str | None
    ) -> Place | None:
        """End the hint for a request, of this router or of another, and return its place."""
        entry = self.book.expected(scope, namespace, key, session)
        copy = self.remote.expected(scope, namespace, key, session)
        if copy is not None:
            theirs = (session is not None and copy.status.session == session, copy.status.tokens)
            hint = None if entry is None else entry.hint
            if hint is None or theirs > (session is not None and hint.session == session, hint.tokens):
                self._end_remote(copy, State.USED, "its request has come")
                return copy.place
        if entry is None:
            return None
        self.use(entry)
        return entry.place

    def _can_take(self, name: str, fleet: Instances) -> bool:
        """Whether an instance is in a fleet of its kind, and not too far ahead of it in load."""
        least = min((known.in_flight for known in fleet), default=0)
        return any(known.name == name and not is_ahead(known, least, self._thresholds) for known in fleet)

    # -- time ---------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End hints that have expired or lost their instance, and drop the state of hints no longer in the
        book."""
        self.preparer.check_places()
        self._expire(self._clock.monotonic())
        self.preparer.start_all(self.book.startable())
        self.preparer.forget_dropped()

    def _expire(self, now: float) -> None:
        self.remote.expire(now)
        for entry in self.book.expire(now):
            self._hints_used.labels("never").inc()
            self.preparer.end(entry)

    async def round(self) -> float:
        """Tick; returns the pause until the next."""
        self.tick()
        return TICK_S

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            InternalError: names the first that does not hold.
        """
        self.book.check()
        self.remote.check()
