"""Real workloads as the simulator needs them: sessions of requests, whose prompts are runs of named blocks.

The prefix that a prompt shares with others decides where it goes; its text does not. So a prompt is a tuple
of block names, 16 tokens each, and two prompts share the common beginning of their tuples.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from benchmarks.lib.data import rows

BLOCK_TOKENS = 16
CHARS_PER_TOKEN = {True: 4.0, False: 1.0}
"""By whether a text is in Latin letters: how many characters a token of a model's vocabulary stands for."""
DOCUMENT_TOKENS = 1024
QUESTIONS = 5

Blocks: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request: its prompt, and tokens of its answer."""

    blocks: Blocks
    output_tokens: int
    think_s: float = 0.0
    """Between the end of the answer before and this request."""


@dataclass(frozen=True, slots=True)
class SimSession:
    """Requests, each sent after the answer to the one before."""

    name: str
    requests: tuple[SimRequest, ...]
    start_s: float = 0.0


class Names:
    """Names of blocks: the same (owner, place) is the same block."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], int] = {}

    def run(self, owner: str, tokens: int) -> Blocks:
        """The blocks of ``tokens`` tokens of ``owner``'s text, whole ones."""
        count = max(1, tokens // BLOCK_TOKENS)
        return tuple(self._known.setdefault((owner, place), len(self._known)) for place in range(count))


def tokens_of(text: str) -> int:
    """About how many tokens a text has."""
    latin = text.isascii() or sum(ord(c) < 0x300 for c in text) > len(text) / 2
    return max(1, round(len(text) / CHARS_PER_TOKEN[latin]))


def loogle(folder: Path, sessions: int = 80) -> list[SimSession]:
    """Questions about long documents (MemServe, sections 8.2 and 8.4): the first 1,024 tokens of a document,
    and its first five questions, asked one after the other.

    The sample at hand has ten documents: each is cut into pieces of 1,024 tokens, and each piece is a
    document of its own, until there are enough.
    """
    documents: list[tuple[str, int, list[tuple[str, str]]]] = []
    for name in ("longdep_qa.jsonl.gz", "shortdep_qa.jsonl.gz"):
        for row in rows(folder / "loogle", name):
            pairs = ast.literal_eval(str(row["qa_pairs"]))
            questions = [(str(one.get("Q")), str(one.get("A"))) for one in pairs]
            documents.append((f"{name}/{row['title']}", tokens_of(str(row["input"])), questions))
    names = Names()
    found: list[SimSession] = []
    for piece in range(max(tokens for _, tokens, _ in documents) // DOCUMENT_TOKENS):
        for title, tokens, asked in documents:
            if (piece + 1) * DOCUMENT_TOKENS > tokens or len(found) == sessions:
                continue
            owner = f"{title}#{piece}"
            document = names.run(owner, DOCUMENT_TOKENS)
            # A piece has its share of the document's questions: about three, as in the paper.
            first = piece * 3 % len(asked)
            questions = (asked[first:] + asked[:first])[: min(QUESTIONS, 3 + piece % 2)]
            requests = tuple(
                SimRequest(document + names.run(owner + question, tokens_of(question)), tokens_of(answer))
                for question, answer in questions
            )
            found.append(SimSession(owner, requests))
    return found


def sharegpt(folder: Path, sessions: int = 200) -> list[SimSession]:
    """Conversations of several turns, each prompt with the whole conversation before it."""
    names = Names()
    found: list[SimSession] = []
    for row in rows(folder / "sharegpt_zh", "sharegpt_zh.0000-0499.jsonl.gz"):
        if len(found) == sessions:
            break
        name = f"conversation {len(found)}"
        said = [str(turn.get("value") or "") for turn in _turns(row)]
        requests: list[SimRequest] = []
        past: Blocks = ()
        for place in range(0, len(said) - 1, 2):
            prompt = past + names.run(f"{name}/{place}", tokens_of(said[place]))
            answer = tokens_of(said[place + 1])
            requests.append(SimRequest(prompt, min(answer, 512), think_s=5.0))
            past = prompt + names.run(f"{name}/{place + 1}", answer)
        if requests:
            found.append(SimSession(name, tuple(requests)))
    return found


def _turns(row: dict[str, object]) -> list[dict[str, object]]:
    turns = row.get("conversations") or row.get("conversation") or row.get("items") or []
    flat: list[dict[str, object]] = []
    for turn in turns if isinstance(turns, list) else []:
        if isinstance(turn, dict) and "value" in turn:
            flat.append(turn)
        elif isinstance(turn, dict):
            flat += [{"value": turn[side]} for side in ("human", "assistant") if side in turn]
    return flat


def mooncake(folder: Path, requests: int = 1500) -> list[SimSession]:
    """A production chat trace: each request a session of its own, with the trace's arrivals. Its blocks of
    512 tokens are 32 of ours each."""
    found: list[SimSession] = []
    for row in rows(folder / "mooncake", "conversation_trace.first_half.jsonl.gz"):
        if len(found) == requests:
            break
        blocks: list[int] = []
        hashes = row["hash_ids"]
        left = int(str(row["input_length"])) // BLOCK_TOKENS
        for name in hashes if isinstance(hashes, list) else []:
            take = min(32, left - len(blocks))
            blocks += range(int(name) * 32, int(name) * 32 + take)
        if blocks:
            start = int(str(row["timestamp"])) / 1000
            request = SimRequest(tuple(blocks), min(512, int(str(row["output_length"]))))
            found.append(SimSession(f"request {len(found)}", (request,), start))
    return found


def repeated(sessions: Sequence[SimSession], share_ratio: int) -> list[SimSession]:
    """The same sessions so many times, under other names: MemServe's share ratio (figure 15)."""
    return [
        replace(session, name=f"{session.name} copy {copy}")
        for copy in range(share_ratio)
        for session in sessions
    ]


def arriving(sessions: Iterable[SimSession], per_second: float, seed: int) -> list[SimSession]:
    """The sessions in random order, beginning as a Poisson process of so many per second."""
    chance = random.Random(seed)
    order = list(sessions)
    chance.shuffle(order)
    now, found = 0.0, []
    for session in order:
        now += chance.expovariate(per_second)
        found.append(replace(session, start_s=now))
    return found


def popular_prefix(sessions: int, prefix_tokens: int, own_tokens: int) -> list[SimSession]:
    """New conversations of one request, all with one long system prompt."""
    names = Names()
    prefix = names.run("system", prefix_tokens)
    return [
        SimSession(f"s{n}", (SimRequest(prefix + names.run(f"own {n}", own_tokens), 64),))
        for n in range(sessions)
    ]
