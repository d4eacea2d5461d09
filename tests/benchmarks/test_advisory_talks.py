"""The load of the advisory benchmark: the same for one seed, as long as the logs, with pauses to work in."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from benchmarks.advisory.talks import (
    FRESH,
    Shape,
    Talk,
    drawn,
    fresh,
    turns_of,
    users,
)
from tests.benchmarks.test_traces import write

WORDS = 40
SHAPE = Shape(least_turns=3, least_past=80, most_past=150)


def encode(text: str) -> list[int]:
    """A token per word."""
    return [sum(word.encode()) for word in text.split()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def conversation(name: int, turns: int) -> dict[str, object]:
        said = []
        for turn in range(turns):
            said.append({"from": "human", "value": " ".join(f"q{name}.{turn}.{n}" for n in range(8))})
            said.append({"from": "gpt", "value": " ".join(f"a{name}.{turn}.{n}" for n in range(WORDS))})
        return {"conversations": said}

    write(
        tmp_path / "sharegpt_zh/sharegpt_zh.0000-0499.jsonl.gz",
        [conversation(number, 3 + number % 3) for number in range(12)],
    )
    return tmp_path


def first_talks(folder: Path, count: int, shape: Shape = SHAPE) -> list[Talk]:
    return [next(talks) for talks in users(folder, encode, count, 7, shape)]


def test_every_user_is_in_the_middle_of_a_conversation(folder: Path) -> None:
    talks = first_talks(folder, 12)
    assert len({talk.name for talk in talks}) == 12
    for talk in talks:
        assert talk.asks
        # Whole turns of 8 and 40 words, from the second late enough turn on, cut to the most there may be.
        assert len(talk.past) in (96, 144, 150)
    assert len({len(talk.past) for talk in talks}) > 1
    assert talks == first_talks(folder, 12)


def test_the_next_conversation_begins_at_its_beginning(folder: Path) -> None:
    (row,) = users(folder, encode, 1, 7, SHAPE)
    first, second, third = itertools.islice(row, 3)
    assert first.past
    assert not second.past
    assert not third.past
    assert second.asks[0].reading_s == 0.0
    assert len(second.asks) >= 3


def test_pauses_are_shorter_by_the_pace_and_long_enough_for_a_load(folder: Path) -> None:
    human = Shape(pace=1.0, least_turns=3, least_past=0, least_typing_s=0.0, longest_pause_s=1e9)
    slow, fast = first_talks(folder, 6, human), first_talks(folder, 6, Shape(
        pace=10.0, least_turns=3, least_past=0, least_typing_s=0.0, longest_pause_s=1e9
    ))  # fmt: skip
    for a, b in zip(slow, fast, strict=True):
        for x, y in zip(a.asks, b.asks, strict=True):
            assert y.typing_s == pytest.approx(x.typing_s / 10)
            assert y.reading_s == pytest.approx(x.reading_s / 10)
    bounded = Shape(pace=1e6, least_turns=3, least_typing_s=0.4, longest_pause_s=0.5)
    for talk in first_talks(folder, 6, bounded):
        assert all(ask.typing_s == 0.4 and 0 <= ask.reading_s <= 0.1 for ask in talk.asks)


def test_answers_are_shorter_by_their_scale_and_prompts_can_be_of_one_length(folder: Path) -> None:
    assert {ask.answer for talk in first_talks(folder, 6) for ask in talk.asks} == {WORDS // 8}
    heavy = Shape(least_turns=3, prompt_tokens=64, answer_tokens=1)
    asks = [ask for talk in first_talks(folder, 6, heavy) for ask in talk.asks]
    assert {(len(ask.new), ask.answer) for ask in asks} == {(64, 1)}
    assert len({ask.new for ask in asks}) == len(asks)


def test_a_crowd_begins_its_conversations(folder: Path) -> None:
    shape = Shape(least_turns=3, under_way=False)
    for row in users(folder, encode, 3, 7, shape):
        first = next(row)
        assert not first.past
        assert first.asks[0].reading_s == 0.0
        assert len(first.asks) >= 3


def test_levels_take_turns_equally_often() -> None:
    order = turns_of([0.0, 0.1, 0.3], 60.0, 5.0, 1)
    assert len(order) == 12
    assert {level: order.count(level) for level in order} == {0.0: 4, 0.1: 4, 0.3: 4}
    assert all(set(order[at : at + 3]) == {0.0, 0.1, 0.3} for at in range(0, 12, 3))
    assert turns_of([1.0], 1.0, 5.0, 1) == [1.0]


def test_what_is_drawn_of_a_share_is_drawn_of_a_larger_one_too() -> None:
    for turn in range(50):
        low, high = drawn(3, "s", turn, 0.2), drawn(3, "s", turn, 0.6)
        assert high or not low
    counted = sum(drawn(3, f"s{number}", 1, 0.3) for number in range(2000))
    assert 500 < counted < 700
    assert not drawn(3, "s", 1, 0.0)
    assert drawn(3, "s", 1, 1.0)


def test_fresh_tokens_are_in_the_vocabulary() -> None:
    tokens = fresh(random.Random(1), 1000)
    assert len(tokens) == 1000
    assert min(tokens) >= FRESH[0]
    assert max(tokens) < FRESH[1]
