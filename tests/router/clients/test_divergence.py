"""Where turns leave the last one of their session, and why; words stand for tokens."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.keys import TOKEN_BYTES, decode_tokens, encode_tokens
from sglang_ext.router.clients.divergence import (
    Cause,
    Divergence,
    Turn,
    common_tokens,
    find_divergence,
    first_difference,
)
from sglang_ext.router.clients.rules import shipped
from sglang_ext.router.hints.session_memory import MOST_CONVERSATIONS, SessionMemory

BLOCK = 16
WORDS: dict[str, int] = {}
BILLING = "x-anthropic-billing-header: cc_version=2.1.245.2ef; cch={};"


def key(text: str) -> bytes:
    return encode_tokens([WORDS.setdefault(word, len(WORDS)) for word in text.split()])


def decode(ids: bytes) -> str:
    names = list(WORDS)
    return " ".join(names[number] for number in decode_tokens(ids))


def many(name: str, count: int) -> str:
    return " ".join(f"{name}{number}" for number in range(count))


def turn(prompt: str, answer: str = "", tools: tuple[str, ...] = ()) -> Turn:
    return Turn(key(f"{prompt} {answer}"), len(prompt.split()), tools)


def found(last: Turn, now: Turn) -> Divergence | None:
    return find_divergence(last, now, shipped().rules, BLOCK, decode)


SYSTEM, TALK = many("system", 64), many("talk", 100)
ANSWER = "so " + many("answer", 40)


def test_a_conversation_that_goes_on_leaves_nothing() -> None:
    last = turn(f"{SYSTEM} {TALK}", ANSWER)
    assert found(last, turn(f"{SYSTEM} {TALK} {ANSWER} and more")) is None
    assert found(last, turn(f"{SYSTEM} {TALK}", "another answer")) is None, "asked again"
    assert found(last, turn(f"{SYSTEM} {many('talk', 50)}")) is None, "an earlier turn again"


CASES: dict[str, tuple[Turn, Turn, Cause, str, tuple[str, str]]] = {
    "billing": (
        turn(f"{BILLING.format('0f3a2')} {SYSTEM} {TALK}", ANSWER),
        turn(f"{BILLING.format('91bc7')} {SYSTEM} {TALK} {ANSWER} on"),
        Cause.RULE, "claude-code-billing", ("cch=0f3a2;", "cch=91bc7;"),
    ),
    "date": (
        turn(f"{SYSTEM} Today is November 28 {TALK}", ANSWER),
        turn(f"{SYSTEM} Today is December 29 {TALK} {ANSWER} on"),
        Cause.DATE, "", ("November 28", "December 29"),
    ),
    "tools reordered": (
        turn(f"{SYSTEM} tool a tool b {TALK}", ANSWER, ("a", "b")),
        turn(f"{SYSTEM} tool b tool a {TALK} {ANSWER} on", tools=("b", "a")),
        Cause.TOOLS_REORDERED, "tool-order", ("a", "b"),
    ),
    "tools changed": (
        turn(f"{SYSTEM} tool a {TALK}", ANSWER, ("a",)),
        turn(f"{SYSTEM} tool a and c {TALK} {ANSWER} on", tools=("a", "c")),
        Cause.TOOLS_CHANGED, "", ("talk0 talk1 talk2 talk3", "and c talk0 talk1"),
    ),
    "reasoning": (
        turn(f"{SYSTEM} {TALK} <assistant>", f"<think> hm {many('thought', 40)} </think> {ANSWER}"),
        turn(f"{SYSTEM} {TALK} <assistant> {ANSWER} <user> {many('next', 80)}"),
        Cause.REASONING_STRIPPED, "", ("<think> hm thought0 thought1", "so answer0 answer1 answer2"),
    ),
    "answer": (
        turn(f"{SYSTEM} {TALK} <assistant>", ANSWER),
        turn(f"{SYSTEM} {TALK} <assistant> So, {many('answer', 40)} <user> on"),
        Cause.ANSWER_CHANGED, "", ("so", "So,"),
    ),
    "truncated": (
        turn(f"{SYSTEM} {TALK}", ANSWER),
        turn(f"{SYSTEM} {' '.join(TALK.split()[40:])} {ANSWER} on"),
        Cause.HISTORY_TRUNCATED, "", ("talk0 talk1 talk2 talk3", "talk40 talk41 talk42 talk43"),
    ),
    "rewritten": (
        turn(f"{many('system', 200)} {TALK}", many("long", 300)),
        turn(f"{many('system', 200)} In short: {many('long', 20)} talk goes on"),
        Cause.HISTORY_REWRITTEN, "", ("talk0 talk1 talk2 talk3", "In short: long0 long1"),
    ),
    "early": (
        turn(f"You like cats {SYSTEM} {TALK}", ANSWER),
        turn(f"You like dogs {SYSTEM} {TALK} {ANSWER} on"),
        Cause.CHANGED_EARLY, "", ("cats", "dogs"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_difference_has_a_place_and_a_cause(case: str) -> None:
    last, now, cause, rule, words = CASES[case]
    one = found(last, now)
    assert one is not None
    assert (one.cause, one.rule, (one.before, one.after)) == (cause, rule, words)
    at = one.at * TOKEN_BYTES
    assert last.key[:at] == now.key[:at]
    assert last.key[at : at + TOKEN_BYTES] != now.key[at : at + TOKEN_BYTES]
    whole = min(len(last.key) // TOKEN_BYTES, now.prompt_tokens - 1) // BLOCK * BLOCK
    assert one.lost == whole - one.at // BLOCK * BLOCK > 0


def test_a_sentence_names_place_words_and_way_out() -> None:
    one = found(*CASES["billing"][:2])
    assert one is not None
    assert one.sentence() == (
        "differs from its last turn at token 2: `cch=0f3a2;` -> `cch=91bc7;`; "
        f"rule `claude-code-billing` saves {one.lost:,} tokens"
    )
    assert str(Divergence(3, 16, Cause.DATE).sentence()).endswith("at token 3 (date)")


def test_another_conversation_of_the_session_is_no_difference() -> None:
    last = turn(f"You are an agent {SYSTEM} {TALK}", ANSWER)
    title = turn(f"You are to find a title {many('for', 200)}")
    assert found(last, title) is None
    sessions = SessionMemory(1 << 20)
    space = ("tokens", None, None, None)
    sessions.learn("s", space, last)
    sessions.learn("s", space, title)
    goes_on = turn(f"You are an agent {SYSTEM} {TALK} {ANSWER} on")
    assert sessions.last_turn("s", space, goes_on) is last
    assert sessions.last_turn("s", ("tokens", "adapter", None, None), goes_on) is None
    for number in range(10):
        sessions.learn("s", space, turn(many(f"other{number}-", 30)))
    assert sessions.last_turn("s", space, goes_on) is not last, f"of {MOST_CONVERSATIONS} alone"


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 100])
def test_tokens_in_common_are_counted(length: int) -> None:
    one = encode_tokens(range(100))
    other = encode_tokens([*range(length), *([7_000] * (100 - length))])
    assert common_tokens(one, other) == common_tokens(other, one) == length
    assert common_tokens(one, other[: length * TOKEN_BYTES]) == length


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [("a b c", "a x c", ("b", "x")), ("a b", "a", ("b", "")), ("", "", ("", "")), ("a", "b", ("a", "b"))],
)
def test_the_first_words_that_differ_are_shown(one: str, other: str, words: Any) -> None:
    assert first_difference(one, other) == words
