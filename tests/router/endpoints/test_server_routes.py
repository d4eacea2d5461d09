"""The table of SGLang's routes is complete and true, and each kind of row acts as it states."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from scripts.following.server_routes import UnreadableRouteError, server_routes
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.contract.places import folder_of, source_with
from sglang_ext.patches.contract.source import Source
from sglang_ext.patches.versions import SUPPORTED, Supported, installed_sglang_version
from sglang_ext.protocol.cluster import Registration, url_of_replica
from sglang_ext.router.endpoints.openapi import description
from sglang_ext.router.endpoints.server_routes import ROWS, How, route_of, table
from tests.support.servers.workers import Gate

DOCS = Path(__file__).parents[3] / "docs" / "router.md"
ADAPTER = {"lora_name": "a", "lora_path": "/adapters/a"}
KEYS = """
[[keys]]
key = "tenant-one-key"
tenant = "one"
requests_per_second = 0.001
burst = 2

[[keys]]
key = "operators-key"
tenant = "operators"
admin = true

[[keys]]
key = "pooled-key"
tenant = "pooled"
isolated = false
tokens_per_minute = 100
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    return file


def with_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# -- the table --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SUPPORTED, ids=lambda each: each.version)
def test_every_route_of_sglang_has_a_row(version: Supported) -> None:
    assert set(version.routes()) - set(ROWS) == set()


def test_every_row_is_a_route_of_sglang() -> None:
    assert set(ROWS) == set().union(*(version.routes() for version in SUPPORTED))


def test_the_record_is_what_the_installed_sglang_has() -> None:
    (known,) = [each for each in SUPPORTED if each.version == installed_sglang_version()]
    found = server_routes(source_with(folder_of("sglang")))
    assert found == known.routes()
    assert len(found) > 90


def written(folder: Path, text: str) -> Source:
    for name, code in {
        "http_server": text,
        "more": "from x import APIRouter\nrouter = APIRouter()\n",
    }.items():
        file = folder / "srt" / "entrypoints" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    return Source({"sglang": folder})


def test_a_route_in_a_new_place_is_found(tmp_path: Path) -> None:
    source = written(
        tmp_path,
        """
import os
from sglang.srt.entrypoints.more import router as more
app.include_router(more)
_root = os.environ.get("ROOT")
if _root:
    @app.get(_root)
    def root(): ...
@app.post(os.environ.get("CHAT", "/chat"))
@app.api_route("/new/{name}", methods=["PUT", "GET"])
def new(): ...
@app.exception_handler(ValueError)
def other(): ...
""",
    )
    (tmp_path / "srt/entrypoints/more.py").write_text(
        "router = APIRouter()\n@router.websocket('/ws')\ndef ws(): ...\n"
    )
    found = server_routes(source)
    assert found["/new/{name}"] == ["GET", "PUT"]
    assert found["/chat"] == ["POST"]
    assert found["/ws"] == ["WEBSOCKET"]
    assert set(found) - set(ROWS) == {"/new/{name}", "/chat", "/ws"}


@pytest.mark.parametrize(
    "text",
    ["@app.get(PATH)\ndef f(): ...", "app.add_api_route('/x', f)", "@app.api_route('/x')\ndef f(): ..."],
)
def test_a_route_that_cannot_be_read_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableRouteError, match=r"http_server\.py:1"):
        server_routes(written(tmp_path, text))


def test_the_table_is_in_the_documentation() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [line for line in table() if line not in text] == []
    assert text.count("| refused |") == sum("| refused |" in line for line in table())


def test_the_table_is_in_the_description() -> None:
    paths = description()["paths"]
    for row in ROWS.values():
        for operation in paths[row.path.replace(":path}", "}")].values():
            assert operation["x-sglang-route"] == row.how.value, row.path
            if row.how is How.REFUSED:
                assert list(operation["responses"]) == ["404"]


async def test_every_row_is_served_as_it_says(start_worker, start_router, client) -> None:
    worker = await start_worker()
    worker.answers = {row.path: (200, {"ours": row.path}) for row in ROWS.values()}
    router = await start_router(worker)
    for row in ROWS.values():
        path = row.path.replace("{model:path}", "stand-in").replace("{method}", "x")
        route = router.routes.get(path.replace("{response_id}", "resp_1"))
        assert route is not None, row.path
        assert row.method in route.methods or row.how is How.REFUSED or row.path.startswith("/v1/responses/")
        if row.how is How.REFUSED:
            async with client.request(row.method, router.url + path, json={}) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (404, "not_offered"), row.path
                assert row.note in error["message"]
        elif row.how in (How.EVERY, How.ALL_OR_NONE) and row.path != "/start_profile":
            async with client.request(row.method, router.url + path, json={"x": 1}) as answer:
                assert answer.status == 200, (row.path, await answer.text())
                assert set((await answer.json())["workers"]) == {worker.url}
            # A page of the web can have a browser send a GET.
            if row.method == "POST":
                async with client.get(router.url + path) as answer:
                    assert answer.status == 405, row.path
    assert {path for _, path, _ in worker.calls} >= {
        row.path for row in ROWS.values() if row.how is How.ALL_OR_NONE
    }
    assert route_of("/dumper/{method}") == "/dumper/"


async def test_the_root_leads_browsers_to_the_page(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    async with client.get(router.url + "/", headers={"accept": "text/html"}, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["location"]) == (302, "/ui")
    async with client.get(router.url + "/", headers={"accept": "text/html,*/*"}) as answer:
        assert "html" in await answer.text()
    async with client.get(router.url + "/") as answer:
        assert await answer.json() == "SGLang is running"


async def test_sagemakers_route_is_a_chat(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 2}
    for _ in range(2):
        async with client.post(router.url + "/invocations", json=body) as answer:
            assert (await answer.json())["object"] == "chat.completion"
    assert answer.headers["x-kv-route-reason"] == "prefix"


# -- any worker -------------------------------------------------------------------------------------


async def test_any_worker_answers_and_the_least_busy_is_asked(start_worker, start_router, client) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers)
    for worker in workers:
        worker.answers["/separate_reasoning"] = (200, {"text": worker.url})
        worker.answers["/parse_function_call"] = (422, {"detail": "no"})
    with router.fleet.carrying(workers[0].url, 0):
        async with client.post(router.url + "/separate_reasoning", json={"text": "t"}) as answer:
            assert await answer.json() == {"text": workers[1].url}
            assert answer.headers["x-kv-instance"] == workers[1].url
    assert workers[1].calls == [("POST", "/separate_reasoning", {"text": "t"})]
    async with client.post(router.url + "/parse_function_call", json={"text": "t"}) as answer:
        assert (answer.status, await answer.json()) == (422, {"detail": "no"})
    async with client.post(router.url + "/parse_function_call", data=b"[") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_json")


async def test_any_worker_is_charged_and_keeps_tenants_apart(
    start_worker, start_router, client, keys_file
) -> None:
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(keys_file))
    worker.answers["/separate_reasoning"] = (200, {})
    worker.answers["/get_weights_by_name"] = (200, [0.5])
    worker.answers["/v1/decisions"] = (200, {"usage": {"total_tokens": 500}})

    async def ask(path: str, key: str) -> tuple[int, Any]:
        async with client.post(router.url + path, json={"name": "w"}, headers=with_key(key)) as answer:
            value = await answer.json()
            return answer.status, value["error"]["code"] if "error" in value else value

    assert await ask("/v1/decisions", "tenant-one-key") == (403, "not_kept_apart")
    assert await ask("/get_weights_by_name", "tenant-one-key") == (403, "not_an_admin")
    assert worker.calls == []
    assert await ask("/separate_reasoning", "tenant-one-key") == (200, {})
    assert (await ask("/separate_reasoning", "tenant-one-key"))[0] == 429
    assert (await ask("/v1/decisions", "pooled-key"))[0] == 200
    assert (await ask("/v1/decisions", "pooled-key"))[0] == 429  # its tokens are spent
    assert await ask("/get_weights_by_name", "operators-key") == (200, [0.5])


async def test_a_worker_that_went_away_is_no_reason_to_ask_the_next(
    start_worker, start_router, client
) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers)
    for worker in workers:
        worker.answers["/v1/decisions"] = (200, {})
        worker.dies = True
    async with client.post(router.url + "/v1/decisions", json={}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (502, "worker_lost")
    assert sum(len(worker.calls) for worker in workers) == 1


# -- every worker, all or none ----------------------------------------------------------------------


@pytest.fixture
async def fleet(start_worker, start_router) -> Any:
    workers = [await start_worker() for _ in range(3)]
    for worker in workers:
        for path in ("/load_lora_adapter", "/unload_lora_adapter", "/update_weights_from_disk"):
            worker.answers[path] = (200, {"success": True})
    return workers, await start_router(*workers, index="approximate")


async def test_a_change_reaches_every_worker(fleet, client) -> None:
    workers, router = fleet
    async with client.post(router.url + "/load_lora_adapter", json=ADAPTER) as answer:
        assert answer.status == 200
        told = await answer.json()
    good = {"status": 200, "message": {"success": True}}
    assert told == {"success": True, "workers": {worker.url: good for worker in workers}}
    for worker in workers:
        assert worker.calls == [("POST", "/load_lora_adapter", ADAPTER)]


async def test_a_change_reaches_a_server_once_and_is_told_of_each_replica(
    start_worker, start_router, client, eventually
) -> None:
    worker = await start_worker()
    worker.answers["/load_lora_adapter"] = (200, {"success": True})
    worker.server_info["dp_size"] = 2
    router = await start_router()
    urls = [url_of_replica(worker.url, rank) for rank in range(2)]
    for rank, url in enumerate(urls):
        router.members.register(Registration(url=url, instance=f"a.dp{rank}", epoch=f"{rank + 1:032x}"))
    await eventually(lambda: len(router.fleet.usable()) == 2)
    async with client.post(router.url + "/load_lora_adapter", json=ADAPTER) as answer:
        assert (answer.status, list((await answer.json())["workers"])) == (200, urls)
    assert worker.calls == [("POST", "/load_lora_adapter", ADAPTER)]


async def test_where_one_fails_the_others_are_set_back(fleet, client) -> None:
    workers, router = fleet
    workers[1].answers["/load_lora_adapter"] = (400, {"success": False, "error_message": "rank too large"})
    workers[2].answers["/unload_lora_adapter"] = (400, {"error_message": "in use"})
    async with client.post(router.url + "/load_lora_adapter", json=ADAPTER) as answer:
        assert answer.status == 400
        told = await answer.json()
    assert told["success"] is False
    one, two, three = (told["workers"][worker.url] for worker in workers)
    assert one == {"status": 200, "message": {"success": True}, "undone": "set back"}
    assert two == {"status": 400, "message": {"success": False, "error_message": "rank too large"}}
    assert three["undone"] == {"error_message": "in use"}
    undone = ("POST", "/unload_lora_adapter", {"lora_name": "a"})
    assert [undone in worker.calls for worker in workers] == [True, False, True]


async def test_while_one_cannot_be_reached_nothing_is_changed(fleet, client, eventually, stack) -> None:
    workers, router = fleet
    router.fleet.lost(workers[1].url, "the test says so")
    async with client.post(router.url + "/load_lora_adapter", json=ADAPTER) as answer:
        assert answer.status == 503
        error = (await answer.json())["error"]
    assert error["code"] == "worker_missing"
    assert f"{workers[1].url} is down" in error["message"]
    assert not any(worker.calls for worker in workers)


async def test_changed_weights_are_fenced_also_where_they_failed(fleet, client) -> None:
    workers, router = fleet
    key = encode_tokens(list(range(64)))
    space = ("tokens", None, None, None)

    def matched() -> dict[str, int]:
        return {name: match.tokens for name, match in router.trees.match(space, key).items() if match.tokens}

    body = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 1}}
    for path in ("/load_lora_adapter", "/update_weights_from_disk"):
        async with client.post(router.url + "/generate", json=body) as answer:
            home = answer.headers["x-kv-instance"]
        assert matched() == {home: 64}
        for worker in workers:
            if worker.url == home:
                worker.answers["/update_weights_from_disk"] = (500, {"success": False})
        async with client.post(router.url + path, json=ADAPTER | {"model_path": "/m"}) as answer:
            told = await answer.json()
        assert bool(matched()) is (path == "/load_lora_adapter")
    assert (answer.status, told["success"]) == (502, False)
    assert {name for name, outcome in told["workers"].items() if outcome["status"] != 200} == {home}


async def test_a_change_goes_on_without_its_client_and_before_the_next(fleet, client, eventually) -> None:
    workers, router = fleet
    workers[0].before_answers = gate = Gate()
    workers[1].answers["/load_lora_adapter"] = (400, {})
    first = asyncio.create_task(client.post(router.url + "/load_lora_adapter", json=ADAPTER))
    await eventually(lambda: all(worker.calls for worker in workers))
    first.cancel()
    second = asyncio.create_task(client.post(router.url + "/update_weights_from_disk", json={}))
    await eventually(lambda: router.server.state.active == 1)
    # Requests that pause or continue workers do not wait.
    for worker in workers:
        worker.answers["/continue_generation"] = (200, {})
    third = asyncio.create_task(client.post(router.url + "/continue_generation", json={}))
    await eventually(lambda: len(workers[2].calls) == 2)
    assert workers[2].calls[1][1] == "/continue_generation"
    gate.open()
    for answer in await asyncio.gather(second, third):
        assert answer.status == 200
    assert [path for _, path, _ in workers[2].calls][2:] == [
        "/unload_lora_adapter",
        "/update_weights_from_disk",
    ]


async def test_a_tenant_changes_no_fleet(start_worker, start_router, client, keys_file) -> None:
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(keys_file))
    rows = [row for row in ROWS.values() if row.how in (How.EVERY, How.ALL_OR_NONE)]
    worker.answers = {row.path: (200, {}) for row in rows}
    for row in rows:
        for headers, status in (({}, 401), (with_key("tenant-one-key"), 403)):
            async with client.request(row.method, router.url + row.path, json={}, headers=headers) as answer:
                assert answer.status == status, row.path
    assert worker.calls == []
