"""SGLang's sessions, which servers keep for clients, are limited in number and in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_ext.router import Router
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tenancy.open_sessions import OpenSessions
from sglang_ext.testing.fakes import FakeClock

Json = dict[str, Any]
OPEN = {"capacity_of_str_len": 1000}
MOST = 3
KEYS = """
[[keys]]
key = "tenant-one-key"
tenant = "one"

[[keys]]
key = "tenant-two-key"
tenant = "two"
"""
ONE, TWO = "tenant-one-key", "tenant-two-key"


@pytest.fixture
async def worker(start_worker) -> Any:
    """A stand-in that opens and closes every session that it is asked to."""
    worker = await start_worker()
    worker.answers = {"/open_session": (200, "as told"), "/close_session": (200, None)}
    return worker


async def post(client, router: Router, path: str, body: Json, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client.post(router.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def ask(session: str) -> Json:
    return {
        "input_ids": [5, 6, 7],
        "session_params": {"id": session},
        "sampling_params": {"max_new_tokens": 2},
    }


async def test_a_client_has_so_many_sessions_and_no_more(
    worker, start_router, client, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    router = await start_router(worker, api_keys_file=str(file), client_sessions=MOST)
    names = []
    for _ in range(MOST):
        status, name = await post(client, router, "/open_session", OPEN, ONE)
        assert status == 200
        names.append(name)
    for _ in range(20):
        status, answer = await post(client, router, "/open_session", OPEN, ONE)
        assert (status, answer["error"]["code"]) == (429, "sessions_limit_exceeded")
    assert len(worker.calls) == MOST, "a refused session reaches no server"
    # Another tenant has its own limit, and a session that was closed makes room.
    assert (await post(client, router, "/open_session", OPEN, TWO))[0] == 200
    assert (await post(client, router, "/close_session", {"session_id": names[0]}, ONE))[0] == 200
    assert (await post(client, router, "/open_session", OPEN, ONE))[0] == 200
    assert (await post(client, router, "/open_session", OPEN, ONE))[0] == 429


async def test_clients_without_keys_have_a_limit_too(worker, start_router, client) -> None:
    router = await start_router(worker, client_sessions=MOST)
    statuses = [(await post(client, router, "/open_session", OPEN))[0] for _ in range(MOST + 2)]
    assert statuses == [200] * MOST + [429] * 2


@pytest.mark.parametrize(("asked", "given"), [(None, 50.0), (20, 20), (1e9, 50.0)])
async def test_a_session_has_a_time_out(
    asked: float | None, given: float, worker, start_router, client
) -> None:
    router = await start_router(worker, session_timeout_secs=50.0)
    body = OPEN if asked is None else {**OPEN, "timeout": asked}
    assert (await post(client, router, "/open_session", body))[0] == 200
    (_, _, sent) = worker.calls[-1]
    assert sent["timeout"] == given


async def test_a_session_counts_until_nothing_was_sent_in_it_for_its_time_out(
    worker, start_router, client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(
        "sglang_ext.router.app.endpoint_parts.OpenSessions", lambda _, **limits: OpenSessions(clock, **limits)
    )
    router = await start_router(worker, client_sessions=1, session_timeout_secs=1000.0)
    _, name = await post(client, router, "/open_session", OPEN)
    clock.advance(600)
    assert (await post(client, router, "/generate", ask(name)))[0] == 200
    clock.advance(600)
    assert (await post(client, router, "/open_session", OPEN))[0] == 429, "it was used 600 s ago"
    clock.advance(600)
    assert (await post(client, router, "/open_session", OPEN))[0] == 200


def test_sessions_of_an_instance_that_is_gone_do_not_count() -> None:
    table = OpenSessions(FakeClock(), most=2, idle_s=100.0)
    for name, instance in (("s1", "w1"), ("s2", "w2")):
        table.opened("client", "", name, instance, 100.0)
    with pytest.raises(RequestRefused):
        table.check("client")
    table.left("w1")
    table.check("client")
    assert (len(table), table.kept_by("w1"), table.kept_by("w2")) == (1, 0, 1)


def test_all_clients_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.router.tenancy.open_sessions.MOST", 10)
    clock = FakeClock()
    table = OpenSessions(clock, most=2, idle_s=100.0)
    for number in range(10):
        table.check(f"client {number // 2}")
        table.opened(f"client {number // 2}", "", f"s{number}", "w", 100.0)
    with pytest.raises(RequestRefused):
        table.check("a further client")
    assert table.size_bytes > 0
    clock.advance(101)
    table.check("a further client")
    assert (len(table), table.size_bytes, table.kept_by("w")) == (0, 0, 0)
