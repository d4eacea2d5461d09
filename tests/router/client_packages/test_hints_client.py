"""Hints from programs: they arrive, and nothing that happens to them reaches the program."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from sglang_ext.advise import MOST_WAITING, Hints, advise
from tests.support.servers.ports import free_port


async def test_hints_reach_the_router(start_worker, start_router) -> None:
    router = await start_router(await start_worker(), api_key="the-key-of-this-test")

    def program() -> Hints:
        with Hints(router.url, "the-key-of-this-test") as hints:
            with advise(hints, session="reviewer", text="You are a reviewer.", earliest_s=1.5, ttl_s=9):
                pass  # another agent works
            hints.hint(input_ids=[1, 2, 3])
            hints.hint(messages=[{"role": "user", "content": "Hello"}], priority=2)
        return hints

    hints = await asyncio.to_thread(program)
    assert (hints.sent, hints.dropped) == (3, 0)
    taken = {entry.hint.session: entry for entry in router.advisor.book.live()}
    assert len(list(router.advisor.book.live())) == 3
    reviewer = taken["reviewer"]
    assert (reviewer.hint.earliest_s, reviewer.hint.ttl_s) == (1.5, 9.0)


async def test_what_fails_takes_its_hint_back(start_worker, start_router) -> None:
    router = await start_router(await start_worker())

    def program() -> Hints:
        with Hints(router.url) as hints:
            with pytest.raises(ZeroDivisionError), advise(hints, session="s", text="You are a reviewer."):
                1 / 0  # noqa: B018
            kept = hints.hint(text="Another one.")
            refused = hints.hint(session="never seen")
            refused.withdraw()
            assert repr(hints)
        assert kept.id is not None
        assert refused.id is None
        return hints

    hints = await asyncio.to_thread(program)
    # A hint that was still waiting when the block failed was never sent.
    states = [entry.state.value for entry in router.advisor.book._entries.values()]
    assert sorted(states) in (["ready"], ["cancelled", "ready"])
    assert hints.withdrawn == states.count("cancelled")


async def test_a_hint_that_was_sent_is_taken_back(start_worker, start_router) -> None:
    router = await start_router(await start_worker())

    def program() -> Hints:
        with Hints(router.url) as hints:
            announced = hints.hint(text="You are a reviewer.")
            deadline = time.monotonic() + 20
            while announced.id is None and time.monotonic() < deadline:
                time.sleep(0.01)
            announced.withdraw()
        return hints

    hints = await asyncio.to_thread(program)
    assert (hints.sent, hints.withdrawn) == (1, 1)
    assert router.advisor.book.counts["cancelled"] == 1
    assert list(router.advisor.book.live()) == []


async def test_what_is_refused_is_said_once_and_dropped(start_worker, start_router, caplog) -> None:
    router = await start_router(await start_worker())

    def program() -> Hints:
        with Hints(router.url) as hints:
            for _ in range(3):
                hints.hint(session="never seen")
            hints.hint(text="This one is fine.")
        return hints

    with caplog.at_level(logging.WARNING, "sglang_ext.client.hints"):
        hints = await asyncio.to_thread(program)
    assert (hints.sent, hints.dropped) == (1, 3)
    said = [record for record in caplog.records if record.name == "sglang_ext.client.hints"]
    assert len(said) == 1
    assert "unknown_session" in said[0].getMessage()


def test_a_missing_router_does_not_block_its_clients() -> None:
    with Hints(f"http://127.0.0.1:{free_port()}") as hints:
        for _ in range(5):
            hints.hint(session="s")
    assert (hints.sent, hints.dropped) == (0, 5)
    hints.hint(session="after the end")


def test_the_oldest_goes_when_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    hints = Hints("http://127.0.0.1:1")
    monkeypatch.setattr(hints, "_thread", object())  # no thread sends
    for number in range(MOST_WAITING + 10):
        hints.hint(session=str(number))
    assert hints.dropped == 10
    assert b'"10"' in hints._waiting[0][1].body


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        Hints(url)
