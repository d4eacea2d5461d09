"""SGLang's sessions at the router: opened at one worker, found there from every router, lost with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sglang_ext.router import Router
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.http.types import RequestRefused

Json = dict[str, Any]
KEYS = """
[[keys]]
key = "tenant-one-key"
tenant = "one"

[[keys]]
key = "tenant-two-key"
tenant = "two"
"""
OPEN = {"capacity_of_str_len": 1000}


@pytest.fixture
async def start_keeping(start_worker) -> Any:
    """Start a stand-in that opens and closes every session that it is asked to."""

    async def start() -> Any:
        worker = await start_worker()
        worker.answers = {"/open_session": (200, "as told"), "/close_session": (200, None)}
        return worker

    return start


def opened(worker: Any) -> list[str]:
    return [body["session_id"] for _, path, body in worker.calls if path == "/open_session"]


async def post(client, router: Router, path: str, body: Json, key: str = "") -> tuple[int, Any, str | None]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client.post(router.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers.get("x-kv-instance")


def ask(session: str, **more: Any) -> Json:
    sampling = {"max_new_tokens": 2}
    return {"input_ids": [5, 6, 7], "session_params": {"id": session, **more}, "sampling_params": sampling}


async def test_requests_go_where_their_session_is(start_keeping, start_router, client) -> None:
    workers = [await start_keeping() for _ in range(3)]
    router = await start_router(*workers, policy="round-robin")
    homes = {}
    for number in range(6):
        status, name, home = await post(client, router, "/open_session", {**OPEN, "timeout": 60})
        assert status == 200
        homes[name] = home
        if number == 0:
            (opening,) = [call for worker in workers for call in worker.calls]
            assert opening[2] == {**OPEN, "timeout": 60, "session_id": name}
    assert [len(opened(worker)) for worker in workers] == [2, 2, 2], "spread while nothing runs"
    for _ in range(2):
        for name, home in homes.items():
            status, _, at = await post(client, router, "/generate", ask(name))
            assert (status, at) == (200, home)
    # The twin: without its session, the same request goes in turn.
    turns = {(await post(client, router, "/generate", {"input_ids": [5, 6, 7]}))[2] for _ in range(3)}
    assert turns == {worker.url for worker in workers}


async def test_a_router_that_starts_later_finds_sessions_by_their_names(
    start_keeping, start_router, client
) -> None:
    workers = [await start_keeping() for _ in range(3)]
    former, later = await start_router(*workers), await start_router(*workers)
    homes = {}
    for _ in range(3):
        _, name, home = await post(client, former, "/open_session", OPEN)
        homes[name] = home
    for name, home in homes.items():
        assert (await post(client, later, "/generate", ask(name)))[::2] == (200, home)
    # The twin: a name that says nothing is not found.
    await post(client, former, "/open_session", {**OPEN, "session_id": "mine"})
    assert (await post(client, later, "/generate", ask("mine")))[0] == 404
    # Nor is the session of a server that has left.
    name, home = next(iter(homes.items()))
    async with client.delete(f"{later.url}/cluster/instances/{quote(home, safe='')}") as answer:
        assert answer.status == 200
    assert (await post(client, later, "/generate", ask(name)))[0] in (404, 410)


async def test_a_session_that_is_closed_or_unknown_is_none(start_keeping, start_router, client) -> None:
    worker = await start_keeping()
    router = await start_router(worker)
    assert (await post(client, router, "/open_session", {**OPEN, "session_id": "mine"}))[:2] == (200, "mine")
    assert (await post(client, router, "/close_session", {"session_id": "mine"}))[0] == 200
    for path, body in (("/generate", ask("mine")), ("/close_session", {"session_id": "mine"})):
        status, answer, _ = await post(client, router, path, body)
        assert (status, answer["error"]["code"]) == (404, "session_not_found")
    assert worker.requests == []


async def test_the_worker_s_own_refusal_is_passed_on(start_keeping, start_router, client) -> None:
    workers = [await start_keeping() for _ in range(2)]
    router = await start_router(*workers)
    body = {**OPEN, "session_id": "mine"}
    _, _, home = await post(client, router, "/open_session", body)
    for worker in workers:
        worker.answers["/open_session"] = (400, {"error": {"message": "still open"}})
    for _ in range(2):
        status, answer, at = await post(client, router, "/open_session", body)
        assert (status, answer["error"]["message"], at) == (400, "still open", home), (
            "which knows whether it is"
        )


async def test_a_session_is_lost_with_its_worker(start_keeping, start_router, client) -> None:
    workers = [await start_keeping() for _ in range(2)]
    router = await start_router(*workers)
    _, name, home = await post(client, router, "/open_session", OPEN)
    router.fleet.lost(home, "the test says so")
    status, answer, _ = await post(client, router, "/generate", ask(name))
    assert (status, answer["error"]["code"]) == (410, "session_lost")
    assert home in answer["error"]["message"]
    assert "is down" in answer["error"]["message"]
    assert "open a new one" in answer["error"]["message"]
    assert all(not worker.requests for worker in workers), "no other worker knows it"
    # It can be opened again, elsewhere.
    status, _, other = await post(client, router, "/open_session", {**OPEN, "session_id": name})
    assert (status, other != home) == (200, True)
    assert (await post(client, router, "/generate", ask(name)))[::2] == (200, other)


async def test_a_worker_that_goes_away_meanwhile_is_not_followed_by_another(
    start_keeping, start_router, client
) -> None:
    workers = [await start_keeping() for _ in range(2)]
    router = await start_router(*workers)
    _, name, home = await post(client, router, "/open_session", OPEN)
    for worker in workers:
        worker.deaths_before_head = 1
    status, answer, _ = await post(client, router, "/generate", ask(name))
    assert (status, answer["error"]["code"]) == (502, "worker_lost")
    assert {worker.url: len(worker.requests) for worker in workers if worker.url != home}.popitem()[1] == 0


async def test_tenants_have_sessions_of_their_own(
    start_keeping, start_router, client, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    worker = await start_keeping()
    router = await start_router(worker, api_keys_file=str(file))
    one, two = "tenant-one-key", "tenant-two-key"
    body = {**OPEN, "session_id": "mine"}
    assert (await post(client, router, "/open_session", body, one))[:2] == (200, "mine")
    assert (await post(client, router, "/generate", ask("mine"), two))[0] == 404
    assert (await post(client, router, "/close_session", {"session_id": "mine"}, two))[0] == 404
    assert (await post(client, router, "/open_session", body, two))[:2] == (200, "mine")
    assert len(set(opened(worker))) == 2, "under two names"
    assert (await post(client, router, "/generate", ask("mine"), one))[0] == 200
    (_, sent, _) = worker.requests[-1]
    assert sent["session_params"]["id"] == opened(worker)[0]
    assert sent["cache_salt"]
    # A request before is called as the client called it, or as its answer did.
    prefix = opened(worker)[0].removesuffix("mine")
    for rid in ("r", prefix + "r"):
        await post(client, router, "/generate", ask("mine", rid=rid), one)
        assert worker.requests[-1][1]["session_params"]["rid"] == prefix + "r"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/open_session", {}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": "many"}, "capacity_of_str_len"),
        ("/open_session", {**OPEN, "session_id": ""}, "session_id"),
        ("/open_session", {**OPEN, "session_id": "x" * 300}, "session_id"),
        ("/open_session", {**OPEN, "timeout": "long"}, "timeout"),
        ("/close_session", {}, "session_id"),
        ("/close_session", {"session_id": 3}, "session_id"),
    ],
)
async def test_what_is_wrong_reaches_no_worker(
    path: str, body: Json, param: str, start_keeping, start_router, client
) -> None:
    worker = await start_keeping()
    router = await start_router(worker)
    status, answer, _ = await post(client, router, path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert worker.calls == []


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (3, "session_params"),
        ({"id": 3}, "session_params.id"),
        ({"id": "s", "offset": "1"}, "session_params.offset"),
        ({"id": "s", "replace": 1}, "session_params.replace"),
        ({"id": "s", "newer": 1}, "session_params.newer"),
        ({"id": "s"}, "session_params"),
    ],
)
def test_what_is_wrong_with_a_request_of_a_session(params: Any, param: str) -> None:
    body = {"input_ids": [1], "session_params": params, "session_id": "other"}
    with pytest.raises(RequestRefused) as refused:
        GENERATE.parse(body, Limits(1000, 4096))
    assert refused.value.param == param


async def test_a_response_is_lost_with_its_worker(start_worker, start_router, client) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers)
    body = {"input": "Hello", "max_output_tokens": 2}
    _, response, home = await post(client, router, "/v1/responses", body)
    router.fleet.lost(home, "the test says so")
    again = {**body, "previous_response_id": response["id"]}
    status, answer, _ = await post(client, router, "/v1/responses", again)
    assert (status, answer["error"]["code"]) == (410, "response_lost")
