"""The table of endpoints: keys, methods, the reports about workers, flushing."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import aiohttp
import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.telemetry.logs import JsonFormatter, TextFormatter
from tests.support.servers.workers import Gate

pytestmark = pytest.mark.slow

BODY = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 1}}


async def test_the_key_is_asked_for_but_by_probes(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker, api_key="secret")
    async with client.get(router.url + "/health") as answer:
        assert answer.status == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        for path in ("/v1/models", "/server_info", "/metrics", "/nothing"):
            async with client.get(router.url + path, headers=headers) as answer:
                assert answer.status == 401
                assert (await answer.json())["error"]["code"] == "invalid_api_key"
        async with client.post(router.url + "/generate", json=BODY, headers=headers) as answer:
            assert answer.status == 401
    assert worker.requests == []
    async with client.post(
        router.url + "/generate", json=BODY, headers={"authorization": "Bearer secret"}
    ) as answer:
        assert answer.status == 200
    assert "authorization" not in worker.requests[-1][2]


async def test_a_clients_own_key_passes_when_the_router_asks_for_none(
    start_worker, start_router, client
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    headers = {"authorization": "Bearer theirs"}
    async with client.post(router.url + "/generate", json=BODY, headers=headers) as answer:
        assert answer.status == 200
    assert worker.requests[-1][2]["authorization"] == "Bearer theirs"


async def test_unknown_paths_and_methods(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    async with client.get(router.url + "/nothing") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
    async with client.get(router.url + "/generate") as answer:
        assert answer.status == 405
        assert answer.headers["allow"] == "POST, PUT"
    async with client.put(router.url + "/generate", json=BODY) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/model_info", "/get_model_info"])
async def test_what_workers_tell_is_passed_on(path, start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    async with client.get(worker.url + path) as direct, client.get(router.url + path) as routed:
        assert routed.status == 200
        assert await routed.json() == await direct.json()
        assert routed.headers["x-kv-instance"] == worker.url


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_tells_of_the_fleet_and_no_secrets(
    path, start_worker, start_router, client
) -> None:
    worker = await start_worker()
    worker.server_info["api_key"] = "hush"
    worker.server_info["launch_command"] = "serve --api-key hush --admin-api-key=hush --port 1"
    worker.server_info["internal_states"] = [{"admin_api_key": "hush", "world_size": 1}]
    router = await start_router(worker, policy="least-load")
    async with client.get(router.url + path) as answer:
        text = await answer.text()
    info = json.loads(text)
    assert "hush" not in text
    assert info["internal_states"][0]["world_size"] == 1
    assert info["launch_command"] == "serve --api-key *** --admin-api-key=*** --port 1"
    assert info["router"]["policy"] == "least-load"
    assert [(w["url"], w["state"]) for w in info["router"]["workers"]] == [(worker.url, "ready")]


async def test_flush_cache_reaches_every_worker_and_clears_the_index(
    start_worker, start_router, client
) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers, policy="round-robin")
    for _ in range(2):
        async with client.post(router.url + "/generate", json=BODY) as answer:
            assert answer.status == 200
    assert all(router.trees.tokens_of(worker.url) for worker in workers)
    workers[1].busy = True
    async with client.post(router.url + "/flush_cache") as answer:
        assert answer.status == 400
        told = await answer.json()
    assert not told["success"]
    assert told["workers"][workers[1].url]["status"] == 400
    assert router.trees.tokens_of(workers[0].url) == 0
    assert router.trees.tokens_of(workers[1].url) > 0
    workers[1].busy = False
    async with client.post(router.url + "/flush_cache") as answer:
        assert answer.status == 200
    assert [worker.flushed for worker in workers] == [2, 1]
    assert router.trees.tokens_of(workers[1].url) == 0


async def test_a_bug_is_a_500_that_says_nothing_of_its_inside(
    start_worker, start_router, client, monkeypatch, caplog
) -> None:
    router = await start_router(await start_worker())

    def broken(*args, **kwargs):
        raise ZeroDivisionError("inner detail")

    monkeypatch.setattr("sglang_ext.router.api.dialect.Dialect.only_warms", broken)
    async with client.post(router.url + "/generate", json=BODY) as answer:
        assert answer.status == 500
        error = (await answer.json())["error"]
    assert "inner detail" not in error["message"]
    assert error["code"] == "internal_error"
    assert "inner detail" in caplog.text


async def test_conversations_stay_with_their_instance(start_worker, start_router, client) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers)
    homes: dict[int, set[str]] = {}
    histories: dict[int, list[dict[str, str]]] = {}
    cached = 0
    for turn in range(4):
        for session in range(4):
            history = histories.setdefault(session, [])
            history.append({"role": "user", "content": f"Tell me about number {session}, part {turn}. " * 6})
            body = {"messages": history, "max_tokens": 8}
            async with client.post(router.url + "/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
                value = await answer.json()
                homes.setdefault(session, set()).add(answer.headers["x-kv-instance"])
                cached += int(answer.headers.get("x-kv-cached-tokens", 0))
            history.append(value["choices"][0]["message"])
    assert all(len(home) == 1 for home in homes.values())
    assert {next(iter(home)) for home in homes.values()} == {worker.url for worker in workers}
    assert cached > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_was_generated_is_part_of_the_next_prefix(
    path, stream, start_worker, start_router, client, eventually, caplog
) -> None:
    """A short question with a long answer: without the answer, its conversation would not be recognized."""
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers)

    async def ask(text: str, history: list[dict[str, str]]) -> tuple[str, str]:
        body = {"prompt": text} if path == "/v1/completions" else {"messages": history}
        body |= {"max_tokens": 400, "stream": stream}
        async with client.post(router.url + path, json=body) as answer:
            assert answer.status == 200
            raw = await answer.read()
            events = raw.replace(b"data: ", b"").replace(b"[DONE]", b"").split(b"\n\n") if stream else [raw]
            choices = [json.loads(event)["choices"][0] for event in events if event]
            parts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
            said = "".join(part.get("content") or part.get("text") or "" for part in parts)
            return answer.headers["x-kv-instance"], said

    question = "What is a radix tree, and who needs one? Tell me at length, please."
    home, said = await ask(question, [{"role": "user", "content": question}])
    await eventually(lambda: router.trees.tokens_of(home) >= 400)
    history = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "More."},
    ]
    again, _ = await ask(question + said + " More.", history)
    assert again == home
    lines = [record.fields for record in caplog.records if record.name == "router.access"]
    assert lines[-1]["reason"] == "prefix"
    assert lines[-1]["matched"] >= 400
    if not stream:
        assert lines[-1]["matched"] >= lines[-1]["cached"] - router.trees.block_size


async def test_the_routing_reason_can_be_hidden(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), explain_routing=False)
    async with client.post(router.url + "/generate", json=BODY) as answer:
        assert "x-kv-route-reason" not in answer.headers
        assert "x-kv-instance" in answer.headers


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"host": "0.0.0.0"}, "--api-key"),
        ({"host": "::"}, "--api-key"),
        ({"host": "example.org"}, "--api-key"),
        ({"host": "0.0.0.0", "api_key": ""}, "--api-key"),
        ({"worker_urls": ("ftp://x",)}, "--worker-urls"),
        ({"worker_urls": ("http://x:99999",)}, "--worker-urls"),
        ({"worker_urls": ("http://x:1", "x:1/")}, "--worker-urls"),
        ({"policy": "best"}, "--policy"),
        ({"port": 70000}, "--port"),
        ({"cache_threshold": 1.5}, "--cache-threshold"),
        ({"tree_max_bytes": 0}, "--memory-limits tree"),
        ({"max_retries": -1}, "--max-retries"),
        ({"balance_rel_threshold": 0.5}, "--balance-rel-threshold"),
        ({"log_level": "loud"}, "--log-level"),
    ],
)
def test_a_wrong_flag_is_named(options, flag) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        RouterConfig(**{"worker_urls": ("http://127.0.0.1:1",), **options})
    assert caught.value.field == flag


def test_loopback_needs_no_key_and_the_rest_does() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert RouterConfig(worker_urls=("h:1",), host=host).api_key is None
    config = RouterConfig(worker_urls=("h:1",), host="0.0.0.0", api_key="hush", worker_api_key="hush")
    assert "hush" not in repr(config)
    assert config.worker_urls == ("http://h:1",)


def test_flags_fill_the_configuration() -> None:
    import dataclasses

    parser = RouterConfig.parser()
    urls = ["--worker-urls", "h:1", "h:2"]
    assert RouterConfig.from_cli_args(parser.parse_args(urls)) == RouterConfig(worker_urls=("h:1", "h:2"))
    fields = {field.name for field in dataclasses.fields(RouterConfig)}
    apart = {one.field for one in RouterConfig.flags() if one.within or one.variable_only}
    lists = {one.dest for one in RouterConfig.options() if not one.field}
    # A key in a file is the key, once it is read.
    there = set(vars(parser.parse_args(urls))) - {"api_key_file", "worker_api_key_file"}
    assert fields - apart == there - lists
    changed = parser.parse_args([*urls, "--policy", "round-robin", "--port", "1", "--hide-routing"])
    config = RouterConfig.from_cli_args(changed)
    assert (config.policy, config.port, config.explain_routing) == ("round-robin", 1, False)


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("router.access", logging.INFO, "", 0, "a\nb", None, None)
    record.fields = {"path": "/x y", "status": 200, "error": 'said "no"\nand left'}
    line = TextFormatter().format(record)
    assert "\n" not in line
    assert 'path="/x y" status=200' in line
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["status"], entry["error"]) == (200, 'said "no"\nand left')


async def test_paths_and_queries_are_sent_on_as_they_came(start_worker, start_router, client) -> None:
    from yarl import URL

    worker = await start_worker()
    router = await start_router(worker)
    url = URL(router.url + "/v1/models/a%2Fb%20c?x=%26&y=1", encoded=True)
    async with client.get(url) as answer:
        assert answer.status == 404
    assert worker.targets[-1] == "/v1/models/a%2Fb%20c?x=%26&y=1"


async def test_large_bodies_are_not_read_without_a_key(start_worker, start_router) -> None:
    router = await start_router(await start_worker(), api_key="secret")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert head.startswith(b"HTTP/1.1 401")
    writer.close()
    await writer.wait_closed()


async def test_stopping_cuts_what_is_running(start_worker, client) -> None:
    worker = await start_worker()
    worker.before_head = Gate()
    async with Router(RouterConfig(worker_urls=(worker.url,), port=0)) as router:
        request = asyncio.ensure_future(client.post(router.url + "/generate", json=BODY))
        await worker.before_head.reached()
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 5.0
    with pytest.raises(aiohttp.ClientError):
        await request
    await worker.until(lambda: worker.aborted == 1)
