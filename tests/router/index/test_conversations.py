"""Conversations that may continue, against a list of all prompts and answers."""

from __future__ import annotations

import random

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.index.conversations import Conversation, Conversations
from sglang_ext.testing.fakes import FakeClock

BLOCK = 4
NS = ("tokens", None, None, None)


def conversations(max_bytes: int = 1 << 20) -> Conversations:
    return Conversations(FakeClock(), BLOCK, max_bytes)


def key(*numbers: int) -> bytes:
    """A block of each number."""
    return b"".join(number.to_bytes(TOKEN_BYTES, "little") * BLOCK for number in numbers)


def said(known: Conversations, numbers: tuple[int, ...], request: str, *, session: bool = False) -> None:
    known.learn(NS, key(*numbers), "t", request, session=session)
    known.check()


def all_of(known: Conversations) -> list[tuple[bytes, int]]:
    return [(each.key, each.uses) for each in known]


def test_a_turn_replaces_the_one_that_it_continues() -> None:
    known = conversations()
    said(known, (1, 2), "a")
    said(known, (7, 8), "b")
    said(known, (1, 2, 3), "c")
    assert all_of(known) == [(key(7, 8), 1), (key(1, 2, 3), 2)]
    assert [each.goes_on for each in known] == [False, True]


def test_one_request_is_one_use_however_often_it_is_learnt() -> None:
    known = conversations()
    said(known, (1, 2), "a")
    said(known, (1, 2, 3), "a")
    said(known, (1, 2, 3), "a")
    assert all_of(known) == [(key(1, 2, 3), 1)]
    said(known, (1, 2, 3), "b")
    assert all_of(known) == [(key(1, 2, 3), 2)]


def test_a_common_beginning_is_no_use_of_any_of_them() -> None:
    known = conversations()
    for number in range(5):
        said(known, (1, 2, 10 + number), f"r{number}")
    assert [each.uses for each in known] == [1] * 5
    said(known, (1, 2), "short")
    assert len(known) == 5


def test_a_session_goes_on_and_stays_one() -> None:
    known = conversations()
    said(known, (1, 2), "a", session=True)
    said(known, (1, 2, 3), "b")
    assert [each.session for each in known] == [True]


def test_namespaces_are_apart_and_less_than_a_block_is_nothing() -> None:
    known = conversations()
    said(known, (1, 2), "a")
    known.learn(("tokens", None, None, "salt"), key(1, 2, 3), "u", "b", session=False)
    known.learn(NS, key(1)[:-TOKEN_BYTES], "t", "c", session=True)
    known.check()
    assert [each.uses for each in known] == [1, 1]


def test_memory_is_bounded_and_the_coldest_go() -> None:
    known, rng = conversations(max_bytes=40_000), random.Random(5)
    for number in range(300):
        said(known, tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 9))), f"r{number}")
        assert known.size_bytes <= 40_000
    assert 0 < len(known) < 100
    assert [each.request for each in known][-1] == "r299"


def test_one_is_forgotten_and_no_other() -> None:
    known = conversations()
    said(known, (1, 2), "a")
    said(known, (1, 3), "b")
    first: Conversation = next(iter(known))
    known.forget(first)
    known.check()
    assert all_of(known) == [(key(1, 3), 1)]
    known.forget(first)
    assert len(known) == 1
