"""The names of the tools that an answer calls, read from answers of OpenAI's and Anthropic's APIs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_ext.router.api.sse import parsed

MOST_TOOLS = 8
"""Names of one answer that are kept."""
_CALLS = re.compile(rb'"tool_calls"\s*:\s*\[|"type"\s*:\s*"(?:tool_use|function_call)"')
_NAMED = re.compile(rb'"name"\s*:\s*"')
_TYPES = ("tool_use", "function_call")


def tools_called(answer: Any) -> tuple[str, ...]:
    """The tools that a whole answer calls, each once, by name."""
    return _distinct(_in_answer(answer))


def tools_called_in(events: Sequence[bytes]) -> tuple[str, ...]:
    """The tools that a stream of events calls. Only events that begin a call are parsed."""
    return _distinct(
        name
        for data in events
        if _CALLS.search(data) and _NAMED.search(data)
        for name in _in_event(parsed(data))
    )


def _distinct(names: Iterator[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))[:MOST_TOOLS]


def _in_answer(answer: Any) -> Iterator[str]:
    if not isinstance(answer, dict):
        return
    for choice in _objects(answer.get("choices")):
        yield from _in_message(choice.get("message"))
    for item in (*_objects(answer.get("content")), *_objects(answer.get("output"))):
        yield from _in_item(item)


def _in_event(event: Any) -> Iterator[str]:
    if not isinstance(event, dict):
        return
    for choice in _objects(event.get("choices")):
        yield from _in_message(choice.get("delta"))
    for key in ("content_block", "item"):
        yield from _in_item(event.get(key))


def _in_message(message: Any) -> Iterator[str]:
    """Of OpenAI's chat completions."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    for call in _objects(calls):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            yield name


def _in_item(item: Any) -> Iterator[str]:
    """Of Anthropic's messages and OpenAI's responses."""
    if isinstance(item, dict) and item.get("type") in _TYPES and isinstance(item.get("name"), str):
        yield item["name"]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict):
            yield each
