"""Conversations that fork and repeat, and how many of their tokens a plain model's cache reuses.

A tenth of the length that people see: a forward pass counts as much as `PASS` tokens (`forks.PASS_TOKENS`).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from sglang_ext.engine.hybrid.forks import AHEAD, Forks

PASS = 24
FORKS = Forks(PASS, AHEAD * PASS)
CONTEXT = 1600
"""Longest prompt with its answer."""

Serve = Callable[[Sequence[int], int], list[int]]
"""Serves a prompt with so many new tokens, and returns those."""
Trace = Callable[[Serve, random.Random], None]


def text(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(5000) for _ in range(rng.randint(least, most))]


def repeats(serve: Serve, rng: random.Random) -> None:
    """The same prompts again and again."""
    prompts = [text(rng, 220, 600) for _ in range(6)] * 5
    rng.shuffle(prompts)
    for prompt in prompts:
        serve(prompt, 8)


def several_answers(serve: Serve, rng: random.Random) -> None:
    """``n=4``: SGLang computes the prompt by itself first."""
    for _ in range(10):
        prompt = text(rng, 60, 500)
        for new_tokens in (0, 8, 8, 8, 8):
            serve(prompt, new_tokens)


def regenerate(serve: Serve, rng: random.Random) -> None:
    """Chats whose users ask for other answers at times, and go on from the last."""
    for _ in range(5):
        history = text(rng, 220, 320)
        for _ in range(4):
            answer = serve(history, 24)
            for _ in range(rng.randint(0, 2)):
                answer = serve(history, 24)
            history = [*history, *answer, *text(rng, 10, 80)]


def system_prompts(serve: Serve, rng: random.Random) -> None:
    """Many users behind few system prompts."""
    prompts = [text(rng, 250, 400) for _ in range(3)]
    users = [at % 3 for at in range(3 * 16)]
    rng.shuffle(users)
    for user in users:
        serve([*prompts[user], *text(rng, 10, 80)], 8)


def agents(serve: Serve, rng: random.Random) -> None:
    """Agents behind one system prompt take turns. The history of a turn lacks the reasoning of earlier turns,
    and the tag that opened it."""
    system = text(rng, 250, 400)
    histories = [[*system, *text(rng, 20, 60)] for _ in range(3)]
    for _ in range(8):
        for history in histories:
            answer = serve([*history, 1, 2, 3], 24)
            history += [*answer[16:], *text(rng, 20, 90)]


TRACES: dict[str, Trace] = {
    "exact repeats": repeats,
    "n > 1": several_answers,
    "regenerate": regenerate,
    "system prompts": system_prompts,
    "agents": agents,
}


class PlainModel:
    """The prefix cache of a model without states: KV of so many tokens. The least recently used go first."""

    def __init__(self, tokens: int) -> None:
        self._room = tokens
        self._known: OrderedDict[int, None] = OrderedDict()
        self.reused = 0

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        names, name = [], 0
        for token in [*prompt, *answer[:-1]]:
            name = hash((name, token))
            names.append(name)
        for name in names[: len(prompt) - 1]:
            if name not in self._known:
                break
            self.reused += 1
        for name in reversed(names):
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > self._room:
            self._known.popitem(last=False)
