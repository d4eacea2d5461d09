"""Tokens that a turn loses because the text of the last answer has other tokens than the model generated.

    python -m benchmarks.agents.retokenized TOKENIZER... [--data FOLDER]

TOKENIZER is a folder with ``tokenizer.json``. The texts are those of ``lmcache_agent_traces``: prompts and
answers of sessions. Two causes:

- at the seams: a template puts text around an answer, and a tokenizer may join the two. Counted on the
  answers as they are, with ChatML around them.
- in the middle: a model samples, once in a while, two tokens where the tokenizer has one for the same text.
  All of the answer from there on is lost. Simulated, for a share of tokens; a model's own share has to be
  measured with its weights.

The most that splicing the server's own tokens into the next prompt can save is the answer itself: ``answers``
is their share of the prompts that follow them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.lib.data import data_folder, rows

HEAD, END = "<|im_start|>assistant\n", "<|im_end|>"
SHARES = (0.0001, 0.001, 0.01)
"""Of tokens that are sampled as two."""
SEED = 7


@dataclass
class Counts:
    """Tokens over all turns that follow an answer."""

    turns: int = 0
    prompts: int = 0
    answers: int = 0
    at_seams: int = 0
    """Answers that have other tokens inside the template than alone."""
    lost: dict[float, int] = field(default_factory=lambda: dict.fromkeys(SHARES, 0))


def sessions(data: Path, name: str) -> Iterator[list[dict[str, Any]]]:
    """The turns of each session of a trace, in their order."""
    for file in sorted((data / "lmcache_agent_traces" / name).glob("*.jsonl.gz")):
        turns: list[dict[str, Any]] = list(rows(data, str(file.relative_to(data))))
        yield sorted(turns, key=lambda turn: turn["timestamp"])


def count(tokenizer: Tokenizer, turns: Sequence[dict[str, Any]], rng: random.Random, counts: Counts) -> None:
    """Add the turns of a session, but the first."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    for last, turn in pairwise(turns):
        answer = encode(last["output"])
        counts.turns += 1
        counts.prompts += len(encode(turn["input"]))
        counts.answers += len(answer)
        counts.at_seams += encode(HEAD + last["output"] + END) != encode(HEAD) + answer + encode(END)
        for share in SHARES:
            # Where the first token is that is sampled as two.
            first = next((at for at in range(len(answer)) if rng.random() < share), len(answer))
            counts.lost[share] += len(answer) - first


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tokenizers", nargs="+", type=Path, metavar="TOKENIZER")
    parser.add_argument("--data", help="the folder with the workloads")
    given = parser.parse_args()
    data = data_folder(given.data)
    shares = [f"lost at {share:.2%}" for share in SHARES]
    print("| tokenizer | trace | turns | prompt | answers | at seams |", " | ".join(shares), "|")
    print("|---" * (6 + len(SHARES)) + "|")
    for path in given.tokenizers:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.add_special_tokens([HEAD.removesuffix("assistant\n"), END])
        for name in ("miniswe", "taubench"):
            counts, rng = Counts(), random.Random(SEED)
            for turns in sessions(data, name):
                count(tokenizer, turns, rng, counts)
            found = [
                *(path.name, name, f"{counts.turns}", f"{counts.prompts / counts.turns:.0f}"),
                *(f"{counts.answers / counts.prompts:.1%}", f"{counts.at_seams / counts.turns:.1%}"),
                *(f"{counts.lost[share] / counts.prompts:.2%}" for share in SHARES),
            ]
            print("|", " | ".join(found), "|", flush=True)


if __name__ == "__main__":
    main()
