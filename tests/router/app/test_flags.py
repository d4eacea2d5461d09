"""Flags whose values no other test compares with the router's behaviour."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.http.types import ConnectFailed, RequestTimeout
from sglang_ext.router.policies import POLICIES, Instance, Match, Prompt, Reason
from sglang_ext.testing.fakes import FakeClock
from tests.support.servers.workers import Gate

BODY: dict[str, Any] = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 1}}


# -- sessions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["header", "field", "cookie"])
async def test_a_session_stays_at_its_instance_however_it_is_named(
    how: str, start_worker, start_router, client, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(f'[[session]]\n{how} = "{"X-Talk" if how == "header" else "talk"}"\n')
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers, policy="session", client_rules=str(rules))
    homes: dict[str, set[str]] = {}
    for number in range(60):
        name = f"s{number % 12}"
        body = {**BODY, "input_ids": [number] * 40, **({"talk": name} if how == "field" else {})}
        headers = {"header": {"x-talk": name}, "cookie": {"cookie": f"a=b; talk={name}"}}.get(how, {})
        async with client.post(router.url + "/generate", json=body, headers=headers) as answer:
            assert (answer.status, answer.headers["x-kv-route-reason"]) == (200, "session")
            homes.setdefault(name, set()).add(answer.headers["x-kv-instance"])
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) > 1, "not all at one"


# -- time-outs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_gets_504(
    stream: bool, start_worker, start_router, client
) -> None:
    worker = await start_worker()
    router = await start_router(worker, request_timeout_secs=1.0)
    worker.before_head = Gate()
    async with client.post(router.url + "/generate", json={**BODY, "stream": stream}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (504, "timeout")
    await worker.until(lambda: worker.aborted == 1)
    assert router.fleet.rows[worker.url].in_flight == 0
    worker.before_head.open()
    worker.before_head = None
    async with client.post(router.url + "/generate", json={**BODY, "stream": stream}) as answer:
        assert answer.status == 200


async def test_a_stream_that_takes_too_long_ends_in_an_error(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker, request_timeout_secs=2.0)
    worker.between_chunks = Gate()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    async with client.post(router.url + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        text = await answer.text()
    assert "did not finish its answer within 2.0 s" in text
    assert "[DONE]" not in text
    worker.between_chunks.open()


@contextmanager
def full_backlog() -> Iterator[str]:
    """An address that answers no connection: its queue of connections is full, and no process accepts."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting = []
        try:
            for _ in range(8):
                connection = socket.socket()
                waiting.append(connection)
                connection.setblocking(False)
                connection.connect_ex(listening.getsockname())
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            for connection in waiting:
                connection.close()


async def test_connecting_takes_no_longer_than_it_may() -> None:
    with full_backlog() as url:
        upstream = Router(RouterConfig(connect_timeout_secs=0.05)).upstream
        try:
            with pytest.raises(ConnectFailed, match=r"within 0\.05 s"):
                await upstream.open("GET", url + "/model_info", timeout_s=20)
            with pytest.raises(RequestTimeout, match=r"within 0\.01 s"):
                await upstream.open("GET", url + "/model_info", timeout_s=0.01)
        finally:
            await upstream.close()


# -- prefixes that attract requests ------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "spreads"), [(0.0, True), (4.0, True), (5.0, False), (6.0, False)])
async def test_a_common_beginning_attracts_up_to_the_factor(factor: float, spreads: bool) -> None:
    """a caches 500 tokens more than b, five times the beginning of 100 that it holds."""
    router = Router(RouterConfig(balance_cache_factor=factor))
    options = router.chooser._routing.placing.thresholds
    fleet = (
        Instance(name="a", in_flight=0, queued_tokens=0, cached_tokens=1500, last_picked=2),
        Instance(name="b", in_flight=0, queued_tokens=0, cached_tokens=1000, last_picked=1),
    )
    for policy in (POLICIES["prompt-tree"], POLICIES["cost"]):
        told = policy(Prompt(150), fleet, {"a": Match(100)}, router.costs, options)
        assert told.instance == ("b" if spreads else "a")
        assert (told.reason is Reason.SPREAD) is spreads
        told = policy(Prompt(150), fleet, {"a": Match(100, own=True)}, router.costs, options)
        assert told.instance == "a", "a request's own past is not a common beginning"


@pytest.mark.parametrize(
    ("queue", "computing", "chosen"), [(1.0, 1.0, "b"), (1.0, 2.0, "a"), (2.0, 2.0, "b"), (0.0, 1.0, "a")]
)
async def test_the_weights_of_equation_1_decide(queue: float, computing: float, chosen: str) -> None:
    """Computing a's cached tokens takes b 90 ms, and the queue at a is 115 ms longer."""
    router = Router(RouterConfig(queue_weight=queue, exec_weight=computing))
    fleet = tuple(
        Instance(name=name, in_flight=1, queued_tokens=0, cached_tokens=0, last_picked=1) for name in "ab"
    )
    with router.costs.sending("a", 1150, 0, streams=True), router.costs.sending("b", 1, 0, streams=True):
        told = POLICIES["cost"](
            Prompt(1000),
            fleet,
            {"a": Match(900, own=True)},
            router.costs,
            router.chooser._routing.placing.thresholds,
        )
    assert told.instance == chosen


async def test_what_passed_by_is_believed_for_the_trees_time() -> None:
    clock = FakeClock()
    router = Router(RouterConfig(tree_ttl_secs=5.0), clock=clock)
    key = encode_tokens(range(64))
    space = ("tokens", None, None, None)
    router.trees.confirm(space, key, "a")
    found = []
    for seconds in (0.0, 4.0, 2.0):
        clock.advance(seconds)
        match = router.trees.match(space, key).get("a")
        found.append(match.tokens if match is not None else 0)
    assert found == [64, 64, 0]


# -- garbage -----------------------------------------------------------------------------------------

_SETTLES = """
import gc
from sglang_ext.router.app import run

class Node:
    pass

kept = [Node() for _ in range(1000)]
lost = Node()
lost.itself = lost
before = gc.get_freeze_count()
del lost
run.settle_garbage()
assert gc.get_freeze_count() > before + 1000, gc.get_freeze_count()
assert gc.get_threshold() == run.GC_THRESHOLDS
assert not any(each is kept[0] for each in gc.get_objects()), "what is there is looked at no more"
new = Node()
new.itself = new
import weakref
watch = weakref.ref(new)
del new
gc.collect()
assert watch() is None, "what comes later is"
print("settled")
"""


def test_settling_freezes_what_is_there_and_nothing_else() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _SETTLES], capture_output=True, text=True, timeout=60, check=False
    )
    assert (told.returncode, told.stdout.strip()) == (0, "settled"), told.stderr
