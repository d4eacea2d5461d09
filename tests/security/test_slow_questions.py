"""A question that a server does not answer in time ends there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_ext.router.endpoints import information
from sglang_ext.router.fleet.fleet import QUESTION_S, Fleet, State
from sglang_ext.router.http.types import ConnectFailed, ConnectionLost
from tests.support.servers.workers import Gate

pytestmark = pytest.mark.slow

TEXT = {"model": "m", "prompt": "one two three"}
GENERATE: dict[str, Any] = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 2}}
THRESHOLD = 3


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_one_question_holds_up_one_instance_and_none_is_taken_for_dead(
    path: str, start_worker, start_router, client, eventually, monkeypatch
) -> None:
    """Once, one body, and all three instances were "suspect -> down" in turn."""
    monkeypatch.setattr(information, "INFO_TIMEOUT_S", 0.3)
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers, health_check_timeout_secs=0.05, health_failure_threshold=THRESHOLD)
    await eventually(lambda: router.tokenizers.trust.text)
    for worker in workers:
        worker.before_tokens = Gate()
        worker.tokenizing = 0
    async with client.post(router.url + path, json=TEXT) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (504, "timeout")
    (asked,) = [worker for worker in workers if worker.tokenizing]
    assert asked.tokenizing == 1
    # It is busy with it for as long as twice the probes that are a verdict otherwise.
    row = router.fleet.rows[asked.url]
    seen = len(asked.targets)
    await eventually(lambda: len(asked.targets) >= seen + 2 * THRESHOLD)
    assert row.state is State.SUSPECT
    assert [each.state for each in router.fleet.rows.values()].count(State.READY) == 2
    for _ in range(6):
        async with client.post(router.url + "/generate", json=GENERATE) as answer:
            assert answer.status == 200
    asked.before_tokens.open()
    await eventually(lambda: row.state is State.READY)
    # The twin: without a question, as many missed probes are the verdict.
    asked.before_tokens, asked.hang_probes = None, Gate()
    await eventually(lambda: row.state is State.DOWN)
    asked.hang_probes.open()


@pytest.mark.parametrize(("error", "status", "asked"), [(ConnectFailed, 200, 2), (ConnectionLost, 502, 1)])
async def test_only_a_question_that_was_not_sent_goes_to_the_next_instance(
    error: type[Exception], status: int, asked: int, start_worker, start_router, client, monkeypatch
) -> None:
    router = await start_router(await start_worker(), await start_worker())
    call, seen = router.api.call, []

    async def fails_once(url: str, method: str, target: str, **more: Any) -> Any:
        if target == "/tokenize":
            seen.append(url)
            if len(seen) == 1:
                raise error("the test says so")
        return await call(url, method, target, **more)

    monkeypatch.setattr(router.api, "call", fails_once)
    async with client.post(router.url + "/tokenize", json=TEXT) as answer:
        assert answer.status == status
    assert len(set(seen)) == len(seen) == asked


def test_for_how_long_a_question_excuses() -> None:
    now = 0.0
    fleet = Fleet(("http://127.0.0.1:1",), failure_threshold=1, now=lambda: now)
    name = "http://127.0.0.1:1"
    row = fleet.rows[name]
    row.state = State.READY
    fleet._usable[name] = row
    with pytest.raises(asyncio.CancelledError), fleet.asking(name):
        raise asyncio.CancelledError
    now = QUESTION_S - 1
    assert fleet.missed(name, "no answer") is State.SUSPECT
    # Asking it again and again prolongs nothing.
    with fleet.asking(name):
        now = QUESTION_S
        assert fleet.missed(name, "no answer") is State.DOWN


def test_an_answered_question_excuses_nothing() -> None:
    now = 0.0
    name = "http://127.0.0.1:1"
    fleet = Fleet((name,), failure_threshold=1, now=lambda: now)
    fleet.rows[name].state = State.READY
    fleet._usable[name] = fleet.rows[name]
    with fleet.asking(name):
        now = 1.0
    assert fleet.missed(name, "no answer") is State.DOWN
