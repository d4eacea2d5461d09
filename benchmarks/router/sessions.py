"""Sessions of prompts for the router benchmark, and playing them through a router."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.lib.common import SEED
from sglang_ext.testing.tokenizer import vocabulary

ANSWER_TOKENS = 4
TIMEOUT_S = 300.0


@dataclass
class Session:
    """One conversation: the text of each turn, and the text so far."""

    name: str
    turns: Sequence[str]
    said: str = ""
    next: int = 0


@dataclass(frozen=True)
class Seen:
    """One answer: seconds to the first token, and the prompt's tokens, of which so many were reused."""

    ttft: float
    prompt: int
    cached: int


@dataclass
class Words:
    """Text of a known number of tokens: each word is one."""

    random: random.Random = field(default_factory=lambda: random.Random(SEED))

    def __post_init__(self) -> None:
        entries, _ = vocabulary()
        self._words = [
            " " + w[1:] for w in entries if w.startswith("Ġ") and w[1:].isalpha() and w[1:].isascii()
        ]

    def text(self, tokens: int) -> str:
        """So many random words."""
        return "".join(self.random.choice(self._words) for _ in range(tokens))


def conversations(
    words: Words, sessions: int, turns: int, *, shared_by: int, prefix_tokens: int, turn_tokens: int
) -> list[Session]:
    """Conversations, of which always ``shared_by`` begin with the same ``prefix_tokens`` tokens."""
    found = []
    prefix = ""
    for number in range(sessions):
        if number % shared_by == 0:
            prefix = words.text(prefix_tokens)
        said = [words.text(turn_tokens) for _ in range(turns)]
        found.append(Session(f"session-{number}", [prefix + said[0], *said[1:]]))
    return found


async def ask(client: httpx.AsyncClient, session: Session) -> Seen:
    """The next turn of a session, and the answer to it."""
    session.said += session.turns[session.next]
    session.next += 1
    body = {
        "text": session.said,
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    begin = time.perf_counter()
    ttft = 0.0
    last = ""
    async with client.stream(
        "POST", "/generate", json=body, headers={"x-session-id": session.name}
    ) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if line.startswith("data:") and "[DONE]" not in line:
                ttft = ttft or time.perf_counter() - begin
                last = line
    event = json.loads(last.removeprefix("data:"))
    session.said += event["text"]
    meta = event["meta_info"]
    return Seen(ttft, meta["prompt_tokens"], meta["cached_tokens"])


def play_rounds(port: int, sessions: Sequence[Session], turns: int, *, at_once: int) -> list[Seen]:
    """Each session's next ``turns`` turns: all have had a turn before any has the next, in random order."""
    chance = random.Random(SEED)

    async def play() -> list[Seen]:
        seen: list[Seen] = []
        async with _client(port) as client:
            for _ in range(turns):
                order = list(sessions)
                chance.shuffle(order)
                line = iter(order)

                async def one(line: Iterable[Session] = line) -> None:
                    for session in line:
                        seen.append(await ask(client, session))

                await asyncio.gather(*(one() for _ in range(at_once)))
        return seen

    return asyncio.run(play())


def play_arriving(port: int, sessions: Sequence[Session], per_second: float) -> list[Seen]:
    """Whole sessions that begin as a Poisson process, in random order."""
    chance = random.Random(SEED)
    order = list(sessions)
    chance.shuffle(order)

    async def play() -> list[Seen]:
        seen: list[Seen] = []
        async with _client(port) as client, asyncio.TaskGroup() as group:

            async def one(session: Session) -> None:
                for _ in session.turns:
                    seen.append(await ask(client, session))

            for session in order:
                await asyncio.sleep(chance.expovariate(per_second))
                group.create_task(one(session))
        return seen

    return asyncio.run(play())


def _client(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        timeout=TIMEOUT_S,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    )
