"""The built-in load: sessions of a seeded mix, each a number of turns.

- *conversations* (60 %): one of 20 system prompts, a few popular; each turn has the conversation before it,
  the answers too;
- *agents* (25 %): one of 6 long beginnings of instructions and tools, and many turns that follow at once;
- *documents* (15 %): one of 200 documents, a few popular, and one question about it.

Tokens are random numbers from the seed. The meaning of a text does not matter here: the place where it
parts from another one does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.simulator.settings import Settings


@dataclass(frozen=True, slots=True)
class Observed:
    """Recorded times of a request, in seconds from its arrival: when the router chose its instance, when that
    began with it and had computed the prompt, and when the first and the last token came.

    decided_s: without the wait for the router's admission, which is simulated.
    """

    decided_s: float
    began_s: float
    computed_s: float
    first_s: float
    last_s: float
    fetch_s: float | None = None
    """That reading KV from other instances took; infinite if it did not come."""
    sending_s: float = 0.0
    """From the choice until the request was sent, in which exports are asked for."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, sent ``think_s`` after the answer to the one before.

    key, answer: encoded tokens of its prompt and of its answer. id: of a recorded one. observed: the times
    that it takes; by the cost model without any. tool: that its answer calls.
    """

    key: bytes
    answer: bytes
    think_s: float = 0.0
    id: str = ""
    observed: Observed | None = None
    tool: str = ""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A recorded hint. key: the conversation so far. lead_s: until the earliest arrival that it names."""

    at_s: float
    session: str
    tenant: int
    key: bytes
    lead_s: float


class Session(Protocol):
    """A session of the load."""

    @property
    def name(self) -> str: ...

    @property
    def tenant(self) -> int:
        """The number of its tenant."""

    @property
    def start_s(self) -> float:
        """When its first request is sent, from the start of the simulation."""

    def turns(self) -> Iterator[Turn]:
        """Its requests, in order. Each is made when it is asked for."""


SYSTEM_PROMPTS: Final = 20
TOOLS: Final = 6
DOCUMENTS: Final = 200
MEAN_TURNS: Final = 3.8
"""Requests of a session, on average."""


class Texts:
    """Texts that sessions share, each a run of random tokens."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"texts {seed}")
        self.systems = [self._text(256, 1536) for _ in range(SYSTEM_PROMPTS)]
        self.tools = [self._text(3000, 5000) for _ in range(TOOLS)]
        self.documents = [self._text(2000, 6000) for _ in range(DOCUMENTS)]

    def _text(self, least: int, most: int) -> bytes:
        return self._random.randbytes(self._random.randint(least, most) * TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class MixedSession:
    """A `Session` of the mix. number: from 0, which with the seed decides all of it."""

    texts: Texts
    seed: int
    number: int
    tenant: int
    start_s: float

    @property
    def name(self) -> str:
        return f"session-{self.number}"

    def turns(self) -> Iterator[Turn]:
        draw = random.Random(f"session {self.seed} {self.number}")
        kind = draw.random()
        if kind < 0.6:
            return _talk(draw, _popular(draw, self.texts.systems), 40, 400, 4, (60, 360), 8.0)
        if kind < 0.85:
            return _talk(draw, _popular(draw, self.texts.tools), 60, 500, 5, (30, 160), 0.8)
        return _talk(draw, _popular(draw, self.texts.documents), 20, 80, 1, (60, 240), 0.0)


def _popular(draw: random.Random, texts: list[bytes]) -> bytes:
    """One of the texts: the first is twice as popular as the second, three times as the third."""
    weights = [1 / place for place in range(1, len(texts) + 1)]
    return draw.choices(texts, weights)[0]


def _talk(
    draw: random.Random,
    text: bytes,
    least: int,
    most: int,
    mean_turns: float,
    answers: tuple[int, int],
    think_s: float,
) -> Iterator[Turn]:
    """Turns that repeat all before them.

    Args:
        text: with which all of them begin.
        least, most: tokens that each turn adds.
        answers: least and most tokens of an answer.
        think_s: mean time between an answer and the next request.
    """
    more = 1 - 1 / mean_turns
    for number in itertools.count():
        text += draw.randbytes(draw.randint(least, most) * TOKEN_BYTES)
        answer = draw.randbytes(draw.randint(*answers) * TOKEN_BYTES)
        yield Turn(text, answer, draw.expovariate(1 / think_s) if number and think_s else 0.0)
        if draw.random() >= more:
            return
        text += answer


def mixed(settings: Settings) -> Iterator[Session]:
    """Sessions of the mix, as they arrive (Poisson), without end."""
    texts = Texts(settings.seed)
    draw = random.Random(f"arrivals {settings.seed}")
    sessions_per_s = settings.rate * settings.instances / MEAN_TURNS
    now = 0.0
    for number in itertools.count():
        now += draw.expovariate(sessions_per_s)
        tenant = _tenant(draw, settings)
        yield MixedSession(texts, settings.seed, number, tenant, now)


def _tenant(draw: random.Random, settings: Settings) -> int:
    if settings.greedy == 1.0:
        return draw.randrange(settings.tenants)
    weights = [settings.greedy] + [1.0] * (settings.tenants - 1)
    return draw.choices(range(settings.tenants), weights)[0]
