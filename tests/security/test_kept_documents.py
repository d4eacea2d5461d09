"""Documents are bounded in bytes: each, all of a tenant, and the text that one request makes of those it
names."""

from __future__ import annotations

import io
import json
from typing import Any

from sglang_ext.router import Router
from sglang_ext.router.api.documents import MAX_COMPOSED_BYTES, MAX_DOCUMENT_BYTES, MOST_NAMED, TOMBSTONE_S

QUESTION = {"model": "m", "messages": [{"role": "user", "content": "y"}], "max_tokens": 1}
MIB = 1 << 20


async def put(client: Any, router: Router, id: str, body: dict[str, Any]) -> tuple[int, Any]:
    data = io.BytesIO(json.dumps(body).encode())
    async with client.put(f"{router.url}/v1/documents/{id}", data=data) as answer:
        return answer.status, await answer.json()


async def ask(client: Any, router: Router, *ids: str) -> tuple[int, Any]:
    body = {**QUESTION, "document_ids": ids}
    async with client.post(f"{router.url}/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


def message(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


async def test_a_document_is_limited_in_bytes(start_worker, start_router, client) -> None:
    """Megabytes that no template renders were a document of 8 tokens."""
    router = await start_router(await start_worker())
    status, body = await put(client, router, "d", message("x", padding="p" * MAX_DOCUMENT_BYTES))
    assert (status, body["error"]["code"]) == (413, "document_too_large")
    assert str(MAX_DOCUMENT_BYTES) in body["error"]["message"]
    assert len(router.documents.book) == 0


async def test_what_no_server_reads_of_a_message_is_not_kept(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    parts: Any = [{"type": "text", "text": "x", "padding": "p" * MIB}]
    assert (await put(client, router, "parts", message(parts)))[0] == 200
    assert (await put(client, router, "d", message("x", padding="p" * MIB, name="n")))[0] == 200
    assert all(kept.document.size_bytes < 100 for kept in router.documents.book)
    assert (await ask(client, router, "d"))[0] == 200
    ((_, sent, _),) = [each for each in worker.requests if each[0] == "/v1/chat/completions"]
    first = {"role": "user", "content": "x", "name": "n"}
    assert sent["messages"] == [first, *QUESTION["messages"]]


async def test_a_tenant_has_a_budget_in_bytes(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), document_bytes_per_tenant=MIB)
    # Fields that are read, and that this template does not render.
    body = message("x", reasoning_content="p" * (400 << 10))
    assert [(await put(client, router, id, body))[0] for id in "ab"] == [200, 200]
    status, refused = await put(client, router, "c", body)
    assert (status, refused["error"]["code"]) == (429, "document_budget_exceeded")
    assert "bytes" in refused["error"]["message"]
    assert (await put(client, router, "a", body))[0] == 200, "it goes for the one of its id"
    async with client.get(router.url + "/metrics") as answer:
        metrics = await answer.text()
    assert 'sglang_ext_router_table_entries{table="documents"} 2.0' in metrics
    assert router.documents.book.size_bytes <= MIB


async def test_names_are_counted_before_they_are_composed(start_worker, start_router, client) -> None:
    """A request of 200 bytes that names one document often was one of 384 MB for the worker."""
    worker = await start_worker()
    router = await start_router(worker)
    size = MAX_COMPOSED_BYTES // MOST_NAMED
    assert (await put(client, router, "d", message("x", reasoning_content="p" * size)))[0] == 200
    status, body = await ask(client, router, *["d"] * MOST_NAMED)
    assert (status, body["error"]["code"]) == (413, "documents_too_large")
    assert not [path for path, *_ in worker.requests if path == "/v1/chat/completions"]
    assert (await ask(client, router, "d", "d", "d"))[0] == 200, "the twin: a text that fits is sent"
    assert router.documents._composing.used == 0


async def test_deleted_documents_are_counted_and_soon_forgotten(start_worker, start_router, client) -> None:
    """They were remembered for up to 30 days, in no budget."""
    router = await start_router(await start_worker())
    for number in range(3):
        assert (await put(client, router, f"d{number}", {"text": "x", "ttl_s": 30 * 86_400}))[0] == 200
        async with client.delete(f"{router.url}/v1/documents/d{number}") as answer:
            assert answer.status == 200
    book = router.documents.book
    assert (len(book), len(book.deleted)) == (0, 3)
    now = router.documents._clock.monotonic()
    assert all(each.expires <= now + TOMBSTONE_S for each in book.deleted.values())
    book.expire(now + TOMBSTONE_S)
    assert len(book.deleted) == 0
