"""The reasoning switch of ``/v1/messages``, and earlier reasoning, as the server's chat template gets them.

SGLang's reasoning parser decides both (``entrypoints/anthropic/serving.py``, and
``OpenAIServingChat.apply_reasoning_enabled`` and ``wrap_reasoning_history``): Anthropic's ``thinking``
becomes an argument of the template, and reasoning of earlier answers a text in front of theirs.
"""

from __future__ import annotations

from typing import Any, Final

from sglang_ext.router.api.validation import Json
from sglang_ext.router.tokens.chat_template import CannotRender

TAGGED: Final = frozenset({
    "deepseek-r1", "deepseek-v3", "dots", "gigachat35", "glm45", "interns1", "kimi_k2", "mimo", "minimax",
    "nanbeige", "nemotron_3", "poolside_v1", "qwen3", "qwen3-thinking", "step3", "step3p5",
})  # fmt: skip
"""Parsers for reasoning between <think> and </think>, of models whose templates have a switch or none."""
_SWITCHES: Final = ("thinking", "enable_thinking")


def shown(payload: Json, parser: str | None) -> Json:
    """The body of a chat, as the template gets it.

    Args:
        payload: as `messages_as_chat.to_chat` makes it; it is not changed.
        parser: the server's ``--reasoning-parser``.

    Raises:
        CannotRender: it has reasoning or the switch, and another parser decides.
    """
    kwargs = payload.get("chat_template_kwargs") or {}
    switched = any(name in kwargs for name in _SWITCHES)
    reasoned = any("reasoning_content" in message for message in payload["messages"])
    if not (switched or reasoned):
        return payload
    if parser is not None and parser not in TAGGED:
        raise CannotRender(f"reasoning of /v1/messages with --reasoning-parser {parser}")
    found = dict(payload)
    if switched and parser is None:
        # The server refuses to switch reasoning on, and has nothing to switch off.
        found["chat_template_kwargs"] = {
            name: value for name, value in kwargs.items() if name not in _SWITCHES
        }
    if reasoned:
        found["messages"] = [_with_reasoning(message, parser) for message in payload["messages"]]
    return found


def _with_reasoning(message: Json, parser: str | None) -> Json:
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        return message
    rest: Json = {name: value for name, value in message.items() if name != "reasoning_content"}
    if parser is not None:
        content: Any = rest.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        text = f"<think>{reasoning}\n</think>"
        rest["content"] = [{"type": "text", "text": text}, *parts] if parts else text
    return rest
