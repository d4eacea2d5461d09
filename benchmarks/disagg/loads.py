"""Loads for the benchmark of prefill and decode apart, made of texts that people and agents wrote.

ShareGPT-like: conversations; every turn continues the whole conversation. ReAct-like: an agent's steps behind
one few-shot prefix; a turn is a tool's output, the answer a thought and an action. LooGLE-like: questions on
a long document; each comes right after the document. Texts are cut into words, and Chinese into characters;
a word is always the same token id. An answer has the length of the logged answer, not its text.
"""

from __future__ import annotations

import ast
import gzip
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.lib.data import rows
from benchmarks.lib.traces import conversations
from sglang_ext.errors import ConfigError

FIRST_ID, LAST_ID = 100, 30_000
_WORD = re.compile(r"[一-鿿]|\w+|[^\w\s]")
_STEP = re.compile(r"(Thought \d+:.*?)(Observation \d+:.*?)(?=\nThought|\nCorrect|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Size:
    """How much of the texts is used. turns: of each session. question, answer: most tokens of one.
    document: tokens of a document, or of a few-shot prefix, at most.
    """

    turns: int
    question: int
    answer: int
    document: int


@dataclass(frozen=True)
class Turn:
    """added: token ids that are new in this turn. answer: how many to generate."""

    added: list[int]
    answer: int


@dataclass(frozen=True)
class Session:
    """load: the load that it belongs to. first: token ids that come before every turn. grows: whether a turn
    comes after the turns and answers before it; else each comes right after `first`.
    """

    load: str
    first: list[int]
    turns: tuple[Turn, ...]
    grows: bool = True


def tokens(text: str) -> list[int]:
    """Ids of the words of a text, the same for the same word."""
    return [FIRST_ID + zlib.crc32(word.encode()) % (LAST_ID - FIRST_ID) for word in _WORD.findall(text)]


def sharegpt(folder: Path, size: Size) -> Iterator[Session]:
    """Conversations with enough turns: the median by the length of its answers first, then the medians of the
    shorter and the longer half, and so on, so that few are like all.
    """
    talks = [pairs[: size.turns] for _, pairs in conversations(folder) if len(pairs) >= size.turns]
    talks.sort(key=lambda pairs: sum(_length(answer, size) for _, answer in pairs))
    for at in middles(len(talks)):
        turns = [
            Turn(tokens(question)[: size.question], _length(answer, size)) for question, answer in talks[at]
        ]
        if all(turn.added for turn in turns):
            yield Session("sharegpt", [], tuple(turns))


def middles(count: int) -> Iterator[int]:
    """Every place of a row once, breadth first: the middle, the middles of both halves, ..."""
    spans = deque([(0, count)])
    while spans:
        begin, end = spans.popleft()
        if begin < end:
            middle = (begin + end) // 2
            yield middle
            spans += [(begin, middle), (middle + 1, end)]


def react(folder: Path, size: Size) -> Iterator[Session]:
    """Steps of an agent behind one few-shot prefix."""
    prefix = tokens(_prefix(folder))[: size.document]
    path = folder / "react_hotpotqa/reflexion_logs/ReAct_base_100q_5trials.txt.gz"
    # Steps that were right in earlier trials appear again in later ones, word by word.
    log = _text(path).split("BEGIN TRIAL 2")[0]
    for run in log.split("\nQuestion: ")[1:]:
        question = run.split("\n", 1)[0]
        steps = _STEP.findall(run)[: size.turns]
        if len(steps) < min(3, size.turns):
            continue
        asked = [question, *(observation for _, observation in steps[:-1])]
        turns = [
            Turn(tokens(text)[: 2 * size.question], _length(thought, size))
            for text, (thought, _) in zip(asked, steps, strict=True)
        ]
        yield Session("react", prefix, tuple(turns))


def loogle(folder: Path, size: Size) -> Iterator[Session]:
    """Questions on the beginning of a document."""
    for row in rows(folder, "loogle/shortdep_qa.jsonl.gz"):
        pairs: Any = row["qa_pairs"]
        if isinstance(pairs, str):
            pairs = ast.literal_eval(pairs)
        turns = [
            Turn(tokens(pair["Q"])[: size.question], _length(str(pair["A"]), size))
            for pair in pairs[: size.turns]
        ]
        yield Session("loogle", tokens(str(row["input"]))[: size.document], tuple(turns), grows=False)


LOADS: Mapping[str, Callable[[Path, Size], Iterator[Session]]] = {
    "sharegpt": sharegpt,
    "react": react,
    "loogle": loogle,
}


def sessions(folder: Path, count: int, size: Size, loads: Sequence[str] = tuple(LOADS)) -> list[Session]:
    """So many sessions of each load, in turns.

    Raises:
        ConfigError: the folder lacks the texts, or they are others than expected.
    """
    found: list[Session] = []
    chosen = [LOADS[name](folder, size) for name in loads]
    for _ in range(count):
        for load in chosen:
            session = next(load, None)
            if session is None:
                raise ConfigError("the texts have too few sessions", field="--data", hint="Ask for fewer")
            found.append(session)
    return found


def _length(answer: str, size: Size) -> int:
    return max(4, min(size.answer, len(_WORD.findall(answer))))


def _prefix(folder: Path) -> str:
    path = folder / "react_hotpotqa/prompts/prompts_naive.json.gz"
    found = orjson.loads(_text(path))
    if not isinstance(found, Mapping) or "webthink_simple6" not in found:
        raise ConfigError(f"{path} has no webthink_simple6", field="--data")
    return str(found["webthink_simple6"])


def _text(path: Path) -> str:
    try:
        return gzip.open(path, "rt", encoding="utf-8").read()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error}", field="--data", hint="Name another folder"
        ) from error
