"""The instances: what is known of each, in which state it is, and how busy it is.

The life of an instance is the table ``TRANSITIONS``; ``Fleet`` applies it and keeps the counters that
policies look at. It does no I/O: ``health`` asks the workers and reports here.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.exchange import ConnectionLost
from router.policies import Instance
from sglang_ext.errors import InternalError

logger = logging.getLogger("router.fleet")


class State(enum.StrEnum):
    """Where an instance is in its life."""

    NEW = "new"
    """Never answered."""
    READY = "ready"
    SUSPECT = "suspect"
    """Missed a probe; still given requests, until the verdict."""
    DOWN = "down"
    UNFIT = "unfit"
    """Answers, but cannot serve here: another model, another role, a key we lack."""


class Event(enum.StrEnum):
    """What ``health`` or a request found out."""

    LEARNT = "learnt"
    """It told its facts, and they fit the fleet."""
    REJECTED = "rejected"
    """It told its facts, and they do not fit."""
    ALIVE = "alive"
    MISSED = "missed"
    """A probe was not answered in time."""
    LOST = "lost"
    """The verdict: too many probes missed in a row, or nobody listens at its port."""


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.LEARNT): State.READY,
    (State.NEW, Event.REJECTED): State.UNFIT,
    (State.NEW, Event.MISSED): State.NEW,
    (State.NEW, Event.LOST): State.NEW,
    (State.READY, Event.ALIVE): State.READY,
    (State.READY, Event.MISSED): State.SUSPECT,
    (State.READY, Event.LOST): State.DOWN,
    (State.READY, Event.LEARNT): State.READY,
    (State.READY, Event.REJECTED): State.UNFIT,
    (State.SUSPECT, Event.ALIVE): State.READY,
    (State.SUSPECT, Event.MISSED): State.SUSPECT,
    (State.SUSPECT, Event.LOST): State.DOWN,
    (State.SUSPECT, Event.LEARNT): State.READY,
    (State.SUSPECT, Event.REJECTED): State.UNFIT,
    (State.DOWN, Event.LEARNT): State.READY,
    (State.DOWN, Event.REJECTED): State.UNFIT,
    (State.DOWN, Event.MISSED): State.DOWN,
    (State.DOWN, Event.LOST): State.DOWN,
    (State.UNFIT, Event.LEARNT): State.READY,
    (State.UNFIT, Event.REJECTED): State.UNFIT,
    (State.UNFIT, Event.MISSED): State.UNFIT,
    (State.UNFIT, Event.LOST): State.DOWN,
}
"""(state, event) -> next state. A pair that is not here is a bug of the caller: ALIVE is only asked of
instances whose facts are known."""

USABLE = frozenset({State.READY, State.SUSPECT})
"""States in which an instance is given requests."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What every instance of a fleet must have in common."""

    name: str
    """``served_model_name``."""
    architecture: str
    vocab_size: int
    """Token ids at or above it kill a stock SGLang scheduler."""
    context_length: int

    def difference(self, other: ModelFacts) -> str | None:
        """The first field in which ``other`` differs, with both values; ``None`` when they agree."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        return None


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """Server settings that change how SGLang turns messages into tokens."""

    chat_template: str | None = None
    completion_template: str | None = None
    hf_chat_template_name: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    default_template_kwargs: tuple[tuple[str, object], ...] = ()
    multimodal: bool = False


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What an instance tells about itself when it is first reached, and whenever it comes back."""

    model: ModelFacts
    weight_version: str
    identity: str
    """Differs between two starts of the same server, so that a restart is told from a hiccup."""
    role: str
    tokenizer_path: str
    truncates: bool = False
    """``--allow-auto-truncate``: too long prompts are cut instead of refused."""
    is_generation: bool = True
    chat: ChatFacts = ChatFacts()


@dataclass(eq=False, slots=True)
class Row:
    """One instance. Only ``Fleet`` writes it."""

    name: str
    """Its URL."""
    state: State = State.NEW
    why: str = "not reached yet"
    """Why it is in this state, for people."""
    facts: InstanceFacts | None = None
    in_flight: int = 0
    queued_tokens: int = 0
    last_picked: int = 0
    misses: int = 0
    other_model: bool = False
    """It was found to serve another model than the fleet."""
    waiting: set[Load] = field(default_factory=set)
    """Requests that give up when the verdict falls."""


class Fleet:
    """All instances of one router, on one event loop.

    Args:
        urls: the instances' URLs; they are their names.
        failure_threshold: probes missed in a row that make the verdict.
        on_restart: called with the name of an instance whose cache is not what it was: restarted, or
            with other weights.
        on_model: called with the facts when the fleet takes on a model: the first one learnt, or a
            new one after every instance of the old one has gone.
        cached_tokens: how many tokens the index believes an instance to hold.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        *,
        failure_threshold: int = 3,
        on_restart: Callable[[str], None] = lambda name: None,
        on_model: Callable[[InstanceFacts], None] = lambda facts: None,
        cached_tokens: Callable[[str], int] = lambda name: 0,
    ) -> None:
        self.rows = {url: Row(url) for url in urls}
        self.model: InstanceFacts | None = None
        """The facts of the first instance of the model being served; kept while the fleet is down."""
        self._failure_threshold = failure_threshold
        self._on_restart = on_restart
        self._on_model = on_model
        self._cached_tokens = cached_tokens
        self._picks = itertools.count(1)

    # -- what is found out ------------------------------------------------------------------------

    def learnt(self, name: str, facts: InstanceFacts) -> State:
        """An instance told what it is; returns the state that this puts it in."""
        row = self.rows[name]
        difference = self._model_difference(facts)
        row.other_model = difference is not None
        problem = _unfit(facts) or difference
        if problem is not None:
            row.facts = None
            return self._apply(row, Event.REJECTED, problem)
        if self.model is None or self.model.model.difference(facts.model):
            self.model = facts
            self._on_model(facts)
        before = row.facts
        if before is None or (before.identity, before.weight_version) != (
            facts.identity,
            facts.weight_version,
        ):
            self._on_restart(name)
        row.facts = facts
        row.misses = 0
        return self._apply(row, Event.LEARNT, "answers")

    def _model_difference(self, facts: InstanceFacts) -> str | None:
        """How its model differs from the one being served; nothing does while nobody serves."""
        if self.model is None or not any(row.state in USABLE for row in self.rows.values()):
            return None
        difference = self.model.model.difference(facts.model)
        return difference and f"it serves another model than the others: {difference}"

    def rejected(self, name: str, why: str) -> State:
        """An instance answers, but will not tell what it is."""
        return self._apply(self.rows[name], Event.REJECTED, why)

    def alive(self, name: str) -> State:
        """A probe was answered."""
        row = self.rows[name]
        row.misses = 0
        return self._apply(row, Event.ALIVE, "answers")

    def missed(self, name: str, why: str) -> State:
        """A probe was not answered; enough of them in a row are the verdict."""
        row = self.rows[name]
        row.misses += 1
        if row.misses >= self._failure_threshold:
            return self._apply(row, Event.LOST, f"{row.misses} probes missed: {why}")
        return self._apply(row, Event.MISSED, why)

    def lost(self, name: str, why: str) -> State:
        """Nobody listens at the instance's address."""
        return self._apply(self.rows[name], Event.LOST, why)

    def _apply(self, row: Row, event: Event, why: str) -> State:
        following = TRANSITIONS.get((row.state, event))
        if following is None:
            raise InternalError(f"instance {row.name} cannot be {event} while it is {row.state}")
        if following is not row.state:
            level = logging.INFO if following is State.READY else logging.WARNING
            logger.log(level, "instance %s: %s -> %s (%s)", row.name, row.state, following, why)
        row.state, row.why = following, why
        if following not in USABLE:
            for load in list(row.waiting):
                load.give_up()
        return following

    # -- what policies see ------------------------------------------------------------------------

    def usable(self, excluded: frozenset[str] = frozenset()) -> tuple[Instance, ...]:
        """The instances that can take a request now, ``excluded`` left out."""
        return tuple(
            Instance(
                row.name, row.in_flight, row.queued_tokens, self._cached_tokens(row.name), row.last_picked
            )
            for row in self.rows.values()
            if row.state in USABLE and row.name not in excluded
        )

    @contextmanager
    def carrying(self, name: str, queued_tokens: int) -> Iterator[Load]:
        """Count a request as being in flight at an instance."""
        row = self.rows[name]
        row.in_flight += 1
        row.last_picked = next(self._picks)
        load = Load(row, queued_tokens)
        try:
            yield load
        finally:
            load.prefilled()
            row.in_flight -= 1

    def __repr__(self) -> str:
        states = ", ".join(f"{row.name}: {row.state} ({row.in_flight})" for row in self.rows.values())
        return f"Fleet({states})"

    def check(self) -> None:
        """Verify the counters.

        Raises:
            InternalError: one of them is impossible.
        """
        for row in self.rows.values():
            if row.in_flight < 0 or row.queued_tokens < 0 or (row.in_flight == 0 and row.queued_tokens):
                raise InternalError(
                    f"{row.name}: {row.in_flight} in flight, {row.queued_tokens} tokens queued"
                )
            if row.state in USABLE and row.facts is None:
                raise InternalError(f"{row.name} is {row.state} without facts")
            if row.waiting and row.state not in USABLE:
                raise InternalError(f"{len(row.waiting)} requests wait for {row.name}, which is {row.state}")


def _unfit(facts: InstanceFacts) -> str | None:
    """Why an instance cannot serve in any fleet of this router."""
    if not facts.is_generation:
        return "it serves an embedding model"
    if facts.role != "colocated":
        return f"its role is {facts.role}; start it without --disaggregation-mode"
    return None


class Load:
    """One request's share of an instance's counters, and its tie to the instance's fate."""

    __slots__ = ("_cancelling", "_given_up", "_row", "_task", "_tokens")

    def __init__(self, row: Row, tokens: int) -> None:
        self._row = row
        self._tokens = tokens
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._given_up = False
        row.queued_tokens += tokens

    def prefilled(self) -> None:
        """Its prompt has been computed: the first byte of the answer is here. Repeating it is harmless."""
        self._row.queued_tokens -= self._tokens
        self._tokens = 0

    @contextmanager
    def until_lost(self) -> Iterator[None]:
        """Give up what runs inside when the instance is found to be down.

        Raises:
            ConnectionLost: it was.
        """
        self._task = asyncio.current_task()
        if self._task is None or self._row.state not in USABLE:
            raise ConnectionLost(f"{self._row.name} is {self._row.state}: {self._row.why}")
        self._cancelling = self._task.cancelling()
        self._row.waiting.add(self)
        try:
            yield
        except asyncio.CancelledError as error:
            # Ours, unless someone else has cancelled the task too (as asyncio.timeout does it).
            if self._given_up and self._task.uncancel() <= self._cancelling:
                raise ConnectionLost(f"{self._row.name} is down: {self._row.why}") from error
            raise
        finally:
            self._row.waiting.discard(self)

    def give_up(self) -> None:
        """The verdict has fallen."""
        self._row.waiting.discard(self)
        if self._task is not None:
            self._given_up = True
            self._task.cancel()
