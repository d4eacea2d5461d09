"""One word for one thing, and prose that names it.

Names that the glossary's words have replaced do not come back. Docstrings and comments name the thing that
acts and the thing acted on, instead of hiding it behind a pronoun.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sglang_ext", "router", "patches")

RETIRED = {
    "HbmRoom": "HbmTier",
    "Giving": "SenderState",
    "GivingRooms": "PrefillSender",
    "Hinted": "Retention",
    "Inbox": "RankCommandQueue",
    "Lend": "Export",
    "Lending": "Exports",
    "ReturnGiver": "ReturnSender",
    "ReturnTaker": "ReturnReceiver",
    "Room": "SendingHandover",
    "Row": "InstanceRecord",
    "Seam": "StreamSplice",
    "Spread": "LocalHistogram",
    "StraightLoads": "DirectLoads",
    "Taking": "ReceiverState",
    "TakingRoom": "ReceivingHandover",
    "TakingRooms": "DecodeReceiver",
    "Tally": "LocalCounter",
    "Theirs": "ServerTokenizer",
    "CacheLifecycle": "RankCache",
    "WholeCache": "RankCache",
    "agree": "Ranks.each_pass",
    "min_over_ranks": "Ranks.each_pass",
    "nonsense": "invalid_reason",
    "obey": "handle_command",
    "room": "handover or reservation",
    "rooms": "handovers or reservations",
}
"""Retired name -> the name of today."""
MODULES = {
    "exchange": "types",
    "hbm_room": "hbm_tier",
    "hinted": "retention",
    "kv_writeback": "returns",
    "lending": "export",
    "pd_giving": "prefill_sender",
    "pd_places": "reservations",
    "pd_returns": "returns",
    "pd_taking": "decode_receiver",
    "row": "instance_record",
    "seam": "stream_splice",
    "straight_loads": "direct_loads",
    "tally": "local_metrics",
    "trial": "tokenizer_check",
    "whole_cache": "rank_cache",
}
"""The same of modules."""


def retired(source: str) -> Iterator[str]:
    """Retired names among the identifiers of a module: prose may agree, code has `Ranks`."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in RETIRED:
            yield f"{token.start[0]}: {token.string} is {RETIRED[token.string]} now"


def test_no_retired_word_is_used() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for line in retired(path.read_text("utf-8"))
    ]
    assert not found
    names = {path.stem for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not names & set(MODULES)


@pytest.mark.parametrize(
    ("source", "count"),
    [("def f(agree):\n    return agree(1)\n", 2), ('"""We agree, in a Row."""\n', 0), ("rows = Row()\n", 1)],
)
def test_a_retired_word_is_found(source: str, count: int) -> None:
    assert len(list(retired(source))) == count


RIDDLES = re.compile(
    r"^(?:what|who|whoever|whom|whose|which)\b(?!.*\?$)"
    r"|\b(?:nobody|somebody|whoever|everybody|anybody)\b"
    r"|\b(?:is|are|was|were|be|been|has|have|had|not|never) (?:told|heard)\b"
    r"|\b(?:tells?|hears?|told|heard) of\b"
    r"|\b(?:that|those) (?:which|who|whose)\b|\bthe ones? (?:that|which|who)\b|\bone (?:that|which|who)\b",
    re.IGNORECASE,
)
"""Sentences that begin with a relative pronoun, people without a name, hearsay, and pronouns for things."""
SENTENCE_ENDS = re.compile(r"(?<=[.!?;:])\s+|\n\s*\n")
MOST_RIDDLES = {
    "sglang_ext/*.py": 0,
    **{
        f"{folder}/**/*.py": 0
        for folder in (
            *("benchmarks", "examples", "scripts"),
            *(f"sglang_ext/{name}" for name in ("calibration", "client", "cluster", "cost_model", "disagg")),
            *(
                f"sglang_ext/{name}"
                for name in ("engine", "flags", "gpu_check", "mempool", "migrate", "patches", "protocol")
            ),
            *(
                f"sglang_ext/{name}"
                for name in ("radix_global", "router", "simulator", "testing", "tiered_store")
            ),
        )
    },
}
"""Modules -> riddles that their prose still has. A number may only fall."""


def prose(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and runs of comments of a module, each with its first line."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value
    first, comments = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            first = first or token.start[0]
            comments.append(token.string.lstrip("#: "))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE) and comments:
            yield first, " ".join(comments)
            first, comments = 0, []


def riddles(source: str) -> Iterator[str]:
    """Sentences of a module's prose that hide their subject or object."""
    for line, text in prose(source):
        for sentence in SENTENCE_ENDS.split(re.sub(r"[ \t]*\n[ \t]*(?=\S)", " ", text)):
            if RIDDLES.search(sentence.strip()):
                yield f"{line}: {sentence.strip()}"


@pytest.mark.parametrize("modules", MOST_RIDDLES)
def test_prose_names_things(modules: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{riddle}"
        for path in sorted(ROOT.glob(modules))
        for riddle in riddles(path.read_text("utf-8"))
    ]
    assert len(found) <= MOST_RIDDLES[modules], "\n".join(found)
    assert len(found) == MOST_RIDDLES[modules], (
        f"lower the number of {modules} in MOST_RIDDLES to {len(found)}"
    )


def test_every_folder_is_held_to_it() -> None:
    held = {path for modules in MOST_RIDDLES for path in ROOT.glob(modules)}
    assert held >= set((ROOT / "sglang_ext").rglob("*.py"))


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""What it waits for."""\n', 1),
        ('"""Free blocks. Nobody has them."""\n', 1),
        ("x = 1  # the router is told of it\n", 1),
        ('"""The one that waits,\nand those who ask."""\n', 1),
        ('"""What is it?"""\n', 0),
        ('"""Blocks which a peer reads. The peer sends COMPLETE."""\n', 0),
        ('x = "who knows"\n', 0),
    ],
)
def test_a_riddle_is_found(source: str, count: int) -> None:
    assert len(list(riddles(source))) == count
