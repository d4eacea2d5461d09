"""Refused requests and their messages; the worker never sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.completions import COMPLETIONS
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import MAX_CONTAINERS, MAX_VALUES, check_length, parse_json_object
from sglang_ext.router.http.types import RequestRefused

LIMITS = Limits(vocab_size=100, context_length=50)
USER = {"role": "user", "content": "x"}

PARSERS = {"generate": GENERATE.parse, "chat": CHAT.parse, "completion": COMPLETIONS.parse}

WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    # endpoint, body, param, words of the message
    ("generate", {}, "text", "there is none"),
    ("generate", {"text": None}, "text", "there is none"),
    ("generate", {"text": "a", "input_ids": [1]}, "input_ids", "text and input_ids"),
    ("generate", {"text": ""}, "text", "empty"),
    ("generate", {"text": []}, "text", "empty"),
    ("generate", {"text": ["a", ""]}, "text[1]", "text[1] is empty"),
    ("generate", {"text": 5}, "text", "a string or an array of strings, not an integer"),
    ("generate", {"text": ["a", 5]}, "text[1]", "must be a string"),
    ("generate", {"input_ids": []}, "input_ids", "empty"),
    ("generate", {"input_ids": "abc"}, "input_ids", "array of token ids, not a string"),
    ("generate", {"input_ids": [1, 100]}, "input_ids[1]", "100, which is not a token id"),
    ("generate", {"input_ids": [1, -1]}, "input_ids[1]", "-1, which is not a token id"),
    ("generate", {"input_ids": [1, 2**63]}, "input_ids", "more than 64 bits"),
    ("generate", {"input_ids": [5, 1, 0, False]}, "input_ids[3]", "an integer, not a boolean"),
    ("generate", {"input_ids": [5, 1, True]}, "input_ids[2]", "an integer, not a boolean"),
    ("generate", {"input_ids": [1, 2.0]}, "input_ids[1]", "an integer, not a number"),
    ("generate", {"input_ids": [1, True]}, "input_ids[1]", "an integer, not a boolean"),
    ("generate", {"input_ids": [1, None]}, "input_ids[1]", "an integer, not null"),
    ("generate", {"input_ids": [1, [2]]}, "input_ids[1]", "an integer, not an array"),
    ("generate", {"input_ids": [[1], [2, 100]]}, "input_ids[1][1]", "not a token id"),
    ("generate", {"input_ids": [[1], []]}, "input_ids[1]", "input_ids[1] is empty"),
    ("generate", {"input_ids": [[1], 2]}, "input_ids[1]", "array of token ids"),
    ("generate", {"text": "a", "stream": "maybe"}, "stream", "a boolean, not a string"),
    ("generate", {"text": "a", "sampling_params": 5}, "sampling_params", "an object"),
    (
        "generate",
        {"text": "a", "sampling_params": {"stop_regex": "(("}},
        "sampling_params.stop_regex",
        "not a regular expression: missing )",
    ),
    ("chat", {"messages": [USER], "stop_regex": ["a", "*"]}, "stop_regex[1]", "not a regular expression"),
    ("completion", {"prompt": "a", "stop_regex": "(?P<a>b)(?P<a>c)"}, "stop_regex", "not a regular"),
    ("generate", {"text": "a", "sampling_params": [{}]}, "sampling_params", "only one prompt"),
    (
        "generate",
        {"text": ["a", "b"], "sampling_params": [{}]},
        "sampling_params",
        "1 elements for 2 prompts",
    ),
    ("generate", {"text": ["a"], "sampling_params": ["x"]}, "sampling_params[0]", "an object"),
    (
        "generate",
        {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
        "sampling_params",
        "same n for every prompt",
    ),
    ("generate", {"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n", "at least 1"),
    ("generate", {"text": "a", "sampling_params": {"n": 10**9}}, "sampling_params.n", "at most"),
    (
        "generate",
        {"text": "a", "sampling_params": {"max_new_tokens": "5"}},
        "sampling_params.max_new_tokens",
        "an integer, not a string",
    ),
    (
        "generate",
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        "sampling_params.max_new_tokens",
        "at least 0",
    ),
    (
        "generate",
        {"text": "a", "sampling_params": {"temperature": "hot"}},
        "sampling_params.temperature",
        "a number",
    ),
    ("generate", {"text": "a", "sampling_params": {"stop": [1]}}, "sampling_params.stop[0]", "a string"),
    (
        "generate",
        {"text": "a", "sampling_params": {"stop_token_ids": [100], "min_new_tokens": 1}},
        "sampling_params.stop_token_ids[0]",
        "not a token id",
    ),
    ("generate", {"text": "a", "top_logprobs_num": 101}, "top_logprobs_num", "size of the vocabulary"),
    ("generate", {"text": "a", "top_logprobs_num": -1}, "top_logprobs_num", "between 0 and 100"),
    (
        "generate",
        {"text": ["a", "b"], "return_logprob": [True]},
        "return_logprob",
        "1 elements for 2 prompts",
    ),
    ("generate", {"text": "a", "lora_path": ["x"]}, "lora_path", "only one prompt"),
    ("generate", {"text": ["a"], "top_logprobs_num": [101]}, "top_logprobs_num[0]", "vocabulary"),
    ("generate", {"text": "a", "return_logprob": 2}, "return_logprob", "booleans"),
    ("generate", {"text": ["a", "b"], "extra_key": ["x"]}, "extra_key", "1 elements for 2 prompts"),
    ("generate", {"text": "a", "cache_salt": 5}, "cache_salt", "a string or an array of strings"),
    ("chat", {}, "messages", "an array of messages, not null"),
    ("chat", {"messages": []}, "messages", "empty"),
    ("chat", {"messages": ["x"]}, "messages[0]", "an object"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0].role", "a string"),
    ("chat", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'king'"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "a string or an array of parts"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "not an integer"),
    ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "an object"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "a string",
    ),
    ("chat", {"messages": [USER], "max_tokens": -1}, "max_tokens", "at least 0"),
    ("chat", {"messages": [USER], "max_completion_tokens": 1.5}, "max_completion_tokens", "an integer"),
    ("chat", {"messages": [USER], "top_logprobs": 101}, "top_logprobs", "at most 100"),
    ("chat", {"messages": [USER], "input_ids": [100]}, "input_ids[0]", "not a token id"),
    ("chat", {"messages": [USER], "input_ids": []}, "input_ids", "empty"),
    ("chat", {"messages": [USER], "model": 5}, "model", "a string"),
    ("chat", {"messages": [USER], "model": None}, "model", "a string, not null"),
    ("chat", {"messages": [USER], "stream": 2}, "stream", "a boolean"),
    ("chat", {"messages": [USER], "top_k": 2**31}, "top_k", "at most 2147483647, not 2147483648"),
    ("chat", {"messages": [USER], "top_k": -(2**31) - 1}, "top_k", "at least -2147483648"),
    ("chat", {"messages": [USER], "seed": 2**63}, "seed", "at most 9223372036854775807"),
    ("chat", {"messages": [USER], "max_tokens": 2**31}, "max_tokens", "at most 2147483647"),
    ("chat", {"messages": [USER], "temperature": 1e300}, "temperature", "to 3.40282e+38, not 1e+300"),
    ("completion", {"prompt": "a", "min_p": -1e39}, "min_p", "from -3.40282e+38"),
    ("completion", {}, "prompt", "must be a string"),
    ("completion", {"prompt": ""}, "prompt", "empty"),
    ("completion", {"prompt": []}, "prompt", "empty"),
    ("completion", {"prompt": ["a", ""]}, "prompt[1]", "prompt[1] is empty"),
    ("completion", {"prompt": ["a", 1]}, "prompt[1]", "must be a string"),
    ("completion", {"prompt": [1, "a"]}, "prompt[1]", "an integer, not a string"),
    ("completion", {"prompt": [[1], "a"]}, "prompt[1]", "array of token ids"),
    ("completion", {"prompt": [[1], [100]]}, "prompt[1][0]", "not a token id"),
    ("completion", {"prompt": [[1], []]}, "prompt[1]", "empty"),
    ("completion", {"prompt": [True]}, "prompt[0]", "not a boolean"),
    ("completion", {"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    ("completion", {"prompt": "a", "logprobs": 101}, "logprobs", "at most 100"),
    ("completion", {"prompt": "a", "n": "two"}, "n", "an integer"),
]


@pytest.mark.parametrize(("endpoint", "body", "param", "words"), WRONG)
def test_refused(endpoint, body, param, words) -> None:
    with pytest.raises(RequestRefused) as caught:
        PARSERS[endpoint](body, LIMITS)
    error = caught.value.payload()["error"]
    assert caught.value.status == 400
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"]


RIGHT: list[tuple[str, dict[str, Any], int]] = [
    # endpoint, body, prompts
    ("generate", {"text": "a"}, 1),
    ("generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 2),
    ("generate", {"input_ids": [0, 99]}, 1),
    ("generate", {"input_ids": [0], "sampling_params": {"stop_token_ids": [100, -1]}}, 1),
    ("generate", {"input_ids": [[0], [99]], "sampling_params": {"max_new_tokens": None}}, 2),
    ("generate", {"input_ids": [], "session_params": {"id": "s"}}, 1),
    ("generate", {"input_embeds": [[0.5]]}, 1),
    ("generate", {"text": "", "image_data": "x"}, 1),
    ("generate", {"text": "a", "sampling_params": None, "stream": None}, 1),
    ("chat", {"messages": [USER], "max_tokens": 0, "model": "whatever:adapter"}, 1),
    ("chat", {"messages": [{"role": "ASSISTANT", "content": None}, USER]}, 1),
    ("chat", {"messages": [USER], "input_ids": [5]}, 1),
    ("chat", {"messages": [USER], "seed": 2**63 - 1, "top_k": 2**31 - 1, "temperature": -0.0}, 1),
    ("completion", {"prompt": "a", "model": "any"}, 1),
    ("completion", {"prompt": [1, 2]}, 1),
    ("completion", {"prompt": [[1], [2]]}, 2),
    ("completion", {"prompt": ["a", "b"]}, 2),
]


@pytest.mark.parametrize(("endpoint", "body", "prompts"), RIGHT)
def test_accepted(endpoint, body, prompts) -> None:
    assert len(PARSERS[endpoint](body, LIMITS).prompts) == prompts


def test_what_keeps_prompts_apart() -> None:
    batch = GENERATE.parse({"text": ["a", "b"], "extra_key": ["x", None], "cache_salt": "s"}, LIMITS)
    assert [prompt.namespace for prompt in batch.prompts] == [(None, "x", "s"), (None, None, "s")]
    chat = CHAT.parse({"messages": [USER], "model": "base:one", "lora_path": "two", "cache_salt": ""}, LIMITS)
    assert chat.prompts[0].namespace == ("one", None, None)


@pytest.mark.parametrize(
    ("tokens", "max_new", "fits"),
    [(49, None, True), (50, None, False), (40, 10, True), (40, 11, False), (49, 1, True), (51, 0, False)],
)
def test_length(tokens, max_new, fits) -> None:
    """SGLang's rule: the prompt is shorter than the context, and prompt and answer together fit in."""
    if fits:
        check_length(tokens, max_new, LIMITS, "text")
        return
    with pytest.raises(RequestRefused, match="context length") as caught:
        check_length(tokens, max_new, LIMITS, "text")
    assert caught.value.code == "context_length_exceeded"
    check_length(tokens, max_new, Limits(100, 50, truncates=True), "text")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b'{"text": "\\ud800"}', "not valid JSON"),
        (b'{"text": NaN}', "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 5000, "not valid JSON"),
        (b"[1]", "a JSON object, not an array"),
        (b"null", "not null"),
    ],
)
def test_what_is_not_a_json_object(body, words) -> None:
    with pytest.raises(RequestRefused, match=words):
        parse_json_object(body)


PATHS = {"generate": "/generate", "chat": "/v1/chat/completions", "completion": "/v1/completions"}


async def test_nothing_that_is_refused_reaches_a_worker(start_worker, start_router, client) -> None:
    worker = await start_worker(vocab_size=100, context_length=50)
    router = await start_router(worker)
    too_long = [
        ("generate", {"input_ids": [1] * 50}, "input_ids", "longer than the model's context length"),
        ("generate", {"text": "word " * 60}, "text", "longer than the model's context length"),
        ("generate", {"text": ["a", "word " * 60]}, "text[1]", "longer than the model's context length"),
        ("completion", {"prompt": [1] * 40}, "prompt", "40 tokens from the input messages and 16 tokens"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "word " * 60}]},
            "messages",
            "longer than the model's context length",
        ),
    ]
    for endpoint, body, param, words in WRONG + too_long:
        async with client.post(router.url + PATHS[endpoint], data=json.dumps(body)) as answer:
            assert answer.status == 400, body
            error = (await answer.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param
            assert words in error["message"]
    async with client.post(router.url + "/generate", data=b"{") as answer:
        assert answer.status == 400
    assert worker.requests == []


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_beyond_the_limit_get_413(announced, start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_payload_bytes=1000)
    body = json.dumps({"text": "x" * 2000}).encode()

    async def pieces():
        for start in range(0, len(body), 300):
            yield body[start : start + 300]

    async with client.post(router.url + "/generate", data=body if announced else pieces()) as answer:
        assert answer.status == 413
        assert (await answer.json())["error"]["code"] == "request_too_large"
    assert worker.requests == []


@pytest.mark.parametrize(
    ("filling", "what"),
    [(b"[],", "objects and arrays"), (b'{"a":{}},', "objects and arrays"), (b"1,", "values")],
)
def test_a_large_body_of_many_small_things_is_not_parsed(filling: bytes, what: str) -> None:
    """Nothing else runs while it is, and it takes many times its size."""
    count = MAX_VALUES if what == "values" else MAX_CONTAINERS
    for size, refused in ((count // 2 - 2, False), (count + 1, True)):
        body = b'{"a":[' + filling * size + b"1]}"
        if not refused:
            assert len(parse_json_object(body)["a"]) == size + 1
            continue
        with pytest.raises(RequestRefused, match=what) as caught:
            parse_json_object(body)
        assert caught.value.status == 413


@pytest.mark.parametrize(
    ("endpoint", "body", "words"),
    [
        ("generate", {"text": "a", "rid": ["a", "b"]}, "only one prompt"),
        ("generate", {"text": "a", "rid": ["a"]}, "only one prompt"),
        ("generate", {"text": ["a", "b"], "rid": ["a"]}, "1 elements for 2 prompts"),
        ("generate", {"text": ["a", "b"], "rid": ["a", 1]}, "an array of strings"),
        ("generate", {"text": "a", "rid": 5}, "a string or an array of strings"),
        ("chat", {"messages": [USER], "rid": ["a"]}, "only one prompt"),
        ("completion", {"prompt": "a", "rid": ["a", "b"]}, "only one prompt"),
    ],
)
async def test_names_that_do_not_fit_the_prompts(
    endpoint: str, body: Any, words: str, start_worker, start_router, client
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    async with client.post(router.url + PATHS[endpoint], json=body) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "rid")
        assert words in error["message"]
    fitting = {"text": ["a", "b"], "rid": ["x", "y"]}
    async with client.post(router.url + "/generate", json=fitting) as answer:
        assert answer.status == 200
    assert len(worker.requests) == 1
