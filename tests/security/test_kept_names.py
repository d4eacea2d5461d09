"""Names that clients choose are bounded, in the router and in schedulers: requests leave them behind."""

from __future__ import annotations

import io
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_ext.engine.tiers.block_names import BlockNames
from sglang_ext.keys import Namespace
from sglang_ext.patches.hooks.request_values import MAX_NAME_CHARACTERS as MOST_AT_SERVERS
from sglang_ext.patches.hooks.request_values import check_message
from sglang_ext.radix_global import Holder
from sglang_ext.router.api.validation import MAX_NAME_CHARACTERS
from sglang_ext.router.clients.divergence import Turn
from sglang_ext.router.dispatch.explain import LoggedRequest, RequestLog
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.bounded import size_of
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.tiers import Tier

LONG = "n" * (MAX_NAME_CHARACTERS + 1)
GENERATE: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


async def post(client: Any, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with client.post(url, data=io.BytesIO(json.dumps(body).encode())) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/advisory", {"text": "x", "session": LONG}, "session"),
        ("/v1/advisory", {"text": "x", "extra_key": LONG}, "extra_key"),
        ("/generate", {**GENERATE, "extra_key": LONG}, "extra_key"),
        ("/generate", {**GENERATE, "cache_salt": LONG}, "cache_salt"),
        ("/generate", {**GENERATE, "lora_path": LONG}, "lora_path"),
        ("/generate", {**GENERATE, "rid": LONG}, "rid"),
        ("/generate", {"input_ids": [[5], [6]], "rid": ["a", LONG]}, "rid[1]"),
        ("/generate", {"input_ids": [[5], [6]], "extra_key": ["a", LONG]}, "extra_key[1]"),
        ("/generate", {**GENERATE, "session_params": {"id": LONG}}, "session_params.id"),
        ("/v1/chat/completions", {**CHAT, "extra_key": LONG}, "extra_key"),
        ("/v1/chat/completions", {**CHAT, "model": f"m:{LONG}"}, "model"),
        ("/v1/completions", {"model": "m", "prompt": "x", "extra_key": LONG}, "extra_key"),
        ("/v1/responses", {"model": "m", "input": "x", "previous_response_id": LONG}, "previous_response_id"),
        ("/abort_request", {"rid": 3 * LONG}, "rid"),
    ],
)
async def test_a_name_is_limited_in_characters(path, body, field, start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    status, answer = await post(client, router.url + path, body)
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert "characters, and may have" in answer["error"]["message"]
    assert not [sent for sent, *_ in worker.requests if sent == path]
    if "extra_key" in body and type(body["extra_key"]) is str:
        status, answer = await post(client, router.url + path, {**body, "extra_key": LONG[1:]})
        assert status == 200, answer


def test_the_request_log_charges_the_names_of_their_prompts() -> None:
    """The ring of 32 MiB had room for 14,000 names of any length."""
    log = RequestLog(1 << 20)
    for number in range(100):
        prompt = Encoded(("tokens", None, f"{number}" + "k" * 100_000, None), b"1234" * 16, 16)
        log.add(LoggedRequest(Record(f"r{number}", "POST", "/generate", 0.0), [prompt], 0.0), 1)
    kept = sum(size_of(*logged.prompts[0].namespace) for logged in log._requests)
    assert 1 <= len(log) < 11
    assert kept < log.size_bytes <= 1 << 20


def test_sessions_charge_their_names() -> None:
    memory = SessionMemory(1 << 20)
    for number in range(100):
        memory.learn(f"{number}" + "s" * 100_000, ("tokens", None, "k" * 1000, None), Turn(b"1234", 1))
    assert len(memory) < 11


def test_names_of_namespaces_take_no_megabytes() -> None:
    """4096 were cached, of any length, longer than their KV."""
    tracemalloc.start()
    identity = Namespace("m", "w", "float16", "geometry")
    names = BlockNames(identity, 16, Holder.of("a", 0, Tier.DISK), "fresh")
    first = names.digest((0, "k" * 500_000, None))
    for number in range(100):
        names.digest((0, f"{number}" + "k" * 500_000, None))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1 << 20
    assert names.digest((0, "k" * 500_000, None)) == first != names.digest((0, "k" * 500_001, None))


def test_servers_refuse_names_that_are_too_long() -> None:
    class Message(msgspec.Struct):
        extra_key: str | None = None
        rid: str | None = None

    def check(**values: str) -> None:
        check_message(Message(**values), msgspec.msgpack.encode, lambda data: SimpleNamespace(data=data))

    check(extra_key="k" * MOST_AT_SERVERS, rid="r")
    for name in ("extra_key", "rid"):
        with pytest.raises(ValueError, match=f"{name} has {MOST_AT_SERVERS + 1} characters, and may have"):
            check(**{name: "k" * (MOST_AT_SERVERS + 1)})
