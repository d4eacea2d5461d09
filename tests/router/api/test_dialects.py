"""Anthropic's messages and OpenAI's responses: refusals, translation, routing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.dialect import DIALECTS, ModelName
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.api.messages_as_chat import MessageAnswer, to_chat
from sglang_ext.router.api.responses import RESPONSES
from sglang_ext.router.api.responses import to_chat as response_to_chat
from sglang_ext.router.api.usage import StreamReader, read_answer
from sglang_ext.router.http.types import RequestRefused

pytestmark = pytest.mark.slow

LIMITS = Limits(1000, 4096)
HI = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [HI]}
WEATHER = {"name": "weather", "description": "tells", "input_schema": {"properties": {}}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": 1}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{}]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"system": 3}, "system"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": {"type": "x"}}, "tool_choice"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stream": "maybe"}, "stream"),
        ({"temperature": "x"}, "temperature"),
    ],
)
def test_messages_that_are_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        MESSAGES.parse({**BODY, **change}, LIMITS)
    assert caught.value.param == param


def test_messages_become_the_conversation_that_sglang_makes_of_them() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    body = {
        **BODY,
        "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "let me see"}, call]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "before"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "rain"}],
                    },
                    {"type": "text", "text": "after"},
                ],
            },
            {"role": "assistant", "content": []},
        ],
        "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "stop_sequences": ["x"],
    }
    chat = to_chat(body)
    assert chat["messages"] == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
                }
            ],
            "content": "let me see",
        },
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "after"},
        {"role": "assistant", "content": ""},
    ]
    (tool,) = chat["tools"]
    assert tool["function"]["parameters"] == {"properties": {}, "type": "object"}
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert (chat["stop"], chat["max_tokens"]) == (["x"], 5)
    assert "input_schema" in WEATHER
    assert "type" not in WEATHER["input_schema"]


def test_thinking_goes_along() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    body = {
        **BODY,
        "messages": [HI, {"role": "assistant", "content": [thought, {"type": "text", "text": "yes"}]}, HI],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "xhigh"},
    }
    chat = to_chat(body)
    assert chat["messages"][1] == {"role": "assistant", "reasoning_content": "hm", "content": "yes"}
    assert chat["chat_template_kwargs"] == {
        "thinking": True,
        "enable_thinking": True,
        "reasoning_effort": "max",
    }


@pytest.mark.parametrize(
    ("change", "opaque"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"messages": [{"role": "system", "content": "x"}, HI]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"url": "u"}}]}]}, False),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, False),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "tool_reference", "tool_name": "f"}],
                            }
                        ],
                    }
                ]
            },
            True,
        ),
    ],
)
def test_what_only_the_server_can_render_is_matched_by_text(change: dict[str, Any], opaque: bool) -> None:
    (prompt,) = MESSAGES.parse({**BODY, **change}, LIMITS).prompts
    assert prompt.opaque is opaque


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "previous_response_id": 3}, "previous_response_id"),
        ({"input": "x", "tools": [3]}, "tools[0]"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "reasoning": "high"}, "reasoning"),
        ({"input": "x", "stream": 2}, "stream"),
    ],
)
def test_responses_that_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        RESPONSES.parse(body, LIMITS)
    assert caught.value.param == param


def test_responses_become_the_conversation_that_sglang_makes_of_them() -> None:
    body = {
        "instructions": "be terse",
        "input": [
            {"role": "developer", "content": "no jokes"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "id": "m", "role": "assistant", "content": "one"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{bad"},
            {"type": "function_call_output", "call_id": "c", "output": [{"text": "1"}, {"text": "2"}]},
            {"role": "assistant", "content": "two"},
            {"role": "assistant", "content": "three"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
        "reasoning": {"effort": "low"},
    }
    chat = response_to_chat(body)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat["messages"] == [
        {"role": "system", "content": "be terse"},
        {"role": "system", "content": "Developer instructions:\nno jokes"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "one", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "12"},
        {"role": "assistant", "content": "two\n\nthree"},
    ]
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f"]
    assert (chat["tool_choice"], chat["reasoning_effort"]) == ("auto", "low")


# -- answers --------------------------------------------------------------------------------------


def test_a_chat_answer_becomes_a_message() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = {
        "model": "m",
        "choices": [
            {
                "message": {"content": "hi", "reasoning_content": "hm", "tool_calls": [call]},
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    told = json.loads(MessageAnswer("m").whole(200, json.dumps(chat).encode()))
    assert [block["type"] for block in told["content"]] == ["thinking", "text", "tool_use"]
    assert told["content"][2]["input"] == {"x": 1}
    assert told["stop_reason"] == "tool_use"
    assert told["usage"] == {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 3}
    error = json.loads(MessageAnswer("m").whole(400, b'{"error": {"message": "wrong"}}'))
    assert error == {"type": "error", "error": {"type": "invalid_request_error", "message": "wrong"}}
    assert b"secret" not in MessageAnswer("m").whole(500, b'{"error": {"message": "secret"}}')


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_chat_stream_becomes_a_message_stream(size: int) -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "he"},
        {"content": "llo"},
        {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"function": {"arguments": ": 1}"}}]},
    ]
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    events: list[dict[str, Any]] = [{"choices": [{"delta": delta}], "usage": usage} for delta in deltas]
    events.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    events.append({"choices": [], "usage": usage})
    raw = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    answer = MessageAnswer("m")
    out = b"".join(answer.feed(raw[i : i + size]) for i in range(0, len(raw), size))
    told = [json.loads(event.split(b"\ndata: ")[1]) for event in out.split(b"\n\n") if event]
    assert [event["type"] for event in told] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert told[0]["message"]["usage"] == {"input_tokens": 9, "output_tokens": 0}
    assert "".join(event["delta"].get("partial_json", "") for event in told[6:8]) == '{"x": 1}'
    assert told[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use"},
        "usage": {"output_tokens": 3},
    }


def test_usage_of_every_form() -> None:
    message = {
        "content": [{"type": "text", "text": "hi"}],
        "usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 3},
    }
    usage = read_answer(json.dumps(message).encode(), MESSAGES, 1)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (9, 4, 3)
    assert usage.output_texts == {0: "hi"}
    response = {
        "id": "resp_1",
        "object": "response",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}],
        "usage": {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
    }
    usage = read_answer(json.dumps(response).encode(), RESPONSES, 1)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (9, 4, 3)
    assert (usage.output_texts, usage.response_id) == ({0: "hi"}, "resp_1")
    chat = {
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
        "sglext": {"cached_tokens_details": {"device": 3, "host": 2, "storage": 1}},
    }
    usage = read_answer(json.dumps(chat).encode(), CHAT, 1)
    assert (usage.cached_tokens, usage.tiers) == (6, {"hbm": 3, "dram": 2, "disk": 1})
    for dialect in DIALECTS.values():
        for body in (b"[]", b"3", b"{", b'{"usage": 3, "output": [1], "content": [2], "meta_info": 4}'):
            assert read_answer(body, dialect, 1).cached_tokens is None
            reader = StreamReader(dialect, 1)
            reader.feed(b"data: " + body + b"\n\n")
            assert reader.output_texts() == {}


# -- through the router ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_routed_as_well_as_chat(
    path: str, stream: bool, start_worker, start_router, client, eventually
) -> None:
    """A conversation begun as chat goes on in another dialect where its KV is, and the other way round."""
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers, policy="prompt-tree")
    turns = [{"role": "user", "content": "What is a radix tree? " * 12}]
    body = {"messages": turns, "max_tokens": 8}
    async with client.post(router.url + "/v1/chat/completions", json=body) as answer:
        home = answer.headers["x-kv-instance"]
        said = (await answer.json())["choices"][0]["message"]
    turns = [*turns, said, {"role": "user", "content": "More, please. " * 12}]
    other = (
        {"model": "m", "max_tokens": 8, "messages": turns}
        if path == "/v1/messages"
        else {"input": turns, "max_output_tokens": 8}
    )
    async with client.post(router.url + path, json={**other, "stream": stream}) as answer:
        assert answer.status == 200
        await answer.read()
        assert answer.headers["x-kv-instance"] == home
        assert answer.headers["x-kv-route-reason"] == "prefix"
        assert int(answer.headers["x-kv-matched-tokens"]) > 48
        if path == "/v1/messages" or not stream:
            assert int(answer.headers["x-kv-cached-tokens"]) > 48
    told = router.request_log.find(answer.headers["x-request-id"], tenant=None, admin=True)
    assert told.record.completion_tokens == 8
    assert all(prompt.tokens is not None for prompt in told.prompts)


async def test_a_response_goes_on_where_the_former_one_is_kept(start_worker, start_router, client) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers, policy="round-robin")
    url = router.url + "/v1/responses"
    async with client.post(url, json={"input": "hello", "max_output_tokens": 2}) as answer:
        home, name = answer.headers["x-kv-instance"], (await answer.json())["id"]
    for _ in range(3):
        body = {"input": "and?", "previous_response_id": name}
        async with client.post(url, json=body) as answer:
            assert (answer.status, answer.headers["x-kv-instance"]) == (200, home)
    async with client.get(f"{url}/{name}") as answer:
        assert (await answer.json())["id"] == name
        assert answer.headers["x-kv-instance"] == home
    async with client.get(f"{url}/resp_none") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "response_not_found")
    async with client.post(url, json={"input": "x", "previous_response_id": "resp_none"}) as answer:
        assert answer.status == 404


async def test_errors_of_messages_have_anthropics_form(start_worker, start_router, client) -> None:
    router = await start_router(await start_worker(), api_key="secret-key")
    for headers, status, kind in (
        ({}, 401, "authentication_error"),
        ({"x-api-key": "secret-key"}, 400, "invalid_request_error"),
    ):
        async with client.post(router.url + "/v1/messages", json={"model": "m"}, headers=headers) as answer:
            assert answer.status == status
            value = await answer.json()
            assert (value["type"], value["error"]["type"]) == ("error", kind)
    async with client.post(
        router.url + "/v1/messages/count_tokens", json=BODY, headers={"x-api-key": "secret-key"}
    ) as answer:
        assert (await answer.json())["input_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_cached_is_asked_for_without_clients_noticing(
    path: str, stream: bool, start_worker, start_router, client
) -> None:
    router = await start_router(await start_worker())
    text = "Hello " * 40
    body = {"messages": [{"role": "user", "content": text}], "model": "m", "max_tokens": 2, "stream": stream}
    if path == "/v1/completions":
        body["prompt"] = text
    for number in range(2):
        headers = {"x-request-id": f"q{number}"}
        async with client.post(router.url + path, json=body, headers=headers) as answer:
            raw = await answer.read()
            assert answer.status == 200
        assert not stream or b"sglext" not in raw
        record = router.request_log.find(f"q{number}", tenant=None, admin=True).record
        if path != "/v1/messages":
            assert bool(record.cached_tokens) == bool(number)
            assert record.tiers == ({"hbm": record.cached_tokens} if number else {})
    # A client that asks for it itself gets it.
    if path != "/v1/messages":
        async with client.post(
            router.url + path, json={**body, "return_cached_tokens_details": True}
        ) as answer:
            assert b"sglext" in await answer.read()


async def test_cache_details_need_not_be_asked_for(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker, cache_details=False)
    async with client.post(router.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}) as answer:
        assert answer.status == 200
    assert "return_cached_tokens_details" not in worker.requests[-1][1]


BACKGROUND = {"input": "hello", "max_output_tokens": 5, "background": True, "store": True}


async def test_what_generates_in_the_background_counts_until_it_ends(
    start_worker, start_router, client, tmp_path, eventually
) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys": [{"key": "sk-background", "tenant": "a", "concurrent": 1}]}')
    file.chmod(0o600)
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(file), max_running_per_instance=1)
    client.headers["authorization"] = "Bearer sk-background"
    url = router.url + "/v1/responses"
    async with client.post(url, json=BACKGROUND) as answer:
        value = await answer.json()
        assert (answer.status, value["status"]) == (200, "queued")
    row = router.fleet.rows[worker.url]
    assert (row.in_flight, router.admission.admitted) == (1, 1)
    async with client.post(url, json={**BACKGROUND, "background": False}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (429, "concurrency_limit_exceeded")
    router.check()
    worker.kept[value["id"]] = worker.in_background[value["id"]]
    await eventually(lambda: not len(router.background))
    assert (row.in_flight, router.admission.admitted) == (0, 0)
    async with client.post(url, json={**BACKGROUND, "background": False}) as answer:
        assert answer.status == 200


async def test_what_was_generated_in_the_background_is_charged(
    start_worker, start_router, client, tmp_path, eventually
) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys": [{"key": "sk-background", "tenant": "a", "tokens_per_minute": 60}]}')
    file.chmod(0o600)
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(file))
    client.headers["authorization"] = "Bearer sk-background"
    url = router.url + "/v1/responses"
    async with client.post(url, json={**BACKGROUND, "max_output_tokens": 100}) as answer:
        name = (await answer.json())["id"]
    worker.kept[name] = worker.in_background[name]
    await eventually(lambda: not len(router.background))
    async with client.post(url, json=BACKGROUND) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (429, "tokens_limit_exceeded")


async def test_a_response_in_the_background_ends_with_its_instance_or_its_time(
    start_worker, start_router, client, eventually
) -> None:
    worker = await start_worker()
    router = await start_router(worker, request_timeout_secs=0.05)
    async with client.post(router.url + "/v1/responses", json=BACKGROUND) as answer:
        name = (await answer.json())["id"]
    await eventually(lambda: f"/v1/responses/{name}/cancel" in worker.targets)
    await eventually(lambda: router.fleet.rows[worker.url].in_flight == 0)
    router = await start_router(worker)
    async with client.post(router.url + "/v1/responses", json=BACKGROUND) as answer:
        name = (await answer.json())["id"]
    assert router.fleet.rows[worker.url].in_flight == 1
    del worker.kept[name]  # as after a restart
    await eventually(lambda: router.fleet.rows[worker.url].in_flight == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_name_the_model_as_the_client_did(
    stream: bool, start_worker, start_router, client
) -> None:
    """Also where the worker was sent another name, which may be a path on its disk."""
    router = await start_router(await start_worker())
    for name in ("default", "stand-in"):
        body = {"input": "hello", "model": name, "max_output_tokens": 2, "stream": stream}
        async with client.post(router.url + "/v1/responses", json=body) as answer:
            assert answer.status == 200
            text = (await answer.text()).replace('": "', '":"')
        assert f'"model":"{name}"' in text
        assert text.count('"model":"') == text.count(f'"model":"{name}"')


def test_a_stream_is_renamed_however_it_is_cut() -> None:
    events = (
        b'event: response.created\ndata: {"response":{"model":"/disk/m","tools":[{"model":"/disk/m"}]}}'
        b"\n\n"
        b'data: {"delta":"\\"model\\":\\"/disk/m\\""}\n\n'
        b'data: {"response":{"model":"another"}}\n\ndata: [DONE]\n\n'
    )
    expected = events.replace(b'"response":{"model":"/disk/m"', b'"response":{"model":"default"', 1)
    for size in (1, 2, 7, 50, len(events)):
        named = ModelName("/disk/m", "default")
        pieces = [events[at : at + size] for at in range(0, len(events), size)]
        assert b"".join(map(named.feed, pieces)) == expected
    named = ModelName("/disk/m", "default")
    assert named.whole(200, b'{"model":"/disk/m","id":"a"}') == b'{"model":"default","id":"a"}'
    for untouched in (b'{"model": "another"}', b"[]", b"no json", b'{"response":5}'):
        assert named.whole(200, untouched) == untouched
    assert named.whole(404, b'{"model":"/disk/m"}') == b'{"model":"/disk/m"}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_the_model_default_is_the_one_that_is_served(
    path: str, start_worker, start_router, client
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    body = {**BODY, "input": "hello", "model": "default"}
    async with client.post(router.url + path, json=body) as answer:
        assert answer.status == 200
    # SGLang looks at the name under /v1/responses only.
    assert worker.requests[-1][1]["model"] == ("stand-in" if path == "/v1/responses" else "default")
    if path == "/v1/responses":
        for asked, sent in (("default:fr", "stand-in:fr"), ("defaults", "defaults"), (None, None)):
            async with client.post(router.url + path, json={**body, "model": asked}) as answer:
                assert answer.status == 200
            assert worker.requests[-1][1]["model"] == sent


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_explained_by_the_id_in_its_answer(
    path: str, stream: bool, start_worker, start_router, client
) -> None:
    router = await start_router(await start_worker())
    body = {
        **BODY,
        "input": "hello",
        "prompt": 'say "id": "x"',
        "stream": stream,
    }
    if path == "/generate":
        body["text"] = body["prompt"]
    async with client.post(router.url + path, json=body, headers={"x-request-id": "mine"}) as answer:
        assert answer.status == 200
        raw = await answer.text()
    if stream:
        raw = next(line[5:] for line in raw.split("\n") if line.startswith("data:"))
    value = json.loads(raw)
    holder = value.get("meta_info") or value.get("response") or value.get("message") or value
    for name in (holder["id"], "mine"):
        async with client.get(f"{router.url}/explain/{name}") as answer:
            assert answer.status == 200, name
            told = await answer.json()
        assert (told["request_id"], told["answer_id"]) == ("mine", holder["id"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_stand_where_people_look_first(
    path: str, stream: bool, start_worker, start_router, client
) -> None:
    """The ``usage`` of a worker with ``--enable-cache-report`` reaches the client, in streams too."""
    router = await start_router(await start_worker())
    text = "Hello " * 40
    body = {"messages": [{"role": "user", "content": text}], "prompt": text, "max_tokens": 2, "model": "m"}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    found = []
    for name in ("first", "second"):
        async with client.post(router.url + path, json=body, headers={"x-request-id": name}) as answer:
            assert answer.status == 200
            raw = await answer.text()
        events = [line[5:] for line in raw.split("\n") if line.startswith("data:") and "[DONE]" not in line]
        values = [json.loads(event) for event in events] if stream else [json.loads(raw)]
        (usage,) = [value["usage"] for value in values if value.get("usage")]
        found.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
        record = router.request_log.find(name, tenant=None, admin=True).record
        assert record.cached_tokens == found[-1]
    assert found[0] == 0
    assert found[1] > 0
