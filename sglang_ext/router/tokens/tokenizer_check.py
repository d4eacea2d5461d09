"""Comparing the router's tokens with a worker's, before they are trusted.

The worker's own ``/v1/tokenize`` renders conversations by the code that serves them. A difference costs
precision of routing and of length checks, so kinds of prompts with a difference are not tokenized here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.worker import NotUsable

logger = logging.getLogger("router.tokenizer_check")


@dataclass(frozen=True, slots=True)
class Trust:
    """The kinds of prompts whose tokens in the router equal the server's."""

    text: bool = False
    chat: bool = False
    tools: bool = False


EVERYTHING = Trust(text=True, chat=True, tools=True)

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  white space \n\n\tand\ttabs, at both ends \n",
    "na\u00efve caf\u00e9, \u4f60\u597d\u4e16\u754c, \U0001f680 x\u0301 1234567",
    "def f(x):\n    return x ** 2  # it's 50% of <b>that</b>\n",
)
_USER: Json = {"role": "user", "content": "What is a radix tree?"}
_TURNS: list[Json] = [
    {"role": "system", "content": "You are terse. \n"},
    _USER,
    {"role": "assistant", "content": " A tree of shared prefixes. "},
    {"role": "user", "content": "Give an example \u2013 in caf\u00e9 terms.\n\nThanks!"},
]
CHATS: tuple[Json, ...] = (
    {"messages": [_USER]},
    {"messages": _TURNS},
    {"messages": [*_TURNS[:2], {"role": "user", "content": [{"type": "text", "text": "one"}]}]},
)
_WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL: Json = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ],
}
TOOLS: tuple[Json, ...] = (
    {"messages": [_USER], "tools": [_WEATHER]},
    {
        "messages": [_USER, _CALL, {"role": "tool", "tool_call_id": "c1", "content": "rain"}, _USER],
        "tools": [_WEATHER],
    },
)

Ours = Callable[[Json], Awaitable[list[int] | None]]
"""A body for ``/v1/tokenize`` -> the router's tokens; ``None`` when it does not tokenize such."""
ServerTokenizer = Callable[[Json], Awaitable[list[int] | None]]
"""The same -> the worker's tokens; ``None`` when it has no such endpoint. Raises ``NotUsable`` when the
worker refuses the sample."""


async def compare(ours: Ours, theirs: ServerTokenizer) -> Trust:
    """Try every sample on both sides.

    For a worker without the endpoint the tokens count as equal, since no difference can be shown.
    """
    text = await _agree("text", [{"prompt": text} for text in TEXTS], ours, theirs)
    chat = await _agree("conversations", CHATS, ours, theirs)
    tools = await _agree("conversations with tools", TOOLS, ours, theirs) if chat else False
    return Trust(text, chat, tools)


async def _agree(
    what: str, samples: tuple[Json, ...] | list[Json], ours: Ours, theirs: ServerTokenizer
) -> bool:
    for sample in samples:
        mine = await ours(sample)
        if mine is None:
            return False
        try:
            reference = await theirs(sample)
        except NotUsable as error:
            logger.warning("%s for a sample of %s; text is matched instead", error, what)
            return False
        if reference is None:
            logger.info("the workers have no /v1/tokenize; the router's tokens of %s are not verified", what)
            return True
        if mine != reference:
            logger.warning(
                "the router's tokens of %s differ from the worker's (%d, %d tokens); text is matched instead",
                what,
                len(mine),
                len(reference),
            )
            return False
    return True
