"""The demo's conversations, which share a long system prompt. The same in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 20_240_613

SYSTEM = """You are the assistant of the operations desk of a company that runs large language models.
Answer in one short paragraph. Say what you know and what you only suspect.

The service has a router, a group of servers, and a store for what they have computed.
1. A request enters at the router, which counts its tokens and looks for a server that knows its beginning.
2. A server keeps what it has computed in the fast memory of its device as long as there is room.
3. What has to leave the fast memory is kept in main memory, and comes back from there when it is needed.
4. A server that is asked for more than it can hold puts requests into a queue, the oldest first.
5. When a server does not answer three probes in a row it is taken out, and comes back when it answers.
6. A client that goes away ends its request; nothing is computed for somebody who does not listen.
7. A prompt that is longer than the model's context is refused, with its length and the limit.
8. Nobody restarts a server by hand before its log and its metrics have been saved.

When you are shown a log, read it from the end, name the first line that is out of the ordinary, and say which
of the rules above it touches. When you are asked for a number, give its unit. When you are not sure, ask for
the one thing that would tell. Do not repeat the question. Do not promise anything in the name of others."""

TOPICS = (
    "requests wait longer than usual",
    "one server is slower than the others",
    "memory of a server fills up over night",
    "answers break off in the middle",
    "the first token is late after lunch",
    "a new model does not load",
)

FOLLOW_UPS = (
    "Thank you. Here is what the log says since then; does that change your mind?",
    "We did as you said. Please look at the new lines, and tell us what to watch next.",
    "It happened again, at about the same load as before. What do these lines have in common with the first?",
)

EVENTS = (
    "queue {n} requests, oldest waits {m} ms",
    "prefill of {n} tokens took {m} ms",
    "server {s} answered the probe after {m} ms",
    "{n} blocks left the fast memory, {m} came back",
    "client closed the connection after {n} tokens",
    "decode batch of {s} requests, {m} tokens per second",
)

FIRST_LOG_LINES = 60
LATER_LOG_LINES = 6


@dataclass(frozen=True)
class Conversation:
    """The user's messages, turn by turn."""

    name: str
    turns: tuple[str, ...]


def conversations(count: int, turns: int) -> tuple[Conversation, ...]:
    """``count`` conversations of ``turns`` turns; the first message of each is the longest."""
    return tuple(
        Conversation(chr(ord("A") + number), tuple(_message(number, turn) for turn in range(turns)))
        for number in range(count)
    )


def _message(number: int, turn: int) -> str:
    source = random.Random(SEED + 1000 * number + turn)
    lines = FIRST_LOG_LINES if turn == 0 else LATER_LOG_LINES
    log = "\n".join(_log_line(source, second) for second in range(lines))
    if turn == 0:
        return f"We see that {TOPICS[number % len(TOPICS)]}. This is the log:\n{log}\nWhat do you make of it?"
    return f"{FOLLOW_UPS[(turn - 1) % len(FOLLOW_UPS)]}\n{log}"


def _log_line(source: random.Random, second: int) -> str:
    event = source.choice(EVENTS)
    numbers = {"n": source.randint(2, 900), "m": source.randint(5, 4000), "s": source.randint(0, 7)}
    return f"{source.randint(10, 23)}:{source.randint(10, 59)}:{10 + second} {event.format(**numbers)}"
