"""Requests from logs: OpenAI's and Anthropic's bodies, SGLang's ``--log-requests``, LiteLLM's payloads.

A log has one JSON object in each line. ``read_requests`` finds out which kind each of them is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
import orjson

from sglang_ext.errors import ConfigError
from sglang_ext.router.api.dialect import DIALECTS
from sglang_ext.router.api.validation import Json

LEVEL = "Start the server with --log-requests --log-requests-level 3 --log-requests-format json"

MILLISECONDS_FROM: Final = 1e11
"""A larger time stamp is in milliseconds: in seconds it would be in the year 5138."""


class LogError(ConfigError):
    """A line of a log cannot be used; names the line."""

    def __init__(self, line: int, why: str, hint: str = "") -> None:
        super().__init__(f"line {line} {why}", field="FILE", hint=hint)


class LoggedBody(msgspec.Struct, frozen=True):
    """A request in a log."""

    path: str
    """Of its HTTP API."""
    body: Json
    headers: Mapping[str, str] = {}
    """Names in lower case."""
    answer: str = ""
    """Its text, where the log has one of a single choice."""
    session: str = ""
    """Where the log itself has a name for it."""
    at: float | None = None
    """When it came, in seconds since the epoch, where the log says."""
    answer_tokens: int | None = None


def read_requests(lines: Iterable[bytes]) -> Iterator[LoggedBody]:
    """The requests of a log, in its order; other lines of SGLang's and LiteLLM's are passed over.

    Raises:
        LogError: a line is no JSON, none of the kinds, or cut off by its server.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            hint = LEVEL if b"Receive: obj=" in line or b"Finish: obj=" in line else ""
            raise LogError(number, f"is not JSON: {error}", hint) from None
        if not isinstance(value, dict):
            raise LogError(number, "is no JSON object")
        if (found := _request(value, number)) is not None:
            yield msgspec.structs.replace(found, at=_time_of(value), answer_tokens=_answer_tokens(value))


def _request(value: Json, number: int) -> LoggedBody | None:
    if isinstance(value.get("event"), str) and "timestamp" in value:
        return _of_sglang(value, number)
    if "call_type" in value and "messages" in value:
        return _of_litellm(value, number)
    headers = _headers(value.get("headers"))
    answer = _text_of(value.get("response"))
    if isinstance(body := value.get("body"), dict):  # OpenAI's batches
        url = value.get("url")
        path = url if isinstance(url, str) else _path_of(body)
        return _logged(path, body, headers, answer, number)
    request = value.get("request")
    body = request if isinstance(request, dict) else value
    return _logged(_path_of(body), body, headers, answer, number)


def _logged(
    path: str | None, body: Json, headers: Mapping[str, str], answer: str, number: int, session: str = ""
) -> LoggedBody:
    if path is None:
        raise LogError(number, "has no messages, input, prompt, text or input_ids")
    return LoggedBody(path, body, headers, answer, session)


def _path_of(body: Json) -> str | None:
    """The path of the API that a body is of, by its fields; None if it is of none."""
    best, most = None, 0
    for path, dialect in DIALECTS.items():
        for names in dialect.known_by:
            if len(names) > most and names <= body.keys():
                best, most = path, len(names)
    return best


def _of_sglang(value: Json, number: int) -> LoggedBody | None:
    """A line of SGLang's: the request with the tokens that its server made of it."""
    if value["event"] != "request.received" or not isinstance(obj := value.get("obj"), dict):
        return None
    ids, text = obj.get("input_ids"), obj.get("text")
    if isinstance(ids, str) or (
        isinstance(text, str) and " ... " in text and len(text) <= 4096 and ids is None
    ):
        raise LogError(number, "has a prompt that its server has cut off", LEVEL)
    if isinstance(ids, list):
        body: Json = {"input_ids": ids}
    elif isinstance(text, str):
        body = {"text": text}
    else:
        raise LogError(number, "has no prompt", LEVEL)
    if isinstance(key := obj.get("extra_key"), str):
        body["extra_key"] = key
    return _logged(_path_of(body), body, _headers(value.get("headers")), "", number)


def _of_litellm(value: Json, number: int) -> LoggedBody | None:
    """LiteLLM's payload for loggers (``StandardLoggingPayload``)."""
    if value["call_type"] not in ("completion", "acompletion", "anthropic_messages"):
        return None
    given = value.get("model_parameters") or {}
    body = {"model": value.get("model"), "messages": value["messages"]}
    body |= {name: given[name] for name in ("system", "tools", "max_tokens") if given.get(name) is not None}
    session = value.get("session_id") or value.get("trace_id")
    name = session if isinstance(session, str) else ""
    return _logged(_path_of(body), body, {}, _text_of(value.get("response")), number, name)


def _time_of(value: Json) -> float | None:
    """When a request came: a number of seconds or milliseconds, or a time by ISO 8601."""
    for name in ("timestamp", "startTime", "start_time", "created_at", "created", "time", "ts"):
        given = value.get(name)
        if isinstance(given, int | float) and not isinstance(given, bool) and given >= 0:
            return given / 1000 if given > MILLISECONDS_FROM else float(given)
        if isinstance(given, str):
            try:
                return datetime.fromisoformat(given).timestamp()
            except ValueError:
                continue
    return None


def _answer_tokens(value: Json) -> int | None:
    """How long an answer was, by its own account."""
    response = value.get("response")
    if isinstance(response, dict) and isinstance(body := response.get("body"), dict):
        response = body
    usage = response.get("usage") if isinstance(response, dict) else None
    for source in (usage, value):
        for name in ("completion_tokens", "output_tokens"):
            if isinstance(source, dict) and isinstance(count := source.get(name), int):
                return count
    return None


def _headers(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {name.lower(): text for name, text in value.items() if isinstance(text, str)}


def _text_of(response: Any) -> str:
    """The text of an answer of one choice."""
    if not isinstance(response, dict):
        return ""
    response = response["body"] if isinstance(response.get("body"), dict) else response
    choices = response.get("choices")
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
        message = choices[0].get("message")
        text = message.get("content") if isinstance(message, dict) else choices[0].get("text")
        return text if isinstance(text, str) else ""
    if isinstance(content := response.get("content"), list):
        texts = [block.get("text") for block in content if isinstance(block, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return ""
