"""One hint: its contents, the states of its life, and the place where its request is expected.

A *place* is the instance where the KV of an expected request is being brought up; if that is a prefill
instance, it includes the instance that will decode.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from dataclasses import dataclass

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.agent import MAX_SECONDS, Advise, FetchSpan


class State(enum.StrEnum):
    """Where a hint is in its life."""

    DEFERRED = "deferred"
    """Waits until the tenant's budget has room."""
    MOVING = "moving"
    """The instance brings the KV in."""
    COMPUTING = "computing"
    """All cached KV is in HBM, and the instance computes the rest while it is idle."""
    READY = "ready"
    """All KV is in place for the request."""
    USED = "used"
    """The request has come."""
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """The instance went away, or could not do it. The request is served all the same."""


ENDED = frozenset({State.USED, State.EXPIRED, State.CANCELLED, State.FAILED})
BUSY = frozenset({State.MOVING, State.COMPUTING})
"""An instance does something for it; its tokens count against the tenant's budget."""

TRANSITIONS: dict[State, frozenset[State]] = {
    State.DEFERRED: frozenset({State.MOVING, State.USED, State.EXPIRED, State.CANCELLED, State.FAILED}),
    State.MOVING: frozenset(
        {State.COMPUTING, State.READY, State.USED, State.EXPIRED, State.CANCELLED, State.FAILED}
    ),
    State.COMPUTING: frozenset({State.READY, State.USED, State.EXPIRED, State.CANCELLED, State.FAILED}),
    State.READY: frozenset({State.USED, State.EXPIRED, State.CANCELLED, State.FAILED}),
}
"""State -> states that may follow. Ended states have no successor."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request is expected. decode: the decode instance, if ``instance`` is a prefill instance."""

    instance: str
    decode: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every instance that takes part."""
        return (self.instance,) if self.decode is None else (self.instance, self.decode)


@dataclass(frozen=True, slots=True)
class Hint:
    """One hint, checked and tokenized.

    namespace, key: as the prompt trees know the conversation so far. session: the client's name of it.
    earliest_s: seconds from now before which the request does not come. ttl_s: how long after that it may.
    """

    tenant: str
    namespace: Hashable
    key: bytes
    session: str | None = None
    priority: int = 0
    earliest_s: float = 0.0
    ttl_s: float | None = None
    learnt: bool = False
    """The router made it from the pauses that it has seen (``pausing``)."""
    dropped_tokens: int = 0
    """How long the conversation was of a hint that has ended; its key is not kept."""

    @property
    def tokens(self) -> int:
        """Of the conversation so far."""
        return self.dropped_tokens or len(self.key) // TOKEN_BYTES

    def without_key(self) -> Hint:
        """An ended hint as it is kept, without its prompt."""
        return dataclasses.replace(self, key=b"", dropped_tokens=self.tokens)

    @property
    def is_sendable(self) -> bool:
        """Whether it can be sent to instances: a hint of tokens, without an adapter."""
        return isinstance(self.namespace, tuple) and self.namespace[:2] == ("tokens", None)

    def as_advise(
        self, id: str, ttl_s: float, spans: tuple[FetchSpan, ...] = (), earliest_s: float = 0.0
    ) -> Advise:
        """The message to an instance, with the router's id of the hint. Seconds are from now on."""
        assert isinstance(self.namespace, tuple)
        _, _, extra_key, salt = self.namespace
        ttl_s, earliest_s = (min(max(0.0, seconds), MAX_SECONDS) for seconds in (ttl_s, earliest_s))
        return Advise(id, self.key, extra_key, salt, self.priority, ttl_s, spans, earliest_s)

    def clipped(self, tokens: int) -> Hint:
        """The hint for its leading ``tokens`` only."""
        return dataclasses.replace(self, key=self.key[: tokens * TOKEN_BYTES])


@dataclass(eq=False, slots=True)
class Entry:
    """A hint in the book. Only ``HintBook`` writes it."""

    id: str
    hint: Hint
    state: State
    born: float
    expires: float
    earliest: float
    """Before which the request does not come."""
    digest: str = ""
    """Of its key, in hexadecimal digits."""
    place: Place | None = None
    why: str = ""
    """Why it ended, for people."""
    ready_at: float | None = None
    ended_at: float | None = None
    ended_from: State | None = None
    """Its state before it ended."""

    @property
    def instance(self) -> str | None:
        """The instance to which the request will be sent first."""
        return None if self.place is None else self.place.instance
