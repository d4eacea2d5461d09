"""Requests made from the router's own description (schemathesis), and a corpus of broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

LEFT_OUT = ("/health_generate", "/invocations")
"""SGLang takes a second or more to answer the one; the other is a chat under another name."""
MAX_TOKENS = 8
TIMEOUT_S = 120
"""Of an answer. Every request is bounded, so that no right one takes a hundredth of it on an idle machine."""

Check = Callable[[str, str, Any, requests.Response], None]


def operations(description: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(path, method) of all operations."""
    for path, methods in description["paths"].items():
        for method in methods:
            yield path, method.upper()


def fuzz(
    url: str, description: dict[str, Any], check: Check, *, examples: int, passed_on: bool = False
) -> int:
    """Send requests to every operation, half of them wrong on purpose. Returns how many were sent.

    Args:
        check: called with (path, method, body, answer); fails if the answer must not be.
        examples: per operation and mode.
        passed_on: also send requests that the router passes on unread; they pause real servers, and change
            weights.
    """
    schema = schemathesis.openapi.from_dict(description)
    sent = 0
    with requests.Session() as session:
        for path, method in operations(description):
            if path in LEFT_OUT or (
                "x-passed-on" in description["paths"][path][method.lower()] and not passed_on
            ):
                continue
            operation = schema[path][method]
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode is GenerationMode.NEGATIVE and method in ("GET", "DELETE"):
                    continue

                sent += _run(operation.as_strategy(generation_mode=mode), url, session, check, examples)
    return sent


def _run(strategy: Any, url: str, session: requests.Session, check: Check, examples: int) -> int:
    sent = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def run(case: Any) -> None:
        nonlocal sent
        bounded(case.path, case.body)
        answer = case.call(base_url=url, session=session, timeout=TIMEOUT_S)
        sent += 1
        check(case.path, case.method, case.body, answer)

    run()
    return sent


LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/invocations": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""Where a request without this field generates until the context is full."""


def bounded(path: str, body: Any) -> None:
    """Keep requests that are right from generating for long."""
    if not isinstance(body, dict):
        return
    if path == "/generate" and body.get("sampling_params") is None:
        body["sampling_params"] = {}  # without one, SGLang generates 128 tokens
    if path in LIMITS and body.get(LIMITS[path]) is None:
        body[LIMITS[path]] = MAX_TOKENS
    if path == "/v1/chat/completions" and body["max_tokens"] == 0:
        body["max_tokens"] = MAX_TOKENS
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = min(body[name], MAX_TOKENS)
    if path in ("/api/chat", "/api/generate"):
        options = body["options"] = body["options"] if isinstance(body.get("options"), dict) else {}
        most = options.get("num_predict")
        options["num_predict"] = min(most, MAX_TOKENS) if type(most) is int else MAX_TOKENS
    if path == "/vertex_generate":
        if not isinstance(body.get("parameters"), dict):
            body["parameters"] = {}
        bounded("/generate", body["parameters"])
    sampling = body.get("sampling_params")
    for one in sampling if isinstance(sampling, list) else [sampling]:
        if isinstance(one, dict):
            if one.get("max_new_tokens") is None:
                one["max_new_tokens"] = MAX_TOKENS
            bounded_sampling(one)
    bounded_sampling(body)


def bounded_sampling(values: dict[str, Any]) -> None:
    for name in ("max_new_tokens", "n"):
        if isinstance(values.get(name), int) and not isinstance(values[name], bool):
            values[name] = min(values[name], 2 if name == "n" else MAX_TOKENS)


def nested(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


MESSAGE = {"role": "user", "content": "x"}
SMALL = {"max_new_tokens": 2}
BROKEN: list[tuple[str, Any]] = [
    *((path, body)
      for path in ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
                   "/api/chat", "/api/generate", "/vertex_generate", "/open_session", "/close_session",
                   "/tokenize", "/detokenize", "/abort_request", "/v1/messages/count_tokens")
      for body in (b"", b"null", b"[]", b"3", b'"x"', b"{", b"{}", b"\xff\xfe", b"\x00", b'{"a": 1e999}',
                   b'{"stream": "yes"}', nested(5000), b'{"model": {"a": 1}}', b" " * 1000)),
    ("/generate", {"text": ""}),
    ("/generate", {"text": []}),
    ("/generate", {"text": ["x", 3]}),
    ("/generate", {"text": "x", "input_ids": [1]}),
    ("/generate", {"input_ids": [-1]}),
    ("/generate", {"input_ids": [2**31]}),
    ("/generate", {"input_ids": [2**63]}),
    ("/generate", {"input_ids": [2**64]}),
    ("/generate", {"input_ids": [1.5]}),
    ("/generate", {"input_ids": [True]}),
    ("/generate", {"input_ids": [[]]}),
    ("/generate", {"input_ids": [[1], 2]}),
    ("/generate", {"text": "x", "sampling_params": {"n": 10**9}}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": -1}}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 10**12}}),
    ("/generate", {"text": "x", "sampling_params": [SMALL]}),
    ("/generate", {"text": ["x", "y"], "sampling_params": [SMALL]}),
    ("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [10**9], "min_new_tokens": 1}}),
    ("/generate", {"text": "x", "sampling_params": {"regex": "(", **SMALL}}),
    ("/generate", {"text": "x", "sampling_params": {"regex": 3}}),
    ("/generate", {"text": "x", "sampling_params": {"temperature": "hot"}}),
    ("/generate", {"text": "x", "sampling_params": {"temperature": -1, **SMALL}}),
    ("/generate", {"text": "x", "sampling_params": {"top_k": 0, **SMALL}}),
    ("/generate", {"text": "x", "sampling_params": {"top_p": 7, **SMALL}}),
    ("/generate", {"text": "x", "sampling_params": {"no_such_thing": 1}}),
    ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 10**6}),
    ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": -1}),
    ("/generate", {"text": ["x", "y", "z"], "return_logprob": [True, False], "stream": True}),
    ("/generate", {"text": "x", "return_logprob": "yes"}),
    ("/generate", {"text": "x", "cache_salt": 3}),
    ("/generate", {"text": ["x", "y"], "extra_key": ["a"]}),
    ("/generate", {"text": "x", "priority": "high"}),
    ("/generate", {"text": "\ud800"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [3]}),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "model": None}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "n": 0}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "tools": 3}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [{"type": "function"}], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "response_format": {"type": "x"}, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "chat_template_kwargs": 3, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [MESSAGE], "top_logprobs": -1, "logprobs": True}),
    ("/v1/completions", {"prompt": [[1], "x"]}),
    ("/v1/completions", {"prompt": [1, 10**9]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}),
    ("/v1/completions", {"prompt": "x", "logprobs": 10**6}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_none"}),
    ("/v1/responses", {"input": [{"type": "no_such_item"}], "max_output_tokens": 4}),
    ("/v1/responses", {"input": "x", "model": "no such model", "max_output_tokens": 4}),
    ("/v1/responses", {"input": "x", "background": True, "max_output_tokens": 4}),
    ("/v1/messages", {"model": "m", "messages": [MESSAGE]}),
    ("/v1/messages", {"model": "m", "max_tokens": -1, "messages": [MESSAGE]}),
    ("/v1/messages", {"model": "m", "max_tokens": 2, "messages": [MESSAGE], "tools": [{"name": "x"}]}),
    ("/v1/messages", {"model": "m", "max_tokens": 2, "messages": [MESSAGE], "thinking": {"type": "enabled"}}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [2**40]}),
    ("/detokenize", {"tokens": [[1], 2]}),
    ("/tokenize", {"prompt": 3}),
    ("/tokenize", {"messages": "x"}),
    ("/abort_request", {"rid": 3}),
    ("/no/such/path", {}),
    ("/v1/responses/", {}),
    ("/v1/responses/x/y/z", {}),
    ("/explain/", {}),
]  # fmt: skip


def send_broken(url: str, check: Check) -> int:
    """Send the corpus. Returns how many requests it has."""
    with requests.Session() as session:
        for path, body in BROKEN:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            check(path, "POST", body, session.post(url + path, data=data, headers=headers, timeout=TIMEOUT_S))
    return len(BROKEN)


def is_ours(answer: requests.Response) -> bool:
    """Whether a 5xx is the router's own doing: a bug of it, or a worker that went away."""
    if answer.status_code < 500:
        return False
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return "x-kv-instance" not in answer.headers
    if isinstance(error, str):  # as Ollama has it
        return any(words in error for words in ("internal error", "of the router", "went away", "no worker"))
    return isinstance(error, dict) and (
        error.get("code") in ("internal_error", "worker_lost", "timeout", "no_worker")
        or "of the router" in str(error.get("message"))
    )
