"""State that routers share: hints, sessions, limits, requests by their ids; over one folder, and over
Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from test_hinting import CHAT, NEXT, OTHER, advise, chat, link, post
from test_membership import needs_redis
from test_tenants import A, B, bearer, keys_file

from sglang_ext.protocol.agent import Advised
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.cluster.broadcast import SyncAsked
from sglang_ext.router.hints.hint import State
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.workers import Gate

pytestmark = pytest.mark.slow

Start = Callable[..., Awaitable[Router]]
MINUTE = 300
"""Tokens a minute: so few that the routers agree by their reports, not because both have refilled."""
BODY = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture(params=["local", pytest.param("redis", marks=needs_redis)])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where membership is kept."""
    if request.param == "local":
        (folder := tmp_path / "routers").mkdir(mode=0o700)
        yield f"local://{folder}"
    else:
        with RedisServer() as redis:
            yield redis.url


async def pair(start_router: Start, shared: str, *workers: Any, **options: Any) -> list[Router]:
    """Two routers that know each other."""
    return [await start_router(*workers, cluster=shared, **options) for _ in range(2)]


def both_see(one: Router, two: Router) -> bool:
    return len(one.members.store.others) == len(two.members.store.others) == 1


# -- hints ------------------------------------------------------------------------------------------------


async def test_a_request_finds_its_hint_at_any_router(
    shared, start_worker, start_router, client, eventually
) -> None:
    """By its session, and by its conversation; the router that took the hint ends it, and counts it as
    used."""
    workers = [await start_worker(), await start_worker()]
    one, two = await pair(start_router, shared, *workers, policy="round-robin")
    links = link(one)
    await eventually(lambda: one.tokenizers.trust.chat and two.tokenizers.trust.chat)
    for turn, session in enumerate(("s", None, "t", None)):
        body = {"messages": NEXT[:2]} if session is None else {"messages": CHAT, "session": session}
        told = await advise(client, one, **body)
        await eventually(lambda told=told: two.advisor.remote.get(told["id"]))
        assert two.advisor.book.promised(told["instance"]) == 1, "it counts as load there, too"
        if turn % 2:
            await chat(client, two, OTHER)  # another request comes between, and takes its turn
        answered = await chat(client, two, NEXT, session=session)
        assert (answered["x-kv-route-reason"], answered["x-kv-instance"]) == ("advised", told["instance"])
        await eventually(lambda told=told: one.advisor.book.find(told["id"]).state is State.USED)
        again = await chat(client, two, NEXT, session=session)
        assert again["x-kv-route-reason"] == "round-robin", "a hint is good for one request"
    assert len(links.withdrawn()) == len(links.hints())
    assert two.advisor.book.promised(workers[0].url) == two.advisor.book.promised(workers[1].url) == 0


async def test_routers_that_share_nothing_do_not(start_worker, start_router, client) -> None:
    """The twin: the same with routers that do not know each other."""
    workers = [await start_worker(), await start_worker()]
    one, two = [await start_router(*workers, policy="round-robin") for _ in range(2)]
    told = await advise(client, one, messages=CHAT, session="s")
    answered = await chat(client, two, NEXT, session="s")
    assert answered["x-kv-route-reason"] == "round-robin"
    assert one.advisor.book.find(told["id"]).state is not State.USED


async def test_a_hint_is_seen_repeated_and_taken_back_at_any_router(
    shared, start_worker, start_router, client, eventually
) -> None:
    worker = await start_worker()
    one, two = await pair(start_router, shared, worker)
    links = link(one)
    links.computing = True  # there is something to wait for
    told = await advise(client, one, messages=CHAT, session="s", ttl_s=30)
    await eventually(lambda: two.advisor.remote.get(told["id"]))
    url = f"{two.url}/v1/advisory/{told['id']}"
    async with client.get(url) as answer:
        seen = await answer.json()
    assert {**seen, "expires_in_s": 0} == {key: 0 if key == "expires_in_s" else told[key] for key in seen}
    assert 0 < seen["expires_in_s"] <= 30

    waiting = asyncio.create_task(client.get(url + "?wait_s=60"))
    streaming = asyncio.create_task(client.get(url, headers={"accept": "text/event-stream"}))
    again = await advise(client, two, messages=CHAT, session="s", ttl_s=300)
    assert (again["reason"], again["id"]) == ("repeated", told["id"])
    assert again["expires_in_s"] > 200
    entry = one.advisor.book.find(told["id"])
    await eventually(lambda: entry.expires - one.clock.monotonic() > 200)
    assert len(links.hints()) == 2, "the instance holds it back for longer"

    one.advisor.preparer.on_advised(worker.url, Advised(bytes(16), told["id"], "done", 0, 0))
    async with await waiting as answer:
        assert (await answer.json())["state"] == "ready"
    async with await streaming as answer:
        assert '"state":"ready"' in (await answer.text()).replace(" ", "")

    async with client.delete(url) as answer:
        assert (await answer.json())["state"] == "cancelled"
    await eventually(lambda: entry.state is State.CANCELLED)
    assert links.withdrawn() == [told["id"]]


async def test_a_longer_conversation_replaces_the_hint_of_another_router(
    shared, start_worker, start_router, client, eventually
) -> None:
    one, two = await pair(start_router, shared, await start_worker())
    first = await advise(client, one, messages=CHAT, session="s")
    await eventually(lambda: two.advisor.remote.get(first["id"]))
    second = await advise(client, two, messages=NEXT, session="s")
    assert second["id"] != first["id"]
    entry = one.advisor.book.find(first["id"])
    await eventually(lambda: entry.state is State.CANCELLED)
    assert "longer" in entry.why
    await eventually(lambda: len(one.advisor.remote) == 1)
    assert len(one.advisor.book) == len(two.advisor.remote) == 0


async def test_limits_of_hints_count_those_of_all_routers(
    shared, start_worker, start_router, client, eventually
) -> None:
    options = {"hints_live": 4, "hints_per_second": 1000}
    one, two = await pair(start_router, shared, await start_worker(), **options)
    for number in range(4):
        await advise(client, (one, two)[number % 2], text=f"Conversation {number}. " * 20)
    await eventually(lambda: len(one.advisor.remote) == len(two.advisor.remote) == 2)
    for router in (one, two):
        status, refused, _ = await post(client, router, "/v1/advisory", {"text": "One more. " * 20})
        assert (status, refused["error"]["code"]) == (429, "hint_refused")


async def test_a_session_that_another_router_served_is_known(
    shared, start_worker, start_router, client, eventually
) -> None:
    one, two = await pair(start_router, shared, await start_worker())
    await eventually(lambda: both_see(one, two))
    await chat(client, one, CHAT, session="s")
    told = await advise(client, two, session="s")
    assert sum(told["tokens"].values()) == len(one.sessions.find("s")[1]) // 4
    status, refused, _ = await post(client, two, "/v1/advisory", {"session": "nobody's"})
    assert (status, refused["error"]["code"]) == (404, "unknown_session")


async def test_a_hint_outlives_its_router_and_who_begins_knows_it(
    shared, start_worker, start_router, client, eventually
) -> None:
    workers = [await start_worker(), await start_worker()]
    two = await start_router(*workers, cluster=shared, policy="round-robin")
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(
            Router(RouterConfig(worker_urls=tuple(w.url for w in workers), cluster=shared, port=0))
        )
        told = await advise(client, one, messages=CHAT, session="s")
        await eventually(lambda: two.advisor.remote.get(told["id"]))
    three = await start_router(*workers, cluster=shared, policy="round-robin")
    await eventually(lambda: three.advisor.remote.get(told["id"]))
    answered = await chat(client, three, NEXT, session="s")
    assert (answered["x-kv-route-reason"], answered["x-kv-instance"]) == ("advised", told["instance"])
    await eventually(lambda: len(two.advisor.remote) == 0)


# -- limits -----------------------------------------------------------------------------------------------


def meter(router: Router, key: str = A) -> Any:
    caller = router.keys.caller(key)
    assert caller is not None
    return caller.meter


async def generate(client: Any, router: Router, key: str = A, **more: Any) -> int:
    async with client.post(router.url + "/generate", json={**BODY, **more}, headers=bearer(key)) as answer:
        await answer.read()
        return int(answer.status)


async def test_a_key_has_its_limit_once_and_not_at_each_router(
    shared, start_worker, start_router, client, eventually, tmp_path
) -> None:
    worker = await start_worker()
    keys = keys_file(
        tmp_path,
        {"key": A, "tenant": "a", "concurrent": 3},
        {"key": B, "tenant": "b", "requests_per_second": 0.001, "burst": 4, "tokens_per_minute": MINUTE},
    )
    one, two = await pair(start_router, shared, worker, api_keys_file=keys)
    await eventually(lambda: both_see(one, two))
    # Requests at once.
    worker.before_head = Gate()
    running = [asyncio.create_task(generate(client, router)) for router in (one, one, two)]
    await eventually(lambda: (meter(one).elsewhere, meter(two).elsewhere) == (1, 2))
    assert [await generate(client, router) for router in (one, two)] == [429, 429]
    worker.before_head.open()
    assert await asyncio.gather(*running) == [200] * 3
    await eventually(lambda: meter(one).elsewhere == meter(two).elsewhere == 0)
    assert [await generate(client, router) for router in (one, two)] == [200, 200]

    # Requests by time, and their tokens.
    began = one.clock.monotonic()

    def agree() -> bool:
        left = [meter(router, B).use() for router in (one, two)]
        return abs(left[0].requests_left - left[1].requests_left) < 0.5 and (
            abs(left[0].tokens_left - left[1].tokens_left) < 60
        )

    for router in (one, two, two, one):
        assert await generate(client, router, B) == 200
        await eventually(agree)
    assert [await generate(client, router, B) for router in (one, two)] == [429, 429]
    refilled = MINUTE / 60 * (one.clock.monotonic() - began)
    assert meter(one, B).use().tokens_left <= MINUTE - 4 * 64 + refilled
    # A third router begins with the rest of the limit, not anew.
    three = await start_router(worker, cluster=shared, api_keys_file=keys)
    await eventually(lambda: meter(three, B).use().requests_left < 1)
    assert await generate(client, three, B) == 429


async def test_the_requests_of_a_router_that_is_gone_run_no_more(
    shared, start_worker, start_router, client, eventually, tmp_path
) -> None:
    worker = await start_worker()
    keys = keys_file(tmp_path, {"key": A, "tenant": "a", "concurrent": 1})
    two = await start_router(worker, cluster=shared, api_keys_file=keys)
    async with AsyncExitStack() as stack:
        config = RouterConfig(
            worker_urls=(worker.url,), cluster=shared, port=0, api_keys_file=keys,
            shutdown_grace_period_secs=0,
        )  # fmt: skip
        one = await stack.enter_async_context(Router(config))
        await eventually(lambda: both_see(one, two))
        worker.before_head = Gate()
        cut = asyncio.create_task(generate(client, one))
        await eventually(lambda: meter(two).elsewhere == 1)
        assert await generate(client, two) == 429
        meter(one)._used = lambda meter: None  # it dies without a word
    await asyncio.gather(cut, return_exceptions=True)
    worker.before_head.open()
    await eventually(lambda: meter(two).elsewhere == 0)
    assert await generate(client, two) == 200


# -- requests, and everything else that has a name ---------------------------------------------------------


async def named(client: Any, url: str, method: str = "GET", **options: Any) -> tuple[int, Any]:
    async with client.request(method, url, **options) as answer:
        return answer.status, await answer.json()


async def abort(client: Any, router: Router, rid: str) -> tuple[int, Any]:
    return await named(client, f"{router.url}/abort_request", "POST", json={"rid": rid})


async def test_an_abort_ends_exactly_the_named_request_at_any_router(
    shared, start_worker, start_router, client, eventually
) -> None:
    """By ``rid`` at its worker, by ``x-request-id`` or the name of a batch by its connection."""
    worker = await start_worker()
    one, two = await pair(start_router, shared, worker)
    await eventually(lambda: both_see(one, two))
    worker.before_head = Gate()

    def start(name: str, **body: Any) -> Any:
        headers = {"x-request-id": f"id-{name}"}
        asked = client.post(one.url + "/generate", json={**BODY, "rid": name, **body}, headers=headers)
        return asyncio.create_task(asked)

    ids = {"input_ids": [list(range(8)), list(range(9))]}
    running = {name: start(name) for name in ("job-1", "job-10", "job-2", "job-20")}
    running["batch"] = start("batch", **ids)
    await eventually(lambda: len(one.flights) == 5)
    assert await abort(client, two, "job-1") == (200, {"aborted": 1})
    assert worker.rids_aborted == [{"rid": "job-1"}]
    assert await abort(client, two, "batch_1") == (200, {"aborted": 1})
    assert worker.rids_aborted[1:] == [{"rid": "batch_1"}]
    for name, ended in (("id-job-2", "job-2"), ("batch", "batch")):
        assert await abort(client, two, name) == (200, {"aborted": 1})
        async with await running.pop(ended) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (499, "aborted")
    assert len(worker.rids_aborted) == 2
    assert await abort(client, two, "job") == (200, {"aborted": 0})
    assert (await abort(client, two, ""))[0] == 400
    assert len(one.flights) == 3
    worker.before_head.open()
    for request in running.values():
        async with await request as answer:
            assert answer.status == 200


async def test_a_tenant_aborts_its_own_requests_at_all_routers(
    shared, start_worker, start_router, client, eventually, tmp_path
) -> None:
    worker = await start_worker()
    keys = keys_file(tmp_path, {"key": A, "tenant": "a"}, {"key": B, "tenant": "b"})
    one, two = await pair(start_router, shared, worker, api_keys_file=keys)
    await eventually(lambda: both_see(one, two))
    worker.before_head = Gate()
    running = [
        asyncio.create_task(generate(client, router, key, rid="same"))
        for router, key in ((one, A), (two, A), (one, B))
    ]
    await eventually(lambda: (len(one.flights), len(two.flights)) == (2, 1))
    body = {"json": {"abort_all": True}, "headers": bearer(A)}
    assert await named(client, f"{two.url}/abort_request", "POST", **body) == (200, {"aborted": 2})
    assert await asyncio.gather(*running[:2]) == [499, 499]
    assert len(one.flights) == 1
    worker.before_head.open()
    assert await running[2] == 200


async def test_a_request_is_explained_by_any_router(
    shared, start_worker, start_router, client, eventually, tmp_path
) -> None:
    """To its tenant only."""
    keys = keys_file(tmp_path, {"key": A, "tenant": "a"}, {"key": B, "tenant": "b"})
    one, two = await pair(start_router, shared, await start_worker(), api_keys_file=keys)
    await eventually(lambda: both_see(one, two))
    headers = {**bearer(A), "x-request-id": "q"}
    async with client.post(one.url + "/generate", json=BODY, headers=headers) as answer:
        assert answer.status == 200
    here = await named(client, one.url + "/explain/q", headers=bearer(A))
    assert here[0] == 200
    assert await named(client, two.url + "/explain/q", headers=bearer(A)) == here
    for router in (one, two):
        assert (await named(client, router.url + "/explain/q", headers=bearer(B)))[0] == 404
    assert (await named(client, two.url + "/explain/none", headers=bearer(A)))[0] == 404


async def test_what_one_router_has_just_answered_is_known_at_the_other(
    shared, start_worker, start_router, client, eventually
) -> None:
    """Hints, documents, responses and instances: asked at once at the router that has not received them
    yet."""
    worker = await start_worker()
    one, two = await pair(start_router, shared, worker)
    link(one)
    await eventually(lambda: both_see(one, two))
    for number in range(20):
        told = await advise(client, one, text=f"Conversation {number}. " * 20)
        assert (await named(client, f"{two.url}/v1/advisory/{told['id']}"))[0] == 200
        document = f"/v1/documents/d{number}"
        body = {"json": {"text": f"Document {number}. " * 20}}
        assert (await named(client, one.url + document, "PUT", **body))[0] == 200
        assert (await named(client, two.url + document))[0] == 200
        asked = {"json": {"input": "Hello", "max_output_tokens": 2}}
        status, response = await named(client, f"{one.url}/v1/responses", "POST", **asked)
        assert status == 200
        assert (await named(client, f"{two.url}/v1/responses/{response['id']}"))[0] == 200
    # A response that the other router has forgotten, or never received, is asked for, also to continue from
    # it.
    two.homes._homes.clear()
    assert (await named(client, f"{two.url}/v1/responses/{response['id']}"))[0] == 200
    two.homes._homes.clear()
    again = {"json": {**asked["json"], "previous_response_id": response["id"]}}
    assert (await named(client, f"{two.url}/v1/responses", "POST", **again))[0] == 200
    for path in ("/v1/responses/none", "/v1/documents/none", "/v1/advisory/none", "/cluster/instances/none"):
        assert (await named(client, two.url + path))[0] == 404


async def test_a_session_is_found_from_the_other_router(
    shared, start_worker, start_router, client, eventually
) -> None:
    """The router that opened it sends its place, or answers a question for it."""
    workers = [await start_worker() for _ in range(2)]
    for worker in workers:
        worker.answers = {"/open_session": (200, "s"), "/close_session": (200, None)}
    one = await start_router(*workers, cluster=shared)
    two = await start_router(*workers, cluster=shared)
    await eventually(lambda: both_see(one, two))
    for number in range(10):
        opening = {"json": {"capacity_of_str_len": 100, "session_id": f"s{number}"}}
        assert (await named(client, one.url + "/open_session", "POST", **opening))[0] == 200
        home = one.homes.get("", f"session s{number}")
        if number % 2:
            two.homes._homes.clear()
        body = {"input_ids": [5, 6], "session_params": {"id": f"s{number}"}}
        async with client.post(two.url + "/generate", json=body) as answer:
            assert (answer.status, answer.headers["x-kv-instance"]) == (200, home)
    closing = {"json": {"session_id": "s0"}}
    assert (await named(client, two.url + "/close_session", "POST", **closing))[0] == 200
    (closed,) = [call for worker in workers for call in worker.calls if call[1] == "/close_session"]
    assert closed[2] == {"session_id": "s0"}


async def test_a_router_that_died_is_not_waited_for(
    shared, start_worker, start_router, client, eventually
) -> None:
    worker = await start_worker()
    one = await start_router(worker, cluster=shared)
    async with Router(RouterConfig(worker_urls=(worker.url,), cluster=shared, port=0)) as two:
        await eventually(lambda: both_see(one, two))
        asking = asyncio.create_task(one.queries.ask(SyncAsked("", "1"), every=True, within_s=600.0))
        two.queries._answering.clear()
        two.queries._answering[SyncAsked] = never
        await eventually(lambda: bool(one.queries._asked) or asking.done())
    async with asyncio.timeout(60):
        await asking


async def never(_query: Any) -> Any:
    await asyncio.Event().wait()


# -- repairs ----------------------------------------------------------------------------------------------

DATE_TIME = '[[rule]]\nname = "date-time"\non = true\n'


async def asked_at(client: Any, router: Router, minute: int) -> None:
    """A turn of a session whose system prompt has the time."""
    words = f"It is 2026-11-29T10:{minute:02}:00Z. You are an agent."
    said = [{"role": "system", "content": words}, {"role": "user", "content": "read"}]
    body = {"model": "default", "max_tokens": 4, "messages": said}
    url = router.url + "/v1/chat/completions"
    async with client.post(url, json=body, headers={"x-opencode-session": "s"}) as answer:
        assert answer.status == 200, await answer.text()


def systems(worker: Any) -> list[str]:
    return [body["messages"][0]["content"] for _, body, _ in worker.requests]


async def test_a_session_keeps_its_first_text_at_any_router(
    shared, start_worker, start_router, client, eventually, tmp_path
) -> None:
    (rules := tmp_path / "rules.toml").write_text(DATE_TIME, encoding="utf-8")
    worker = await start_worker()
    one, two = await pair(start_router, shared, worker, client_rules=str(rules))
    await eventually(lambda: both_see(one, two))
    await asked_at(client, one, 1)
    await eventually(lambda: len(two.metrics.tables["pins"]) == 1)
    for minute, router in ((2, two), (3, one)):
        await asked_at(client, router, minute)
    assert systems(worker) == ["It is 2026-11-29T10:01:00Z. You are an agent."] * 3


async def test_routers_that_share_nothing_keep_their_own(
    start_worker, start_router, client, tmp_path
) -> None:
    """The twin."""
    (rules := tmp_path / "rules.toml").write_text(DATE_TIME, encoding="utf-8")
    worker = await start_worker()
    one, two = [await start_router(worker, client_rules=str(rules)) for _ in range(2)]
    for minute, router in ((1, one), (2, two), (3, one)):
        await asked_at(client, router, minute)
    assert [text[17:22] for text in systems(worker)] == ["10:01", "10:02", "10:01"]
