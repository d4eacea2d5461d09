"""The description of the API: that it is true, and that requests made from it break nothing."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import jsonschema
import pytest
import requests
from api_fuzz import BROKEN, fuzz, is_ours, operations, send_broken

from sglang_ext.flags.help import Removed
from sglang_ext.router import RouterConfig
from sglang_ext.router.endpoints.openapi import description

pytestmark = pytest.mark.slow


async def test_every_endpoint_is_described_and_there(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker())
    async with client.get(router.url + "/openapi.json") as answer:
        told = await answer.json()
    assert told == description()
    described = {(path.partition("{")[0], method) for path, method in operations(told)}
    served = {(route.path, method) for route in router.routes for method in route.methods}
    not_sglangs = ("/ui", "/cluster", "/v1/advisory")
    ours = {route.path for route in router.routes if not route.path.startswith(not_sglangs)}
    assert described - served == set(), "described, and not there"
    assert ours - {path for path, _ in described} == set()


def test_the_description_is_openapi() -> None:
    told = description(asks_for_key=True)
    assert told["openapi"].startswith("3.1")
    assert told["security"]
    for item in told["paths"].values():
        for operation in item.values():
            body = operation.get("requestBody")
            if body is not None:
                jsonschema.Draft202012Validator.check_schema(body["content"]["application/json"]["schema"])


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}}),
    ("/generate", {"input_ids": [[1], [2]], "extra_key": ["a", "b"]}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": [1, 2]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}]}),
    ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
    ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "x"}], "options": {"seed": 1}}),
    ("/api/generate", {"model": "m", "prompt": "x", "stream": False}),
    ("/vertex_generate", {"instances": [{"text": "x"}], "parameters": {"stream": True}}),
    ("/open_session", {"capacity_of_str_len": 1000, "session_id": "s", "timeout": 1.5}),
    ("/close_session", {"session_id": "s"}),
]


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_what_clients_send_fits_the_description(path: str, body: dict[str, Any]) -> None:
    schema = description()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({}, schema)


def never_ours(path: str, method: str, body: Any, answer: requests.Response) -> None:
    assert not is_ours(answer), (method, path, str(body)[:300], answer.status_code, answer.text[:300])


async def test_requests_made_from_the_description_find_no_bug(
    start_worker, start_router, long_run: bool
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    sent = await asyncio.to_thread(
        fuzz, router.url, description(), never_ours, examples=200 if long_run else 5, passed_on=long_run
    )
    assert sent > 200
    assert len(router.fleet.usable()) == 1
    assert len(router.flights) == 0


async def test_broken_requests_find_no_bug(start_worker, start_router, eventually) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    assert await asyncio.to_thread(send_broken, router.url, never_ours) == len(BROKEN)
    assert len(router.flights) == 0
    # A response in the background holds its place until it has ended.
    assert router.admission.admitted == len(worker.in_background) > 0
    worker.kept.update(worker.in_background)
    await eventually(lambda: router.admission.admitted == 0)


async def test_a_bug_would_be_found(start_worker, start_router, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: with a bug in the router, the very same corpus finds it."""
    router = await start_router(await start_worker())

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("sglang_ext.router.api.chat.take_objects", broken)
    with pytest.raises(AssertionError, match="internal error"):
        await asyncio.to_thread(send_broken, router.url, never_ours)


def test_every_flag_has_a_home_in_the_documentation() -> None:
    """docs/router.md names every flag of the router, and none that is refused naming another."""
    from pathlib import Path

    flags, removed = set[str](), set[str]()
    for action in RouterConfig.parser()._actions:
        (removed if isinstance(action, Removed) else flags).update(action.option_strings)
    flags -= {"-h", "--help"}
    text = (Path(__file__).parents[3] / "docs" / "router.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z-]*", text))
    assert flags - named == set()
    assert removed
    assert removed & named == set()
