"""Instances that register, drain and leave while requests go on, through real sockets; several routers."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from yarl import URL

from sglang_ext.clock import SystemClock
from sglang_ext.cluster.router_client import RouterClient, quoted
from sglang_ext.cluster_key import ClusterKey, read_cluster_key
from sglang_ext.errors import ConfigError, UserError
from sglang_ext.protocol.cluster import PATH, Instances, instance_path
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.cluster.membership import ROUTER_TTL_S
from sglang_ext.router.fleet.fleet import State
from sglang_ext.testing.fakes import Stopwatch
from tests.support.servers.ports import free_port
from tests.support.servers.redis_server import HOW_TO_GET_IT, RedisServer, redis_is_installed
from tests.support.servers.workers import Gate, StandInWorker, running_worker

pytestmark = pytest.mark.slow

Json = dict[str, Any]
BODY = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 4}}
needs_redis = pytest.mark.skipif(not redis_is_installed(), reason=HOW_TO_GET_IT)


def registration(worker: StandInWorker, name: str = "a", epoch: int = 1, **more: Any) -> Json:
    return {"url": worker.url, "instance": name, "epoch": f"{epoch:032x}", **more}


class Client:
    """Calls of one router, and their answers."""

    def __init__(self, session: aiohttp.ClientSession, router: Router, headers: Json | None = None) -> None:
        self._session = session
        self._url = router.url
        self._headers = headers or {}

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Json]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self._session.request(
            method, URL(self._url + path, encoded=True), data=data, headers={**self._headers, **headers}
        ) as answer:
            return answer.status, await answer.json()

    async def register(self, worker: StandInWorker, name: str = "a", epoch: int = 1, **more: Any) -> Json:
        status, answer = await self.call("POST", PATH, registration(worker, name, epoch, **more))
        assert status == 200, answer
        return answer

    async def generate(self, **more: Any) -> tuple[int, str]:
        async with self._session.post(self._url + "/generate", json={**BODY, **more}) as answer:
            await answer.read()
            return answer.status, answer.headers.get("x-kv-instance", "")

    async def instances(self) -> dict[str, Json]:
        _, answer = await self.call("GET", PATH)
        return {instance["instance"]: instance for instance in answer["instances"]}


@pytest.fixture
async def start(start_router, client):
    """Start a router without workers; returns it and a client of it."""

    async def begin(**options: Any) -> tuple[Router, Client]:
        router = await start_router(**options)
        return router, Client(client, router)

    return begin


async def test_an_instance_registers_serves_and_leaves(start, start_worker, eventually) -> None:
    router, client = await start()
    assert (await client.generate())[0] == 503
    worker = await start_worker()
    answer = await client.register(worker)
    assert answer["router"] == router.members.router
    assert answer["verdict_s"] <= 3.0
    await eventually(lambda: len(router.fleet.usable()) == 1)
    assert await client.generate() == (200, worker.url)
    view = (await client.instances())["a"]
    assert (view["state"], view["usable"], view["registered"]) == ("ready", True, True)
    status, one = await client.call("GET", instance_path("a"))
    assert (status, one["url"]) == (200, worker.url)
    by_url = f"{PATH}/{quoted(worker.url)}"
    assert (await client.call("GET", by_url))[1]["instance"] == "a"
    status, _ = await client.call("DELETE", instance_path("a"))
    assert status == 200
    assert await client.instances() == {}
    assert (await client.generate())[0] == 503
    status, everything = await client.call("GET", "/cluster")
    assert (status, everything["store"]["kind"]) == (200, "embedded")
    assert "no instance has joined" in everything["unusable"]


async def test_what_is_wrong_is_said(start, start_worker) -> None:
    _, client = await start()
    worker = await start_worker()
    for body, words in (
        (b"{", "not JSON"),
        (registration(worker, epoch=1) | {"epoch": "xyz"}, "epoch"),
        (registration(worker) | {"color": 1}, "color"),
        ({}, "url"),
    ):
        status, answer = await client.call("POST", PATH, body)
        assert status == 400
        assert words in answer["error"]["message"]
    far = registration(worker) | {"url": "http://192.0.2.1:1"}
    assert (await client.call("POST", PATH, far))[0] == 403
    assert (await client.call("POST", PATH, registration(worker), origin="http://evil"))[0] == 403
    for method, path in (("GET", "x"), ("DELETE", "x"), ("POST", "x/drain"), ("POST", "x/role")):
        status, answer = await client.call(
            method, f"{PATH}/{path}", {"role": "prefill"} if "role" in path else None
        )
        assert (status, answer["error"]["code"]) == (404, "no_such_instance")
    await client.register(worker)
    assert (await client.call("POST", instance_path("a")))[0] == 405
    assert (await client.call("GET", instance_path("a", "drain")))[0] == 405
    assert (await client.call("PUT", PATH))[0] == 405
    assert (await client.call("POST", instance_path("a", "drain"), {"deadline_s": -1}))[0] == 400
    status, answer = await client.call("POST", instance_path("a", "role"), {"role": "prefill"})
    assert status in (200, 409)


async def test_a_role_is_what_the_server_was_started_as(start, start_worker, eventually) -> None:
    router, client = await start()
    worker = await start_worker()
    await client.register(worker)
    await eventually(lambda: len(router.fleet.usable()) == 1)
    assert (await client.call("POST", instance_path("a", "role"), {"role": "colocated"}))[0] == 200
    status, answer = await client.call("POST", instance_path("a", "role"), {"role": "decode"})
    assert (status, answer["error"]["code"]) == (409, "role_is_fixed")
    assert "Drain it" in answer["error"]["message"]
    other = await start_worker()
    await client.register(other, "b", role="prefill")
    await eventually(lambda: router.fleet.rows[other.url].state is State.UNFIT)
    assert "registered as prefill" in (await client.instances())["b"]["why"]


async def test_instances_that_cannot_work_together_are_shown_with_the_setting(
    start, start_worker, eventually, caplog: pytest.LogCaptureFixture
) -> None:
    """Two colocated ones of one model, and the halves of a pair, which is given no request."""
    caplog.set_level(logging.WARNING, "router.members")
    router, client = await start()
    one, two = await start_worker(), await start_worker()
    common = {"model": "stand-in", "endpoints": ["127.0.0.1:1"], "weights": "w"}
    await client.register(one, "a", settings={"rope_theta": "1.0"}, namespace="n", **common)
    assert (await client.call("GET", "/cluster"))[1]["incompatible"] == []
    await client.register(two, "b", settings={"rope_theta": "2.0"}, namespace="m", **common)
    (found,) = (await client.call("GET", "/cluster"))[1]["incompatible"]
    assert (found["what"], found["instances"], found["others"]) == ("sharing", ["b"], ["a"])
    assert found["differences"] == [{"setting": "rope_theta", "one": "2.0", "other": "1.0"}]
    assert "b cannot share KV with a: rope_theta (2.0 at b, 1.0 at a)" in found["why"]
    await client.register(two, "b", settings={"rope_theta": "2.0"}, namespace="m", **common)
    assert [record.message for record in caplog.records].count(found["why"]) == 1
    await client.call("DELETE", instance_path("b"))
    await client.call("DELETE", instance_path("a"))
    assert (await client.call("GET", "/cluster"))[1]["incompatible"] == []

    halves = {"prefill": "1.0", "decode": "2.0"}
    for role, theta in halves.items():
        worker = await start_worker()
        worker.model_info["disaggregation_mode"] = role
        fields = {"settings": {"rope_theta": theta}, "handover": {"--page-size": "1"}, "model": "stand-in"}
        await client.register(worker, role, role=role, **fields)
        await eventually(lambda url=worker.url: router.fleet.rows[url].state is State.READY)
    seen = (await client.call("GET", "/cluster"))[1]
    setting = "rope_theta (1.0 at prefill, 2.0 at decode)"
    assert [(each["what"], setting in each["why"]) for each in seen["incompatible"]] == [("hand-over", True)]
    assert setting in seen["unusable"]
    status, answer = await client.call("POST", "/generate", BODY)
    assert status == 503
    assert setting in answer["error"]["message"]


async def test_a_name_that_lives_elsewhere(start, start_worker, eventually) -> None:
    router, client = await start()
    one, two = await start_worker(), await start_worker()
    await client.register(one)
    await eventually(lambda: len(router.fleet.usable()) == 1)
    status, answer = await client.call("POST", PATH, registration(two, "a", 2))
    assert (status, answer["error"]["code"]) == (409, "name_taken")


async def test_an_instance_drains_while_it_finishes(start, start_worker, eventually, client) -> None:
    router, calls = await start()
    worker = await start_worker()
    await calls.register(worker)
    await eventually(lambda: len(router.fleet.usable()) == 1)
    worker.before_head = Gate()
    running = asyncio.create_task(calls.generate())
    await worker.before_head.reached()
    other = await start_worker()
    await calls.register(other, "b", 2)
    await eventually(lambda: len(router.fleet.usable()) == 2)
    status, view = await calls.call("POST", instance_path("a", "drain"), {"deadline_s": 60})
    assert (status, view["state"], view["draining"]["in_flight"]) == (200, "draining", 1)
    assert 0 < view["draining"]["deadline_s"] <= 60
    assert [await calls.generate() for _ in range(4)] == [(200, other.url)] * 4
    worker.before_head.open()
    assert await running == (200, worker.url)
    assert (await calls.instances())["a"]["state"] == "left"
    assert (await calls.register(worker))["state"] == "left"
    status, view = await calls.call("POST", instance_path("a", "drain"), {"cancel": True})
    assert (status, view["state"]) == (200, "new")
    await eventually(lambda: len(router.fleet.usable()) == 2)


async def test_a_restart_is_a_retry_for_what_had_not_begun(start, start_worker, eventually) -> None:
    router, client = await start()
    worker, other = await start_worker(), await start_worker()
    await client.register(worker)
    await eventually(lambda: len(router.fleet.usable()) == 1)
    worker.before_head = Gate()
    running = [asyncio.create_task(client.generate()) for _ in range(3)]
    await worker.before_head.reached()
    await eventually(lambda: router.fleet.rows[worker.url].in_flight == 3)
    await client.register(other, "b", 2)
    await eventually(lambda: len(router.fleet.usable()) == 2)
    await client.register(worker, "a", 3)
    assert await asyncio.gather(*running) == [(200, other.url)] * 3
    worker.before_head.open()


async def test_a_dead_instance_is_forsaken_within_three_seconds(start, start_worker, eventually) -> None:
    """By default settings: its waiting requests are answered by another instance."""
    router, client = await start(health_check_interval_secs=0.5)
    worker, other = await start_worker(), await start_worker()
    await client.register(worker)
    await eventually(lambda: len(router.fleet.usable()) == 1)
    worker.before_head, worker.hang_probes = Gate(), Gate()
    running = asyncio.create_task(client.generate())
    await worker.before_head.reached()
    await client.register(other, "b", 2)
    with Stopwatch() as verdict:
        assert await running == (200, other.url)
    assert verdict.seconds < 4.0
    assert (await client.instances())["a"]["state"] == "down"
    worker.before_head.open()
    worker.hang_probes.open()


# -- keys ----------------------------------------------------------------------------------------------------


async def test_only_members_register_where_there_is_a_key(start, start_worker, key_file, eventually) -> None:
    _, client = await start(cluster_key_file=str(key_file), api_key="operator")
    worker = await start_worker()
    body = json.dumps(registration(worker)).encode()
    key, now = read_cluster_key(key_file), SystemClock().wall()
    good = key.sign("POST", PATH, body, now)
    for header in (
        "",
        "Bearer operator",
        key.sign("POST", PATH, body + b" ", now),
        key.sign("POST", PATH, body, 5),
    ):
        status, answer = await client.call("POST", PATH, body, authorization=header)
        assert (status, answer["error"]["code"]) == (401, "not_a_member")
    assert (await client.call("POST", PATH, body, authorization=good))[0] == 200
    status, answer = await client.call("POST", PATH, body, authorization=good)
    assert status == 401
    assert "used before" in answer["error"]["message"]
    # An agent without the key: any process that listens there could speak for the instance.
    bare = json.dumps(registration(worker) | {"agent": "tcp://127.0.0.1:1", "agent_key": ""}).encode()
    header = key.sign("POST", PATH, bare, now)
    status, answer = await client.call("POST", PATH, bare, authorization=header)
    assert (status, answer["error"]["code"]) == (403, "no_agent_key")
    # A key is enough to be trusted with addresses of other machines.
    far = json.dumps(registration(worker, "far", 2) | {"url": "http://192.0.2.1:1"}).encode()
    assert (await client.call("POST", PATH, far, authorization=key.sign("POST", PATH, far, now)))[0] == 200
    assert (await client.call("GET", PATH))[0] == 401
    assert (await client.call("GET", PATH, authorization="Bearer wrong"))[0] == 401
    assert (await client.call("GET", PATH, authorization="Bearer operator"))[0] == 200
    assert (await client.call("GET", PATH, authorization=key.sign("GET", PATH, b"", now)))[0] == 200
    path = instance_path("far", "drain")
    assert (await client.call("POST", path))[0] == 401
    assert (await client.call("POST", path, authorization="Bearer operator"))[0] == 200
    path = instance_path("far")
    assert (await client.call("DELETE", path, authorization=key.sign("DELETE", path, b"", now)))[0] == 200


async def test_a_clock_that_is_wrong_keeps_no_member_out(start, key_file) -> None:
    """The router's answer gives its time, sealed; a stranger's would not count."""
    router, _ = await start(cluster_key_file=str(key_file), api_key="operator")
    key, now = read_cluster_key(key_file), SystemClock().wall
    for off_s in (-90.0, 0.0, 90.0, 1e6):
        there = RouterClient(router.url, key=key, wall=lambda off_s=off_s: now() + off_s)
        assert (await asyncio.to_thread(there.call, "GET", PATH, Instances)).instances == ()
    stranger = RouterClient(router.url, key=ClusterKey(b"another key of at least thirty-two characters"))
    with pytest.raises(UserError, match="administrator's key"):
        await asyncio.to_thread(stranger.call, "GET", PATH, Instances)


async def test_a_router_that_others_can_reach_refuses_instances_without_a_key(
    start, start_worker, client
) -> None:
    router, _ = await start(host="0.0.0.0", api_key="operator")
    worker = await start_worker()
    url = f"http://127.0.0.1:{router.url.rpartition(':')[2]}{PATH}"
    async with client.post(url, json=registration(worker)) as answer:
        assert answer.status == 403
        assert "--cluster-key-file" in (await answer.json())["error"]["message"]
    async with client.get(url, headers={"authorization": "Bearer operator"}) as answer:
        assert answer.status == 200
    async with client.get(url) as answer:
        assert answer.status == 401


async def test_a_tenants_key_is_not_an_administrators(start, start_worker, tmp_path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": "tenant-key-0123456789", "tenant": "t"}]}))
    keys.chmod(0o600)
    _, client = await start(api_keys_file=str(keys), api_key="operator")
    assert (await client.call("GET", PATH, authorization="Bearer tenant-key-0123456789"))[0] == 401
    assert (await client.call("GET", PATH, authorization="Bearer operator"))[0] == 200


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cluster": "etcd://x"}, "--cluster"),
        ({"cluster": "redis://"}, "--cluster"),
        ({"cluster": "redis://h:99999"}, "--cluster"),
        ({"cluster": "unix://"}, "--cluster"),
        ({"cluster": "redis://example.org:6379"}, "--cluster"),
        ({"cluster": "redis://127.0.0.1", "cluster_name": "a b"}, "--cluster-name"),
        ({"cluster_password_file": "x"}, "--cluster-password-file"),
    ],
)
def test_flags_that_cannot_work(options: Json, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**options)
    assert caught.value.field == field
    RouterConfig(cluster="redis://:secret@example.org:6379")
    RouterConfig(cluster="redis://example.org:6379", cluster_password_file="x")
    assert "secret" not in repr(RouterConfig(cluster="redis://:secret@example.org:6379"))


# -- several routers -----------------------------------------------------------------------------------------


@pytest.fixture
def redis():
    with RedisServer() as server:
        yield server


@needs_redis
async def test_two_routers_share_their_instances(redis, start, start_worker, eventually) -> None:
    one, ask_one = await start(cluster=redis.url)
    two, ask_two = await start(cluster=redis.url)
    worker, listed = await start_worker(), await start_worker()
    await ask_one.register(worker)
    await eventually(lambda: len(one.fleet.usable()) == len(two.fleet.usable()) == 1)
    # A document that one router received is at the other, too.
    status, _ = await ask_one.call("PUT", "/v1/documents/d", {"input_ids": [1] * 64})
    assert status == 200
    await eventually(lambda: two.documents.book.find("", "d"))
    # A stream that one router sends is load for the other.
    worker.before_head = Gate()
    running = [asyncio.create_task(ask_one.generate()) for _ in range(4)]
    await eventually(lambda: sum(i.in_flight for i in two.fleet.usable()) == 4)
    two.members.list_url(listed.url)
    await eventually(lambda: len(one.fleet.usable()) == len(two.fleet.usable()) == 2)
    # A drain wished of one router is one for both, and ends when both have finished.
    await ask_two.call("POST", instance_path("a", "drain"))
    await eventually(lambda: [i.name for i in one.fleet.usable()] == [listed.url])
    assert (await ask_two.instances())["a"]["state"] == "left"
    await eventually(lambda: one.fleet.rows[worker.url].state is State.DRAINING)

    async def seen_elsewhere() -> Json:
        while not (seen := (await ask_two.instances())["a"]["elsewhere"]) or seen[0]["state"] != "draining":
            pass
        return seen[0]

    assert (await asyncio.wait_for(seen_elsewhere(), 10))["router"] == one.members.router
    worker.before_head.open()
    assert {status for status, _ in await asyncio.gather(*running)} == {200}
    await eventually(lambda: one.fleet.rows[worker.url].state is State.LEFT)
    # A third router finds everything.
    three, ask_three = await start(cluster=redis.url)
    assert [i.name for i in three.fleet.usable()] == [listed.url]
    assert (await ask_three.instances())["a"]["state"] == "left"
    _, everything = await ask_three.call("GET", "/cluster")
    assert everything["store"]["connected"]
    status, document = await ask_three.call("GET", "/v1/documents/d")
    assert (status, document["kind"]) == (200, "input_ids")


@needs_redis
async def test_the_password_of_redis_comes_from_a_file(start, start_router, tmp_path) -> None:
    file = tmp_path / "password"
    with RedisServer(password="right") as redis:
        url = f"unix://{redis.socket}"
        file.write_text("right\n")
        file.chmod(0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            await start_router(cluster=url, cluster_password_file=str(file))
        file.chmod(0o600)
        router, _ = await start(cluster=url, cluster_password_file=str(file))
        assert router.members.store.view().connected
        file.write_text("wrong\n")
        with pytest.raises(ConfigError, match="Redis refuses us"):
            await start_router(cluster=url, cluster_password_file=str(file))


@needs_redis
async def test_redis_dies_and_the_routers_serve_on(redis, start, start_worker, eventually) -> None:
    one, ask_one = await start(cluster=redis.url)
    two, ask_two = await start(cluster=redis.url)
    worker = await start_worker()
    await ask_one.register(worker)
    await eventually(lambda: len(two.fleet.usable()) == 1)
    redis.kill()
    await eventually(lambda: not one.members.store.view().connected)
    _, everything = await ask_one.call("GET", "/cluster")
    assert not everything["store"]["connected"]
    assert everything["store"]["error"]
    value = one.metrics.registry.get_sample_value
    one.metrics.refreshing()
    assert value("sglang_ext_router_membership_connected") == 0.0
    for table in ("pending-words", "refused-records"):
        assert value("sglang_ext_router_table_entries", {"table": table}) is not None
    for client in (ask_one, ask_two):
        assert await client.generate() == (200, worker.url)
    late = await start_worker()
    await ask_one.register(late, "late", 2)
    await eventually(lambda: len(one.fleet.usable()) == 2)
    redis.start()
    await eventually(lambda: len(two.fleet.usable()) == 2)


@needs_redis
async def test_a_router_dies_and_the_other_has_everything(
    redis, start, start_worker, eventually, client, stack: AsyncExitStack
) -> None:
    one, ask_one = await start(cluster=redis.url)
    mortal = await stack.enter_async_context(AsyncExitStack())
    two = await mortal.enter_async_context(Router(RouterConfig(cluster=redis.url, port=0)))
    worker = await start_worker()
    await Client(client, two).register(worker)
    await eventually(lambda: len(one.fleet.usable()) == 1)
    await eventually(lambda: two.members.router in one.members.store.others)
    await mortal.aclose()
    await eventually(lambda: one.members.store.others == {})
    assert await ask_one.generate() == (200, worker.url)
    assert (await ask_one.register(worker))["state"] == "ready"


@needs_redis
async def test_a_router_is_killed_and_its_requests_are_no_load_any_more(
    redis, start, start_worker, eventually, client
) -> None:
    """Without a goodbye: its word expires."""
    one, ask_one = await start(cluster=redis.url)
    worker = await start_worker()
    await ask_one.register(worker)
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_ext.router", "--cluster", redis.url, "--port", str(port)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(lambda: len(one.members.store.others) == 1, 60.0)
        worker.before_head = Gate()
        held = asyncio.create_task(client.post(f"http://127.0.0.1:{port}/generate", json=BODY))
        await eventually(lambda: sum(i.in_flight for i in one.fleet.usable()) == 1, 20.0)
    finally:
        process.kill()
        await process.wait()
    assert isinstance((await asyncio.gather(held, return_exceptions=True))[0], aiohttp.ClientError)
    await eventually(lambda: one.members.store.others == {}, 3 * ROUTER_TTL_S)
    assert [i.in_flight for i in one.fleet.usable()] == [0]
    worker.before_head.open()
    assert await ask_one.generate() == (200, worker.url)


@needs_redis
async def test_a_response_is_found_through_any_router(redis, start, start_worker, eventually) -> None:
    one, _ = await start(cluster=redis.url)
    two, _ = await start(cluster=redis.url)
    worker = await start_worker()
    one.members.list_url(worker.url)
    await eventually(lambda: len(two.fleet.usable()) == 1)
    one.homes.keep("tenant", "resp_1", worker.url)

    def known() -> bool:
        return len(two.homes) == 1

    await eventually(known)
    assert two.homes.get("tenant", "resp_1") == worker.url


@needs_redis
async def test_a_worker_that_dies_is_seen_by_each_router(redis, start, eventually, tokenizer) -> None:
    one, ask_one = await start(cluster=redis.url)
    two, _ = await start(cluster=redis.url)
    async with running_worker(StandInWorker(tokenizer=tokenizer)) as worker:
        await ask_one.register(worker)
        await eventually(lambda: len(one.fleet.usable()) == len(two.fleet.usable()) == 1)
    await eventually(lambda: one.fleet.usable() == two.fleet.usable() == ())
    assert two.fleet.rows[worker.url].state is State.DOWN
