"""Documents through a router: the workers' requests, ownership, retention, by stand-ins."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from index_views import in_dram
from test_hinting import Links, post

from sglang_ext.clock import SystemClock
from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router
from sglang_ext.router.api.documents import Document
from sglang_ext.router.hints.document_book import LEASE_S, RENEW_S

pytestmark = pytest.mark.slow

MANUAL = [{"role": "system", "content": "The manual of the ship says many things. " * 20}]
ASK = [{"role": "user", "content": "What does it say?"}]


class Later(SystemClock):
    """The time, and how far the test is ahead of it."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    def wall(self) -> float:
        return super().wall() + self.ahead


def link(router: Router) -> Links:
    links = Links()
    router.documents._links = links
    return links


async def put(client: Any, router: Router, id: str, key: str | None = None, **body: Any) -> tuple[int, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with client.put(f"{router.url}/v1/documents/{id}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def told(client: Any, router: Router, path: str, method: str = "GET") -> tuple[int, Any]:
    async with client.request(method, router.url + path) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("path", "document", "request_", "meant"),
    [
        (
            "/v1/chat/completions",
            {"messages": MANUAL},
            {"model": "m", "messages": ASK, "max_tokens": 2},
            {"messages": [*MANUAL, *ASK]},
        ),
        (
            "/generate",
            {"text": "The manual. " * 40},
            {"text": "Why?"},
            {"text": "The manual. " * 40 + "Why?"},
        ),
        ("/v1/completions", {"input_ids": [5, 6, 7]}, {"prompt": [8]}, {"prompt": [5, 6, 7, 8]}),
    ],
)
async def test_a_worker_is_sent_what_is_meant(
    path, document, request_, meant, start_worker, start_router, client
) -> None:
    """So that the answer is the one to the whole prompt."""
    worker = await start_worker()
    router = await start_router(worker)
    status, body = await put(client, router, "manual", **document)
    assert (status, body["object"], body["id"]) == (200, "document", "manual")
    status, answer, _ = await post(client, router, path, {**request_, "document_ids": ["manual"]})
    assert status == 200, answer
    status, plain, _ = await post(client, router, path, {**request_, **meant})
    named, whole = (sent for where, sent, _ in worker.requests if where == path)
    assert named == whole
    assert "document_ids" not in named
    for each in (answer, plain):
        for told_apart in ("id", "created", "meta_info", "usage", "sglext"):
            each.pop(told_apart, None)
    assert answer == plain


async def test_it_is_explained_and_counted(
    start_worker, start_router, client, eventually: Callable[..., Any]
) -> None:
    router = await start_router(await start_worker())
    await eventually(lambda: router.tokenizers.trust.chat)
    _, registered = await put(client, router, "manual", messages=MANUAL)
    assert registered["tokens"] > 100
    body = {"model": "m", "messages": ASK, "document_ids": ["manual"], "max_tokens": 2}
    for _ in range(2):
        status, _, headers = await post(client, router, "/v1/chat/completions", body)
        assert status == 200
    _, story = await told(client, router, f"/explain/{headers['x-request-id']}")
    whole = registered["tokens"] // 16 * 16
    assert story["documents"]["ids"] == ["manual"]
    assert story["documents"]["tokens"] == registered["tokens"]
    assert story["documents"]["cached_tokens"] >= whole
    async with client.get(router.url + "/metrics") as answer:
        metrics = await answer.text()
    assert 'sglang_ext_router_document_requests_total{cached="all"} 1.0' in metrics
    assert 'sglang_ext_router_document_requests_total{cached="none"} 1.0' in metrics
    assert f"sglang_ext_router_document_cached_tokens_total {float(whole)}" in metrics
    assert "sglang_ext_router_documents 1.0" in metrics
    _, again = await told(client, router, "/v1/documents/manual")
    assert again["requests"] == 2
    _, _, headers = await post(client, router, "/v1/chat/completions", {"model": "m", "messages": ASK})
    _, story = await told(client, router, f"/explain/{headers['x-request-id']}")
    assert story["documents"] is None


async def test_it_is_listed_replaced_and_deleted(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    links = link(router)
    await put(client, router, "b", input_ids=[1] * 64, ttl_s=60)
    await put(client, router, "a", input_ids=[2] * 64)
    _, listed = await told(client, router, "/v1/documents")
    assert [each["id"] for each in listed["data"]] == ["a", "b"]
    first, second = links.hints()
    assert (first.ttl_s, second.ttl_s) == (pytest.approx(60, abs=1), LEASE_S)
    await put(client, router, "b", input_ids=[1] * 64, ttl_s=600)
    assert links.withdrawn() == [], "the same again only lives longer"
    assert links.hints()[-1].id == first.id
    await put(client, router, "b", input_ids=[3] * 64)
    assert links.withdrawn() == [first.id]
    assert links.hints()[-1].id != first.id
    status, body = await told(client, router, "/v1/documents/b", "DELETE")
    assert (status, body) == (200, {"id": "b", "object": "document", "deleted": True})
    assert links.withdrawn() == [first.id, links.hints()[-1].id]
    for path, method in (("/v1/documents/b", "GET"), ("/v1/documents/b", "DELETE")):
        status, body = await told(client, router, path, method)
        assert (status, body["error"]["code"]) == (404, "no_such_document")
    status, body, _ = await post(client, router, "/generate", {"input_ids": [1], "document_ids": ["a", "b"]})
    assert (status, body["error"]["param"]) == (404, "document_ids[1]")


async def test_a_document_is_announced_again_and_again_while_it_lives(
    start_worker, start_router, client
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    links = link(router)
    documents = router.documents
    documents._clock = clock = Later()
    await put(client, router, "d", input_ids=[1] * 64, ttl_s=RENEW_S + 5, priority=2)
    (first,) = links.hints()
    assert (first.priority, first.tokens, first.ttl_s) == (
        2,
        documents.book.find("", "d").hint.key,
        pytest.approx(RENEW_S + 5, abs=1),
    )
    await documents.tick()
    assert len(links.hints()) == 1
    clock.ahead += RENEW_S
    await documents.tick()
    assert [hint.id for hint in links.hints()] == [first.id] * 2
    assert links.hints()[1].ttl_s == pytest.approx(5, abs=1)
    router.fleet.restarted(worker.url)
    assert documents.book.pinned() == 0
    await documents.tick()
    assert len(links.hints()) == 3, "an instance that was started anew knows nothing of it"
    assert documents.book.pinned() > 0
    clock.ahead += 5
    await documents.tick()
    assert (links.withdrawn(), len(documents.book)) == ([first.id], 0)
    status, _, _ = await post(client, router, "/generate", {"input_ids": [1], "document_ids": ["d"]})
    assert status == 404


async def test_an_instance_that_goes_is_replaced(start_worker, start_router, client) -> None:
    workers = {
        worker.url: worker for worker in (await start_worker(), await start_worker(), await start_worker())
    }
    router = await start_router(*workers.values())
    links = link(router)
    _, body = await put(client, router, "d", input_ids=[1] * 64, instances=2)
    held = set(body["instances"])
    assert {name for name, _ in links.told} == held
    assert len(held) == 2
    gone = held.pop()
    router.fleet.lost(gone, "the test says so")
    links.told.clear()
    await router.documents.tick()
    hints = [name for name, message in links.told if message in links.hints()]
    assert hints == [*(set(workers) - held - {gone})], "an instance that still holds it gets no message"


async def test_what_is_elsewhere_or_below_is_brought(
    start_worker, start_router, client, monkeypatch, eventually: Callable[..., Any]
) -> None:
    router = await start_router(await start_worker())
    links = link(router)
    in_dram(router, monkeypatch)
    ids = [7] * 160
    await post(client, router, "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})
    _, body = await put(client, router, "d", input_ids=ids)
    ((name, held),) = body["instances"].items()
    assert (held["held_back"], held["tokens"]["dram"]) == (True, 160)
    links.deaf.add(name)
    router.documents.again(name)
    await router.documents.tick()
    _, body = await told(client, router, "/v1/documents/d")
    assert body["instances"][name]["held_back"] is False, "nobody was told"


async def test_budgets_are_kept(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), document_blocks_per_tenant=100)
    assert (await put(client, router, "a", input_ids=[1] * 1024))[0] == 200
    status, body = await put(client, router, "b", input_ids=[2] * 1024)
    assert (status, body["error"]["code"]) == (429, "document_budget_exceeded")
    assert "36 left" in body["error"]["message"]
    assert (await put(client, router, "a", input_ids=[2] * 1024))[0] == 200, "in place of the former"
    await told(client, router, "/v1/documents/a", "DELETE")
    assert (await put(client, router, "b", input_ids=[2] * 1024))[0] == 200


async def test_a_tenant_has_its_own_documents(start_worker, start_router, client, tmp_path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(
        json.dumps(
            {"keys": [{"key": f"key-of-{name}", "tenant": name, "priority": 1} for name in ("one", "two")]}
        )
    )
    path.chmod(0o600)
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(path), document_blocks_per_tenant=100)
    links = link(router)
    one, two = ({"authorization": f"Bearer key-of-{name}"} for name in ("one", "two"))
    assert (await put(client, router, "d", "key-of-one", input_ids=[1] * 1024))[0] == 200
    for method in ("GET", "DELETE"):
        async with client.request(method, router.url + "/v1/documents/d", headers=two) as answer:
            assert answer.status == 404
    body = {"input_ids": [9], "document_ids": ["d"], "sampling_params": {"max_new_tokens": 1}}
    status, refused, _ = await post(client, router, "/generate", body, **two)
    assert (status, refused["error"]["code"]) == (404, "no_such_document")
    assert worker.requests == []
    assert (await put(client, router, "d", "key-of-two", input_ids=[2] * 1024))[0] == 200, "its own budget"
    for headers, token in ((one, 1), (two, 2)):
        assert (await post(client, router, "/generate", body, **headers))[0] == 200
        assert worker.requests[-1][1]["input_ids"] == [token] * 1024 + [9]
    salts = list(
        dict.fromkeys(hint.cache_salt for hint in links.hints())
    )  # hints are repeated as time passes
    assert None not in salts
    assert len(set(salts)) == 2
    assert [sent["cache_salt"] for _, sent, _ in worker.requests] == salts
    status, refused = await put(client, router, "e", "key-of-one", input_ids=[1], priority=2)
    assert (status, refused["error"]["param"]) == (400, "priority")


async def test_routers_learn_from_each_other(start_worker, start_router, client) -> None:
    """A document registered at one router is served and held back by the other; the newest counts, whatever
    the order."""
    worker = await start_worker()
    one, two = await start_router(worker), await start_router(worker)
    links = link(two)
    heard: list[Document] = []
    one.documents.changed.subscribe(heard.append)
    await put(client, one, "d", input_ids=[1] * 64)
    await put(client, one, "d", input_ids=[2] * 64)
    older, newer = heard
    for document in (newer, older, newer):
        two.documents.learn(document)
    await two.documents.tick()
    (hint,) = links.hints()
    assert hint.tokens == encode_tokens([2] * 64)
    body = {"input_ids": [9], "document_ids": ["d"], "sampling_params": {"max_new_tokens": 1}}
    assert (await post(client, two, "/generate", body))[0] == 200
    assert worker.requests[-1][1]["input_ids"] == [2] * 64 + [9]
    await told(client, one, "/v1/documents/d", "DELETE")
    deleted = heard[-1]
    two.documents.learn(deleted)
    two.documents.learn(newer)
    assert links.withdrawn() == [hint.id]
    assert two.documents.all() == [deleted]
    assert (await post(client, two, "/generate", body))[0] == 404


async def test_other_apis_and_forged_names_are_refused(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await put(client, router, "d", messages=MANUAL)
    anthropic = {"model": "m", "max_tokens": 1, "messages": ASK, "document_ids": ["d"]}
    status, body, _ = await post(client, router, "/v1/messages", anthropic)
    assert (status, "takes no documents" in body["error"]["message"]) == (400, True)
    for forged in ("../d", "", "D", "d\u0000", "x" * 10_000):
        status, body, _ = await post(
            client, router, "/v1/chat/completions", {"model": "m", "messages": ASK, "document_ids": [forged]}
        )
        assert (status, body["error"]["code"]) == (404, "no_such_document")
    status, body = await put(client, router, "e", input_ids=[10**9])
    assert (status, body["error"]["param"]) == (400, "input_ids[0]")
    status, body = await put(client, router, "e", messages=[{"role": "nobody", "content": "x"}])
    assert status == 400
    status, body = await put(client, router, "e", text="x", cache_salt="another's")
    assert (status, body["error"]["param"]) == (400, "cache_salt")
    assert worker.requests == []


async def test_a_hint_may_name_documents(start_worker, start_router, client, eventually) -> None:
    router = await start_router(await start_worker())
    await eventually(lambda: router.tokenizers.trust.chat)
    await put(client, router, "d", messages=MANUAL)
    status, whole, _ = await post(client, router, "/v1/advisory", {"messages": [*MANUAL, *ASK]})
    status, named, _ = await post(client, router, "/v1/advisory", {"messages": ASK, "document_ids": ["d"]})
    assert (status, named["id"]) == (200, whole["id"]), "the same prompt is the same hint"
    status, body, _ = await post(client, router, "/v1/advisory", {"session": "s", "document_ids": ["d"]})
    assert (status, body["error"]["code"]) == (400, "invalid_document")


async def test_what_cannot_be_tokenized_is_served_and_not_held_back(
    start_worker, start_router, client, monkeypatch
) -> None:
    """Until its tokens are known."""
    router = await start_router(await start_worker(tokenizer_path="/nowhere"))
    links = link(router)
    _, body = await put(client, router, "d", messages=MANUAL)
    assert (body["tokens"], links.told) == (None, [])
    assert "tokens are not known" in body["why_not_held_back"]
    status, _, _ = await post(
        client,
        router,
        "/v1/chat/completions",
        {"model": "m", "messages": ASK, "max_tokens": 1, "document_ids": ["d"]},
    )
    assert status == 200
