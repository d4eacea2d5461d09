"""The API of the router in front of real SGLang servers: dialects, tenants, SDKs, SGLang's own programs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import requests
from api_fuzz import BROKEN, TIMEOUT_S, fuzz, is_ours, send_broken
from http_bodies import bodies
from router_rig import ROOT, SPECS, running, sglang_program, until

from sglang_ext.patches.versions import SGLANG_VERSION, installed_sglang_version
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.endpoints.openapi import description
from tests.support.servers.dialect import record
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

Json = dict[str, Any]
KEYS = {"a": "sk-tenant-a-1", "b": "sk-tenant-b-1"}
TEXT = "The librarian of a small town reads a book about radix trees. " * 6
TOOL: Json = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TURNS: list[Json] = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": [{"type": "text", "text": "I see."}]},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "then?"}]},
]


@pytest.fixture(scope="module")
def servers(get_server: Callable[[ServerSpec], ServerProcess]) -> list[ServerProcess]:
    return [get_server(spec) for spec in SPECS]


async def test_a_server_answers_as_the_recorded_one(servers: list[ServerProcess]) -> None:
    """The stand-ins are compared with the recording. `python -m scripts.record_dialect` records a new one."""
    if installed_sglang_version() != SGLANG_VERSION:
        pytest.skip(f"recorded is SGLang {SGLANG_VERSION}")
    await until(lambda: running(servers) == 0)
    servers[0].flush()
    recorded = json.loads((ROOT / "tests" / "router" / "dialect.json").read_text("utf-8"))
    found = await asyncio.to_thread(record, servers[0].url)
    assert list(found) == list(recorded)
    assert {name: found[name] for name in found if found[name] != recorded[name]} == {}


@pytest.fixture
async def start(servers: list[ServerProcess]) -> AsyncIterator[Callable[..., Any]]:
    """Start a router in front of flushed servers; options are ``RouterConfig``'s."""
    routers: list[Router] = []
    await until(lambda: running(servers) == 0)
    for server in servers:
        server.flush()

    async def begin(**options: Any) -> Router:
        router = Router(RouterConfig(worker_urls=tuple(s.url for s in servers), port=0, **options))
        await router.start()
        routers.append(router)
        return router

    yield begin
    for router in routers:
        router.check()
        await router.stop()


def keys_file(folder: Path, *, isolated: bool = True) -> str:
    path = folder / "keys.json"
    entries = [{"key": key, "tenant": tenant, "isolated": isolated} for tenant, key in KEYS.items()]
    path.write_text(json.dumps({"keys": entries}))
    path.chmod(0o600)
    return str(path)


BODIES: dict[str, Json] = {
    "/generate": {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 4,
    },
    "/v1/completions": {"prompt": TEXT, "temperature": 0, "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "temperature": 0, "max_output_tokens": 8},
    "/v1/messages": {
        "model": "m", "messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 4,
    },
}  # fmt: skip


def model_of(router: Router) -> str:
    assert router.fleet.model is not None
    return router.fleet.model.model.name


async def _cached(router: Router, client: aiohttp.ClientSession, path: str, tenant: str) -> int:
    """The server's own count of cached tokens."""
    headers = {"authorization": f"Bearer {KEYS[tenant]}", "x-request-id": f"{tenant}{path.replace('/', '-')}"}
    body = {**BODIES[path], "model": model_of(router)}
    async with client.post(router.url + path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return int(answer.headers.get("x-kv-cached-tokens", 0))


@pytest.mark.parametrize("path", BODIES)
async def test_two_tenants_never_share_kv(
    path: str, start: Callable[..., Any], client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    router = await start(api_keys_file=keys_file(tmp_path), policy="round-robin")
    # Round robin over two servers: each tenant comes to each server, after the other has been there.
    found = {"a": 0, "b": 0}
    for _ in range(2):
        assert await _cached(router, client, path, "a") == 0
    for _ in range(2):
        assert await _cached(router, client, path, "b") == 0
    for _ in range(2):
        for tenant in found:
            found[tenant] += await _cached(router, client, path, tenant)
    assert min(found.values()) > 100


@pytest.mark.parametrize("path", BODIES)
async def test_with_the_salt_off_they_would(
    path: str, start: Callable[..., Any], client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The leaking twin: the very same requests find the other tenant's KV."""
    router = await start(api_keys_file=keys_file(tmp_path, isolated=False), policy="round-robin")
    for _ in range(2):
        await _cached(router, client, path, "a")
    assert await _cached(router, client, path, "b") > 40


async def test_messages_have_the_tokens_that_the_server_gives_them(
    start: Callable[..., Any], servers: list[ServerProcess], client: aiohttp.ClientSession
) -> None:
    router: Router = await start()
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}
    plain = {"model": "m", "max_tokens": 2, "messages": TURNS}
    bodies: list[Json] = [
        plain,
        {**plain, "system": "Be terse."},
        {**plain, "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": " terse."}]},
        {**plain, "tools": [TOOL]},
        {
            **plain,
            "tools": [TOOL],
            "messages": [
                *TURNS,
                {"role": "assistant", "content": [{"type": "text", "text": "so"}, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
            ],
        },
    ]
    for number, body in enumerate(bodies):
        name = f"m{number}"
        async with client.post(
            router.url + "/v1/messages", json=body, headers={"x-request-id": name}
        ) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
        story = router.request_log.find(name, tenant=None, admin=True)
        assert story is not None
        theirs = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        assert [prompt.tokens for prompt in story.prompts] == [theirs], body
        count = {name: value for name, value in body.items() if name != "max_tokens"}
        async with client.post(router.url + "/v1/messages/count_tokens", json=count) as answer:
            assert (await answer.json())["input_tokens"] == theirs


async def test_responses_have_the_tokens_that_the_server_gives_them(
    start: Callable[..., Any], client: aiohttp.ClientSession
) -> None:
    router: Router = await start()
    function = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    bodies: list[Json] = [
        {"input": TEXT},
        {"input": TEXT, "instructions": "Be terse."},
        {
            "instructions": "Be terse.",
            "input": [
                {"role": "developer", "content": "No jokes."},
                {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
                {"role": "assistant", "content": "two"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "three"},
                {"role": "user", "content": "four"},
            ],
            "tools": [function],
        },
    ]
    for number, body in enumerate(bodies):
        name = f"r{number}"
        # SGLang itself takes no "default" under this path, as it does under the others.
        model = model_of(router) if number else "default"
        full = {**body, "model": model, "max_output_tokens": 6, "temperature": 0}
        async with client.post(
            router.url + "/v1/responses", json=full, headers={"x-request-id": name}
        ) as answer:
            assert answer.status == 200, await answer.text()
            response = await answer.json()
            usage = response["usage"]
        story = router.request_log.find(response["id"], tenant=None, admin=True)
        assert story is not None
        assert story.record.request_id == name
        assert [prompt.tokens for prompt in story.prompts] == [usage["input_tokens"]], body


async def test_a_response_in_the_background_counts_until_the_server_has_ended_it(
    start: Callable[..., Any], client: aiohttp.ClientSession
) -> None:
    router: Router = await start()
    url = router.url + "/v1/responses"
    body = {
        "model": "default", "input": TEXT, "temperature": 0, "max_output_tokens": 40, "background": True,
        "store": True,
    }  # fmt: skip
    async with client.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        response = await answer.json()
    assert response["status"] == "queued"
    background = router.background
    assert len(background) == 1
    assert sum(row.in_flight for row in router.fleet.rows.values()) == 1
    await until(lambda: len(background) == 0)
    assert sum(row.in_flight for row in router.fleet.rows.values()) == 0
    async with client.get(f"{url}/{response['id']}") as answer:
        assert (await answer.json())["status"] in ("completed", "incomplete")


@pytest.mark.parametrize("tenant", [None, "a"])
async def test_the_anthropic_client_works(
    tenant: str | None, start: Callable[..., Any], servers: list[ServerProcess], tmp_path: Path
) -> None:
    """Passed through without tenants, translated with them: the answers are the same."""
    router: Router = await start(**({"api_keys_file": keys_file(tmp_path)} if tenant else {}))
    ask: Any = {
        "model": "m",
        "max_tokens": 8,
        "messages": TURNS,
        "system": "Be terse.",
        "extra_body": {"temperature": 0.0},
    }
    direct = anthropic.AsyncAnthropic(base_url=servers[0].url, api_key="none", max_retries=0)
    routed = anthropic.AsyncAnthropic(
        base_url=router.url, api_key=KEYS[tenant] if tenant else "none", max_retries=0
    )
    async with direct, routed:
        expected = await direct.messages.create(**ask)
        got = await routed.messages.create(**ask)
        assert [block.model_dump() for block in got.content] == [b.model_dump() for b in expected.content]
        assert got.stop_reason == expected.stop_reason
        total = expected.usage.input_tokens + (expected.usage.cache_read_input_tokens or 0)
        assert got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0) == total
        assert got.usage.output_tokens == expected.usage.output_tokens
        async with routed.messages.stream(**ask) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == final.content[0].text == got.content[0].text  # type: ignore[union-attr]
        assert final.stop_reason == expected.stop_reason
        count = await routed.messages.count_tokens(model="m", messages=TURNS, system="Be terse.")
        assert count.input_tokens == total
        with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
            await routed.messages.create(model="m", max_tokens=1, messages=[])
        wrong = anthropic.AsyncAnthropic(base_url=router.url, api_key="sk-wrong-key", max_retries=0)
        if tenant:
            with pytest.raises(anthropic.AuthenticationError):
                await wrong.messages.create(**ask)
        await wrong.close()


async def test_the_openai_client_gets_responses(start: Callable[..., Any]) -> None:
    router: Router = await start()
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as sdk:
        model = (await sdk.models.list()).data[0].id
        whole = await sdk.responses.create(model=model, input=TEXT, temperature=0, max_output_tokens=8)
        assert whole.output_text
        stream = await sdk.responses.create(
            model=model, input=TEXT, temperature=0, max_output_tokens=8, stream=True
        )
        kinds = [event.type async for event in stream]
        assert (kinds[0], kinds[-1]) == ("response.created", kinds[-1])
        assert kinds[-1] in ("response.completed", "response.incomplete")
        completion = await sdk.completions.create(model=model, prompt="One day", max_tokens=4, temperature=0)
        assert completion.choices[0].text
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve("resp_none")


async def test_an_abort_ends_the_request_at_its_server(
    start: Callable[..., Any], servers: list[ServerProcess], client: aiohttp.ClientSession
) -> None:
    router: Router = await start()
    body = {
        "text": "Go on",
        "rid": "job-1",
        "sampling_params": {"max_new_tokens": 6000, "ignore_eos": True},
    }
    request = asyncio.ensure_future(client.post(router.url + "/generate", json=body))
    await until(lambda: running(servers) == 1)
    async with client.post(router.url + "/abort_request", json={"rid": "job-1"}) as answer:
        assert await answer.json() == {"aborted": 1}
    async with await request as answer:
        value = await answer.json()
    reason = value["meta_info"]["finish_reason"] if "meta_info" in value else value["error"]
    assert "abort" in json.dumps(reason).lower()
    await until(lambda: running(servers) == 0)


async def test_answers_and_metrics_report_where_cached_tokens_were_found(
    start: Callable[..., Any], client: aiohttp.ClientSession
) -> None:
    router: Router = await start()
    for path in ("/generate", "/v1/chat/completions", "/v1/completions"):
        for expected in (False, True):
            body = {**BODIES[path], "extra_key": path}  # completions and generate have the same prompt
            async with client.post(router.url + path, json=body, headers={"x-request-id": "q"}) as answer:
                assert answer.status == 200
                assert (int(answer.headers["x-kv-cached-tokens"]) > 40) is expected, path
        async with client.get(router.url + "/explain/q") as answer:
            told = await answer.json()
        assert told["causes"] == ["hit"], told
        assert sum(told["cached"]["tiers"].values()) == told["cached"]["tokens"]
    tokens = router.metrics.registry.get_sample_value
    hbm = tokens("sglang_ext_router_tier_tokens_total", {"tier": "hbm"})
    assert hbm == tokens("sglang_ext_router_cached_tokens_total")
    assert hbm is not None
    assert hbm > 120
    for path in ("/health_generate", "/server_info", "/get_model_info"):
        async with client.get(router.url + path) as answer:
            assert answer.status == 200
    async with client.post(router.url + "/tokenize", json={"prompt": "One day"}) as answer:
        ids = (await answer.json())["tokens"]
    async with client.post(router.url + "/detokenize", json={"tokens": ids}) as answer:
        assert (await answer.json())["text"] == "One day"


async def test_frontend_programs_run_unchanged(
    start: Callable[..., Any], servers: list[ServerProcess], tmp_path: Path
) -> None:
    router: Router = await start()
    script = str(ROOT / "examples" / "frontend_program.py")
    out = await sglang_program("script", script, "--url", router.url, "--tokens", "6", cwd=tmp_path)
    told = json.loads(out[out.index("{") :])
    assert told["streamed"] > 0
    assert len(told["tickets"]) == 4
    for row in told["tickets"]:
        assert row["team"] in ("shipping", "billing", "returns", "abuse")
        assert re.fullmatch(r"[A-Z]{2}-[0-9]{4}", row["order"])
        assert re.fullmatch(r"[1-9]", row["days"])
    value = router.metrics.registry.get_sample_value
    assert value("sglang_ext_router_requests_total", {"endpoint": "/generate", "status": "200"})
    # Instructions and tickets are prefilled once, not once per step.
    cached, prompted = (value(f"sglang_ext_router_{kind}_tokens_total") for kind in ("cached", "prompt"))
    assert cached is not None
    assert prompted
    assert cached > 0.6 * prompted


@pytest.mark.parametrize("backend", [pytest.param("sglang", marks=pytest.mark.long), "sglang-oai-chat"])
async def test_bench_serving_runs(
    backend: str, start: Callable[..., Any], servers: list[ServerProcess], tmp_path: Path
) -> None:
    router: Router = await start()
    assert router.fleet.model is not None
    arguments = {
        "--backend": backend,
        "--base-url": router.url,
        "--model": router.fleet.model.model.name,
        "--tokenizer": router.fleet.model.tokenizer_path,
        "--dataset-name": "random-ids",
        "--num-prompts": "6",
        "--random-input-len": "48",
        "--random-output-len": "8",
        "--request-rate": "20",
        "--output-file": str(tmp_path / "out.jsonl"),
    }
    flat = [part for pair in arguments.items() for part in pair]
    await sglang_program("module", "sglang.bench_serving", *flat, "--flush-cache", cwd=tmp_path)
    result = json.loads((tmp_path / "out.jsonl").read_text())
    assert result["completed"] == 6


def never_ours(path: str, method: str, body: Any, answer: Any) -> None:
    assert not is_ours(answer), (method, path, str(body)[:300], answer.status_code, answer.text[:300])


async def test_no_request_harms_a_server(
    start: Callable[..., Any], servers: list[ServerProcess], long_run: bool
) -> None:
    """A corpus of broken requests, variations of it, and schemathesis's requests from the description, at
    real servers."""
    # This test does not check whether a busy machine's servers answer probes in time.
    router: Router = await start(health_check_timeout_secs=20.0)
    assert await asyncio.to_thread(send_broken, router.url, never_ours) == len(BROKEN)
    examples = 60 if long_run else 3
    sent = await asyncio.to_thread(fuzz, router.url, description(), never_ours, examples=examples)
    assert sent > 60

    def send_mutated() -> None:
        with requests.Session() as session:
            for path, body in bodies(3000 if long_run else 60, Random(0)):
                never_ours(path, "POST", body, session.post(router.url + path, data=body, timeout=TIMEOUT_S))

    await asyncio.to_thread(send_mutated)
    await until(lambda: running(servers) == 0)
    for server in servers:
        assert server.running
        assert server.generate([1, 2, 3], max_new_tokens=2).prompt_tokens == 3
    assert len(router.fleet.usable()) == 2
    assert len(router.flights) == 0
