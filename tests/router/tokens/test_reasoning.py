"""Reasoning of ``/v1/messages``: the form in which the chat template gets it."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.router.api.messages_as_chat import to_chat
from sglang_ext.router.tokens.chat_template import CannotRender
from sglang_ext.router.tokens.reasoning import shown

HI = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def chat(*blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    said = [HI, {"role": "assistant", "content": list(blocks)}, HI] if blocks else [HI]
    return to_chat({"model": "m", "messages": said, **fields})


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def test_earlier_reasoning_is_put_in_front_of_its_answer() -> None:
    wrapped = {"type": "text", "text": "<think>a\nb\n</think>"}
    answer = {"type": "text", "text": "yes"}
    for blocks, content in (
        ([thought("a"), thought("b"), answer], [wrapped, answer]),
        ([thought("a"), thought("b")], wrapped["text"]),
        ([thought("a"), thought("b"), CALL], wrapped["text"]),
        ([thought("a"), answer, thought("b"), answer], [wrapped, answer, answer]),
    ):
        message = shown(chat(*blocks), "qwen3")["messages"][1]
        assert message["content"] == content
        assert "reasoning_content" not in message


def test_a_server_without_a_parser_drops_reasoning() -> None:
    found = shown(chat(thought("a"), {"type": "text", "text": "yes"}), None)
    assert found["messages"][1] == {"role": "assistant", "content": "yes"}


def test_the_switch_is_of_servers_with_a_parser() -> None:
    asked = chat(thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert shown(asked, "qwen3")["chat_template_kwargs"] == {
        "thinking": False,
        "enable_thinking": False,
        "reasoning_effort": "low",
    }
    assert shown(asked, None)["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert asked["chat_template_kwargs"]["thinking"] is False, "the body is not changed"


@pytest.mark.parametrize("body", [chat(thought("a")), chat(thinking={"type": "adaptive"})])
def test_other_parsers_are_the_server_s_matter(body: dict[str, Any]) -> None:
    with pytest.raises(CannotRender, match="--reasoning-parser mistral"):
        shown(body, "mistral")


def test_other_messages_need_no_parser() -> None:
    plain = chat({"type": "text", "text": "yes"}, output_config={"effort": "low"})
    assert shown(plain, "mistral") is plain
