"""Hints through a router: the routing of later requests, the reports, the effects of a flood. Workers are
stand-ins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from index_views import Matches, in_dram, see

from sglang_ext.protocol.agent import MAX_PROMPT_BYTES, Advise, Advised, Withdraw
from sglang_ext.router import Router
from sglang_ext.router.endpoints.advisory_api import MOST_ACTIONS
from sglang_ext.router.hints.whereabouts import Whereabouts, whereabouts
from sglang_ext.router.policies import Match
from sglang_ext.tiers import Tier
from tests.support.servers.workers import Gate

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "Tell me of the sea. " * 20}]
NEXT = [*CHAT, {"role": "assistant", "content": "It is deep. " * 20}, {"role": "user", "content": "And?"}]
OTHER = [{"role": "user", "content": "Something else."}]
EPOCH = bytes(16)


@dataclass
class Links:
    """Agents that take every hint, and report only when the test wants."""

    told: list[tuple[str, Advise | Withdraw]] = field(default_factory=list)
    reachable: bool = True
    computing: bool = False
    deaf: set[str] = field(default_factory=set)
    """Instances without an agent."""

    def computes(self, name: str) -> bool:
        return self.computing

    def send(self, name: str, message: Advise | Withdraw) -> bool:
        reached = self.reachable and name not in self.deaf
        if reached:
            self.told.append((name, message))
        return reached

    def hints(self) -> list[Advise]:
        return [message for _, message in self.told if isinstance(message, Advise)]

    def withdrawn(self) -> list[str]:
        return [message.id for _, message in self.told if isinstance(message, Withdraw)]


def link(router: Router) -> Links:
    links = Links()
    router.advisor.preparer._links = links
    return links


async def post(client: Any, router: Router, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    async with client.post(router.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


async def chat(client: Any, router: Router, messages: Any, session: str | None = None) -> Any:
    headers = {} if session is None else {"x-session-id": session}
    body = {"model": "m", "messages": messages, "max_tokens": 2}
    status, _, told = await post(client, router, "/v1/chat/completions", body, **headers)
    assert status == 200
    return told


async def advise(client: Any, router: Router, **body: Any) -> dict[str, Any]:
    status, told, _ = await post(client, router, "/v1/advisory", body)
    assert status == 200, told
    assert isinstance(told, dict)
    return told


async def test_a_request_goes_where_its_hint_said(start_worker, start_router, client) -> None:
    one, two = await start_worker(), await start_worker()
    router = await start_router(one, two, policy="round-robin")
    for turn in range(4):
        told = await advise(client, router, messages=CHAT, session=f"s{turn}")
        assert told["verdict"] == "accepted"
        await chat(client, router, OTHER)  # another request comes between, and takes its turn
        answered = await chat(client, router, NEXT, session=f"s{turn}")
        assert answered["x-kv-instance"] == told["instance"]
        assert answered["x-kv-route-reason"] == "advised"


async def test_a_request_without_a_session_is_known_by_its_conversation(
    start_worker, start_router, client, eventually: Callable[..., Any]
) -> None:
    router = await start_router(await start_worker(), await start_worker(), policy="round-robin")
    await eventually(lambda: router.tokenizers.trust.chat)
    told = await advise(client, router, messages=NEXT[:2])
    answered = await chat(client, router, NEXT)
    assert (answered["x-kv-route-reason"], answered["x-kv-instance"]) == ("advised", told["instance"])
    again = await chat(client, router, NEXT)
    assert again["x-kv-route-reason"] == "round-robin", "a hint is good for one request"


async def test_expected_requests_count_as_load(start_worker, start_router, client) -> None:
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers, policy="least-load")
    placed = [(await advise(client, router, text=f"Conversation {i}"))["instance"] for i in range(6)]
    assert sorted(placed) == sorted([worker.url for worker in workers] * 2)


async def test_what_is_below_hbm_is_brought_and_the_client_can_see_it(
    start_worker, start_router, client, monkeypatch
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    links = link(router)
    in_dram(router, monkeypatch)
    await chat(client, router, NEXT, session="s")
    told = await advise(client, router, session="s", priority=3, ttl_s=60)
    assert told["state"] == "moving"
    assert told["tokens"]["dram"] > 0
    assert told["tokens"]["hbm"] == 0
    (hint,) = links.hints()
    assert (hint.id, hint.priority) == (told["id"], 3)
    assert 0 < hint.ttl_s <= 60
    url = f"{router.url}/v1/advisory/{told['id']}"
    async with client.get(url) as answer:
        assert (await answer.json())["state"] == "moving"

    waiting = asyncio.create_task(client.get(url + "?wait_s=20"))
    streaming = asyncio.create_task(client.get(url, headers={"accept": "text/event-stream"}))
    await asyncio.sleep(0)
    brought = told["tokens"]["dram"]
    router.advisor.preparer.on_advised(worker.url, Advised(EPOCH, told["id"], "done", brought, brought))
    async with await waiting as answer:
        ready = await answer.json()
    assert (ready["state"], ready["moved_tokens"]) == ("ready", brought)
    assert (ready["tokens"]["hbm"], ready["tokens"]["dram"]) == (brought, 0)
    async with await streaming as answer:
        events = [line[6:] for line in (await answer.text()).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["state"] == "ready"


async def test_an_unanswered_hint_is_sent_again_on_a_new_channel(
    start_worker, start_router, client, monkeypatch
) -> None:
    """The hint, or the answer, may be lost with the channel: it is never taken for done."""
    worker = await start_worker()
    router = await start_router(worker)
    links = link(router)
    in_dram(router, monkeypatch)
    await chat(client, router, NEXT, session="s")
    told = await advise(client, router, session="s", ttl_s=60)
    at = worker.url

    async def state() -> str:
        async with client.get(f"{router.url}/v1/advisory/{told['id']}") as answer:
            return (await answer.json())["state"]

    router.agents.reached("http://another:1")
    assert len(links.hints()) == 1, "it was not asked"
    router.agents.reached(at)
    once, again = links.hints()
    assert (again.id, again.tokens, again.spans) == (once.id, once.tokens, once.spans)
    assert again.ttl_s <= once.ttl_s
    links.reachable = False
    router.agents.reached(at)
    assert await state() == "moving", "and is still waited for where that is lost too"
    links.reachable = True
    router.agents.reached(at)
    assert len(links.hints()) == 3
    router.advisor.preparer.on_advised(at, Advised(EPOCH, told["id"], "done", 0, 0))
    assert await state() == "ready"
    router.agents.reached(at)
    assert len(links.hints()) == 3, "there is nothing to answer any more"


@pytest.mark.parametrize("why", ["taken back", "taken for dead"])
async def test_the_end_of_a_hint_is_sent_again_on_a_new_channel(
    why: str, start_worker, start_router, client, monkeypatch
) -> None:
    """Otherwise, if the message was lost with the former channel, it holds KV back for the hint's full
    time."""
    worker = await start_worker()
    router = await start_router(worker)
    links = link(router)
    in_dram(router, monkeypatch)
    await chat(client, router, NEXT, session="s")
    told = await advise(client, router, session="s", ttl_s=60)
    links.reachable = False
    if why == "taken back":
        async with client.delete(f"{router.url}/v1/advisory/{told['id']}") as answer:
            assert answer.status == 200
    else:
        router.advisor.preparer.on_lost(worker.url)
    assert links.withdrawn() == []
    links.reachable = True
    router.agents.reached("http://another:1")
    assert links.withdrawn() == [], "it was not asked"
    router.agents.reached(worker.url)
    assert links.withdrawn() == [told["id"]]
    entry = router.advisor.book.find(told["id"])
    monkeypatch.setattr(router.advisor._clock, "monotonic", lambda: entry.expires)
    router.agents.reached(worker.url)
    assert links.withdrawn() == [told["id"]], "it knows by itself when the time is over"


async def test_the_agent_gets_a_withdrawal_when_the_request_has_come(
    start_worker, start_router, client, monkeypatch
) -> None:
    router = await start_router(await start_worker())
    links = link(router)
    in_dram(router, monkeypatch)
    await chat(client, router, NEXT, session="s")
    told = await advise(client, router, session="s")
    await chat(client, router, NEXT, session="s")
    assert links.withdrawn() == [told["id"]], "bringing more would only compete with the request"
    async with client.get(f"{router.url}/v1/advisory/{told['id']}") as answer:
        assert (await answer.json())["state"] == "used"


async def test_a_hint_that_is_taken_back_is_withdrawn(
    start_worker, start_router, client, monkeypatch
) -> None:
    router = await start_router(await start_worker())
    links = link(router)
    in_dram(router, monkeypatch)
    await chat(client, router, NEXT, session="s")
    told = await advise(client, router, session="s")
    async with client.delete(f"{router.url}/v1/advisory/{told['id']}") as answer:
        assert (await answer.json())["state"] == "cancelled"
    assert links.withdrawn() == [told["id"]]
    answered = await chat(client, router, NEXT, session="s")
    assert answered["x-kv-route-reason"] != "advised"


async def test_what_is_in_hbm_already_is_held_back(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    links = link(router)
    await chat(client, router, NEXT, session="s")
    told = await advise(client, router, session="s", ttl_s=20)
    assert (told["state"], told["tokens"]["hbm"] > 0) == ("ready", True)
    (hint,) = links.hints()
    assert (hint.id, hint.spans) == (told["id"], ())
    assert (await advise(client, router, session="s", ttl_s=21))["id"] == told["id"]
    assert len(links.hints()) == 1, "a second more is not worth a message"
    assert (await advise(client, router, session="s", ttl_s=60))["id"] == told["id"]
    assert links.hints()[1].ttl_s > 50, "it is held back for longer"
    await chat(client, router, NEXT, session="s")
    assert links.withdrawn() == [told["id"]], "nothing is held back any more"


async def test_a_grown_conversation_ends_what_was_held_back_for_the_former(
    start_worker, start_router, client
) -> None:
    router = await start_router(await start_worker())
    links = link(router)
    await chat(client, router, NEXT, session="s")
    first = await advise(client, router, messages=CHAT, session="s")
    url = f"{router.url}/v1/advisory/{first['id']}"
    second = await advise(client, router, messages=NEXT[:2], session="s")
    assert second["id"] != first["id"]
    assert links.withdrawn() == [first["id"]]
    async with client.get(url) as answer:
        told = await answer.json()
    assert (told["state"], "longer one" in told["why"]) == ("cancelled", True)


async def test_a_stream_ends_with_its_hint(start_worker, start_router, client, monkeypatch) -> None:
    """Also when it expires as another one comes."""
    router = await start_router(await start_worker(), hints_per_second=10_000)
    link(router)
    in_dram(router, monkeypatch)
    await chat(client, router, NEXT, session="s")
    told = await advise(client, router, session="s", ttl_s=0.2)
    url = f"{router.url}/v1/advisory/{told['id']}"
    async with client.get(url, headers={"accept": "text/event-stream"}) as stream:
        assert b"moving" in await stream.content.readline()
        monkeypatch.setattr(router.advisor, "tick", lambda: None)
        async with asyncio.timeout(20):
            while router.advisor.book.find(told["id"]).state.value == "moving":
                await advise(client, router, text="Another one")
            rest = await stream.text()
    assert '"state":"expired"' in rest
    assert rest.rstrip().endswith("data: [DONE]")


async def test_an_instance_that_computes_ahead_gets_hints_of_uncached_prompts(
    start_worker, start_router, client
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    links = link(router)
    told = await advise(client, router, messages=CHAT)
    assert (told["state"], links.hints()) == ("ready", []), "there is nothing to bring"
    links.computing = True
    told = await advise(client, router, messages=NEXT[:2])
    assert (told["state"], told["tokens"]["hbm"]) == ("moving", 0)
    url = f"{router.url}/v1/advisory/{told['id']}"
    router.advisor.preparer.on_advised(worker.url, Advised(EPOCH, told["id"], "computing", 0, 0))
    async with client.get(url) as answer:
        assert (await answer.json())["state"] == "computing"
    router.advisor.check()
    router.advisor.preparer.on_advised(worker.url, Advised(EPOCH, told["id"], "computed", 64, 0, 64))
    async with client.get(url) as answer:
        ready = await answer.json()
    assert (ready["state"], ready["moved_tokens"], ready["computed_tokens"]) == ("ready", 0, 64)
    assert ready["tokens"]["hbm"] == 64
    assert sum(ready["tokens"].values()) == sum(told["tokens"].values())
    async with client.get(router.url + "/metrics") as answer:
        assert "hint_computed_tokens_total 64.0" in await answer.text()


async def test_a_high_priority_is_spread_over_instances(start_worker, start_router, client) -> None:
    """With any policy: here, a policy that prefers the instance with the conversation."""
    workers = [await start_worker() for _ in range(3)]
    router = await start_router(*workers, policy="prompt-tree")
    first = await chat(client, router, NEXT)

    async def placed(number: int, priority: int) -> str:
        messages = [*NEXT, {"role": "assistant", "content": f"Answer {number}"}]
        told = await advise(
            client, router, messages=messages, session=f"s{priority}-{number}", priority=priority
        )
        return str(told["instance"])

    low = [await placed(number, 0) for number in range(4)]
    assert set(low) == {first["x-kv-instance"]}
    high = [await placed(number, 1) for number in range(6)]
    counts = sorted(high.count(worker.url) for worker in workers)
    assert counts[-1] - counts[0] <= 2
    assert counts[0] >= 1
    assert high[0] == first["x-kv-instance"], "where its KV is, as long as that is as good"


async def test_an_unreachable_agent_costs_the_hint_its_move_and_not_its_place(
    start_worker, start_router, client, monkeypatch
) -> None:
    router = await start_router(await start_worker())
    link(router).reachable = False
    in_dram(router, monkeypatch)
    await chat(client, router, NEXT, session="s")
    told = await advise(client, router, session="s")
    assert (told["verdict"], told["state"], told["moved_tokens"]) == ("accepted", "ready", 0)
    answered = await chat(client, router, NEXT, session="s")
    assert answered["x-kv-route-reason"] == "advised"


async def test_a_hint_does_not_survive_its_instance(
    start_worker, start_router, client, eventually: Callable[..., Any]
) -> None:
    one, two = await start_worker(), await start_worker()
    router = await start_router(one, two)
    told = await advise(client, router, messages=NEXT[:2], session="s")
    (gone,) = [worker for worker in (one, two) if worker.url == told["instance"]]
    router.fleet.lost(gone.url, "the test says so")
    router.advisor.tick()
    async with client.get(f"{router.url}/v1/advisory/{told['id']}") as answer:
        assert (await answer.json())["state"] == "failed"
    answered = await chat(client, router, NEXT, session="s")
    assert answered["x-kv-route-reason"] != "advised"


async def test_an_instance_that_filled_up_meanwhile_is_not_insisted_on(
    start_worker, start_router, client
) -> None:
    one, two = await start_worker(), await start_worker()
    router = await start_router(one, two, balance_abs_threshold=2)
    told = await advise(client, router, messages=NEXT[:2], session="s")
    loads = [router.fleet.begin(told["instance"], 0) for _ in range(10)]
    try:
        answered = await chat(client, router, NEXT, session="s")
    finally:
        for load in loads:
            router.fleet.end(load)
    assert answered["x-kv-instance"] != told["instance"]


async def test_a_session_that_is_not_known_needs_its_conversation(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    status, body, _ = await post(client, router, "/v1/advisory", {"session": "never seen"})
    assert (status, body["error"]["code"]) == (404, "unknown_session")


async def test_a_flood_is_refused_with_the_time_to_come_back(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), hints_per_second=0.001)
    answers = [await post(client, router, "/v1/advisory", {"text": f"Prompt {i}"}) for i in range(6)]
    assert [status for status, _, _ in answers] == [200] + [429] * 5
    assert int(answers[-1][2]["retry-after"]) >= 1
    assert answers[-1][1]["error"]["code"] == "hint_refused"
    await chat(client, router, CHAT)  # requests are served all the same


async def test_hints_expire_and_leave_nothing_behind(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    told = await advise(client, router, text="Once", ttl_s=0.01)
    async with asyncio.timeout(60):
        while router.advisor.book.find(told["id"]).state.value != "expired":
            await asyncio.sleep(0.01)
            router.advisor.tick()
    assert router.advisor.book.promised(told["instance"]) == 0


async def test_one_tenants_hints_are_not_anothers(start_worker, start_router, client, tmp_path) -> None:
    keys = {"keys": [{"key": "key-of-a-1", "tenant": "a"}, {"key": "key-of-b-1", "tenant": "b"}]}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(keys))
    path.chmod(0o600)
    router = await start_router(await start_worker(), await start_worker(), api_keys_file=str(path))
    a, b = {"authorization": "Bearer key-of-a-1"}, {"authorization": "Bearer key-of-b-1"}
    status, told, _ = await post(client, router, "/v1/advisory", {"messages": NEXT[:2], "session": "s"}, **a)
    assert status == 200
    async with client.get(f"{router.url}/v1/advisory/{told['id']}", headers=b) as answer:
        assert answer.status == 404
    body = {"model": "m", "messages": NEXT, "max_tokens": 2}
    _, _, theirs = await post(client, router, "/v1/chat/completions", body, **{**b, "x-session-id": "s"})
    assert theirs["x-kv-route-reason"] != "advised"
    _, _, own = await post(client, router, "/v1/chat/completions", body, **{**a, "x-session-id": "s"})
    assert own["x-kv-route-reason"] == "advised"
    status, refused, _ = await post(
        client, router, "/v1/advisory", {"text": "x", "cache_salt": "stolen"}, **a
    )
    assert (status, refused["error"]["code"]) == (400, "reserved_field")


# -- hints in other requests --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        (
            "/v1/chat/completions",
            {"model": "m", "messages": CHAT, "prompt_cache_options": {"prewarm": True, "ttl": "1m"}},
            lambda answer: answer["choices"][0]["message"]["content"],
        ),
        (
            "/v1/completions",
            {"model": "m", "prompt": "Once", "prompt_cache_options": {"prewarm": True}},
            lambda answer: answer["choices"][0]["text"],
        ),
        (
            "/v1/messages",
            {"model": "m", "messages": CHAT, "max_tokens": 0},
            lambda answer: "".join(part["text"] for part in answer["content"]),
        ),
        (
            "/generate",
            {"text": "Once", "prompt_cache_options": {"prewarm": True}},
            lambda answer: answer["text"],
        ),
    ],
)
async def test_a_prewarm_is_a_hint_and_generates_nothing(
    start_worker, start_router, client, path, body, text_of
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    before = len(worker.requests)
    status, answer, headers = await post(client, router, path, body)
    assert status == 200
    assert text_of(answer) == ""
    assert headers["x-kv-advisory"] == "accepted"
    assert len(worker.requests) == before, "no worker has to do with it"
    assert router.advisor.book.find(headers["x-kv-advisory-id"]) is not None
    async with client.post(router.url + path, json={**body, "stream": True}) as streamed:
        assert streamed.status == 200
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert b"data: " in await streamed.read()


async def test_an_envelope_is_taken_beside_its_request(
    start_worker, start_router, client, eventually: Callable[..., Any]
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    actions = [
        {"action_id": "1", "action_type": "prefetch", "action_version": "1", "payload": {"text": "Next"}},
        {"action_id": "2", "action_type": "prefetch", "action_version": "1", "payload": {"text": 3}},
        {"action_id": "3", "action_type": "other", "action_version": "1", "payload": {}},
    ]
    hints = {"protocol_version": "1", "message_id": "m", "actions": actions}
    body = {"text": "Now", "sampling_params": {"max_new_tokens": 1}, "kv_hints": hints}
    worker.before_head = Gate()
    asked = asyncio.create_task(post(client, router, "/generate", body))
    await eventually(lambda: len(router.advisor.book) == 1)
    await eventually(lambda: not any(task.get_name() == "take a hint" for task in asyncio.all_tasks()))
    worker.before_head.open()
    status, _, headers = await asked
    assert status == 200
    (entry,) = router.advisor.book.live()
    assert headers["x-kv-hints"] == f"3=rejected, 1=completed;id={entry.id}, 2=rejected"


async def test_an_envelope_of_thousands_costs_as_much_as_one_of_a_few(
    start_worker, start_router, client, eventually: Callable[..., Any]
) -> None:
    router = await start_router(await start_worker(), hints_per_second=1e6)
    actions = [{"action_type": "prefetch", "payload": {"input_ids": [n] * 20}} for n in range(2000)]
    body = {"text": "Now", "sampling_params": {"max_new_tokens": 1}, "kv_hints": {"actions": actions}}
    for _ in range(3):
        status, _, _ = await post(client, router, "/generate", body)
        assert status == 200
    await eventually(lambda: len(router.advisor.book) == MOST_ACTIONS)
    await eventually(lambda: not any(task.get_name() == "take a hint" for task in asyncio.all_tasks()))
    assert len(router.advisor.book) == MOST_ACTIONS


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input_ids": [5] * (MAX_PROMPT_BYTES // 4 + 1)}, "hint_too_long"),
        ({"input_ids": [5] * 100, "extra_key": "x" * 5000}, "out_of_range"),
        ({"input_ids": [5] * 250_000}, "context_length_exceeded"),
    ],
)
async def test_a_hint_that_does_not_fit_a_message_or_a_context_is_refused(
    body: Any, code: str, start_worker, start_router, client
) -> None:
    length = 200_000 if code == "context_length_exceeded" else 1 << 20
    router = await start_router(await start_worker(context_length=length))
    body["input_ids"] = body["input_ids"][: MAX_PROMPT_BYTES // 4] if length == 200_000 else body["input_ids"]
    links = link(router)
    for _ in range(3):
        status, told, _ = await post(client, router, "/v1/advisory", body)
        assert (status, told["error"]["code"]) == (400, code)
    assert links.told == []
    assert len(router.advisor.book) == 0
    router.advisor.check()


async def test_a_hint_whose_placing_fails_gives_its_budget_back(
    start_worker, start_router, client, monkeypatch
) -> None:
    router = await start_router(await start_worker(), hint_tokens=600)

    def broken(matches: Matches) -> Matches:
        raise RuntimeError("the tree fails")

    with monkeypatch.context() as patch:
        see(router, patch, broken)
        for number in range(3):
            status, _, _ = await post(client, router, "/v1/advisory", {"input_ids": [number] * 500})
            assert status == 500
    told = await advise(client, router, input_ids=[9] * 500)
    assert told["state"] != "waiting", "the budget of the others is free"
    assert len(list(router.advisor.book.live())) == 1
    router.advisor.check()


# -- where the KV is ------------------------------------------------------------------------------------


def test_whereabouts_add_up_whatever_the_index_says() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        tokens = int(rng.integers(0, 200))
        matches = {}
        for name in ("one", "two"):
            total = int(rng.integers(0, 250))
            dram = int(rng.integers(0, total + 1))
            disk = int(rng.integers(0, total - dram + 1))
            matches[name] = Match(total, below={Tier.DRAM: dram, Tier.DISK: disk})
        where = whereabouts(matches, "one", tokens)
        parts = where.as_json().values()
        assert min(parts) >= 0
        assert sum(parts) == tokens
        moved = where.brought_up(int(rng.integers(0, 300)))
        told = moved.as_json()
        assert min(told.values()) >= 0
        assert sum(told.values()) - told["nowhere"] == tokens - where.nowhere
        assert told["hbm"] >= where.as_json()["hbm"]


def test_whereabouts_of_what_another_has() -> None:
    matches = {"one": Match(32, below={Tier.DRAM: 16}), "two": Match(96)}
    assert whereabouts(matches, "one", 100) == Whereabouts({Tier.HBM: 16, Tier.DRAM: 16}, 64, 4)
    assert whereabouts({}, "one", 10) == Whereabouts(nowhere=10)
