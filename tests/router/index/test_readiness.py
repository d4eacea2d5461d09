"""A router is ready when it has its instances' snapshots; until then its decisions report that they are
missing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from test_router_index import BLOCK, NAMING

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import FROM_AGENT, Hello, NamesStored, PlacementEvent, Welcome
from sglang_ext.radix_global.sync.stream import EventStream, Sends
from sglang_ext.router import Router
from sglang_ext.router.cluster.readiness import Readiness, State
from sglang_ext.router.endpoints.information import NOT_SERVING
from sglang_ext.router.index.index import names_of
from sglang_ext.router.policies.base import Role
from sglang_ext.tiers import Tier
from tests.support.servers.ports import free_port
from tests.support.servers.workers import StandInWorker

pytestmark = pytest.mark.slow

TENANT = (None, None)
TOKENS = 40 * BLOCK


def test_a_router_is_ready_when_it_awaits_no_instance() -> None:
    readiness = Readiness(10.0)
    assert readiness.look(0.0, [], []) is State.IDLE
    assert readiness.look(1.0, ["a", "b"], ["a", "b"]) is State.WAITING
    assert readiness.look(2.0, ["a", "b"], ["b"]) is State.WAITING
    assert readiness.look(3.0, ["a", "b"], []) is State.READY


def test_the_wait_is_bounded_from_the_first_instance_on() -> None:
    readiness = Readiness(10.0)
    readiness.look(0.0, [], [])
    assert readiness.look(5.0, ["a"], ["a"]) is State.WAITING
    assert readiness.look(14.9, ["a", "b"], ["a", "b"]) is State.WAITING
    assert readiness.look(15.0, ["a", "b"], ["a", "b"]) is State.READY


def test_one_that_joins_later_takes_nothing_back_and_a_whole_fleet_does() -> None:
    readiness = Readiness(10.0)
    assert readiness.look(0.0, ["a"], []) is State.READY
    assert readiness.look(1.0, ["a", "b"], ["b"]) is State.READY
    assert readiness.look(2.0, [], []) is State.IDLE
    assert readiness.look(3.0, ["a", "b"], ["a"]) is State.WAITING


class Reporter:
    """The agent of an instance, whose every message waits until the test sends it."""

    def __init__(self, router: Router, name: str, role: Role = Role.COLOCATED) -> None:
        self._index = router.trees
        self._name = name
        self._stream = EventStream(name, name.encode()[-16:].rjust(16), self._index.block_size, NAMING)
        self._index.attach(name, role)
        self._index.expect(name)
        self._index.on_heartbeat(name, alive=True)
        sends, number = self._stream.hello(b"r", Hello("r"))
        assert number is not None
        self._number = number
        self._send(sends)

    def begin(self) -> None:
        self._send(self._stream.begin(self._number))

    def part(self, *events: PlacementEvent) -> None:
        self._send(self._stream.part(self._number, list(events)))

    def end(self) -> None:
        self._send(self._stream.end(self._number))

    def on_disk(self, prompt: list[int]) -> NamesStored:
        names = names_of(NAMING, TENANT, encode_tokens(prompt), self._index.block_size)
        return NamesStored(Tier.DISK.level, b"".join(names))

    def _send(self, sends: Sends) -> None:
        for _, data in sends:
            message = FROM_AGENT.decode(data)
            if isinstance(message, Welcome):
                self._index.began(self._name, message.epoch, message.naming)
            else:
                self._index.apply(self._name, message)  # type: ignore[arg-type]


def prompt(number: int) -> list[int]:
    return [number] * TOKENS


Start = Callable[..., Awaitable[tuple[Router, list[StandInWorker]]]]


@pytest.fixture
def start(start_worker: Any, start_router: Any) -> Start:
    async def started(count: int = 2, *, tells: bool = True, **options: Any) -> Any:
        workers = [await start_worker() for _ in range(count)]
        for worker in workers:
            flag = "--kv-router http://127.0.0.1:1" if tells else ""
            worker.server_info["launch_command"] = f"--model-path m {flag}"
        return await start_router(*workers, **options), workers

    return started


async def ready(router: Router, client: Any) -> tuple[int, dict[str, Any]]:
    async with client.get(router.url + "/ready") as answer:
        return answer.status, dict(await answer.json())


async def ask(router: Router, client: Any, number: int) -> tuple[str, str, str]:
    """Where a request went, why, and under which id."""
    body = {"input_ids": prompt(number), "sampling_params": {"max_new_tokens": 1}}
    async with client.post(router.url + "/generate", json=body) as answer:
        assert answer.status == 200
        headers = answer.headers
        return headers["x-kv-instance"], headers["x-kv-route-reason"], headers["x-request-id"]


async def explained(router: Router, client: Any, id: str) -> dict[str, Any]:
    async with client.get(f"{router.url}/explain/{id}") as answer:
        return dict(await answer.json())


@pytest.mark.parametrize("policy", ["prompt-tree", "cost"])
async def test_until_a_snapshot_is_in_decisions_say_that_they_lack_it(
    policy: str, start: Start, client: Any
) -> None:
    """Before an instance has registered, while its snapshot comes in, and after."""
    router, (one, two) = await start(policy=policy)
    assert await ready(router, client) == (
        503,
        {"status": State.WAITING.value, "workers": 2, "usable": 2, "awaited": 2},
    )
    async with client.get(router.url + "/health") as answer:
        assert answer.status == 200, "it can serve"
    _, reason, id = await ask(router, client, 1)
    assert reason == "index-awaited"
    told = await explained(router, client, id)
    assert sorted(told["routing"][0]["index_awaited"]) == sorted([one.url, two.url])
    assert told["routing"][0]["index_not_trusted"] == []
    assert "index-awaited" in told["causes"]

    first = Reporter(router, one.url)
    first.begin()
    first.end()
    second = Reporter(router, two.url)
    assert (await ask(router, client, 2))[1] == "index-awaited", "it has said hello, and no more"
    second.begin()
    second.part(second.on_disk(prompt(3)))
    assert (await ready(router, client))[1]["awaited"] == 1
    assert (await ask(router, client, 3))[:2] == (two.url, "prefix"), "received reports are used"
    assert (await ask(router, client, 4))[1] == "index-awaited", "the report may still come"
    second.part(second.on_disk(prompt(5)))
    second.end()
    assert (await ready(router, client))[0] == 200
    assert (await ask(router, client, 5))[:2] == (two.url, "prefix")
    _, reason, id = await ask(router, client, 6)
    assert reason == "no-prefix"
    assert (await explained(router, client, id))["routing"][0]["index_awaited"] == []
    async with client.get(router.url + "/metrics") as answer:
        text = await answer.text()
    counted = [line for line in text.splitlines() if "decisions_total" in line and "index-awaited" in line]
    assert [line.rpartition(" ")[2] for line in counted] == ["3.0"]


async def test_a_cluster_says_of_whom_it_waits(start: Start, client: Any) -> None:
    router, (one, two) = await start()
    first = Reporter(router, one.url)
    first.begin()
    first.end()
    async with client.get(router.url + "/cluster") as answer:
        views = {view["url"]: view for view in (await answer.json())["instances"]}
    assert [views[one.url]["awaited"], views[two.url]["awaited"]] == [False, True]
    assert [views[one.url]["trusted"], views[two.url]["trusted"]] == [True, False]


async def test_the_wait_for_one_that_never_tells_ends(
    start: Start, client: Any, eventually: Callable[..., Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, _ = await start(1, index_wait_secs=30.0)
    assert (await ready(router, client))[0] == 503
    later = router.clock.monotonic() + 31
    monkeypatch.setattr(router.clock, "monotonic", lambda: later)
    assert (await ready(router, client))[0] == 200
    assert (await ask(router, client, 1))[1] == "no-prefix", "it is one like those that never tell"


async def test_a_router_does_not_wait_for_instances_that_publish_no_events(start: Start, client: Any) -> None:
    router, _ = await start(tells=False)
    assert (await ready(router, client))[0] == 200
    assert (await ask(router, client, 1))[1] == "no-prefix"


@pytest.mark.parametrize(
    ("options", "status"), [({"index_wait_secs": 0.0}, 200), ({"index": "approximate"}, 200)]
)
async def test_waiting_can_be_left_out(
    options: dict[str, Any], status: int, start: Start, client: Any
) -> None:
    router, _ = await start(**options)
    assert (await ready(router, client))[0] == status


async def test_a_restarted_instance_is_awaited_and_the_router_stays_ready(start: Start, client: Any) -> None:
    router, (one, two) = await start()
    for worker in (one, two):
        reporter = Reporter(router, worker.url)
        reporter.begin()
        reporter.end()
    assert (await ready(router, client))[0] == 200
    router.fleet.lost(two.url, "the test says so")
    router.trees.detach(two.url)
    await router.watch.check_once(two.url)
    assert await ready(router, client) == (
        200,
        {"status": State.READY.value, "workers": 2, "usable": 2, "awaited": 1},
    )
    assert (await ask(router, client, 1))[1] == "index-awaited"


async def test_a_broken_stream_is_not_what_is_awaited(start: Start, client: Any) -> None:
    """A gap in the events of an instance that was known is another matter."""
    router, (one,) = await start(1)
    reporter = Reporter(router, one.url)
    reporter.begin()
    reporter.end()
    router.trees.lost_touch(one.url)
    assert (await ask(router, client, 1))[1] == "untrusted"


async def test_a_router_is_not_ready_before_clients_can_connect(start: Start, client: Any) -> None:
    """Instances reach it before: a supervisor that asks where they do would call it ready too early."""
    member_port = free_port()
    router, _ = await start(tells=False, member_port=member_port, standby_fd=0)
    at = f"http://127.0.0.1:{member_port}/ready"
    async with client.get(at) as answer:
        assert (answer.status, (await answer.json())["status"]) == (503, NOT_SERVING)
    await router.take_over()
    async with client.get(at) as answer:
        assert (answer.status, (await answer.json())["status"]) == (200, "ok")
