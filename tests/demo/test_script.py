"""The messages of the demo's conversations."""

from __future__ import annotations

from examples.demo.script import conversations


def test_the_same_in_every_run() -> None:
    assert conversations(6, 4) == conversations(6, 4)


def test_no_two_messages_are_alike() -> None:
    said = [text for conversation in conversations(8, 5) for text in conversation.turns]
    assert len(set(said)) == len(said) == 40


def test_the_first_message_is_the_longest() -> None:
    for conversation in conversations(6, 4):
        assert len(conversation.turns[0]) > 2 * max(len(text) for text in conversation.turns[1:])
