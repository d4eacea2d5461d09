"""Every endpoint is charged before it does anything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_hinting import in_dram, link

from sglang_ext.router.endpoints import charges
from sglang_ext.router.endpoints.charges import Charge, charge_of
from sglang_ext.router.endpoints.routes import Access, Route, RouteTable
from tests.support.servers.workers import Gate

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "router.md"
KEY = {"authorization": "Bearer key-of-tenant-a"}
OTHER = {"authorization": "Bearer key-of-tenant-b"}
BODY: dict[str, Any] = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 2}}


def key_file(folder: Path, limits: str) -> str:
    """Tenant a with limits, tenant b without."""
    file = folder / "keys.toml"
    file.write_text(
        f'[[keys]]\nkey = "key-of-tenant-a"\ntenant = "a"\n{limits}\n'
        '[[keys]]\nkey = "key-of-tenant-b"\ntenant = "b"\n'
    )
    file.chmod(0o600)
    return str(file)


def unjudged(routes: RouteTable) -> list[str]:
    """Endpoints without a row, and rows that let a client's request through uncharged."""
    found = []
    for route in routes:
        for method in route.methods:
            row = charges.ROWS.get(route.path, {})
            charge = row.get("") or row.get(method)
            if charge is None or (charge is Charge.NOTHING) is (route.access is Access.CLIENT):
                found.append(f"{method} {route.path}")
    return found


async def test_every_endpoint_of_the_router_is_judged(start_worker, start_router) -> None:
    router = await start_router(await start_worker())
    assert unjudged(router.routes) == []
    served = {route.path for route in router.routes}
    assert set(charges.ROWS) == served, "a row is of no endpoint"
    # The twin: an endpoint that is added later is found, and charged in full until it is judged.
    added = Route("/v1/new", frozenset({"POST"}), next(iter(router.routes)).handler)
    assert unjudged(RouteTable([*router.routes, added])) == ["POST /v1/new"]
    assert charge_of(added, "POST") is Charge.WORK
    opened = Route("/explain/", frozenset({"GET"}), added.handler, Access.OPEN)
    assert unjudged(RouteTable([*router.routes, opened])) == ["GET /explain/"]


def test_the_table_is_in_the_documentation() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [line for line in charges.table() if line not in text] == []


async def test_beyond_its_rate_a_key_reaches_nothing(
    start_worker, start_router, client, tmp_path: Path
) -> None:
    """Once, 40 of 40 passed on most of these."""
    worker = await start_worker()
    limits = "requests_per_second = 0.001\nburst = 1"
    router = await start_router(worker, api_keys_file=key_file(tmp_path, limits))
    async with client.post(router.url + "/generate", json=BODY, headers=KEY) as answer:
        assert answer.status == 200
    passed = []
    asked, requests = len(worker.targets), len(worker.requests)
    for route in router.routes:
        for method in route.methods if route.access is Access.CLIENT else ():
            path = route.path if not route.path.endswith("/") else route.path + "x"
            async with client.request(method, router.url + path, json={}, headers=KEY) as answer:
                refused = answer.status == 429 and int(answer.headers["retry-after"]) > 1
                if not refused:
                    passed.append((method, path, answer.status))
    assert passed == []
    assert requests == len(worker.requests)
    others = [
        target for target in worker.targets[asked:] if not target.startswith(("/model_info", "/health"))
    ]
    assert others == [], "probes of the router itself come in between, and nothing else"
    # Another tenant is not refused, nor counted.
    for path in ("/v1/models", "/server_info", "/health_generate"):
        async with client.get(router.url + path, headers=OTHER) as answer:
            assert answer.status == 200, path


async def test_a_large_body_of_a_key_beyond_its_rate_is_not_read(
    start_worker, start_router, client, tmp_path: Path
) -> None:
    limits = "requests_per_second = 0.001\nburst = 1"
    router = await start_router(await start_worker(), api_keys_file=key_file(tmp_path, limits))
    async with client.get(router.url + "/v1/models", headers=KEY) as answer:
        assert answer.status == 200
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    head = f"PUT /v1/documents/d HTTP/1.1\r\nhost: h\r\nauthorization: {KEY['authorization']}\r\n"
    writer.write(f"{head}content-length: 100000000\r\n\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 429")
    writer.close()


async def test_questions_are_answered_while_a_key_has_all_that_may_run(
    start_worker, start_router, client, eventually, tmp_path: Path
) -> None:
    """A key can look at its requests, and end them, while as many run as it may have."""
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=key_file(tmp_path, "concurrent = 1"))
    worker.before_head = Gate()
    first = asyncio.create_task(client.post(router.url + "/generate", json={**BODY, "rid": "r"}, headers=KEY))
    await eventually(lambda: bool(worker.requests))
    for method, path, status in (
        ("GET", "/v1/models", 200), ("GET", "/v1/documents", 200), ("DELETE", "/v1/documents/none", 404),
        ("POST", "/tokenize", 429), ("GET", "/health_generate", 429), ("POST", "/v1/advisory", 429),
    ):  # fmt: skip
        async with client.request(method, router.url + path, json={}, headers=KEY) as answer:
            assert answer.status == status, path
    async with client.post(router.url + "/abort_request", json={"rid": "r"}, headers=KEY) as answer:
        assert await answer.json() == {"aborted": 1}
    worker.before_head.open()
    async with await first:
        pass


@pytest.mark.parametrize("by", ["?wait_s=60", "stream"])
async def test_who_waits_for_a_hint_has_one_request_less(
    by: str, start_worker, start_router, client, eventually, monkeypatch, tmp_path: Path
) -> None:
    router = await start_router(await start_worker(), api_keys_file=key_file(tmp_path, "concurrent = 1"))
    meter = router.keys.meters[0]
    link(router)
    in_dram(router, monkeypatch)
    async with client.post(router.url + "/generate", json=BODY, headers=KEY) as answer:
        assert answer.status == 200
    hint = {"input_ids": BODY["input_ids"]}
    async with client.post(router.url + "/v1/advisory", json=hint, headers=KEY) as answer:
        told = await answer.json()
    assert told["state"] == "moving"
    one = router.url + "/v1/advisory/" + told["id"]
    headers = KEY | ({"accept": "text/event-stream"} if by == "stream" else {})
    target = one + (by if by != "stream" else "")
    waiting = asyncio.create_task(client.get(target, headers=headers))
    await eventually(lambda: meter.running == 1)
    async with client.get(target, headers=headers) as answer:
        assert answer.status == 429
    async with client.get(one, headers=KEY) as answer:
        assert answer.status == 200, "its state can be asked for"
    async with client.delete(one, headers=KEY) as answer:
        assert answer.status == 200
    async with await waiting as answer:
        await answer.read()
    await eventually(lambda: meter.running == 0)


async def test_however_many_ask_whether_an_instance_generates_it_is_tried_once(
    start_worker, start_router, client, eventually, monkeypatch
) -> None:
    """``/health_generate`` has each instance generate; a router without keys limits no client's rate."""
    router = await start_router(await start_worker(), await start_worker())
    call, gate, tried = router.api.call, Gate(), []

    async def gated(url: str, method: str, target: str, **more: Any) -> Any:
        if target == "/health_generate":
            tried.append(url)
            await gate.wait()
        return await call(url, method, target, **more)

    monkeypatch.setattr(router.api, "call", gated)
    asking = [asyncio.create_task(client.get(router.url + "/health_generate")) for _ in range(20)]
    await eventually(lambda: router.server.state.active == 20)
    asking.pop().cancel()  # a client that leaves ends it for no other client
    await eventually(lambda: router.server.state.active == 19)
    gate.open()
    for task in asking:
        async with await task as answer:
            assert answer.status == 200
    assert len(tried) == 2
    async with client.get(router.url + "/health_generate") as answer:
        assert answer.status == 200
    assert len(tried) == 4, "later it is tried anew"
