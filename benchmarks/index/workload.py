"""Prompts for the index benchmark: conversations that share system prompts and grow turn by turn.

Everything follows from the seed. Token ids serve as slots too, so that a cache's answer can be checked
against the prompt itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

VOCABULARY = 32_000
MISSING = VOCABULARY
"""A token that no prompt in the tree starts with."""

SYSTEM_PROMPTS = 8
SYSTEM_TOKENS = (200, 700)
"""Shortest and longest system prompt."""

BACKGROUND_TOKENS = 1_280
"""Mean length of the conversations that fill the tree to the wanted number of nodes."""
BACKGROUND_TURN = 96

TURN_TOKENS = {2_048: 256, 8_192: 512, 32_768: 1_024}
"""Mean length of a turn (a question and its answer) in the measured conversations, by their length."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the scheduler has it, and its expected match in the tree."""

    tokens: array[int]
    slots: torch.Tensor
    """int64, shape (tokens,)."""
    known: int
    """Leading tokens that the tree has."""


def prompt(tokens: Tokens, known: int) -> Prompt:
    return Prompt(array("q", tokens.tobytes()), torch.from_numpy(tokens.copy()), known)


@dataclass(frozen=True)
class Conversation:
    """Its tokens, the lengths at which its turns end, and how long its system prompt is."""

    tokens: Tokens
    ends: list[int]
    system: int


class Workload:
    """Conversations of one length, and the tree they are looked up in.

    Args:
        nodes: nodes of the tree that has one node per turn.
        length: tokens of a measured conversation.
        conversations: how many are measured.
        seed: of every random choice.
    """

    def __init__(self, nodes: int, length: int, conversations: int, seed: int) -> None:
        self._random = np.random.default_rng([seed, nodes, length])
        self._turn = TURN_TOKENS[length]
        self._length = length
        self._nodes = nodes
        self._systems = [
            self._fresh(int(self._random.integers(*SYSTEM_TOKENS))) for _ in range(SYSTEM_PROMPTS)
        ]
        self._measured = [self._conversation(length, self._turn) for _ in range(conversations)]

    def _fresh(self, count: int) -> Tokens:
        return self._random.integers(0, VOCABULARY, count, dtype=np.int64)

    def _system(self) -> Tokens:
        return self._systems[int(self._random.integers(SYSTEM_PROMPTS))]

    def _conversation(self, length: int, turn: int) -> Conversation:
        system = self._system()
        ends: list[int] = []
        end = len(system)
        while end < length:
            end = min(length, end + int(self._random.integers(turn // 2, turn * 3 // 2)))
            ends.append(end)
        tokens = np.concatenate([system, self._fresh(length - len(system))])
        return Conversation(tokens, ends, len(system))

    def filling(self) -> Iterator[Prompt]:
        """The prompts that build the tree, in order: every turn of every conversation."""
        left = self._nodes - SYSTEM_PROMPTS
        known_systems: set[int] = set()
        for conversation in self._measured:
            left -= len(conversation.ends)
            yield from self._turns_of(conversation, known_systems)
        while left > 0:
            length = int(self._random.integers(SYSTEM_TOKENS[1], 2 * BACKGROUND_TOKENS - SYSTEM_TOKENS[1]))
            conversation = self._conversation(length, BACKGROUND_TURN)
            conversation = replace(conversation, ends=conversation.ends[:left])
            left -= len(conversation.ends)
            yield from self._turns_of(conversation, known_systems)

    def _turns_of(self, conversation: Conversation, known_systems: set[int]) -> Iterator[Prompt]:
        known = conversation.system if conversation.system in known_systems else 0
        known_systems.add(conversation.system)
        for end in conversation.ends:
            yield prompt(conversation.tokens[:end], known)
            known = end

    def whole(self, number: int) -> Prompt:
        """A measured conversation as it is in the tree."""
        tokens = self._measured[number % len(self._measured)].tokens
        return prompt(tokens, len(tokens))

    def next_turn(self, number: int) -> Prompt:
        """The same with a new turn at its end; as long as the others."""
        conversation = self._measured[number % len(self._measured)]
        tokens, known = conversation.tokens, conversation.ends[-2]
        new = self._fresh(len(tokens) - known)
        new[0] = (tokens[known] + 1) % VOCABULARY
        return prompt(np.concatenate([tokens[:known], new]), known)

    def parting(self, number: int) -> Prompt:
        """A prompt that leaves a known conversation at a random place, most often inside an edge."""
        tokens = self._measured[number % len(self._measured)].tokens
        known = int(self._random.integers(len(tokens) // 4, len(tokens) * 3 // 4))
        new = self._fresh(len(tokens) - known)
        new[0] = (tokens[known] + 1) % VOCABULARY
        return prompt(np.concatenate([tokens[:known], new]), known)

    def new_chat(self) -> Prompt:
        """A known system prompt with something new behind it."""
        conversation = self._measured[int(self._random.integers(len(self._measured)))]
        new = self._fresh(self._length - conversation.system)
        return prompt(np.concatenate([conversation.tokens[: conversation.system], new]), conversation.system)

    def unknown(self) -> Prompt:
        """A prompt that shares nothing with the tree."""
        tokens = self._fresh(self._length)
        tokens[0] = MISSING
        return prompt(tokens, 0)
