"""Prefill and decode apart: one request, two instances, one answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_ext.protocol.cluster import url_of_replica
from sglang_ext.router.dispatch.pairs import beside, meeting_point
from sglang_ext.router.http.types import ConnectionLost
from tests.support.servers.workers import Gate, StandInWorker

pytestmark = pytest.mark.slow

BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 3}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello " * 30}], "max_tokens": 3},
    "/v1/messages": {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello " * 30}],
        "max_tokens": 3,
    },
}


@pytest.fixture
def start_pair(start_worker: Any) -> Any:
    async def start(role: str, port: int = 0) -> StandInWorker:
        worker: StandInWorker = await start_worker()
        worker.model_info["disaggregation_mode"] = role
        if port:
            worker.server_info["disaggregation_bootstrap_port"] = port
        return worker

    return start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_both_get_the_request_and_decode_answers(
    path: str, stream: bool, start_pair, start_router, client, eventually
) -> None:
    prefill, decode = await start_pair("prefill", 7001), await start_pair("decode")
    router = await start_router(prefill, decode)
    rooms = set()
    for number in range(2):
        # A stand-in does not wait for the KV; once decode has answered, the other half is not sent any more.
        decode.before_head = Gate()
        request = asyncio.ensure_future(
            client.post(router.url + path, json={**BODIES[path], "stream": stream})
        )
        await eventually(lambda number=number: len(prefill.requests) > number)
        decode.before_head.open()
        async with await request as answer:
            assert answer.status == 200
            assert await answer.read()
            assert answer.headers["x-kv-instance"] == decode.url
            assert answer.headers["x-kv-prefill-instance"] == prefill.url
        (_, first, _), (_, second, _) = prefill.requests[-1], decode.requests[-1]
        assert first == second
        assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", 7001)
        assert 0 < first["bootstrap_room"] < 1 << 63
        rooms.add(first["bootstrap_room"])
    assert len(rooms) == 2
    for worker in (prefill, decode):
        assert router.trees.tokens_of(worker.url) > 0
    assert all(row.in_flight == 0 for row in router.fleet.rows.values())


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_decode_is_sent_the_replica_that_prefills(rank: int | None) -> None:
    url = "http://127.0.0.1:1001"
    fields = meeting_point(url if rank is None else url_of_replica(url, rank), None)
    assert fields["bootstrap_host"] == "127.0.0.1"
    assert fields.get("disagg_prefill_dp_rank") == rank


async def test_nothing_goes_on_from_a_response_that_a_pair_has_given(
    start_pair, start_router, client
) -> None:
    """The instance that prefills does not have it, so the decode instance would wait for KV in vain."""
    router = await start_router(await start_pair("prefill"), decode := await start_pair("decode"))
    url = router.url + "/v1/responses"
    async with client.post(url, json={"input": "hello", "max_output_tokens": 2}) as answer:
        assert (answer.status, answer.headers["x-kv-instance"]) == (200, decode.url)
        name = (await answer.json())["id"]
    asked = len(decode.requests)
    async with client.post(url, json={"input": "and?", "previous_response_id": name}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "previous_response_id")
        assert decode.url in error["message"]
        assert "whole conversation" in error["message"]
    assert len(decode.requests) == asked
    async with client.get(f"{url}/{name}") as answer:
        assert (await answer.json())["id"] == name


async def test_an_instance_of_one_kind_alone_serves_nothing(start_pair, start_router, client) -> None:
    router = await start_router(await start_pair("prefill"))
    async with client.post(router.url + "/generate", json=BODIES["/generate"]) as answer:
        assert answer.status == 503
        assert "decode" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("dies", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_either_half_may_die_before_the_first_byte(
    dies: str, stream: bool, start_pair, start_router, client
) -> None:
    workers = {role: [await start_pair(role) for _ in range(2)] for role in ("prefill", "decode")}
    router = await start_router(*workers["prefill"], *workers["decode"])
    for worker in workers[dies]:
        worker.deaths_before_head = 1
    workers[dies][1].deaths_before_head = 0
    for _ in range(2):
        body = {**BODIES["/generate"], "stream": stream}
        async with client.post(router.url + "/generate", json=body) as answer:
            assert answer.status == 200
            assert await answer.read()
    assert all(row.in_flight == 0 for row in router.fleet.rows.values())


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_pair_of_which_a_half_answers_with_an_error_is_not_the_last(
    first: str, start_pair, start_router, client, eventually
) -> None:
    """Both halves fail, as when their weights differ, and either may answer first."""
    pair = {role: await start_pair(role) for role in ("prefill", "decode")}
    router = await start_router(*pair.values())
    late = next(worker for role, worker in pair.items() if role != first)

    async def asked(url: str, number: int = 0) -> tuple[int, str]:
        body = {**BODIES["/generate"], "input_ids": [100 * number + token for token in range(64)]}
        async with client.post(url, json=body) as answer:
            return answer.status, await answer.text()

    for worker in pair.values():
        worker.fails = "the weights differ"
    late.before_head = Gate()
    status, text = await asked(router.url + "/generate")
    assert (status, '"pair_failed"' in text, "the weights differ" in text) == (500, True, True), text
    assert pair[first].url in text
    assert all(row.in_flight == 0 for row in router.fleet.rows.values())

    # With another pair to go to, no client sees the failure.
    prefill, decode = await start_pair("prefill"), await start_pair("decode")
    other = await start_router(pair[first], prefill, decode)
    heard, prefills = len(pair[first].requests), [prefill, pair["prefill"]]
    for number in range(3):
        decode.before_head = Gate()  # once decode has answered, the other half is not sent any more
        before = sum(len(worker.requests) for worker in prefills)
        request = asyncio.ensure_future(asked(other.url + "/generate", number))
        await eventually(lambda before=before: sum(len(worker.requests) for worker in prefills) > before)
        decode.before_head.open()
        assert (await request)[0] == 200
    assert len(pair[first].requests) > heard


async def test_decode_does_not_wait_for_a_prefill_that_failed(
    start_pair, start_router, client, eventually
) -> None:
    prefills = [await start_pair("prefill") for _ in range(2)]
    decode = await start_pair("decode")
    router = await start_router(*prefills, decode)
    decode.before_head = Gate()
    for worker in prefills:
        worker.deaths_before_head = 1
    prefills[1].deaths_before_head = 0
    request = asyncio.ensure_future(client.post(router.url + "/generate", json=BODIES["/generate"]))
    if not prefills[1].requests:
        await eventually(lambda: len(prefills[1].requests) == 1)
    if prefills[0].requests:
        await decode.until(lambda: decode.aborted == 1)
    decode.before_head.open()
    async with await request as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["x-kv-prefill-instance"] == prefills[1].url


async def test_a_client_that_goes_away_ends_both_halves(start_pair, start_router, client, eventually) -> None:
    prefill, decode = await start_pair("prefill"), await start_pair("decode")
    router = await start_router(prefill, decode)
    prefill.before_head, decode.before_head = Gate(), Gate()
    request = asyncio.ensure_future(client.post(router.url + "/generate", json=BODIES["/generate"]))
    await eventually(lambda: bool(prefill.requests and decode.requests))
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await prefill.until(lambda: prefill.aborted == 1)
    await decode.until(lambda: decode.aborted == 1)
    await eventually(lambda: all(row.in_flight == 0 for row in router.fleet.rows.values()))


# -- the two halves, moment by moment -------------------------------------------------------------


async def halves(leg_ends: int, block_ends: int, *, cancel_at: int | None = None, fails: bool = True) -> str:
    """The outcome of a block that takes ``block_ends`` turns beside a leg that fails after ``leg_ends``."""

    async def leg() -> None:
        for _ in range(leg_ends):
            await asyncio.sleep(0)
        if fails:
            raise ConnectionLost("the leg")

    async def run() -> str:
        async with beside(leg, lambda: True):
            for _ in range(block_ends):
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "done"

    task = asyncio.ensure_future(run())
    for turn in range(40):
        if turn == cancel_at:
            task.cancel()
        await asyncio.sleep(0)
    try:
        return await task
    except ConnectionLost:
        return "leg failed"
    except asyncio.CancelledError:
        return "cancelled"


@pytest.mark.parametrize("leg_ends", range(10))
@pytest.mark.parametrize("block_ends", range(10))
async def test_a_failing_half_interrupts_the_other_or_comes_too_late(leg_ends: int, block_ends: int) -> None:
    outcome = await halves(leg_ends, block_ends)
    if leg_ends + 2 < block_ends:
        assert outcome == "leg failed"
    elif leg_ends > block_ends + 1:
        assert outcome == "done"
    else:
        assert outcome in ("done", "leg failed")
    assert await halves(leg_ends, block_ends, fails=False) == "done"


@pytest.mark.parametrize("cancel_at", range(12))
@pytest.mark.parametrize("leg_ends", range(8))
async def test_a_cancellation_is_never_swallowed(leg_ends: int, cancel_at: int) -> None:
    outcome = await halves(leg_ends, 30, cancel_at=cancel_at)
    if cancel_at > leg_ends + 3:
        assert outcome == "leg failed"
    else:
        assert outcome in ("cancelled", "leg failed")
    assert await halves(50, 30, cancel_at=cancel_at) == "cancelled"
