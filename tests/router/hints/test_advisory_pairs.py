"""Hints where prefill and decode are apart: the place is a pair, and both ends promote their blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from index_views import in_dram
from test_hinting import CHAT, EPOCH, NEXT, Links, advise, link, post

from sglang_ext.protocol.agent import Advise, Advised
from sglang_ext.router import Router
from tests.support.servers.workers import StandInWorker

pytestmark = pytest.mark.slow

Messages = list[dict[str, str]]


@dataclass
class Cluster:
    """A router, the messages to its agents, and its stand-ins by their URLs."""

    router: Router
    links: Links
    workers: dict[str, StandInWorker]
    client: Any

    async def ask(self, messages: Messages = NEXT, session: str | None = "s") -> Any:
        """Send a chat; the headers of its answer. A pair must have got it, with one room."""
        before = {url: len(worker.requests) for url, worker in self.workers.items()}
        headers = {} if session is None else {"x-session-id": session}
        body = {"model": "m", "messages": messages, "max_tokens": 2}
        status, answer, told = await post(self.client, self.router, "/v1/chat/completions", body, **headers)
        assert status == 200, answer
        new = {url: worker.requests[before[url] :] for url, worker in self.workers.items()}
        pair = {told["x-kv-instance"], told["x-kv-prefill-instance"]}
        # Stand-ins do not wait for each other: the answer may be there before prefill has got its half.
        assert new[told["x-kv-instance"]]
        assert {url for url, requests in new.items() if requests} <= pair
        (room,) = {body["bootstrap_room"] for requests in new.values() for _, body, _ in requests}
        assert room > 0
        return told

    async def hint(self, **body: Any) -> dict[str, Any]:
        return await advise(self.client, self.router, **{"session": "s", **body})

    async def state(self, id: str) -> dict[str, Any]:
        async with self.client.get(f"{self.router.url}/v1/advisory/{id}") as answer:
            return dict(await answer.json())

    def told(self, kind: type) -> list[str]:
        """The instances that received messages of this kind, in order."""
        return [name for name, message in self.links.told if isinstance(message, kind)]

    def withdrawn(self) -> set[str]:
        return {name for name, message in self.links.told if not isinstance(message, Advise)}

    def other(self, url: str) -> str:
        """The other instance of the same role."""
        role = self.workers[url].model_info["disaggregation_mode"]
        (other,) = [
            there
            for there, worker in self.workers.items()
            if there != url and worker.model_info["disaggregation_mode"] == role
        ]
        return other


@pytest.fixture
def start(start_worker: Any, start_router: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def started(prefill: int = 2, decode: int = 2, **options: Any) -> Cluster:
        workers = []
        for role in ("prefill",) * prefill + ("decode",) * decode:
            worker: StandInWorker = await start_worker()
            worker.model_info["disaggregation_mode"] = role
            workers.append(worker)
        router = await start_router(*workers, **options)
        in_dram(router, monkeypatch)
        return Cluster(router, link(router), {worker.url: worker for worker in workers}, client)

    found: Callable[..., Awaitable[Cluster]] = started
    return found


async def hinted(cluster: Cluster) -> dict[str, Any]:
    """A conversation of which both halves of a pair hold the KV in DRAM, and the hint of its next request."""
    await cluster.ask()
    told = await cluster.hint()
    assert told["decode"] is not None
    return told


async def test_a_hinted_request_goes_to_its_pair(start: Any) -> None:
    """Claimed: the hint named a pair, both received it, and both are informed when the request has come."""
    cluster = await start()
    first = await cluster.ask()
    told = await cluster.hint()
    assert cluster.told(Advise) == [told["instance"], told["decode"]]
    answered = await cluster.ask()
    assert answered["x-kv-route-reason"] == "advised"
    assert answered["x-kv-prefill-instance"] == told["instance"]
    assert answered["x-kv-instance"] == told["decode"] == first["x-kv-instance"]
    assert cluster.withdrawn() == {told["instance"], told["decode"]}
    assert (await cluster.state(told["id"]))["state"] == "used"
    assert (await cluster.ask())["x-kv-route-reason"] != "advised", "a hint is good for one request"


async def test_it_goes_there_whatever_the_policy_says_by_then(start: Any) -> None:
    cluster = await start(policy="round-robin")
    for turn in range(4):
        told = await cluster.hint(messages=CHAT, session=f"s{turn}")
        await cluster.ask([{"role": "user", "content": "Something else."}], session=None)  # takes its turn
        answered = await cluster.ask(session=f"s{turn}")
        assert answered["x-kv-route-reason"] == "advised"
        assert answered["x-kv-prefill-instance"] == told["instance"]
        assert answered["x-kv-instance"] == told["decode"]


async def test_a_hint_is_ready_when_both_ends_are(start: Any) -> None:
    cluster = await start()
    told = await hinted(cluster)
    assert (told["state"], told["moved_tokens"], told["decode_moved_tokens"]) == ("moving", 0, 0)
    advisor, id = cluster.router.advisor, told["id"]
    held = told["tokens"]["dram"]
    advisor.preparer.on_advised(told["instance"], Advised(EPOCH, id, "done", held, held))
    seen = await cluster.state(id)
    assert (seen["state"], seen["moved_tokens"], seen["decode_moved_tokens"]) == ("moving", held, 0)
    advisor.preparer.on_advised(cluster.other(told["decode"]), Advised(EPOCH, id, "done", held, held))
    assert (await cluster.state(id))["state"] == "moving", "that one was not asked"
    advisor.preparer.on_advised(told["decode"], Advised(EPOCH, id, "done", held, held - 16))
    seen = await cluster.state(id)
    assert (seen["state"], seen["moved_tokens"], seen["decode_moved_tokens"]) == ("ready", held, held - 16)


async def test_who_decodes_is_not_asked_to_fetch_or_to_compute(start: Any) -> None:
    """Prefill hands over the blocks that a decode instance lacks."""
    cluster = await start()
    cluster.links.computing = True
    told = await cluster.hint(messages=CHAT, session=None)
    assert cluster.told(Advise) == [told["instance"]]


async def test_an_instance_without_an_agent_is_just_not_asked(start: Any) -> None:
    """As a decode instance is that keeps nothing (``--kv-pd-caching 1``): the pair is kept all the same."""
    cluster = await start()
    cluster.links.deaf = {url for url in cluster.workers if cluster.router.fleet.rows[url].role == "decode"}
    told = await hinted(cluster)
    assert cluster.told(Advise) == [told["instance"]]
    cluster.router.advisor.preparer.on_advised(told["instance"], Advised(EPOCH, told["id"], "done", 16, 16))
    assert (await cluster.state(told["id"]))["state"] == "ready"
    answered = await cluster.ask()
    assert (answered["x-kv-route-reason"], answered["x-kv-instance"]) == ("advised", told["decode"])


async def test_a_repeated_hint_is_repeated_to_both(start: Any) -> None:
    cluster = await start()
    told = await hinted(cluster)
    assert (await cluster.hint(ttl_s=600))["id"] == told["id"]
    assert cluster.told(Advise) == [told["instance"], told["decode"]] * 2


async def test_an_expired_hint_ends_at_both(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await start()
    await cluster.ask()
    told = await cluster.hint(ttl_s=5)
    advisor = cluster.router.advisor
    now = advisor._clock.monotonic()
    monkeypatch.setattr(advisor._clock, "monotonic", lambda: now + 6)
    advisor.tick()
    assert (await cluster.state(told["id"]))["state"] == "expired"
    assert cluster.withdrawn() == {told["instance"], told["decode"]}, "both were still busy with it"
    assert advisor.book.promised(told["decode"]) == 0
    assert (await cluster.ask())["x-kv-route-reason"] != "advised"


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed before", "not noticed before"])
@pytest.mark.parametrize("how", ["dead", "drained"])
async def test_another_instance_decodes_when_the_first_is_gone(how: str, noticed: bool, start: Any) -> None:
    cluster = await start()
    told = await hinted(cluster)
    gone, other = told["decode"], cluster.other(told["decode"])
    # A running request keeps it from being drained at once.
    with cluster.router.fleet.carrying(gone, 0):
        if how == "dead":
            cluster.router.fleet.lost(gone, "the test says so")
        else:
            cluster.router.fleet.drain(gone, "the test says so")
        if noticed:
            cluster.router.advisor.tick()
            seen = await cluster.state(told["id"])
            assert (seen["state"], seen["instance"], seen["decode"]) == ("moving", told["instance"], other)
            assert gone not in cluster.withdrawn()
        answered = await cluster.ask()
    assert answered["x-kv-route-reason"] == "advised"
    assert answered["x-kv-prefill-instance"] == told["instance"]
    assert answered["x-kv-instance"] == other
    cluster.router.advisor.check()


async def test_the_next_that_decodes_brings_up_what_it_holds(start: Any) -> None:
    cluster = await start()
    first = await cluster.ask()
    told = await cluster.hint()
    gone, other = told["decode"], cluster.other(told["decode"])
    assert gone == first["x-kv-instance"]
    hint = cluster.links.hints()[0]
    cluster.router.trees.confirm(("tokens", None, None, None), hint.tokens, other)
    cluster.router.fleet.lost(gone, "the test says so")
    cluster.router.advisor.preparer.on_lost(gone)
    assert cluster.told(Advise) == [told["instance"], gone, other]
    cluster.router.advisor.preparer.on_advised(told["instance"], Advised(EPOCH, told["id"], "done", 16, 16))
    assert (await cluster.state(told["id"]))["state"] == "moving"
    cluster.router.advisor.preparer.on_advised(gone, Advised(EPOCH, told["id"], "done", 16, 16))
    assert (await cluster.state(told["id"]))["state"] == "moving", "the dead say nothing that counts"
    cluster.router.advisor.preparer.on_advised(other, Advised(EPOCH, told["id"], "done", 16, 16))
    assert (await cluster.state(told["id"]))["state"] == "ready"


@pytest.mark.parametrize("how", ["dead", "drained"])
async def test_a_hint_does_not_survive_the_instance_that_prefills(how: str, start: Any) -> None:
    cluster = await start()
    told = await hinted(cluster)
    gone = told["instance"]
    with cluster.router.fleet.carrying(gone, 0):
        if how == "dead":
            cluster.router.fleet.lost(gone, "the test says so")
        else:
            cluster.router.fleet.drain(gone, "the test says so")
        cluster.router.advisor.tick()
        assert (await cluster.state(told["id"]))["state"] == "failed"
        assert cluster.withdrawn() == {told["instance"], told["decode"]}, (
            "they need to do no more, where they live"
        )
        answered = await cluster.ask()
    assert answered["x-kv-route-reason"] != "advised"
    assert answered["x-kv-prefill-instance"] == cluster.other(gone)


async def test_a_hint_ends_with_the_last_instance_that_decodes(start: Any) -> None:
    cluster = await start(prefill=1, decode=1)
    told = await hinted(cluster)
    cluster.router.fleet.lost(told["decode"], "the test says so")
    cluster.router.advisor.preparer.on_lost(told["decode"])
    assert (await cluster.state(told["id"]))["state"] == "failed"
    assert cluster.withdrawn() == {told["instance"]}
    cluster.router.advisor.check()


async def test_a_pair_that_dies_under_its_request_is_replaced(start: Any) -> None:
    """No probe has noticed yet: the request itself finds out, and goes on with another decode instance."""
    cluster = await start()
    told = await hinted(cluster)
    cluster.workers[told["decode"]].deaths_before_head = 1
    body = {"model": "m", "messages": NEXT, "max_tokens": 2}
    status, answer, headers = await post(
        cluster.client, cluster.router, "/v1/chat/completions", body, **{"x-session-id": "s"}
    )
    assert status == 200, answer
    assert headers["x-kv-instance"] == cluster.other(told["decode"])
    await asyncio.sleep(0)
    assert (await cluster.state(told["id"]))["state"] == "used"


async def test_one_that_carries_too_much_meanwhile_does_not_decode(start: Any) -> None:
    cluster = await start(balance_abs_threshold=2)
    told = await hinted(cluster)
    fleet = cluster.router.fleet
    loads = [fleet.begin(told["decode"], 0) for _ in range(10)]
    try:
        answered = await cluster.ask()
    finally:
        for load in loads:
            fleet.end(load)
    assert answered["x-kv-route-reason"] == "advised"
    assert answered["x-kv-prefill-instance"] == told["instance"]
    assert answered["x-kv-instance"] == cluster.other(told["decode"])


async def test_the_load_of_who_decodes_says_nothing_of_who_prefills(start: Any) -> None:
    """Idle decode instances do not make a prefill instance count as overloaded."""
    cluster = await start(prefill=1, balance_abs_threshold=2)
    told = await hinted(cluster)
    fleet = cluster.router.fleet
    loads = [fleet.begin(told["instance"], 0) for _ in range(10)]
    try:
        assert (await cluster.ask())["x-kv-route-reason"] == "advised"
    finally:
        for load in loads:
            fleet.end(load)


async def test_a_high_priority_is_spread_over_both_kinds(start: Any) -> None:
    cluster = await start(policy="prompt-tree")
    await cluster.ask()
    placed = [
        await cluster.hint(
            messages=[*NEXT, {"role": "assistant", "content": f"Answer {number}"}],
            session=f"high {number}",
            priority=1,
        )
        for number in range(6)
    ]
    for end in ("instance", "decode"):
        counts = [sum(told[end] == url for told in placed) for url in {told[end] for told in placed}]
        assert len(counts) == 2
        assert max(counts) - min(counts) <= 2


async def test_a_document_is_held_back_where_prompts_are_computed(start: Any, client: Any) -> None:
    cluster = await start(prefill=2, decode=1)
    router, links = cluster.router, cluster.links
    router.documents._links = links
    body = {"messages": CHAT, "instances": 3}
    async with client.put(f"{router.url}/v1/documents/d", json=body) as answer:
        assert answer.status == 200, await answer.text()
        told = await answer.json()
    roles = {cluster.workers[name].model_info["disaggregation_mode"] for name in told["instances"]}
    assert (len(told["instances"]), roles) == (2, {"prefill"})
    ask = {"model": "m", "messages": NEXT[1:], "document_ids": ["d"], "max_tokens": 2}
    status, _, headers = await post(client, router, "/v1/chat/completions", ask)
    assert (status, headers["x-kv-prefill-instance"] in told["instances"]) == (200, True)
    (_, sent, _) = cluster.workers[headers["x-kv-instance"]].requests[-1]
    assert sent["messages"] == [*CHAT, *NEXT[1:]], "decode is sent the prompt that prefill computes"
