"""Requests through the router: answers, streams, disconnects, retries."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from sglang_ext.protocol.cluster import Registration, url_of_replica
from tests.support.servers.workers import Gate

pytestmark = pytest.mark.slow

PROMPTS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 5}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi there"}], "max_tokens": 5},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 5},
}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_the_workers(path, stream, start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    body = {**PROMPTS[path], "stream": stream}
    async with client.post(worker.url + path, json=body) as direct:
        expected = await direct.read()
    await client.post(worker.url + "/flush_cache")
    async with client.post(router.url + path, json=body) as routed:
        assert routed.status == 200
        assert routed.headers["content-type"] == direct.headers["content-type"]
        assert routed.headers["x-kv-instance"] == worker.url
        assert routed.headers["x-kv-route-reason"] == "no-prefix"
        got = await routed.read()
    assert _without_ids(got) == _without_ids(expected)


@pytest.mark.parametrize("path", PROMPTS)
async def test_the_router_chooses_the_replica_and_names_it_to_the_server(
    path, start_worker, start_router, client, eventually
) -> None:
    """Whatever rank a client names, in a body or in a header."""
    worker = await start_worker()
    worker.server_info["dp_size"] = 2
    router = await start_router(policy="round-robin")
    urls = [url_of_replica(worker.url, rank) for rank in range(2)]
    for rank, url in enumerate(urls):
        router.members.register(Registration(url=url, instance=f"a.dp{rank}", epoch=f"{rank + 1:032x}"))
    await eventually(lambda: len(router.fleet.usable()) == 2)
    served = []
    for _ in range(4):
        rank = {"x-data-parallel-rank": "7", "x-override-routed-dp-rank": "7"}
        async with client.post(
            router.url + path, json=PROMPTS[path] | {"routed_dp_rank": 7}, headers=rank
        ) as answer:
            assert answer.status == 200
            served.append(answer.headers["x-kv-instance"])
    assert sorted(served) == sorted(urls * 2)
    named = [headers["x-data-parallel-rank"] for _, _, headers in worker.requests]
    assert [url_of_replica(worker.url, int(rank)) for rank in named] == served
    if path == "/generate":
        ranks = [body["routed_dp_rank"] for _, body, _ in worker.requests]
        assert [url_of_replica(worker.url, rank) for rank in ranks] == served


def _without_ids(body: bytes) -> bytes:
    """The body without the request id that the stand-in puts into meta_info."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    values = [line if line == b"[DONE]" else json.loads(line) for line in lines]
    for value in values:
        if isinstance(value, dict) and "meta_info" in value:
            value["meta_info"]["id"] = ""
    return repr(values).encode()


@pytest.mark.parametrize("path", PROMPTS)
async def test_the_first_byte_passes_before_the_worker_finishes(
    path, start_worker, start_router, client
) -> None:
    worker = await start_worker()
    worker.between_chunks = Gate()
    router = await start_router(worker)
    async with client.post(router.url + path, json={**PROMPTS[path], "stream": True}) as answer:
        first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 30)
        assert first.startswith(b"data: {")
        assert worker.finished == 0
        worker.between_chunks.open()
        rest = await answer.read()
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_upstream(
    stream, start_worker, start_router, client, eventually
) -> None:
    worker = await start_worker()
    gate = Gate()
    if stream:
        worker.between_chunks = gate
    else:
        worker.before_head = gate
    router = await start_router(worker)
    request = asyncio.ensure_future(
        client.post(router.url + "/generate", json={**PROMPTS["/generate"], "stream": stream})
    )
    await gate.reached()
    if stream:
        answer = await request
        await answer.content.readuntil(b"\n\n")
        answer.close()
    else:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await worker.until(lambda: worker.aborted == 1)
    assert worker.finished == 0
    value = router.metrics.registry.get_sample_value
    await eventually(lambda: value("sglang_ext_router_client_disconnects_total") == 1.0)
    await eventually(lambda: router.fleet.rows[worker.url].in_flight == 0)


@pytest.mark.parametrize("moment", ["tokenize", "connect", "body"])
async def test_a_cancellation_at_every_await_leaves_nothing_behind(
    moment, start_worker, start_router, client, monkeypatch, eventually
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    gate = Gate()
    payload = {**PROMPTS["/generate"], "stream": moment == "body"}
    if moment == "tokenize":
        payload["text"] = "new " * 500  # too long to be tokenized outside of the pool
        run = router.tokenizers.pool.run

        async def gated(*args: Any) -> Any:
            await gate.wait()
            return await run(*args)

        monkeypatch.setattr(router.tokenizers.pool, "run", gated)
    elif moment == "connect":
        worker.before_head = gate
    else:
        worker.between_chunks = gate
    request = asyncio.ensure_future(client.post(router.url + "/generate", json=payload))
    await gate.reached()
    if moment == "body":
        (await request).close()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    if moment != "tokenize":
        await worker.until(lambda: worker.aborted == 1)
    row = router.fleet.rows[worker.url]
    await eventually(lambda: row.in_flight == 0)
    assert row.queued_tokens == 0
    assert not row.waiting
    gate.open()
    monkeypatch.undo()
    worker.before_head = worker.between_chunks = None
    async with client.post(router.url + "/generate", json=PROMPTS["/generate"]) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_connection_means_another_worker(stream, start_worker, start_router, client) -> None:
    dying, healthy = await start_worker(), await start_worker()
    router = await start_router(dying, healthy, policy="round-robin")
    dying.deaths_before_head = 2
    instances = []
    for _ in range(2):
        body = {**PROMPTS["/generate"], "stream": stream}
        async with client.post(router.url + "/generate", json=body) as answer:
            assert answer.status == 200
            assert b"length" in await answer.read()
            instances.append(answer.headers["x-kv-instance"])
    assert healthy.url in instances
    assert len(dying.requests) >= 1
    async with client.get(router.url + "/metrics") as metrics:
        assert 'sglang_ext_router_retries_total{why="lost"}' in await metrics.text()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_workers_is_not_given_the_whole_fleet(
    stream, start_worker, start_router, client
) -> None:
    """Nor is the same request of another client, for a while; others are served."""
    workers = [await start_worker() for _ in range(4)]
    for worker in workers:
        worker.deaths_before_head = 1
    router = await start_router(*workers)
    body = {**PROMPTS["/generate"], "stream": stream}
    for _ in range(3):
        async with client.post(router.url + "/generate", json=body) as answer:
            assert answer.status == 500
            assert (await answer.json())["error"]["code"] == "request_ends_servers"
    assert sum(len(worker.requests) for worker in workers) == 2
    for worker in workers:
        worker.deaths_before_head = 0
    async with client.post(router.url + "/v1/completions", json=PROMPTS["/v1/completions"]) as answer:
        assert answer.status == 200


async def test_streams_that_a_workers_death_breaks_off_count_as_its_deaths(
    start_worker, start_router, client
) -> None:
    """Once a stream has begun, it is not sent to another worker; a client that repeats it is refused."""
    workers = [await start_worker() for _ in range(4)]
    for worker in workers:
        worker.die_after_chunks = 2
    router = await start_router(*workers, policy="round-robin")
    body = {**PROMPTS["/generate"], "stream": True}
    statuses = []
    for _ in range(4):
        async with client.post(router.url + "/generate", json=body) as answer:
            statuses.append(answer.status)
            await answer.read()
    assert statuses == [200, 200, 500, 500]


async def test_a_request_that_is_answered_after_a_death_is_no_suspect(
    start_worker, start_router, client
) -> None:
    dying, healthy = await start_worker(), await start_worker()
    router = await start_router(dying, healthy, policy="round-robin")
    dying.deaths_before_head = 1
    for _ in range(2):
        async with client.post(router.url + "/generate", json=PROMPTS["/generate"]) as answer:
            assert answer.status == 200
    assert not dying.deaths_before_head
    assert repr(router.generation.suspects) == "Suspects(0)"


async def test_a_worker_that_dies_in_mid_stream_ends_the_stream_with_an_error(
    start_worker, start_router, client
) -> None:
    worker = await start_worker()
    worker.die_after_chunks = 2
    router = await start_router(worker)
    body = {**PROMPTS["/generate"], "stream": True}
    async with client.post(router.url + "/generate", json=body) as answer:
        events = [event for event in (await answer.read()).split(b"\n\n") if event]
    last = json.loads(events[-1].removeprefix(b"data: "))
    assert last["error"]["code"] == "worker_lost"
    assert b"[DONE]" not in b"".join(events)
    assert len(worker.requests) == 1
    assert router.metrics.registry.get_sample_value("sglang_ext_router_broken_streams_total") == 1.0


async def test_a_refused_connection_is_a_verdict_at_once(
    start_worker, start_router, client, unused_tcp_port
) -> None:
    worker = await start_worker()
    router = await start_router(f"http://127.0.0.1:{unused_tcp_port}", worker, policy="round-robin")
    for _ in range(3):
        async with client.post(router.url + "/generate", json=PROMPTS["/generate"]) as answer:
            assert answer.status == 200
            assert answer.headers["x-kv-instance"] == worker.url


async def test_without_a_worker_the_answer_is_503_with_retry_after(
    start_router, client, unused_tcp_port
) -> None:
    router = await start_router(f"http://127.0.0.1:{unused_tcp_port}")
    async with client.post(router.url + "/generate", json=PROMPTS["/generate"]) as answer:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert (await answer.json())["error"]["code"] == "no_worker"
    async with client.get(router.url + "/health") as answer:
        assert answer.status == 503


async def test_a_stopped_worker_is_given_up_on_while_it_is_waited_for(
    start_worker, start_router, client
) -> None:
    stuck, other = await start_worker(), await start_worker()
    stuck.before_head = Gate()
    router = await start_router(
        stuck,
        other,
        policy="round-robin",
        health_check_timeout_secs=1.0,
        health_failure_threshold=2,
    )
    stuck.hang_probes = Gate()
    answers = [client.post(router.url + "/generate", json=PROMPTS["/generate"]) for _ in range(2)]
    for answer in await asyncio.gather(*answers):
        assert answer.status == 200
        assert answer.headers["x-kv-instance"] == other.url
    assert router.fleet.rows[stuck.url].state == "down"
    assert len(stuck.requests) == 1


async def test_what_the_worker_answers_with_an_error_passes_unchanged(
    start_worker, start_router, client
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    body = {"text": "x", "token_ids_logprob": [-1]}
    async with client.post(router.url + "/generate", json=body) as answer:
        assert answer.status == 400
        assert "valid range is [0, 32000)" in await answer.text()
    assert router.fleet.rows[worker.url].state == "ready"


async def test_request_ids_pass_both_ways(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    url = router.url + "/generate"
    async with client.post(url, json=PROMPTS["/generate"], headers={"x-request-id": "abc-1"}) as answer:
        assert answer.headers["x-request-id"] == "abc-1"
    assert worker.requests[-1][2]["x-request-id"] == "abc-1"
    async with client.post(url, json=PROMPTS["/generate"], headers={"x-request-id": "a b"}) as answer:
        assert len(answer.headers["x-request-id"]) == 32


async def test_tokens_are_counted_and_reported(start_worker, start_router, client, caplog) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    ids = list(range(100, 200))
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 3}}
    for cached in (0, 99):
        async with client.post(router.url + "/generate", json=body) as answer:
            assert answer.headers["x-kv-cached-tokens"] == str(cached)
    async with client.post(router.url + "/generate", json={**body, "stream": True}) as answer:
        assert answer.headers["x-kv-cached-tokens"] == "99"
        await answer.read()
    async with client.get(router.url + "/metrics") as metrics:
        text = await metrics.text()
    assert "sglang_ext_router_prompt_tokens_total 300.0" in text
    assert "sglang_ext_router_cached_tokens_total 198.0" in text
    assert 'sglang_ext_router_requests_total{endpoint="/generate",status="200"} 3.0' in text
    assert 'sglang_ext_router_decisions_total{policy="auto",reason="prefix"} 2.0' in text
    lines = [record.fields for record in caplog.records if record.name == "router.access"]
    assert [line.get("cached") for line in lines if line["path"] == "/generate"] == [0, 99, 99]
    assert all(line["prompt"] == 100 for line in lines if line["path"] == "/generate")


async def test_no_delay_is_set_on_both_sides(start_worker, start_router, client) -> None:
    import socket

    worker = await start_worker()
    router = await start_router(worker)
    async with client.post(router.url + "/generate", json=PROMPTS["/generate"]) as answer:
        await answer.read()
    ends = [client_end.transport for client_end in router.server.state.connections]
    ends += [end.transport for pool in router.upstream._pools.values() for end in pool.connections]
    assert len(ends) >= 2
    for transport in ends:
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_client_that_expects_100_continue_gets_it(start_worker, start_router) -> None:
    router = await start_router(await start_worker())
    body = json.dumps(PROMPTS["/generate"]).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    )
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_learnt_from_is_passed_on_all_the_same(
    stream, start_worker, start_router, client, monkeypatch, caplog
) -> None:
    router = await start_router(await start_worker())

    class Broken(dict[int, str]):
        def items(self) -> Any:
            raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(
        "sglang_ext.router.api.openai.OpenAiDialect.texts", lambda self, answers: Broken({0: "a text"})
    )
    body = {**PROMPTS["/v1/completions"], "stream": stream}
    async with client.post(router.url + "/v1/completions", json=body) as answer:
        text = await answer.text()
    assert answer.status == 200
    assert "[DONE]" in text if stream else json.loads(text)["choices"]
    assert "cannot learn generated tokens" in caplog.text


async def _until_nobody_listens(client: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            async with client.get(url + "/health"):
                pass
        except aiohttp.ClientConnectionError:
            return


async def test_a_stream_ends_whole_while_the_router_stops(start_worker, start_router, client) -> None:
    """Everything that a running request needs outlives it."""
    worker = await start_worker()
    worker.between_chunks = Gate()
    router = await start_router(worker, shutdown_grace_period_secs=3600)
    body = {**PROMPTS["/v1/chat/completions"], "stream": True}
    async with client.post(router.url + "/v1/chat/completions", json=body) as answer:
        await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 30)
        stopping = asyncio.create_task(router.stop())
        await _until_nobody_listens(client, router.url)
        worker.between_chunks.open()
        rest = await answer.text()
    assert rest.endswith("data: [DONE]\n\n")
    await asyncio.wait_for(stopping, 20)
    assert len(router.flights) == 0
