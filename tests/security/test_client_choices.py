"""Clients' choices that must not decide: paths at servers, shapes of fields, requests that have left the
queue."""

from __future__ import annotations

from typing import Any

import pytest
from yarl import URL

from sglang_ext.router.dispatch.queueing import MOST_GONE, Line, QueueFull, Waiting


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../flush_cache",
        "/v1/models/%2e%2e/%2e%2e/flush_cache",
        "/v1/models/a/../../flush_cache",
        "/v1/models/a%2F..%2F..%2Fflush_cache",
        "/v1/models/..%5c..%5cflush_cache",
        "/v1/models/%252e%252e/%252e%252e/flush_cache",
        "/v1/models/./x",
        "/v1/models//x",
    ],
)
async def test_the_name_of_a_model_leads_nowhere_else(start_worker, start_router, client, path: str) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    asked = len(worker.requests)
    async with client.get(URL(router.url + path, encoded=True)) as answer:
        assert answer.status == 404
        assert "flush_cache" not in [each[0] for each in worker.requests[asked:]]
        assert (await answer.json())["error"]["code"] in ("model_not_found", "not_found")


CHOICES = [{"function": "x"}, {"function": 1}, {"function": []}, {"function": None}, {}, {"type": "function"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("path", ["/v1/advisory", "/v1/chat/completions", "/v1/responses"])
async def test_a_malformed_tool_choice_is_the_clients_fault(
    start_worker, start_router, client, path: str, choice: Any
) -> None:
    router = await start_router(await start_worker())
    message = {"role": "user", "content": "hi"}
    body: dict[str, Any] = {"model": "m", "tools": TOOLS, "tool_choice": choice}
    if path == "/v1/responses":
        body |= {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
    else:
        body["messages"] = [message]
    async with client.post(router.url + path, json=body) as answer:
        told = await answer.text()
    assert answer.status < 500, told
    if path != "/v1/responses":
        assert answer.status == 400, told
    body["tool_choice"] = "auto"
    async with client.post(router.url + path, json=body) as answer:
        assert answer.status == 200, "the twin"


def test_a_queue_forgets_requests_that_have_left() -> None:
    line = Line(4)
    for _ in range(4):
        line.join(Waiting(priority=9))
    for _ in range(20_000):
        ticket, _ = line.join(Waiting(priority=10))  # displaces one
        line.leave(ticket)
        line.join(Waiting(priority=9))
        line.check()
    assert len(line._heap) <= 3 * len(line) + MOST_GONE + 1
    with pytest.raises(QueueFull):
        line.join(Waiting())
    for _ in range(4):
        assert line.next() is not None
    assert line.next() is None
