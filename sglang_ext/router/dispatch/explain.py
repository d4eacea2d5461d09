"""Why a request hit or missed: a bounded log of recent requests, and their explanations.

A logged request keeps the facts of its routing at that time: the prompt's keys, the fleet, the tokens that
each instance was believed to hold, the decision. An explanation is made only when a client asks for it. It
adds the instance's report and the index's history of evictions, and names the causes. The log keeps no text
of prompts, and a tenant sees its own requests only.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from sglang_ext.router.clients.divergence import Divergence, common_tokens
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.index.index import Index
from sglang_ext.router.policies import Fleet, Match
from sglang_ext.router.telemetry.estimate import Estimate
from sglang_ext.router.telemetry.fetch_note import FetchNote
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.signals import Signal

LOGGED_BYTES = 2000
"""Memory of a logged request, without its keys and its fleet."""
INSTANCE_BYTES = 24
"""Of a fleet, for each instance: a reference, its score, and a share of the few that a request changes."""
CHARACTER_BYTES = 4
"""Of a text, at most."""
MATCHING_UNITS = 16
"""Prompts of two namespaces count as the same beginning from so many tokens on."""


class Cause(enum.StrEnum):
    """Why tokens of a prompt were found, or not."""

    HIT = "hit"
    """All that could be reused was; the last block of a prompt is always computed."""
    NEVER_STORED = "never-stored"
    """No instance was known to hold any of it, and nothing of it is known to have been evicted."""
    EVICTED = "evicted"
    """An instance held it, and evicted it before the request came."""
    OTHER_SALT = "other-salt"
    """The same beginning is known under another adapter, ``extra_key`` or ``cache_salt``."""
    BELOW_THRESHOLD = "below-threshold"
    """The holder was not chosen, because the cached part of the prompt was below the threshold."""
    OTHER_INSTANCE = "other-instance"
    """The holder was not chosen, for the decision's reason."""
    INDEX_NOT_TRUSTED = "index-not-trusted"
    """The index of an instance was not trusted, so its KV was unknown."""
    INDEX_AWAITED = "index-awaited"
    """The snapshot of an instance had not arrived, so the rest of its KV was unknown."""
    BELIEVED_ONLY = "believed-only"
    """The chosen instance was believed to hold more than it found."""
    NOT_REPORTED = "not-reported"
    """The instance did not report its cached tokens (start it with ``--enable-cache-report``)."""
    HISTORY_UNKNOWN = "history-unknown"
    """The index keeps no history, so that evicted prompts and new ones look the same."""


class Choice(msgspec.Struct, frozen=True):
    """One decision for a request; a retry makes another."""

    instance: str
    reason: str
    matched: int
    holders: Mapping[str, Match]
    """Instance -> its match by the index."""
    scores: Mapping[str, float]
    fleet: Fleet = ()
    """The instances that it was chosen from, as they were seen."""
    decode: str | None = None
    fetch: FetchNote | None = None
    """Spans fetched from other instances; their outcome is filled in when they end."""
    estimate: Estimate | None = None
    """Expected times; the observed ones are filled in later."""

    @property
    def untrusted(self) -> list[str]:
        """Instances whose index was not believed."""
        return [known.name for known in self.fleet if not (known.trusted or known.awaited)]

    @property
    def awaited(self) -> list[str]:
        """Instances whose snapshot was not in."""
        return [known.name for known in self.fleet if known.awaited]


class LoggedRequest(msgspec.Struct, eq=False):
    """The log entry of one request."""

    record: Record
    prompts: Sequence[Encoded]
    at: float
    """Seconds since the epoch."""
    choices: list[Choice] = []
    size_bytes: int = 0
    """Estimated memory, from when it is added to the others."""
    session: str | None = None
    """Its session, under a name that no other tenant's has."""
    max_new_tokens: int | None = None
    whole: bytes = b""
    """The key of its only prompt with the answer, as far as that is known; until it has ended."""


class History(Protocol):
    """The past evictions in an index."""

    def __call__(self, namespace: Hashable, key: bytes) -> Iterable[Any]:
        """Evictions of a prompt's blocks, oldest first: ``index_history.Departure`` or the like."""


class Oracle(Protocol):
    """The tokens that an oracle of equal capacity would have found; see ``regret``."""

    def explain(self, request_id: str, *, admin: bool) -> dict[str, Any] | None:
        """A request's part in the answer of ``/explain``; None where it is not known."""


class RequestLog:
    """A ring of the most recent requests, bounded in bytes; the oldest go first.

    Args:
        max_bytes: estimated memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._requests: deque[LoggedRequest] = deque()
        self._open: dict[int, LoggedRequest] = {}
        """Requests that have not ended, by the id of their record; none where nothing waits for their end."""
        self.size_bytes = 0
        self.ended: Signal[[LoggedRequest, float]] = Signal()
        """A logged request has ended, and when; ``monotonic``."""

    def add(self, logged: LoggedRequest, instances: int) -> None:
        """Remember a request. Of several with the same id, the last counts.

        Args:
            instances: how many the fleet has that it will keep with its choice.
        """
        characters = len(logged.record.request_id) + len(logged.record.path)
        size, names = LOGGED_BYTES + INSTANCE_BYTES * instances, set()
        for prompt in logged.prompts:
            size += len(prompt.key)
            # Prompts of one request share the objects of its names.
            for name in prompt.namespace:
                if name is not None and id(name) not in names:
                    names.add(id(name))
                    characters += len(name)
        logged.size_bytes = size + CHARACTER_BYTES * characters
        self._requests.append(logged)
        self.size_bytes += logged.size_bytes
        while self.size_bytes > self._max_bytes:
            self.size_bytes -= self._requests.popleft().size_bytes
        if self.ended:
            self._open[id(logged.record)] = logged

    def learn(self, flight: Flight, namespace: tuple[str | None, ...], key: bytes) -> None:
        """An instance has a request's prompt. key: the prompt, with the known part of the answer."""
        logged = self._open.get(id(flight.record))
        if logged is not None and len(logged.prompts) == 1 and namespace == logged.prompts[0].namespace:
            logged.whole = key

    def end(self, record: Record, now: float) -> None:
        """A request of any kind has ended."""
        logged = self._open.pop(id(record), None)
        if logged is not None:
            self.ended(logged, now)
            logged.whole = b""

    def find(self, request_id: str, *, tenant: str | None, admin: bool) -> LoggedRequest | None:
        """The logged of a request, by its ``x-request-id`` or the id that stands in its answer, if the asker
        may see it. Ids are the choice of clients, and may be those of others: the asker's own go first."""
        found = None
        for known in reversed(self._requests):
            record = known.record
            mine = record.caller.tenant == tenant
            if mine and record.request_id == request_id:
                return known
            if found is None and (admin or mine) and request_id in (record.answer_id, record.request_id):
                found = known
        return found

    def elsewhere(self, logged: LoggedRequest) -> int:
        """Leading tokens that other requests have had in common under another namespace."""
        return max((_common(logged, other) for other in self._requests if other is not logged), default=0)

    def __len__(self) -> int:
        return len(self._requests)

    def __repr__(self) -> str:
        return f"RequestLog({len(self)}, bytes={self.size_bytes} of {self._max_bytes})"


def _matched_by(prompts: Sequence[Encoded]) -> str:
    if all(prompt.tokens is not None for prompt in prompts):
        return "tokens"
    before = any(prompt.known is not prompt for prompt in prompts)
    return "tokens before the first picture, then text" if before else "text"


def _common(logged: LoggedRequest, other: LoggedRequest) -> int:
    """Tokens that prompts of two requests have in common, where only the namespace keeps them apart."""
    most = 0
    for mine in logged.prompts:
        for theirs in other.prompts:
            if mine.namespace == theirs.namespace or mine.namespace[:1] != theirs.namespace[:1]:
                continue
            most = max(most, common_tokens(mine.key, theirs.key))
    return most


def causes(
    logged: LoggedRequest, evictions: Sequence[Mapping[str, Any]] | None, elsewhere: int, block_size: int
) -> list[Cause]:
    """The causes of a request's hit or miss, the most specific first.

    Args:
        evictions: of blocks of its prompts; ``None`` when the index keeps no history.
        elsewhere: leading tokens that are known under another namespace.
        block_size: tokens per block.
    """
    record = logged.record
    found: list[Cause] = []
    if not logged.choices:
        return found
    choice = logged.choices[-1]
    best = max((match.tokens for match in choice.holders.values()), default=0)
    reused = record.cached_tokens
    if reused is None:
        found.append(Cause.NOT_REPORTED)
    total = record.prompt_tokens
    reached = choice.matched if reused is None else reused
    if total is not None and reached >= max(1, (total - 1) // block_size * block_size):
        return [Cause.HIT, *found]
    if reused is not None and reused + block_size < choice.matched:
        found.append(Cause.BELIEVED_ONLY)
    if best > choice.matched:
        below = choice.reason == "short-prefix"
        found.append(Cause.BELOW_THRESHOLD if below else Cause.OTHER_INSTANCE)
    lost = [event for event in evictions or () if not event["still_in"]]
    if lost:
        found.append(Cause.EVICTED)
    if choice.awaited:
        found.append(Cause.INDEX_AWAITED)
    if choice.untrusted:
        found.append(Cause.INDEX_NOT_TRUSTED)
    if elsewhere >= MATCHING_UNITS and elsewhere > reached:
        found.append(Cause.OTHER_SALT)
    if not best and not lost and not reached:
        found.append(Cause.HISTORY_UNKNOWN if evictions is None else Cause.NEVER_STORED)
    return found


def evictions_of(logged: LoggedRequest, history: History | None) -> list[dict[str, Any]] | None:
    """Evictions of blocks of a request's prompts before it arrived, as JSON."""
    if history is None:
        return None
    return [
        {
            "instance": event.instance,
            "tier": event.tier,
            "at": event.at,
            "tokens": event.tokens,
            "still_in": event.still_in,
        }
        for prompt in logged.prompts
        if prompt.tokens is not None
        for event in history(prompt.namespace, prompt.key)
        if event.at <= logged.at
    ]


def as_json(
    logged: LoggedRequest,
    log: RequestLog,
    history: History | None,
    spilled: Callable[[Any, bytes, float], list[dict[str, Any]]],
    *,
    block_size: int,
    admin: bool,
    own: bool,
) -> dict[str, Any]:
    """The answer of ``GET /explain/{request_id}``.

    Args:
        spilled: returns the copies of a prompt's prefix that other instances kept before a time.
        own: the asker's key has sent the request, and may see its words.
    """
    record = logged.record

    def shown(seconds: float) -> float:
        return seconds if admin else record.shown(seconds)

    evictions = evictions_of(logged, history)
    # A match under another salt reveals other tenants' prompts: for administrators only.
    elsewhere = log.elsewhere(logged) if admin else 0
    return {
        "request_id": record.request_id,
        "answer_id": record.answer_id,
        "at": logged.at,
        "endpoint": record.path,
        "tenant": record.caller.tenant,
        "status": record.status,
        "causes": [cause.value for cause in causes(logged, evictions, elsewhere, block_size)],
        "prompt": {
            "tokens": record.prompt_tokens,
            "matched_by": _matched_by(logged.prompts),
            "prompts": len(logged.prompts),
        },
        "divergence": _divergence(record.divergence, texts=own),
        "splice": None
        if record.splice is None
        else {"outcome": record.splice, "saved_tokens": record.spliced_tokens},
        "pause": None if record.pause is None else record.pause.as_json(),
        "repairs": [{"rule": each.rule, "changes": each.changes} for each in record.repairs],
        "cached": {"tokens": record.cached_tokens, "tiers": record.tiers or None},
        "documents": None
        if record.documents is None
        else {
            "ids": list(record.documents.ids),
            "tokens": record.documents.tokens,
            "cached_tokens": min(record.cached_tokens or 0, record.documents.tokens),
        },
        "durability": record.durability,
        "routing": [
            {
                "instance": choice.instance,
                "decode": choice.decode,
                "reason": choice.reason,
                "believed_tokens": choice.matched,
                "holders": {
                    name: {tier.name: count for tier, count in match.by_tier().items()}
                    for name, match in choice.holders.items()
                },
                "scores": dict(choice.scores),
                "index_not_trusted": choice.untrusted,
                "index_awaited": choice.awaited,
                "fetch": None if choice.fetch is None else choice.fetch.as_json(),
                "estimate": None if choice.estimate is None else choice.estimate.as_json(),
            }
            for choice in logged.choices
        ],
        "evictions": evictions,
        "spilled": [
            each for prompt in logged.prompts for each in spilled(prompt.namespace, prompt.key, logged.at)
        ],
        "same_prompt_under_another_salt": elsewhere if admin else None,
        "seconds": {
            "queued": shown(record.queued_s),
            "first_byte": None if record.first_byte is None else shown(record.first_byte - record.started),
            **{stage: shown(seconds) for stage, seconds in record.stages.items()},
            "instances": None if record.instance_stages is None else dict(record.instance_stages.items()),
        },
        "error": record.error,
    }


def _divergence(found: Divergence | None, *, texts: bool) -> dict[str, Any] | None:
    if found is None:
        return None
    shown = {
        "at": found.at,
        "lost_tokens": found.lost,
        "cause": found.cause.value,
        "rule": found.rule or None,
    }
    if not texts:
        return shown
    return {**shown, "before": found.before, "after": found.after, "text": found.sentence()}


class Explainer:
    """Explains requests that this router has served.

    Args:
        trees: the index, and its record of evictions.
        instances: the names of the fleet's instances.
        spilled: see ``as_json``.
        oracle: compares requests with an oracle.
    """

    def __init__(
        self,
        log: RequestLog,
        trees: Index,
        instances: Callable[[], Iterable[str]],
        spilled: Callable[[Any, bytes, float], list[dict[str, Any]]],
        oracle: Oracle,
    ) -> None:
        self._log = log
        self._oracle = oracle
        self._trees = trees
        self._instances = instances
        self._spilled = spilled

    def explain(self, request_id: str, *, tenant: str | None, admin: bool) -> dict[str, Any] | None:
        """The answer of ``GET /explain/{request_id}``; None for a request that is not known to the caller."""
        logged = self._log.find(request_id, tenant=tenant, admin=admin)
        if logged is None:
            return None
        shown = as_json(
            logged,
            self._log,
            self._history(),
            self._spilled,
            block_size=self._trees.block_size,
            admin=admin,
            own=logged.record.caller.tenant == tenant,
        )
        return shown | {"oracle": self._oracle.explain(logged.record.request_id, admin=admin)}

    def _history(self) -> History | None:
        """The index's history of evictions; None if no instance reports them."""
        reports = any(self._trees.reports(name) for name in self._instances())
        return self._trees.history if reports and self._trees.mode != "approximate" else None

    def __repr__(self) -> str:
        return f"Explainer({self._log})"
