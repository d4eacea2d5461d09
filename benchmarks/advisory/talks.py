"""The load of the advisory benchmark: people in tokens, with the pauses that hints work in.

People are Symphony's (section 4, trace generation): a fixed number of them, each reading and typing at human
speed in conversations that really were. The first conversation of each is under way when the measurement
begins, at a turn drawn at random, as it is at any moment of a service that has been running for long.

The load differs from people's and from a GPU's as follows, and the figures say so: pauses are shorter by
``pace``; answers are generated to one part in ``answer_scale`` of their logged length, because a step of
generation on a CPU takes as long as computing some twenty tokens of a prompt, and batches hardly help; the
past that a conversation begins with has its full length, up to ``most_past`` tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.traces import Session, Turn, people

Encode = Callable[[str], list[int]]
"""From text to tokens."""
FRESH = (100, 30_000)
"""Where tokens come from that no log has."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the logs become a load.

    pace: pauses are so many times shorter than people's. answer_scale: answers are so many times shorter.
    least_turns: of the conversations taken. most_past: tokens that are there at the beginning, at most.
    least_typing_s, longest_pause_s: bounds of the shortened times; a load from DRAM or a peer must be shorter
    than the former, and the latter keeps pauses shorter than a measurement. prompt_tokens, answer_tokens: of
    every request, instead of the logged ones (Symphony, figure 16). under_way: the first conversation of each
    user is; else it begins.
    """

    pace: float = 16.0
    answer_scale: int = 8
    least_turns: int = 8
    least_past: int = 1024
    most_past: int = 3072
    least_typing_s: float = 0.3
    longest_pause_s: float = 6.0
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    under_way: bool = True


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its new tokens, the tokens to generate, and the pauses before it.

    reading_s: until the hint. typing_s: from the hint to the request.
    """

    new: tuple[int, ...]
    answer: int
    reading_s: float
    typing_s: float


@dataclass(frozen=True, slots=True)
class Talk:
    """A session: the turns before the measurement, and the turns in it."""

    name: str
    past: tuple[int, ...]
    asks: tuple[Ask, ...]


def users(folder: Path, encode: Encode, count: int, seed: int, shape: Shape) -> list[Iterator[Talk]]:
    """An endless row of talks for each of so many users; of each, the first is under way."""
    rows = people(folder, users=count, seed=seed, least_turns=shape.least_turns, pace=shape.pace)
    return [
        _talks(row, encode, random.Random(f"{seed}/talks/{user}"), shape) for user, row in enumerate(rows)
    ]


def _talks(row: Iterator[Session], encode: Encode, rng: random.Random, shape: Shape) -> Iterator[Talk]:
    for number, session in enumerate(row):
        if number == 0 and shape.under_way:
            yield _under_way(session, encode, rng, shape)
        else:
            asks = tuple(_ask(turn, encode, rng, shape) for turn in session.turns)
            yield Talk(session.name, (), asks)


def _under_way(session: Session, encode: Encode, rng: random.Random, shape: Shape) -> Talk:
    """A conversation at one of its turns. One with a short past begins as late as it takes to be long."""
    said: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    for turn in session.turns:
        starts.append(len(said))
        said += encode(turn.text) + encode(turn.answer_text)
        ends.append(len(said))
    late = [at for at in range(1, len(starts)) if starts[at] >= shape.least_past]
    at = rng.choice(late) if late else len(starts) - 1
    past = tuple(said[: min(starts[at], shape.most_past)])
    asks = [_ask(turn, encode, rng, shape) for turn in session.turns[at:]]
    # The measurement begins at a random moment of a pause.
    share = rng.random()
    first = asks[0]
    asks[0] = Ask(first.new, first.answer, first.reading_s * share, first.typing_s)
    return Talk(session.name, past, tuple(asks))


def _ask(turn: Turn, encode: Encode, rng: random.Random, shape: Shape) -> Ask:
    new = tuple(encode(turn.text)) or (FRESH[0],)
    if shape.prompt_tokens is not None:
        new = fresh(rng, shape.prompt_tokens)
    answer = shape.answer_tokens or max(4, len(encode(turn.answer_text)) // shape.answer_scale)
    typing = min(max(turn.typing_s, shape.least_typing_s), shape.longest_pause_s)
    reading = min(turn.reading_s, shape.longest_pause_s - typing)
    return Ask(new, answer, max(0.0, reading), typing)


def fresh(rng: random.Random, tokens: int) -> tuple[int, ...]:
    """So many tokens that no earlier prompt contains."""
    return tuple(rng.randrange(*FRESH) for _ in range(tokens))


# --- levels of the varied parameter within a measurement ---


def turns_of(levels: Sequence[float], seconds: float, slice_s: float, seed: int) -> list[float]:
    """The level of each slice of a measurement: each as often as the others, in an order drawn anew for every
    round of them, so that disturbances of the machine affect all levels."""
    rng = random.Random(f"{seed}/levels")
    rounds = max(1, round(seconds / slice_s / len(levels)))
    order: list[float] = []
    for _ in range(rounds):
        order += rng.sample(list(levels), len(levels))
    return order


def drawn(seed: int, session: str, turn: int, share: float) -> bool:
    """Whether a request is in the drawn share of all requests; it stays in when the share grows."""
    return random.Random(f"{seed}/{session}/{turn}").random() < share
