"""Fields of clients' requests: content that is named by others, at any depth, and unknown fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.router import RouterConfig
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.tenancy.admit import judged
from sglang_ext.router.tenancy.request_fields import forbidden, unjudged
from sglang_ext.router.tenancy.tenants import ANYBODY, Caller

NONE: frozenset[str] = frozenset()
HASH = "sha256:" + "0" * 64
IMAGE = {"type": "image_url", "image_url": {"url": "data:,", "content_hash": HASH}}


def asked_of(payload: dict[str, Any]) -> Dialect:
    """The HTTP API that takes such a body."""
    takes = (d for d in DIALECTS.values() if {d.prompt_field, *d.media_in, *d.own_fields} & payload.keys())
    return next(takes, GENERATE)


POISON: list[tuple[dict[str, Any], str]] = [
    ({"mm_hashes": ["00"]}, "mm_hashes"),
    ({"mm_hashes": [["00"], ["01"]]}, "mm_hashes"),
    ({"mm_content_hashes": [HASH]}, "mm_content_hashes"),
    ({"lora_id": "other"}, "lora_id"),
    ({"lora_id": ["other", None]}, "lora_id"),
    ({"http_worker_ipc": "ipc:///tmp/x"}, "http_worker_ipc"),
    ({"encoder_urls": ["http://169.254.169.254"]}, "encoder_urls"),
    ({"positional_embed_overrides": {}}, "positional_embed_overrides"),
    ({"token_indices_to_pool": [1 << 30]}, "token_indices_to_pool"),
    ({"sampling_params": {"is_normalized": True}}, "sampling_params.is_normalized"),
    ({"sampling_params": [{}, {"stop_str_max_len": 1 << 40}]}, "sampling_params[1].stop_str_max_len"),
    ({"sampling_params": {"of_a_newer_server": 1}}, "sampling_params.of_a_newer_server"),
    ({"image_data": {"url": "x", "content_hash": HASH}}, "image_data.content_hash"),
    ({"image_data": [[{"url": "x"}], [{"url": "x", "content_hash": HASH}]]}, "image_data.content_hash"),
    ({"image_data": [{"format": "processor_output", "pad_value": 7}]}, "image_data.pad_value"),
    ({"video_data": [{"url": "x", "hash": 7}]}, "video_data.hash"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages: image_url.content_hash"),
    ({"messages": [{"role": "tool", "content": [{"content": [IMAGE]}]}]}, "messages: image_url.content_hash"),
    ({"input": [{"type": "message", "content": [IMAGE]}]}, "input: image_url.content_hash"),
    ({"input": [{"type": "function_call_output", "output": [IMAGE]}]}, "input: image_url.content_hash"),
]


@pytest.mark.parametrize(("payload", "field"), POISON)
@pytest.mark.parametrize("tenant", [False, True])
def test_no_caller_names_content_that_others_share(payload: dict[str, Any], field: str, tenant: bool) -> None:
    assert [name for name, _ in forbidden(payload, asked_of(payload), tenant=tenant, trusted=NONE)] == [field]


@pytest.mark.parametrize(
    "payload",
    [
        {"text": "x", "sampling_params": {"temperature": 0, "custom_params": {"content_hash": 1}}},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"mm_hashes": 1}}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        {"mm_hashes": None, "lora_id": None, "image_data": None, "messages": "x", "sampling_params": 3},
        {"tools": [{"function": {"parameters": {"properties": {"content_hash": {}}}}}]},
        {"metadata": {"mm_hashes": "1"}, "lora_path": "a", "extra_key": "b", "user": "c"},
    ],
)
def test_what_is_the_request_s_own_affair_passes(payload: dict[str, Any]) -> None:
    for tenant in (False, True):
        assert list(forbidden(payload, asked_of(payload), tenant=tenant, trusted=NONE)) == []
        assert unjudged(payload, asked_of(payload), tenant=tenant, trusted=NONE) == []


@pytest.mark.parametrize("name", ["cache_salt", "request_id", "bootstrap_room", "custom_logit_processor"])
def test_fields_of_tenants_are_free_without_tenants(name: str) -> None:
    assert [
        found for found, _ in forbidden({name: "x"}, GENERATE, tenant=True, trusted=frozenset({name}))
    ] == [name]
    assert list(forbidden({name: "x"}, GENERATE, tenant=False, trusted=NONE)) == []


def test_the_operator_can_vouch_for_clients_but_not_for_tenants() -> None:
    trusted = frozenset({"mm_hashes", "content_hash", "names_of_a_newer_server"})
    payload: dict[str, Any] = {
        "mm_hashes": ["00"],
        "messages": [{"content": [IMAGE]}],
        "names_of_a_newer_server": 1,
    }
    assert list(forbidden(payload, asked_of(payload), tenant=False, trusted=trusted)) == []
    assert unjudged(payload, asked_of(payload), tenant=False, trusted=trusted) == []
    found = {name for name, _ in forbidden(payload, asked_of(payload), tenant=True, trusted=trusted)}
    assert found == {"mm_hashes", "messages: image_url.content_hash"}
    assert unjudged(payload, asked_of(payload), tenant=True, trusted=trusted) == ["names_of_a_newer_server"]


@pytest.mark.parametrize("name", ["lora_id", "cache_salt", "is_normalized", "text"])
def test_only_what_needs_trust_can_be_trusted(name: str) -> None:
    with pytest.raises(ConfigError, match="--trusted-fields"):
        RouterConfig(trusted_fields=f"mm_hashes, {name}")
    assert RouterConfig(trusted_fields="mm_hashes, newer").trusted() == {"mm_hashes", "newer"}


def test_unknown_fields_are_left_out_of_the_body() -> None:
    payload = {"text": "x", "store_it": 1, "kv_hints": {"version": 1}, "user": "u"}
    body = json.dumps(payload).encode()
    assert json.loads(judged(body, payload, ANYBODY, GENERATE)) == {"text": "x", "user": "u"}
    assert json.loads(judged(body, payload, Caller(trusted=frozenset({"kv_hints"})), GENERATE)) == {
        "text": "x",
        "kv_hints": {"version": 1},
        "user": "u",
    }
    plain = b'{ "text":"x" }'
    assert judged(plain, {"text": "x"}, ANYBODY, GENERATE) is plain


BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 2}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
async def test_through_every_endpoint(path: str, start_worker: Any, start_router: Any, client: Any) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    for name in ("mm_hashes", "lora_id", "http_worker_ipc"):
        async with client.post(router.url + path, json={**BODIES[path], name: ["00"]}) as answer:
            said = await answer.json()
            assert answer.status == 400
            assert name in said["error"]["message"]
    assert worker.requests == []
    more = {"prompt_cache_key": "k", "of_a_newer_server": {"a": 1}}
    async with client.post(router.url + path, json={**BODIES[path], **more}) as answer:
        assert answer.status == 200, await answer.text()
    ((_, body, _),) = worker.requests
    assert set(body) & set(more) == set()
    assert set(body) >= set(BODIES[path])


async def test_an_operator_who_vouches(start_worker: Any, start_router: Any, client: Any) -> None:
    worker = await start_worker()
    router = await start_router(worker, trusted_fields="mm_hashes")
    body = {**BODIES["/generate"], "mm_hashes": ["00"]}
    async with client.post(router.url + "/generate", json=body) as answer:
        assert answer.status == 200
    assert worker.requests[0][1]["mm_hashes"] == ["00"]
