"""Breakpoints that clients mark: where they are in a prompt, and which instances are sent them."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.keys import KEEP_HEADER, MOST_KEPT, TOKEN_BYTES
from sglang_ext.protocol.cluster import Registration
from sglang_ext.router.api.job import Job, PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.tokens.breakpoints import places_of

Json = dict[str, Any]
LIMITS = Limits(32_000, 4096, False, "m")
MARK = {"cache_control": {"type": "ephemeral"}}
SYSTEM = [{"type": "text", "text": f"Part {part} of the system prompt. " * 20} for part in range(2)]
READ = {"name": "read", "description": "Reads a file", "input_schema": {"type": "object"}}


def body(*messages: Any, system: Any = SYSTEM, **fields: Any) -> Json:
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": content} for at, content in enumerate(messages)]
    return {"model": "default", "max_tokens": 4, "system": system, "messages": said, **fields}


def text(words: str, **fields: Any) -> Json:
    return {"type": "text", "text": words, **fields}


def test_conversations_end_where_the_client_has_marked_them() -> None:
    marked = [SYSTEM[0] | MARK, SYSTEM[1] | MARK]
    talk = [[text("read"), text("a file", **MARK)], "so", [text("go on", **MARK)]]
    found = MESSAGES.beginnings(body(*talk, system=marked, tools=[READ | MARK]))
    chats = [chat.payload for chat in found]
    assert [len(chat["messages"]) for chat in chats] == [1, 2, 2, 2], "the last one ends the conversation"
    assert all("tools" in chat for chat in chats)
    assert [chat["messages"][0]["content"] for chat in chats[1:3]] == [
        SYSTEM[0]["text"],
        SYSTEM[0]["text"] + "\n" + SYSTEM[1]["text"],
    ]
    assert MESSAGES.beginnings(body("read", "so", [text("go on", **MARK)])) == []
    assert MESSAGES.beginnings(body("read", "so", "go on")) == []


@pytest.fixture
async def router(start_worker, start_router) -> Any:
    return await start_router(await start_worker())


async def test_places_are_those_of_the_prompt_s_tokens(router: Any) -> None:
    asked = body([text("read", **MARK)], "so", "go on", system=[SYSTEM[0] | MARK, SYSTEM[1] | MARK])
    job = MESSAGES.parse(asked, LIMITS)
    (prompt,) = await router.tokenizers.encode(job, limits=LIMITS)
    begun = MESSAGES.beginnings(asked)
    places = await places_of(begun, prompt, router.tokenizers, LIMITS, None)
    assert len(places) == 3
    words = [router.tokenizers.decode(prompt.key[: place * TOKEN_BYTES]) for place in places]
    assert words[0].rstrip().endswith(SYSTEM[0]["text"].rstrip())
    assert SYSTEM[1]["text"].rstrip() in words[1]
    assert "read" not in words[1]
    assert "read" in words[2]
    assert "so" not in words[2].partition("read")[2]

    other = body("another question", system=asked["system"])
    (theirs,) = await router.tokenizers.encode(MESSAGES.parse(other, LIMITS), limits=LIMITS)
    assert theirs.key[: places[1] * TOKEN_BYTES] == prompt.key[: places[1] * TOKEN_BYTES]


async def test_no_more_places_than_the_api_takes(router: Any) -> None:
    system = [{**SYSTEM[0], "text": f"Part {part}. ", **MARK} for part in range(9)]
    asked = body("read", system=system)
    (prompt,) = await router.tokenizers.encode(MESSAGES.parse(asked, LIMITS), limits=LIMITS)
    places = await places_of(MESSAGES.beginnings(asked), prompt, router.tokenizers, LIMITS, None)
    assert 1 < len(places) <= MOST_KEPT
    text_only = PromptInput(chat=None, text="x", opaque=True)
    (opaque,) = await router.tokenizers.encode(Job(False, (text_only,)), limits=LIMITS)
    assert await places_of(MESSAGES.beginnings(asked), opaque, router.tokenizers, LIMITS, None) == ()


@pytest.mark.parametrize("keeps", [True, False])
async def test_they_go_to_instances_that_keep_states_and_to_no_others(
    keeps: bool, start_worker, start_router, client
) -> None:
    listed, registered = await start_worker(), await start_worker()
    registered.server_info["launch_command"] = "launch_server --kv-router http://127.0.0.1:1"
    router = await start_router(listed, registered, policy="round-robin")
    about = Registration(url=registered.url, instance="r", epoch="1" * 32, keeps_states=keeps)
    router.fleet.join(registered.url, about)
    marked = body("read", system=[SYSTEM[0] | MARK, SYSTEM[1]])
    for asked in (marked, marked, body("read"), body("read")):
        theirs = {KEEP_HEADER: "7"}
        async with client.post(router.url + "/v1/messages", json=asked, headers=theirs) as answer:
            assert answer.status == 200, await answer.text()
    sent = [headers.get(KEEP_HEADER) for _, _, headers in registered.requests]
    assert len(sent) == 2
    assert [value is not None for value in sent] == [keeps, False]
    assert all(value is None or int(value) > 50 for value in sent)
    assert all(KEEP_HEADER not in headers for _, _, headers in listed.requests)
