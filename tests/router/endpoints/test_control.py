"""Aborting, waiting for room, retries within their budget, explanations, and requests to one worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.router.dispatch.explain import Cause, Choice, LoggedRequest, RequestLog, as_json, causes
from sglang_ext.router.index.history import Departure
from sglang_ext.router.policies import Instance, Match
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.router.tokens.encoded import Encoded
from tests.support.servers.workers import Gate

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 2}}


async def test_an_abort_reaches_the_instance_that_runs_the_request(
    start_worker, start_router, client, eventually
) -> None:
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers)
    for worker in workers:
        worker.before_head = Gate()
    request = asyncio.ensure_future(client.post(router.url + "/generate", json={**BODY, "rid": "r1"}))
    await eventually(lambda: any(worker.requests for worker in workers))
    async with client.post(router.url + "/abort_request", json={"rid": "r1"}) as answer:
        assert await answer.json() == {"aborted": 1}
    for worker in workers:
        assert worker.rids_aborted == ([{"rid": "r1"}] if worker.requests else [])
        worker.before_head.open()
    async with await request as answer:
        assert answer.status == 200  # the worker's own answer


@pytest.mark.parametrize("by", ["x-request-id", "abort_all"])
async def test_a_request_without_rid_is_aborted_by_its_connection(
    by: str, start_worker, start_router, client, eventually
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.before_head = Gate()
    headers = {"x-request-id": "q1"}
    request = asyncio.ensure_future(client.post(router.url + "/generate", json=BODY, headers=headers))
    await eventually(lambda: bool(worker.requests))
    body = {"rid": "q1"} if by == "x-request-id" else {"abort_all": True}
    async with client.post(router.url + "/abort_request", json=body) as answer:
        assert await answer.json() == {"aborted": 1}
    async with await request as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (499, "aborted")
    await worker.until(lambda: worker.aborted == 1)
    assert len(router.flights) == 0
    async with client.post(router.url + "/abort_request", json=body) as answer:
        assert await answer.json() == {"aborted": 0}
    async with client.post(router.url + "/abort_request", json={}) as answer:
        assert answer.status == 400


async def test_requests_wait_for_room_by_priority(start_worker, start_router, client, eventually) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_running_per_instance=1, queue_size=2)
    worker.before_head = Gate()
    done: list[str] = []

    async def ask(name: str, priority: int) -> int:
        body = {**BODY, "priority": priority}
        async with client.post(router.url + "/generate", json=body) as answer:
            await answer.read()
            done.append(name)
            return answer.status

    first = asyncio.create_task(ask("first", 0))
    await eventually(lambda: len(worker.requests) == 1)
    low = asyncio.create_task(ask("low", 0))
    await eventually(lambda: len(router.admission.line) == 1)
    high = asyncio.create_task(ask("high", 7))
    await eventually(lambda: len(router.admission.line) == 2)
    async with client.post(router.url + "/generate", json=BODY) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (await answer.json())["error"]["code"] == "queue_full"
    assert len(worker.requests) == 1
    async with client.get(router.url + "/metrics") as answer:
        metrics = await answer.text()
    assert "sglang_ext_router_queue_waiting 2.0" in metrics
    assert 'sglang_ext_router_refused_total{why="queue_full"} 1.0' in metrics
    worker.before_head.open()
    assert await asyncio.gather(first, low, high) == [200, 200, 200]
    assert done == ["first", "high", "low"]


async def test_waiting_ends(start_worker, start_router, client, eventually) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_running_per_instance=1, queue_timeout_secs=0.05)
    worker.before_head = Gate()
    first = asyncio.create_task(client.post(router.url + "/generate", json=BODY))
    await eventually(lambda: len(worker.requests) == 1)
    async with client.post(router.url + "/generate", json=BODY) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "queue_timeout")
    worker.before_head.open()
    async with await first as answer:
        assert answer.status == 200


async def test_a_client_that_goes_away_while_it_waits_leaves_its_place(
    start_worker, start_router, client, eventually
) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_running_per_instance=1)
    worker.before_head = Gate()

    async def ask() -> int:
        async with client.post(router.url + "/generate", json=BODY) as answer:
            await answer.read()
            return answer.status

    first = asyncio.create_task(ask())
    await eventually(lambda: len(worker.requests) == 1)
    impatient = asyncio.create_task(ask())
    await eventually(lambda: len(router.admission.line) == 1)
    patient = asyncio.create_task(ask())
    await eventually(lambda: len(router.admission.line) == 2)
    impatient.cancel()
    await eventually(lambda: len(router.admission.line) == 1)
    worker.before_head.open()
    assert await asyncio.gather(first, patient) == [200, 200]
    assert len(worker.requests) == 2
    await eventually(lambda: not router.flights)
    assert router.admission.admitted == 0


async def test_a_full_instance_is_passed_over_for_one_with_room(
    start_worker, start_router, client, eventually
) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers, max_running_per_instance=1, policy="prompt-tree")
    async with client.post(router.url + "/generate", json=BODY) as answer:
        home = answer.headers["x-kv-instance"]
    (holder,) = [worker for worker in workers if worker.url == home]
    holder.before_head = Gate()
    first = asyncio.create_task(client.post(router.url + "/generate", json=BODY))
    await eventually(lambda: len(holder.requests) == 2)
    async with client.post(router.url + "/generate", json=BODY) as answer:
        assert answer.headers["x-kv-instance"] != home
    holder.before_head.open()
    async with await first:
        pass


async def test_the_retry_budget_ends_retries(start_worker, start_router, client, monkeypatch) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers, retry_budget=0.0)
    monkeypatch.setattr(router.generation._budget, "reserve", 0)
    for worker in workers:
        worker.deaths_before_head = 1
    async with client.post(router.url + "/generate", json=BODY) as answer:
        assert answer.status == 502
    assert sum(len(worker.requests) for worker in workers) == 1
    async with client.get(router.url + "/metrics") as answer:
        assert "sglang_ext_router_retries_denied_total 1.0" in await answer.text()


async def test_what_one_worker_is_asked(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    for path in ("/tokenize", "/v1/tokenize"):
        async with client.post(router.url + path, json={"prompt": "Hello"}) as answer:
            tokens = (await answer.json())["tokens"]
            assert tokens
            assert answer.headers["x-kv-instance"] == worker.url
    async with client.post(router.url + "/detokenize", json={"tokens": tokens}) as answer:
        assert (await answer.json())["text"] == "Hello"
    for body in ({"tokens": [10**9]}, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": [[1], [-1]]}):
        async with client.post(router.url + "/detokenize", json=body) as answer:
            assert answer.status == 400
    for path in ("/health", "/ready", "/health_generate"):
        async with client.get(router.url + path) as answer:
            assert answer.status == 200


# -- explanations ---------------------------------------------------------------------------------


def logged(
    *,
    total: int | None = 100,
    cached: int | None = 0,
    matched: int = 0,
    reason: str = "no-prefix",
    holders: dict[str, int] | None = None,
    untrusted: tuple[str, ...] = (),
) -> LoggedRequest:
    record = Record("r", "POST", "/generate", 0.0)
    record.prompt_tokens, record.cached_tokens = total, cached
    held = {name: Match(tokens) for name, tokens in (holders or {}).items()}
    fleet = tuple(Instance(name, 0, 0, 0, 0, trusted=False) for name in untrusted)
    return LoggedRequest(record, [], 0.0, [Choice("i", reason, matched, held, {}, fleet)])


EVICTION = [{"instance": "i", "tier": "hbm", "at": 1.0, "tokens": 96, "still_in": ""}]
DEMOTION = [{**EVICTION[0], "still_in": "dram"}]


@pytest.mark.parametrize(
    ("told", "evictions", "elsewhere", "expected"),
    [
        (logged(cached=96, matched=96), [], 0, [Cause.HIT]),
        (logged(cached=99, matched=0), None, 0, [Cause.HIT]),
        (logged(), [], 0, [Cause.NEVER_STORED]),
        (logged(), None, 0, [Cause.HISTORY_UNKNOWN]),
        (logged(), EVICTION, 0, [Cause.EVICTED]),
        (logged(), DEMOTION, 0, [Cause.NEVER_STORED]),
        (logged(), [], 64, [Cause.OTHER_SALT, Cause.NEVER_STORED]),
        (logged(untrusted=("j",)), [], 0, [Cause.INDEX_NOT_TRUSTED, Cause.NEVER_STORED]),
        (logged(matched=96, holders={"i": 96}), [], 0, [Cause.BELIEVED_ONLY]),
        (logged(reason="short-prefix", holders={"j": 16}), [], 0, [Cause.BELOW_THRESHOLD]),
        (logged(reason="rebalanced", holders={"j": 96}), [], 0, [Cause.OTHER_INSTANCE]),
        (logged(cached=None, matched=96), [], 0, [Cause.HIT, Cause.NOT_REPORTED]),
    ],
)
def test_causes(told: LoggedRequest, evictions: Any, elsewhere: int, expected: list[Cause]) -> None:
    assert causes(told, evictions, elsewhere, 16) == expected


def test_the_request_log_is_bounded_and_the_oldest_go() -> None:
    log = RequestLog(20_000)
    key = encode_tokens(range(500))
    for number in range(50):
        record = Record(f"r{number}", "POST", "/generate", 0.0)
        log.add(LoggedRequest(record, [Encoded(("tokens",), key, 500)], 0.0), 4)
        assert log.size_bytes <= 20_000
    assert 0 < len(log) < 10
    assert log.find("r49", tenant=None, admin=True) is not None
    assert log.find("r0", tenant=None, admin=True) is None
    assert log.size_bytes == sum(s.size_bytes for s in log._requests)
    other = Record("r49", "POST", "/generate", 0.0, caller=Caller("b", admin=False))
    log.add(LoggedRequest(other, [], 0.0), 4)
    of_b = log.find("r49", tenant="b", admin=False)
    assert of_b is not None
    assert of_b.record is other
    assert log.find("r49", tenant="c", admin=False) is None
    mine = log.find("r49", tenant=None, admin=True)
    assert mine is not None
    assert mine.record is not other
    log.add(LoggedRequest(record, [], 0.0), 700)  # each keeps the fleet that it was chosen from
    assert 0 < len(log) < 3
    none = RequestLog(0)
    none.add(LoggedRequest(record, [], 0.0), 4)
    assert len(none) == 0


async def test_a_request_is_explained(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker, policy="prompt-tree")

    async def explain(name: str) -> Any:
        async with client.get(f"{router.url}/explain/{name}") as answer:
            return await answer.json()

    for name, change in (("first", {}), ("again", {}), ("salted", {"extra_key": "k"})):
        headers = {"x-request-id": name}
        async with client.post(router.url + "/generate", json={**BODY, **change}, headers=headers) as answer:
            assert answer.status == 200
    first, again, salted = [await explain(name) for name in ("first", "again", "salted")]
    assert "hit" not in first["causes"]
    assert again["causes"] == ["hit"]
    assert again["cached"]["tokens"] == 63
    assert again["routing"][0]["holders"] == {worker.url: {"hbm": 64, "dram": 0, "disk": 0}}
    assert "other-salt" in salted["causes"]
    assert salted["same_prompt_under_another_salt"] == 64
    assert first["routing"][0]["estimate"]["observed_s"] is None, "no first byte can be seen of it"
    async with client.get(router.url + "/explain/none") as answer:
        assert answer.status == 404


async def test_explain_shows_an_estimate_beside_the_observation(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    body, headers = {**BODY, "stream": True}, {"x-request-id": "one"}
    async with client.post(router.url + "/generate", json=body, headers=headers) as answer:
        await answer.read()
    async with client.get(f"{router.url}/explain/one") as answer:
        estimate = (await answer.json())["routing"][0]["estimate"]
    terms = ("queue_s", "load_s", "transfer_s", "exec_s")
    assert estimate["ttft_s"] == sum(estimate[term] for term in terms) == estimate["exec_s"]
    assert estimate["correction"] == 1.0
    assert estimate["observed_queue_s"] == 0
    ratio = estimate["observed_s"] / estimate["ttft_s"]
    assert ratio > 0

    async def shown() -> dict[str, float]:
        async with client.get(router.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        split = [line.rpartition(" ") for line in lines if "estimate" in line or "correction" in line]
        return {name: float(value) for name, _, value in split if not name.startswith("#")}

    found, at = await shown(), f'instance="{worker.url}"'
    for term in ("ttft", "exec"):
        name = f'sglang_ext_router_estimate_ratio_%s{{{at},term="{term}"}}'
        assert found[name % "sum"] == pytest.approx(ratio)
        assert found[name % "count"] == 1
    # One answer is the only evidence: it is believed, within the bounds of defaults.
    assert found[f"sglang_ext_router_cost_correction{{{at}}}"] == pytest.approx(max(ratio, 1 / 256))
    assert found[f"sglang_ext_router_queue_estimate_seconds{{{at}}}"] == 0
    router.costs.forget(worker.url)
    assert at not in str(await shown()), "requests that left are not shown any more"


def test_evictions_before_the_request_explain_it_and_later_ones_do_not() -> None:
    key = encode_tokens(range(96))
    missed = logged()
    missed.prompts = [Encoded(("tokens", None, None, None), key, 96)]
    missed.at = 100.0

    def history(namespace: Any, asked: bytes) -> list[Departure]:
        assert (namespace, asked) == (("tokens", None, None, None), key)
        return [Departure("i", "hbm", 40.0, 64, "dram"), *([Departure("i", "dram", moment, 64)])]

    def spilled(namespace: Any, asked: bytes, before: float) -> list[dict[str, Any]]:
        assert (namespace, asked, before) == (("tokens", None, None, None), key, 100.0)
        return [{"to": "j"}]

    log = RequestLog(1 << 20)
    for moment, expected in ((50.0, "evicted"), (150.0, "never-stored")):
        value = as_json(missed, log, history, spilled, block_size=16, admin=True, own=True)
        assert value["causes"] == [expected]
        tiers = [event["tier"] for event in value["evictions"]]
        assert tiers == (["hbm", "dram"] if moment < 100 else ["hbm"])
    value = as_json(missed, log, None, spilled, block_size=16, admin=True, own=True)
    assert value["causes"] == ["history-unknown"]
    assert value["spilled"] == [{"to": "j"}]
