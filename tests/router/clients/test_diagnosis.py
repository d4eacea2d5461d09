"""Diagnoses of caches, in the words of Anthropic's and of OpenAI's API."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_tenants import keys_file

from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer

SYSTEM = "You are an agent. " + "It reads files and edits code with care. " * 20
TALK = "Read the files of the folder, one after another, and say what each is for. " * 8
READ = {"name": "read", "description": "Reads a file", "input_schema": {"type": "object"}}
WRITE = {**READ, "name": "write"}
Json = dict[str, Any]


def message(last: str | None, *turns: str, **fields: Any) -> Json:
    roles = ("user", "assistant")
    return {
        "model": "default",
        "max_tokens": 4,
        "system": SYSTEM,
        "tools": [READ],
        "messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)],
        "diagnostics": {"previous_message_id": last},
        **fields,
    }


class Asking:
    """Sends bodies to a router."""

    def __init__(self, client: Any, url: str) -> None:
        self._client, self._url = client, url

    async def whole(self, path: str, body: Json, status: int = 200, **headers: str) -> Json:
        async with self._client.post(self._url + path, json=body, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            found: Json = await answer.json()
            return found

    async def events(self, path: str, body: Json) -> list[Json]:
        async with self._client.post(self._url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            lines = (await answer.text()).splitlines()
            return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.fixture(scope="module")
def with_tools(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a worker: a tokenizer whose template renders the tools."""
    folder = tmp_path_factory.mktemp("tokenizer") / "with-tools"
    shutil.copytree(tokenizer_dir, folder)
    template = folder / "chat_template.jinja"
    template.write_text("{{ tools | tojson if tools else '' }}" + template.read_text("utf-8"), "utf-8")
    loaded = load_tokenizer(str(folder), trust_remote_code=False)
    return {"tokenizer": loaded, "tokenizer_path": str(folder)}


@pytest.fixture
async def asking(client, start_worker, start_router, with_tools) -> Asking:
    router = await start_router(await start_worker(**with_tools))
    return Asking(client, router.url)


CHANGED: dict[str, Json] = {
    "system_changed": {"system": "An agent. " + SYSTEM},
    "tools_changed": {"tools": [WRITE, READ]},
    "model_changed": {"model": "default:adapter"},
}


@pytest.mark.parametrize("reason", CHANGED)
async def test_the_part_that_changed_is_named(asking: Asking, reason: str) -> None:
    first = await asking.whole("/v1/messages", message(None, TALK))
    assert first["diagnostics"] is None
    body = message(first["id"], TALK, "so", "go on", **CHANGED[reason])
    second = await asking.whole("/v1/messages", body)
    missed = second["diagnostics"]["cache_miss_reason"]
    assert missed["type"] == reason
    shared = 0 if reason != "system_changed" else 16
    assert 300 < missed["cache_missed_input_tokens"] <= 420 - shared, "of 400 tokens"


async def test_turns_that_go_on_have_no_reason(asking: Asking) -> None:
    first = await asking.whole("/v1/messages", message(None, TALK))
    text = first["content"][0]["text"]
    going_on = message(first["id"], TALK, text, "go on")
    marked = {"type": "text", "text": TALK, "cache_control": {"type": "ephemeral"}}
    going_on["messages"][0]["content"] = [marked]
    second = await asking.whole("/v1/messages", going_on)
    assert second["diagnostics"] is None
    shorter = await asking.whole("/v1/messages", message(second["id"], TALK))
    assert shorter["diagnostics"] is None, "an earlier turn again"


async def test_a_changed_message_is_told_apart_from_another_parameter(asking: Asking) -> None:
    first = await asking.whole("/v1/messages", message(None, TALK, "so", TALK))
    changed = await asking.whole("/v1/messages", message(first["id"], "Now " + TALK, "so", TALK, "yes", "on"))
    missed = changed["diagnostics"]["cache_miss_reason"]
    assert missed["type"] == "messages_changed"
    edited = await asking.whole("/v1/messages", message(first["id"], TALK, "so", "Now " + TALK))
    later = edited["diagnostics"]["cache_miss_reason"]
    assert later["type"] == "messages_changed"
    assert later["cache_missed_input_tokens"] < missed["cache_missed_input_tokens"]


async def test_an_answer_that_is_not_known_is_not_found(asking: Asking) -> None:
    unknown = await asking.whole("/v1/messages", message("msg_0", TALK))
    assert unknown["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    quiet = message(None, TALK)
    del quiet["diagnostics"]
    first = await asking.whole("/v1/messages", quiet)
    assert "diagnostics" not in first
    later = await asking.whole("/v1/messages", message(first["id"], TALK))
    assert later["diagnostics"]["cache_miss_reason"]["type"] == "previous_message_not_found", "did not opt in"
    wrong = await asking.whole(
        "/v1/messages", message(None, TALK, diagnostics={"previous_message_id": 7}), status=400
    )
    assert "diagnostics.previous_message_id" in wrong["error"]["message"]


async def test_a_stream_begins_with_it_and_is_else_unchanged(asking: Asking) -> None:
    first = await asking.events("/v1/messages", message(None, TALK))
    assert first[0]["type"] == "message_start"
    assert first[0]["message"]["diagnostics"] is None
    name = first[0]["message"]["id"]
    body = message(name, TALK, "so", "go on", system="An agent. " + SYSTEM)
    second = await asking.events("/v1/messages", body)
    found = second[0]["message"].pop("diagnostics")
    assert found["cache_miss_reason"]["type"] == "system_changed"
    del body["diagnostics"]
    plain = await asking.events("/v1/messages", body)
    for events in (second, plain):
        del events[0]["message"]["id"], events[0]["message"]["usage"]
        for event in events:
            event.pop("usage", None)
    assert second == plain


async def test_repaired_parts_are_no_difference(asking: Asking) -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1.245.2ef; cc_entrypoint=cli; cch={};"

    def system(cch: str) -> list[Json]:
        return [{"type": "text", "text": text} for text in (billing.format(cch), SYSTEM)]

    first = await asking.whole("/v1/messages", message(None, TALK, system=system("0f3a2")))
    second = await asking.whole(
        "/v1/messages", message(first["id"], TALK, "so", "on", system=system("91bc7"))
    )
    assert second["diagnostics"] is None


async def test_other_tenants_answers_are_not_found(
    client, start_worker, start_router, with_tools, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path, {"key": "a" * 32, "tenant": "a"}, {"key": "b" * 32, "tenant": "b"})
    router = await start_router(await start_worker(**with_tools), api_keys_file=keys)
    asking = Asking(client, router.url)
    mine, theirs = ({"authorization": "Bearer " + name * 32} for name in "ab")
    first = await asking.whole("/v1/messages", message(None, TALK), **mine)
    own = await asking.whole("/v1/messages", message(first["id"], TALK, "so", "on", tools=[WRITE]), **mine)
    assert own["diagnostics"]["cache_miss_reason"]["type"] == "tools_changed"
    other = await asking.whole("/v1/messages", message(first["id"], TALK), **theirs)
    assert other["diagnostics"]["cache_miss_reason"]["type"] == "previous_message_not_found"


def response(last: str | None, *texts: str, **fields: Any) -> Json:
    roles = ("user", "assistant")
    return {
        "model": "default",
        "max_output_tokens": 4,
        "instructions": SYSTEM,
        "input": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)],
        "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
        "prompt_cache_options": {} if last is None else {"comparison_response_id": last},
        **fields,
    }


async def test_responses_are_compared(asking: Asking) -> None:
    first = await asking.whole("/v1/responses", response(None, TALK))
    assert "prompt_cache_diagnostics" not in first
    again = await asking.whole("/v1/responses", response(first["id"], TALK, "so", "go on"))
    assert again["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    tools = [{"type": "function", "name": "write", "parameters": {"type": "object"}}]
    found = await asking.whole("/v1/responses", response(first["id"], TALK, tools=tools))
    missed = found["prompt_cache_diagnostics"]
    assert (missed["type"], missed["reason"]) == ("cache_miss", "tools_changed")
    assert 100 < missed["cache_missed_tokens"] <= missed["comparison_reusable_tokens"]
    other = await asking.whole("/v1/responses", response(first["id"], TALK, instructions="An " + SYSTEM))
    assert other["prompt_cache_diagnostics"]["reason"] == "input_changed"
    unknown = await asking.whole("/v1/responses", response("resp_0", TALK))
    assert unknown["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    goes_on = response(first["id"], "on", previous_response_id=first["id"])
    opaque = await asking.whole("/v1/responses", goes_on)
    assert opaque["prompt_cache_diagnostics"] == {"type": "unavailable"}


async def test_events_with_a_response_have_it(asking: Asking) -> None:
    first = await asking.events("/v1/responses", response(None, TALK))
    name = next(event["response"]["id"] for event in first if "response" in event)
    events = await asking.events("/v1/responses", response(name, TALK, "so", "on"))
    holders = [event["response"] for event in events if "response" in event]
    assert holders
    assert all(holder["prompt_cache_diagnostics"] == {"type": "cache_hit"} for holder in holders)
