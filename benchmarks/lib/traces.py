"""The prompts of people and of agents, and their times: sessions, with the moments at which a hint can be
sent.

People (Symphony, section 4, trace generation): the next request of a conversation comes once its user has
read the answer and typed the question, at human speed; the hint comes when the typing begins. No trace gives
the arrival of a user, so there is a fixed number of them, each of whom begins a new conversation when one
ends (a closed loop).

Agents: a logged run of several agents, one calling the next. An agent's own conversation is a session; the
hint for the next call can be sent as soon as the present one is, because the graph of calls is known, with
the shortest time that the present call takes as a lower bound of the arrival.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.data import rows


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast people are: characters per minute, drawn once per person from a normal distribution.

    mean, deviation: of the distribution. least: lower bound of a drawn speed.
    """

    mean: float
    deviation: float
    least: float

    def draw(self, rng: random.Random) -> float:
        """Characters per second of one person."""
        return max(self.least, rng.gauss(self.mean, self.deviation)) / 60.0


@dataclass(frozen=True, slots=True)
class Script:
    """Reading and typing in one kind of script."""

    reading: Speed
    typing: Speed


ALPHABETIC = Script(reading=Speed(987.0, 118.0, 400.0), typing=Speed(270.0, 75.0, 60.0))
"""Reading: English in the standardized texts IReST (Symphony's reference 43). Typing: some 54 words of five
characters a minute, as students type (reference 27 studies them)."""
IDEOGRAPHIC = Script(reading=Speed(255.0, 29.0, 120.0), typing=Speed(55.0, 15.0, 15.0))
"""Reading: Chinese in IReST. Typing: of characters through a phonetic input method."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    text: the new text of the request; the text before it is the session's past. reading_s: seconds between
    the end of the answer before and the start of the typing; 0 in a first turn. typing_s: seconds of typing,
    which is the lead of a hint that is sent at the first key. answer_text: the logged answer; its length
    gives the number of tokens to generate.
    """

    text: str
    reading_s: float
    typing_s: float
    answer_text: str

    @property
    def gap_s(self) -> float:
        """Seconds between the end of the answer before and this request."""
        return self.reading_s + self.typing_s


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation of one person."""

    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of a logged run of agents.

    session: the conversation of one agent in one run. send_s, receive_s: since the run began.
    hint_s: when the hint for it can be sent: when the call before it in the run is.
    earliest_s: seconds from the hint to the earliest arrival, from profiling; a lower bound.
    """

    session: str
    phase: str
    send_s: float
    receive_s: float
    hint_s: float
    earliest_s: float
    prompt_tokens: int
    completion_tokens: int


def script_of(text: str) -> Script:
    """The script that most letters of ``text`` belong to."""
    letters = [character for character in text if character.isalpha()]
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in letters)
    return IDEOGRAPHIC if 2 * wide > len(letters) else ALPHABETIC


def timed(
    name: str, exchanges: Sequence[tuple[str, str]], rng: random.Random, *, pace: float = 1.0
) -> Session:
    """A conversation with the times that its user takes.

    Args:
        exchanges: (question, answer), in their order.
        pace: how many times faster than people the session goes; 1 is human.
    """
    script = script_of("".join(question + answer for question, answer in exchanges))
    reading, typing = script.reading.draw(rng) * pace, script.typing.draw(rng) * pace
    turns = []
    before = ""
    for question, answer in exchanges:
        turns.append(Turn(question, len(before) / reading, len(question) / typing, answer))
        before = answer
    return Session(name, tuple(turns))


def conversations(folder: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """ShareGPT's conversations of people with an assistant: a name, and (question, answer) pairs.

    Conversations that do not begin with a person or have no answer are left out.
    """
    name = "sharegpt_zh/sharegpt_zh.0000-0499.jsonl.gz"
    for number, row in enumerate(rows(folder, name)):
        said = row.get("conversations")
        if isinstance(said, list) and (exchanges := _exchanges(said)):
            yield f"conversation-{number}", exchanges


def _exchanges(said: Iterable[Mapping[str, str]]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    question = ""
    for message in said:
        text = message["value"].strip()
        if message["from"] == "human":
            question = text
        elif question and text:
            pairs.append((question, text))
            question = ""
    return pairs


def people(
    folder: Path, *, users: int, seed: int = 0, least_turns: int = 2, pace: float = 1.0
) -> list[Iterator[Session]]:
    """One endless row of sessions per user, of conversations with at least ``least_turns`` turns.

    The users share the conversations out among them: no two are in the same one before each has been had.
    """
    if users < 1:
        raise ValueError(f"users must be at least 1, not {users}")
    pool = [(name, pairs) for name, pairs in conversations(folder) if len(pairs) >= least_turns]
    if not pool:
        raise ValueError(f"no conversation has {least_turns} turns")
    random.Random(seed).shuffle(pool)

    def sessions(user: int) -> Iterator[Session]:
        rng = random.Random(f"{seed}/{user}")
        at = user
        while True:
            name, pairs = pool[at % len(pool)]
            yield timed(f"{name}/{at // len(pool)}", pairs, rng, pace=pace)
            at += users

    return [sessions(user) for user in range(users)]


def agent_runs(folder: Path) -> list[list[AgentCall]]:
    """Runs of a software company of agents: the calls of each, in their order.

    The lower bound of an arrival is the shortest time that a call of the phase before took in any run.
    """
    runs: dict[str, list[dict[str, object]]] = {}
    for row in rows(folder, "chatdev_logs/calls.jsonl.gz"):
        runs.setdefault(str(row["session"]), []).append(row)
    shortest: dict[str, float] = {}
    for calls in runs.values():
        for call in calls:
            taken = _number(call["t_recv"]) - _number(call["t_send"])
            phase = str(call["phase"])
            shortest[phase] = min(shortest.get(phase, taken), taken)
    return [_linked(run, calls, shortest) for run, calls in runs.items()]


def _linked(run: str, calls: list[dict[str, object]], shortest: Mapping[str, float]) -> list[AgentCall]:
    linked = []
    before: dict[str, object] | None = None
    for call in sorted(calls, key=lambda call: _number(call["turn"])):
        phase, send_s = str(call["phase"]), _number(call["t_send"])
        linked.append(
            AgentCall(
                session=f"{run}/{phase}",
                phase=phase,
                send_s=send_s,
                receive_s=_number(call["t_recv"]),
                hint_s=send_s if before is None else _number(before["t_send"]),
                earliest_s=0.0 if before is None else shortest[str(before["phase"])],
                prompt_tokens=int(_number(call["prompt_tokens"])),
                completion_tokens=int(_number(call["completion_tokens"])),
            )
        )
        before = call
    return linked


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
