"""Copies of the hints of other routers, for requests that arrive here and for the limits of tenants.

Each router has a copy of every other router's hints. A request claims its hint at whichever router it
arrives; the router that has taken the hint then gets a message and ends it. A copy has the digest and the
length of the announced conversation.

Pure: no I/O and no clock; ``now`` is seconds of any clock that does not go back.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_ext.errors import InternalError
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.cluster.broadcast import HintStatus, Namespace
from sglang_ext.router.hints.advisory_book import ENDED_KEPT_S, LENGTHS_TRIED
from sglang_ext.router.hints.hint import BUSY, ENDED, Hint, Place, State

DIGEST_BYTES = 16


def digest_of(key: bytes) -> str:
    """The digest by which routers compare conversations without their tokens."""
    return hashlib.blake2b(key, digest_size=DIGEST_BYTES).hexdigest()


@dataclass(eq=False, slots=True)
class RemoteHint:
    """A hint of another router, by its last status. Only ``RemoteHints`` writes it."""

    status: HintStatus
    state: State
    expires: float
    ended_at: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it changes, and replaced."""

    @property
    def id(self) -> str:
        """Its name, at all routers."""
        return self.status.id

    @property
    def place(self) -> Place | None:
        """Where its request is expected."""
        status = self.status
        return None if status.instance is None else Place(status.instance, status.decode)

    def is_for(self, hint: Hint) -> bool:
        """Whether a hint that is given now says nothing new."""
        return self.status.tokens == hint.tokens and self.status.digest == digest_of(hint.key)

    def as_json(self, now: float) -> dict[str, Any]:
        """The hint for clients."""
        left = round(max(0.0, self.expires - now), 3)
        return {**self.status.view, "state": self.state.value, "expires_in_s": left}


class RemoteHints:
    """The copies of other routers' hints; found by id, by session, or by the beginning of a prompt."""

    def __init__(self) -> None:
        self._copies: dict[str, RemoteHint] = {}
        self._by_session: dict[tuple[str, str], RemoteHint] = {}
        self._by_prompt: dict[tuple[str, Namespace, int, str], RemoteHint] = {}
        self._lengths: dict[tuple[str, Namespace], Counter[int]] = {}
        """(Tenant, namespace) -> tokens of live copies."""
        self._live: Counter[str] = Counter()
        self._moving: Counter[str] = Counter()
        """Tenant -> live copies, and tokens that are being moved for them."""
        self._next_look = math.inf
        """No copy ends, or is forgotten, before."""
        self._ranks: dict[str, Counter[int]] = {}
        """Instance -> priorities of the requests expected there."""

    def __len__(self) -> int:
        """The number of copies that have not ended."""
        return sum(self._live.values())

    def __repr__(self) -> str:
        return f"RemoteHints({len(self)} live, {len(self._copies)} known)"

    # -- messages of other routers --------------------------------------------------------------------------

    def learn(self, status: HintStatus, now: float) -> bool:
        """Another router says how a hint of its own is; True when it was not known."""
        try:
            state = State(status.state)
        except ValueError:
            return False  # of a newer release
        before = self._copies.get(status.id)
        if before is None:
            copy = RemoteHint(status, state, now + status.lives_s, now if state in ENDED else None)
            self._copies[status.id] = copy
            self._look_at(copy)
            if copy.ended_at is None:
                self._enter(copy)
            return True
        if status.stamp <= before.status.stamp:
            return False
        is_live = before.ended_at is None
        if is_live:
            self._leave(before)
        before.status, before.expires = status, now + status.lives_s
        if state in ENDED or is_live:  # an older message does not revive a hint that has ended here
            before.state = state
        if before.state in ENDED:
            before.ended_at = now if before.ended_at is None else before.ended_at
        else:
            self._enter(before)
        self._look_at(before)
        self._notify(before)
        return False

    def end(self, copy: RemoteHint, state: State, why: str, now: float) -> None:
        """It has ended here, or at a third router."""
        if copy.ended_at is None:
            self._leave(copy)
            copy.state, copy.ended_at = state, now
            self._look_at(copy)
            copy.status = msgspec.structs.replace(copy.status, view={**copy.status.view, "why": why})
            self._notify(copy)

    def prolong(self, copy: RemoteHint, expires: float) -> None:
        """It was given again, and lives longer."""
        copy.expires = max(copy.expires, expires)

    def expire(self, now: float) -> None:
        """End copies that were not used in time, and drop those that ended long ago."""
        if now < self._next_look:
            return
        self._next_look = math.inf
        for copy in list(self._copies.values()):
            if copy.ended_at is None and copy.expires <= now:
                self.end(copy, State.EXPIRED, "its request did not come", now)
            elif copy.ended_at is not None and copy.ended_at + ENDED_KEPT_S <= now:
                del self._copies[copy.id]
                continue
            self._look_at(copy)

    def _look_at(self, copy: RemoteHint) -> None:
        """Look again when a copy ends, or is to be forgotten."""
        ends = copy.expires if copy.ended_at is None else copy.ended_at + ENDED_KEPT_S
        self._next_look = min(self._next_look, ends)

    # -- who asks -------------------------------------------------------------------------------------------

    def get(self, id: str, tenant: str | None = None) -> RemoteHint | None:
        """A copy by its id, of a tenant if one is named, also for a while after it has ended."""
        copy = self._copies.get(id)
        return copy if copy is not None and tenant in (None, copy.status.tenant) else None

    def all(self) -> Iterator[RemoteHint]:
        """Every copy, those of ended hints included."""
        return iter(list(self._copies.values()))

    def same(self, hint: Hint) -> RemoteHint | None:
        """The copy that a hint repeats, or follows: of its session, else of its conversation."""
        if hint.session is not None:
            return self._by_session.get((hint.tenant, hint.session))
        return self._by_prompt.get((hint.tenant, _names(hint), hint.tokens, digest_of(hint.key)))

    def expected(
        self, tenant: str, namespace: Namespace, key: bytes, session: str | None
    ) -> RemoteHint | None:
        """The copy that expects a request: of its session, else the longest whose conversation it continues
        and which is not another session's."""
        if session is not None and (copy := self._by_session.get((tenant, session))) is not None:
            return copy
        tokens = len(key) // TOKEN_BYTES
        lengths = sorted(each for each in self._lengths.get((tenant, namespace), ()) if each <= tokens)
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        found, done = None, 0
        for length in lengths[-LENGTHS_TRIED:]:
            hasher.update(key[done : (done := length * TOKEN_BYTES)])
            copy = self._by_prompt.get((tenant, namespace, length, hasher.hexdigest()))
            if copy is not None and (session is None or copy.status.session is None):
                found = copy
        return found

    def live(self, tenant: str) -> int:
        """A tenant's hints that have not ended."""
        return self._live[tenant]

    def moving(self, tenant: str) -> int:
        """Tokens that are being moved for a tenant's hints."""
        return self._moving[tenant]

    def promised(self, instance: str, least: int | None = None) -> int:
        """Requests that are expected at an instance; of at least this priority."""
        ranks = self._ranks.get(instance, Counter[int]())
        return sum(count for priority, count in ranks.items() if least is None or priority >= least)

    # -- inside ---------------------------------------------------------------------------------------------

    def _enter(self, copy: RemoteHint) -> None:
        status = copy.status
        self._live[status.tenant] += 1
        if copy.state in BUSY:
            self._moving[status.tenant] += status.tokens
        if status.session is not None:
            self._by_session[status.tenant, status.session] = copy
        place = (status.tenant, status.namespace, status.tokens, status.digest)
        if status.tokens and place not in self._by_prompt:
            self._by_prompt[place] = copy
            self._lengths.setdefault(place[:2], Counter())[status.tokens] += 1
        for name in () if copy.place is None else copy.place.names:
            self._ranks.setdefault(name, Counter())[status.priority] += 1

    def _leave(self, copy: RemoteHint) -> None:
        status = copy.status
        _take(self._live, status.tenant, 1)
        if copy.state in BUSY:
            _take(self._moving, status.tenant, status.tokens)
        if status.session is not None and self._by_session.get((status.tenant, status.session)) is copy:
            del self._by_session[status.tenant, status.session]
        place = (status.tenant, status.namespace, status.tokens, status.digest)
        if self._by_prompt.get(place) is copy:
            del self._by_prompt[place]
            _take(self._lengths[place[:2]], status.tokens, 1)
            if not self._lengths[place[:2]]:
                del self._lengths[place[:2]]
        for name in () if copy.place is None else copy.place.names:
            _take(self._ranks[name], status.priority, 1)
            if not self._ranks[name]:
                del self._ranks[name]

    def _notify(self, copy: RemoteHint) -> None:
        copy.changed.set()
        copy.changed = asyncio.Event()

    def check(self) -> None:
        """Verify every map and every count against the copies.

        Raises:
            InternalError: names the first that does not hold.
        """
        live = [copy for copy in self._copies.values() if copy.ended_at is None]
        if any((copy.state in ENDED) != (copy.ended_at is not None) for copy in self._copies.values()):
            raise InternalError("a copy of a hint has ended and has not")
        if Counter(copy.status.tenant for copy in live) != self._live:
            raise InternalError(f"copies of hints {self._live}, counted otherwise")
        moving = Counter[str]()
        ranks: dict[str, Counter[int]] = {}
        for copy in live:
            if copy.state in BUSY and copy.status.tokens:
                moving[copy.status.tenant] += copy.status.tokens
            for name in () if copy.place is None else copy.place.names:
                ranks.setdefault(name, Counter())[copy.status.priority] += 1
        if (moving, ranks) != (self._moving, self._ranks):
            raise InternalError(f"moving {self._moving} at {self._ranks}, counted {moving} at {ranks}")
        lengths: dict[tuple[str, Namespace], Counter[int]] = {}
        for tenant, namespace, tokens, _ in self._by_prompt:
            lengths.setdefault((tenant, namespace), Counter())[tokens] += 1
        if lengths != self._lengths:
            raise InternalError("lengths of copies do not agree")
        if any(copy.ended_at is not None for copy in (*self._by_session.values(), *self._by_prompt.values())):
            raise InternalError("a copy of a hint that has ended can be found")


def _take(counts: Counter[Any], key: Any, count: int) -> None:
    counts[key] -= count
    if not counts[key]:
        del counts[key]


def _names(hint: Hint) -> Namespace:
    return hint.namespace if isinstance(hint.namespace, tuple) else ()
