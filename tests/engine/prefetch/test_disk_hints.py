"""Hints for models with windows or states: disk to DRAM, bounded, expiring; and commands that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.engine.cache.refusals import Refusals
from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.hybrid.store import Promotion
from sglang_ext.engine.prefetch.advice import Advice
from sglang_ext.engine.prefetch.disk_hints import AT_ONCE, MOST_WAITING, DiskHints, Known
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchEnd, PrefetchResult
from sglang_ext.protocol.agent import Advise, Export, Fetch, FetchSpan, PeerDead, Source, Withdraw


class FakeStore:
    """Reads a prompt's blocks when `arrive` says so."""

    block_tokens = 16

    def __init__(self) -> None:
        self.promotions: dict[Any, Promotion] = {}

    def promote(self, handle: Any, names: Any, priority: int) -> None:
        self.promotions[handle] = Promotion(blocks=len(names))

    def ready(self, handle: Any) -> bool:
        return self.promotions[handle].over

    def promoted(self, handle: Any) -> Promotion | None:
        return self.promotions.get(handle)

    def release(self, handle: Any) -> None:
        self.promotions.pop(handle, None)

    def arrive(self) -> None:
        for each in self.promotions.values():
            each.over = True


class Rig:
    def __init__(self) -> None:
        self.store = FakeStore()
        store: Any = self.store
        self.ended: list[PrefetchResult] = []
        self.hints = DiskHints(store, lambda tokens, key, salt: Known(32, [b"n"] * 3))
        self.advice = Advice(self.hints, self.ended.append)

    def passes(self) -> None:
        self.hints.each_pass()
        self.advice.each_pass()


def test_a_hint_reads_and_is_answered() -> None:
    rig = Rig()
    rig.advice.takes_command(Advise("h", b"\1\0\0\0", ttl_s=10.0), at=100.0)
    rig.passes()
    assert not rig.ended
    assert rig.hints.busy
    rig.store.arrive()
    rig.passes()
    assert rig.ended == [PrefetchResult("h", PrefetchEnd.DONE, 32, 48)]
    assert not rig.store.promotions
    assert not rig.hints.busy


def test_few_are_read_at_once_and_the_highest_priority_first() -> None:
    rig = Rig()
    for number in range(10):
        rig.advice.takes_command(Advise(f"{number}", b"", priority=number, ttl_s=10.0), at=0.0)
    rig.passes()
    assert {hint.id for hint in rig.store.promotions} == {"9", "8", "7", "6"}
    assert len(rig.store.promotions) == AT_ONCE


def test_too_many_drop_the_weakest() -> None:
    rig = Rig()
    for number in range(MOST_WAITING + 1):
        rig.advice.takes_command(Advise(f"{number}", b"", priority=number, ttl_s=10.0), at=0.0)
    rig.advice.each_pass()
    assert [(each.id, each.end) for each in rig.ended] == [("0", PrefetchEnd.DROPPED)]


@pytest.mark.parametrize("begun", [True, False])
def test_a_withdrawn_hint_ends(begun: bool) -> None:
    rig = Rig()
    rig.advice.takes_command(Advise("h", b"", ttl_s=10.0), at=0.0)
    if begun:
        rig.passes()
    rig.advice.takes_command(Withdraw("h"), at=1.0)
    rig.passes()
    assert [each.end for each in rig.ended] == [PrefetchEnd.CANCELLED]
    assert not rig.store.promotions


def test_a_hint_whose_time_is_over_before_its_turn_is_dropped() -> None:
    rig = Rig()
    rig.advice.takes_command(Advise("h", b"", ttl_s=10.0), at=0.0)
    assert rig.hints.alarm == 10.0
    rig.hints.expire(9.0)
    assert rig.hints.busy
    rig.hints.expire(10.0)
    rig.passes()
    assert [each.end for each in rig.ended] == [PrefetchEnd.DROPPED]


class Recorded(Replies):
    epoch = b"e" * 16

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def reply_to_hint(self, result: Any) -> None:
        self.sent.append(result)

    reply_to_fetch = reply_to_hint


def test_other_commands_are_answered_as_refused() -> None:
    replies = Recorded()
    refusals = Refusals(replies, hints=False)
    span = FetchSpan(Source(("h:1",), "x"), 16)
    for message in (
        Fetch("f", b"", (span,)),
        Advise("a", b""),
        Export("e", b""),
        PeerDead("i"),
    ):
        assert refusals.takes_command(message, 0.0)
    fetched, advised = replies.sent
    assert (fetched.id, fetched.how.value) == ("f", "refused")
    assert (advised.id, advised.end) == ("a", PrefetchEnd.DROPPED)
    assert not Refusals(replies, hints=True).takes_command(Advise("a", b""), 0.0)
