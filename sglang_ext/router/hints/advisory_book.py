"""All hints of one router: budgets, repetition, expiry, and the requests that each instance expects.

A hint (Symphony's advisory request, section 3.2) announces a session's next request. It causes work before
the request has arrived, and the request may never come. So each tenant has limits: hints per second, hints at
once, and tokens being moved at once. A hint beyond a limit is:

- refused, with the time after which to try again, if it exceeds the rate, the hints at once, or the memory
  for their prompts;
- clipped to a leading part, which is useful by itself, if it has more tokens than the budget has left;
- deferred until another one ends, if the budget is used up.

A repeated hint prolongs the first one, and no KV is moved twice.

Places (``hint``) count as load at every instance that takes part, or all hints of one moment would choose the
same one; those of high priority are counted by themselves.

Pure: no I/O and no clock; ``now`` is seconds of any clock that does not go back.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import heapq
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

from sglang_ext.errors import InternalError
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.hints.hint import BUSY, ENDED, TRANSITIONS, Entry, Hint, Place, State
from sglang_ext.router.tenancy.bounded import ENTRY_BYTES
from sglang_ext.router.tenancy.rate import TokenBucket

MAX_TTL_S = 3600.0
REPEATED = "repeated"
"""The reason of the answer to a repeated hint."""
ENDED_KEPT_S = 60.0
"""Time for which the outcome of an ended hint can be queried."""
LENGTHS_TRIED = 64
"""A prompt is looked for at so many lengths, the longest first, so that a flood of hints costs it nothing."""
BEGIN_BYTES = 64
"""Of a prompt's key, by which it is seen at once that no hint announced it."""
DIGEST_BYTES = 16


class Verdict(enum.StrEnum):
    """The immediate answer to the client."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class HintLimits:
    """The limits of one tenant.

    per_second, burst: hints. live: hints that have not ended. moving_tokens: of hints being moved, together.
    ttl_s: how long a hint lives that does not say so. bytes: memory for the prompts of live hints. learnt:
    the share of these that hints of the router's own may use, so that clients' hints have the rest.
    """

    per_second: float = 50.0
    burst: int = 200
    live: int = 1000
    moving_tokens: int = 1 << 20
    ttl_s: float = 120.0
    bytes: int = 64 << 20
    learnt: float = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """The book's answer to a hint.

    entry: None when refused. start: whether the caller has to start moving now. retry_after_s: of a refusal.
    replaced: a hint of the same session that has ended with this.
    """

    verdict: Verdict
    reason: str
    entry: Entry | None = None
    start: bool = False
    retry_after_s: float | None = None
    replaced: Entry | None = None


class RemoteCounts(Protocol):
    """Counts of other routers' hints, which share the tenants' limits."""

    def live(self, tenant: str) -> int:
        """Those of a tenant that have not ended."""

    def moving(self, tenant: str) -> int:
        """Tokens that are being moved for them."""

    def promised(self, instance: str, least: int | None = None) -> int:
        """Their requests that are expected at an instance; of at least this priority."""


class HintBook:
    """All hints that one router has taken.

    Args:
        limits: of every tenant.
    """

    def __init__(self, limits: HintLimits, remote: RemoteCounts) -> None:
        self._limits = limits
        self._remote = remote
        self._entries: dict[str, Entry] = {}
        self._live: dict[str, dict[str, Entry]] = {}
        """Tenant -> live entries by id."""
        self._by_session: dict[tuple[str, str], Entry] = {}
        self._by_prompt: dict[tuple[str, Hashable, int, bytes], Entry] = {}
        """(Tenant, namespace, length of the key in bytes, its digest) -> the live entry of that prompt."""
        self._lengths: dict[tuple[str, Hashable, bytes], Counter[int]] = {}
        """(Tenant, namespace, `_beginning`) -> lengths of live keys in bytes, to find the hints that a prompt
        continues."""
        self._bytes: Counter[str] = Counter()
        """Tenant -> memory of live hints."""
        self._next_expiry = math.inf
        """No live hint ends before."""
        self._moving: Counter[str] = Counter()
        """Tenant -> tokens being moved."""
        self._deferred: dict[str, deque[Entry]] = {}
        self._ranks: dict[str, Counter[int]] = {}
        """Instance -> priorities of the requests expected there."""
        self._buckets: dict[str, TokenBucket] = {}
        self._ended: deque[Entry] = deque()
        self.counts: Counter[str] = Counter()
        """Verdicts, and ends by state."""

    # -- hints ------------------------------------------------------------------------------------

    def offer(self, id: str, hint: Hint, now: float) -> Answer:
        """Take a hint; ``id`` is its name from here on, unless it repeats another."""
        before = self._same(hint)
        answer = self._offer(id, hint, now)
        if before is not None and before.state in ENDED and before.ended_at == now:
            answer = dataclasses.replace(answer, replaced=before)
        self.counts[answer.verdict.value] += 1
        return answer

    def _offer(self, id: str, hint: Hint, now: float) -> Answer:
        self.expire(now)
        limits = self._limits
        if not hint.learnt and (refusal := self.too_fast(hint.tenant, now)) is not None:
            return refusal
        earliest, expires = self.times(hint, now)
        same = self._same(hint)
        if same is not None:
            if same.hint.key.startswith(hint.key):
                self.repeated(same, earliest, expires)
                return Answer(_verdict_of(same), REPEATED, same)
            # The conversation has grown meanwhile: KV that was brought up already is not moved again.
            self._end(same, State.CANCELLED, now, "followed by a longer one of the same session")
        if (full := self._too_many(hint)) is not None:
            live = self._live.get(hint.tenant, {})
            first = min((entry.expires for entry in live.values()), default=now + 1.0)
            return Answer(Verdict.REFUSED, full, retry_after_s=max(0.0, first - now))
        left = limits.moving_tokens - self._all_moving(hint.tenant)
        asked = hint.tokens
        hint = hint.clipped(min(asked, limits.moving_tokens))
        if left > 0:
            hint = hint.clipped(min(hint.tokens, left))
        entry = Entry(id, hint, State.DEFERRED, now, expires, earliest)
        self._add(entry)
        if left <= 0 and hint.tokens:
            self._deferred.setdefault(hint.tenant, deque()).append(entry)
            return Answer(Verdict.DEFERRED, "the budget of tokens being moved is used up", entry)
        self._start(entry)
        if hint.tokens < asked:
            reason = f"the budget leaves room for {hint.tokens} tokens"
            return Answer(Verdict.CLIPPED, reason, entry, start=True)
        return Answer(Verdict.ACCEPTED, "new", entry, start=True)

    def _too_many(self, hint: Hint) -> str | None:
        """Why a tenant has no room for one more hint; None when it has."""
        limits, live = self._limits, len(self._live.get(hint.tenant, ()))
        share = limits.learnt if hint.learnt else 1.0
        if live + self._remote.live(hint.tenant) >= share * limits.live:
            return "too many hints at once"
        if hint.learnt and self._all_moving(hint.tenant) + hint.tokens > share * limits.moving_tokens:
            return "too many tokens are being moved"
        tokens = min(hint.tokens, limits.moving_tokens)
        if self._bytes[hint.tenant] + ENTRY_BYTES + tokens * TOKEN_BYTES > share * limits.bytes:
            return f"the hints at once announce more tokens than {limits.bytes} bytes hold"
        return None

    def too_fast(self, tenant: str, now: float) -> Answer | None:
        """Count one more hint of a tenant; the refusal, if it is beyond the rate."""
        wait = self._bucket(tenant, now).take(now)
        return _too_fast(wait) if wait > 0.0 else None

    def refused(self, tenant: str, now: float) -> Answer | None:
        """As ``too_fast``, of a hint that is not known yet; one within the rate is not counted."""
        if (wait := self._bucket(tenant, now).wait(now)) <= 1e-6:
            return None
        self.counts[Verdict.REFUSED.value] += 1
        return _too_fast(wait)

    def taken_elsewhere(self, tenant: str, now: float) -> None:
        """Another router has counted one."""
        self._bucket(tenant, now).charge(now, 1.0)

    def times(self, hint: Hint, now: float) -> tuple[float, float]:
        """Before when the request of a hint that is given now does not come, and until when it may."""
        earliest = now + hint.earliest_s
        return earliest, earliest + min(self._limits.ttl_s if hint.ttl_s is None else hint.ttl_s, MAX_TTL_S)

    def repeated(self, entry: Entry, earliest: float, expires: float) -> None:
        """A hint was given again: it lives longer."""
        entry.expires, entry.earliest = max(entry.expires, expires), earliest

    def _all_moving(self, tenant: str) -> int:
        return self._moving[tenant] + self._remote.moving(tenant)

    def placed(self, entry: Entry, place: Place) -> None:
        """The request is expected there."""
        if entry.state in ENDED:
            return
        self._leave_place(entry)
        entry.place = place
        for name in place.names:
            self._ranks.setdefault(name, Counter())[entry.hint.priority] += 1

    def arrived(self, entry: Entry, now: float) -> list[Entry]:
        """All KV of a hint is in HBM: it is ready. Returns the hints that can start now."""
        if entry.state in BUSY:
            self._move_on(entry, State.READY)
            entry.ready_at = now
        return self.startable()

    def computing(self, entry: Entry) -> None:
        """All cached KV has been brought up, and the instance computes the rest."""
        if entry.state is State.MOVING:
            self._move_on(entry, State.COMPUTING)

    def failed(self, entry: Entry, now: float, why: str) -> list[Entry]:
        """It could not be done. Returns those that can start now."""
        if entry.state not in ENDED:
            self._end(entry, State.FAILED, now, why)
        return self.startable()

    def cancel(self, entry: Entry, now: float, why: str = "taken back") -> list[Entry]:
        """The client takes it back. Returns those that can start now."""
        if entry.state not in ENDED:
            self._end(entry, State.CANCELLED, now, why)
        return self.startable()

    def startable(self) -> list[Entry]:
        """Deferred hints for which the budget has room again; they count as moving from here on."""
        ready: list[Entry] = []
        for tenant, waiting in list(self._deferred.items()):
            while waiting:
                entry = waiting[0]
                if entry.state is State.DEFERRED:
                    if self._all_moving(tenant) + entry.hint.tokens > self._limits.moving_tokens:
                        break
                    self._start(entry)
                    ready.append(entry)
                waiting.popleft()
            if not waiting:
                del self._deferred[tenant]
        return ready

    # -- requests ---------------------------------------------------------------------------------

    def expected(self, tenant: str, namespace: Hashable, key: bytes, session: str | None) -> Entry | None:
        """The hint that expects a request which has come: of its session, else the longest hint whose
        conversation the prompt continues, and which is not another session's."""
        entry = self._by_session.get((tenant, session)) if session is not None else None
        return entry or self._continued(tenant, namespace, key, any_session=session is None)

    def used(self, entry: Entry, now: float) -> None:
        """Its request has come, here or at another router."""
        self._end(entry, State.USED, now, "its request has come")

    def _continued(self, tenant: str, namespace: Hashable, key: bytes, *, any_session: bool) -> Entry | None:
        lengths = [
            length
            for beginning in {_beginning(key), b""}
            for length in self._lengths.get((tenant, namespace, beginning), ())
            if length <= len(key)
        ]
        found, done, hasher = None, 0, hashlib.blake2b(digest_size=DIGEST_BYTES)
        for length in sorted(heapq.nlargest(LENGTHS_TRIED, lengths)):
            hasher.update(memoryview(key)[done:length])
            done = length
            entry = self._by_prompt.get((tenant, namespace, length, hasher.digest()))
            if entry is not None and (any_session or entry.hint.session is None):
                found = entry
        return found

    def promised(self, instance: str, least: int | None = None) -> int:
        """Requests that are expected at ``instance`` and have not come; of at least this priority."""
        ranks = self._ranks.get(instance, Counter[int]())
        here = sum(count for priority, count in ranks.items() if least is None or priority >= least)
        return here + self._remote.promised(instance, least)

    def lost(self, instance: str, now: float) -> list[Entry]:
        """``instance`` is gone. Returns the hints whose requests it was to get first, which have failed.
        Hints whose requests it was only to decode live on: see ``decoding_at``."""
        gone = [entry for entry in self.live() if entry.instance == instance]
        for entry in gone:
            self._end(entry, State.FAILED, now, f"{instance} went away")
        return gone

    def decoding_at(self, instance: str) -> list[Entry]:
        """The hints whose requests ``instance`` is to decode: if it is gone, each needs another one."""
        return [entry for entry in self.live() if entry.place is not None and entry.place.decode == instance]

    # -- time -------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Entry]:
        """End hints that were not used in time, and drop those that ended long ago. Returns the expired
        ones."""
        late: list[Entry] = []
        if now >= self._next_expiry:
            late = [entry for entry in self.live() if entry.expires <= now]
            for entry in late:
                self._end(entry, State.EXPIRED, now, "its request did not come")
            self._next_expiry = min((entry.expires for entry in self.live()), default=math.inf)
        while self._ended and (self._ended[0].ended_at or 0.0) + ENDED_KEPT_S <= now:
            del self._entries[self._ended.popleft().id]
        return late

    def get(self, id: str, tenant: str) -> Entry | None:
        """A tenant's hint by its id, also for a while after it has ended."""
        entry = self._entries.get(id)
        return entry if entry is not None and entry.hint.tenant == tenant else None

    def find(self, id: str) -> Entry | None:
        """Any tenant's hint by its id."""
        return self._entries.get(id)

    def live(self) -> Iterator[Entry]:
        """Hints that have not ended."""
        for entries in list(self._live.values()):
            yield from list(entries.values())

    # -- inside -----------------------------------------------------------------------------------

    def _bucket(self, tenant: str, now: float) -> TokenBucket:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = TokenBucket(self._limits.per_second, self._limits.burst, now)
            self._buckets[tenant] = bucket
        return bucket

    def _same(self, hint: Hint) -> Entry | None:
        if hint.session is not None:
            return self._by_session.get((hint.tenant, hint.session))
        return self._by_prompt.get(_place(hint))

    def _add(self, entry: Entry) -> None:
        hint = entry.hint
        if entry.id in self._entries:
            raise InternalError(f"hint {entry.id} is in the book already")
        self._entries[entry.id] = entry
        self._live.setdefault(hint.tenant, {})[entry.id] = entry
        if hint.session is not None:
            self._by_session[hint.tenant, hint.session] = entry
        self._bytes[hint.tenant] += ENTRY_BYTES + len(hint.key)
        self._next_expiry = min(self._next_expiry, entry.expires)
        place = _place(hint)
        entry.digest = place[3].hex()
        if hint.key and place not in self._by_prompt:
            self._by_prompt[place] = entry
            beginning = (hint.tenant, hint.namespace, _beginning(hint.key))
            self._lengths.setdefault(beginning, Counter())[len(hint.key)] += 1

    def _start(self, entry: Entry) -> None:
        self._move_on(entry, State.MOVING)
        self._moving[entry.hint.tenant] += entry.hint.tokens

    def _end(self, entry: Entry, state: State, now: float, why: str) -> None:
        entry.ended_at, entry.ended_from, entry.why = now, entry.state, why
        self._move_on(entry, state)
        self._ended.append(entry)
        self.counts[state.value] += 1
        self._leave_place(entry)
        hint = entry.hint
        live = self._live[hint.tenant]
        del live[entry.id]
        if not live:
            del self._live[hint.tenant]
        if hint.session is not None and self._by_session.get((hint.tenant, hint.session)) is entry:
            del self._by_session[hint.tenant, hint.session]
        place = _place(hint)
        if self._by_prompt.get(place) is entry:
            del self._by_prompt[place]
            beginning = (hint.tenant, hint.namespace, _beginning(hint.key))
            lengths = self._lengths[beginning]
            lengths[len(hint.key)] -= 1
            if not lengths[len(hint.key)]:
                del lengths[len(hint.key)]
            if not lengths:
                del self._lengths[beginning]
        self._bytes[hint.tenant] -= ENTRY_BYTES + len(hint.key)
        if not self._bytes[hint.tenant]:
            del self._bytes[hint.tenant]
        entry.hint = hint.without_key()

    def _move_on(self, entry: Entry, state: State) -> None:
        if state not in TRANSITIONS.get(entry.state, ()):
            raise InternalError(f"hint {entry.id} cannot become {state} while it is {entry.state}")
        if entry.state in BUSY and state not in BUSY:
            self._moving[entry.hint.tenant] -= entry.hint.tokens
            if not self._moving[entry.hint.tenant]:
                del self._moving[entry.hint.tenant]
        entry.state = state

    def _leave_place(self, entry: Entry) -> None:
        for name in () if entry.place is None else entry.place.names:
            ranks = self._ranks[name]
            ranks[entry.hint.priority] -= 1
            if not ranks[entry.hint.priority]:
                del ranks[entry.hint.priority]
            if not ranks:
                del self._ranks[name]

    @property
    def size_bytes(self) -> int:
        """Memory of all hints, ended ones included."""
        return sum(self._bytes.values()) + ENTRY_BYTES * len(self._ended)

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._entries) - len(self._ended)

    def __repr__(self) -> str:
        live = sum(len(entries) for entries in self._live.values())
        return f"HintBook({live} live, moving {dict(self._moving)}, {dict(self.counts)})"

    def check(self) -> None:
        """Verify every counter and every map against the entries.

        Raises:
            InternalError: names the first that does not hold.
        """
        live = list(self.live())
        if any(entry.state in ENDED for entry in live):
            raise InternalError("a hint that has ended is live")
        if len(self._entries) != len(live) + len(self._ended):
            raise InternalError("hints were lost")
        moving = Counter[str]()
        ranks: dict[str, Counter[int]] = {}
        for entry in live:
            if entry.state in BUSY and entry.hint.tokens:
                moving[entry.hint.tenant] += entry.hint.tokens
            for name in () if entry.place is None else entry.place.names:
                ranks.setdefault(name, Counter())[entry.hint.priority] += 1
        if ranks != self._ranks:
            raise InternalError(f"priorities {self._ranks}, counted {ranks}")
        if moving != self._moving:
            raise InternalError(f"moving {self._moving}, counted {moving}")
        mapped = [*self._by_session.values(), *self._by_prompt.values()]
        if any(entry.state in ENDED for entry in mapped):
            raise InternalError("a hint that has ended can be found")
        lengths: dict[tuple[str, Hashable, bytes], Counter[int]] = {}
        for place, entry in self._by_prompt.items():
            if place != _place(entry.hint):
                raise InternalError(f"hint {entry.id} stands under {place}")
            beginning = (*place[:2], _beginning(entry.hint.key))
            lengths.setdefault(beginning, Counter())[len(entry.hint.key)] += 1
        if lengths != self._lengths:
            raise InternalError("lengths of prompts do not agree")
        sizes = Counter[str]()
        for entry in live:
            sizes[entry.hint.tenant] += ENTRY_BYTES + len(entry.hint.key)
        if sizes != self._bytes or max(sizes.values(), default=0) > self._limits.bytes:
            raise InternalError(f"hints take {self._bytes} bytes, counted {sizes}")
        if any(entry.expires < self._next_expiry for entry in live):
            raise InternalError("a hint ends earlier than is looked for")
        for tenant, tokens in self._moving.items():
            if tokens > self._limits.moving_tokens:
                raise InternalError(f"{tenant} moves {tokens} tokens at once")


def _beginning(key: bytes) -> bytes:
    """The first bytes of a key, by which hints are looked up; empty for a shorter key."""
    return key[:BEGIN_BYTES] if len(key) >= BEGIN_BYTES else b""


def _place(hint: Hint) -> tuple[str, Hashable, int, bytes]:
    """The lookup key of a hint's prompt."""
    digest = hashlib.blake2b(hint.key, digest_size=DIGEST_BYTES).digest()
    return hint.tenant, hint.namespace, len(hint.key), digest


def _too_fast(wait: float) -> Answer:
    return Answer(Verdict.REFUSED, "too many hints per second", retry_after_s=wait)


def _verdict_of(entry: Entry) -> Verdict:
    return Verdict.DEFERRED if entry.state is State.DEFERRED else Verdict.ACCEPTED
