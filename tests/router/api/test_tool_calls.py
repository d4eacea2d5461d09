"""The tools that answers call, in the forms of the APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.router.api.tool_calls import MOST_TOOLS, tools_called, tools_called_in

CALL = {"id": "c", "type": "function", "function": {"name": "Bash", "arguments": '{"name": "x"}'}}
USE = {"type": "tool_use", "id": "c", "name": "Bash", "input": {"name": "x", "type": "tool_use"}}
ITEM = {"arguments": '{"name": "x"}', "call_id": "c", "name": "Bash", "type": "function_call"}


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}]},
        {"content": [{"type": "text", "text": "I look."}, USE]},
        {"output": [{"type": "message", "content": []}, ITEM]},
    ],
)
def test_a_whole_answer_names_its_tools(answer: Any) -> None:
    assert tools_called(answer) == ("Bash",)


@pytest.mark.parametrize(
    "events",
    [
        [
            {"choices": [{"delta": {"content": "I look.", "tool_calls": None}}]},
            {"choices": [{"delta": {"tool_calls": [CALL]}}]},
            {"choices": [{"delta": {"tool_calls": [{"function": {"name": None, "arguments": "{"}}]}}]},
        ],
        [{"type": "content_block_start", "index": 1, "content_block": USE}],
        [{"type": "response.output_item.added", "item": ITEM}],
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_stream_names_its_tools(events: list[Any], separators: tuple[str, str]) -> None:
    assert tools_called_in([json.dumps(each, separators=separators).encode() for each in events]) == ("Bash",)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "tool_calls",
        {"choices": [{"message": {"content": '{"tool_calls": [{"function": {"name": "Bash"}}]}'}}]},
        {"choices": [{"message": {"tool_calls": ["Bash", {"function": {"name": 3}}, {"function": None}]}}]},
        {"content": [{"type": "tool_use"}, {"type": "text", "name": "Bash"}], "choices": {"message": 1}},
    ],
)
def test_what_is_no_call_names_no_tool(answer: Any) -> None:
    assert tools_called(answer) == ()
    assert tools_called_in([json.dumps(answer).encode(), b'{"tool_calls":["name":"']) == ()


def test_names_are_few_and_each_stands_once() -> None:
    calls = [{"function": {"name": f"t{number % 20}"}} for number in range(60)]
    assert len(tools_called({"choices": [{"message": {"tool_calls": calls}}]})) == MOST_TOOLS
