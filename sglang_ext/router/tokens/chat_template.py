"""Rendering a conversation as SGLang does, so that the router's tokens equal the server's.

SGLang parses a request into pydantic models, dumps those, reworks the messages and hands them to the
tokenizer's chat template (``entrypoints/openai/serving_chat.py``, ``protocol.py`` and
``parser/jinja_template_utils.py``). This module repeats the effect of those steps on the template's input,
for models with a Jinja template; the order of keys matters, because templates print tools as
JSON. Unsupported input raises ``CannotRender``, and the prompt is then matched by its text: that
costs precision, never correctness, because requests are forwarded unchanged. In addition,
``tokenizing`` compares a few conversations with the server's own tokens before it trusts this module.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.nodes
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang_ext.router.api.job import Pair
from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.facts import ChatFacts

UNSUPPORTED_PARSERS = frozenset({
    "hunyuan", "kimi_k3", "inkling", "muse", "deepseekv32", "deepseekv4", "deepseekv41",
})  # fmt: skip
"""Reasoning or tool parsers with which SGLang renders, or prepares, messages in its own way."""

UNSUPPORTED_ARCHITECTURES = re.compile(r"DeepseekV(32|4)|GptOss|Inkling|KimiK3|MossVL", re.IGNORECASE)
"""Models whose messages SGLang encodes in Python instead of by a template, or always by a processor."""

LONG_PART = 256
"""Bytes of a part of a message, as JSON, up to which it is matched as it is."""
_SHOWN = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
"""Parts of a message by their type, and as the template sees them."""
_MARK = "\x00"
_GENERIC_FIELDS = ("content", "tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools")


class CannotRender(Exception):
    """This module cannot reproduce SGLang's rendering of a request; the text gives the reason."""


class TemplateFailed(CannotRender):
    """The chat template raises for a conversation and its arguments, as it will at the server."""


def reranking(template: str) -> Callable[[Pair], str] | None:
    """A function from a (query, document) pair to the prompt, for the chat template of a reranker (Qwen3's);
    None for other templates, by SGLang's own test (``entrypoints/openai/serving_rerank.py``)."""
    lower = template.lower()
    if not ("answer can only be" in lower and '"yes"' in lower and '"no"' in lower):
        return None
    if "<|vision_start|>" in lower or "<|image_pad|>" in lower:

        def other(pair: Pair) -> str:
            raise CannotRender("a reranker of pictures puts a query and a document together in its own way")

        return other
    compiled = ImmutableSandboxedEnvironment(loader=jinja2.BaseLoader()).from_string(template)

    def render(pair: Pair) -> str:
        messages = [{"role": "user", "content": text} for text in (pair.query, pair.document)]
        values = {"instruct": pair.instruct} if pair.instruct else {}
        try:
            return compiled.render(messages=messages, **values)
        except Exception as error:
            raise TemplateFailed(f"the chat template failed: {type(error).__name__}: {error}") from error

    return render


@dataclass(frozen=True, slots=True)
class Rendering:
    """Arguments of the chat template, and the text appended to its tokens."""

    messages: list[Json]
    tools: list[Json] | None
    kwargs: Json
    assistant_prefix: str | None


_GLM53 = ("[gMASK]<sop>", "Reasoning Effort:", "<tool_call>", "<arg_key>", "<arg_value>")
"""Markers of GLM-5.3's template; earlier models of the same architecture have other templates."""


def unsupported(chat: ChatFacts, architecture: str, template: str | None = None) -> str | None:
    """Why conversations cannot be rendered here for such a server, or ``None`` if they can.

    Args:
        template: of the model, if that is known.
    """
    for parser in (chat.reasoning_parser, chat.tool_call_parser):
        if parser in UNSUPPORTED_PARSERS:
            return f"the server renders messages in its own way for the parser {parser}"
    if UNSUPPORTED_ARCHITECTURES.search(architecture):
        return f"the server encodes messages of {architecture} without a template"
    if chat.chat_template is not None and not chat.chat_template.endswith(".jinja"):
        return f"the server uses its built-in chat template {chat.chat_template!r}"
    if chat.chat_template is None and "GlmMoeDsa" in architecture and is_glm53(template or ""):
        return "the server renders GLM-5.3's chat template in Python"
    return None


def is_glm53(template: str) -> bool:
    """Whether SGLang, from 0.5.23 on, has a program in the place of this template."""
    return all(part in template for part in _GLM53) and "enable_thinking" not in template


def content_format(template: str) -> str:
    """Whether the template takes content as parts (``openai``) or as text (``string``).

    SGLang's rule: a template that loops over a message's content, or speaks of media, takes parts.
    """
    if any(word in template for word in ("image", "audio", "video", "vision")):
        return "openai"
    from transformers.utils.chat_template_utils import _compile_jinja_template  # imports torch if it is there

    try:
        tree = _compile_jinja_template(template).environment.parse(template)
    except jinja2.TemplateError:
        return "string"
    loops = (loop.iter for loop in tree.find_all(jinja2.nodes.For))
    return "openai" if any(_is_content(source) for source in loops) else "string"


def _is_content(node: jinja2.nodes.Node) -> bool:
    if isinstance(node, jinja2.nodes.Filter):
        return node.node is not None and _is_content(node.node)
    if isinstance(node, jinja2.nodes.Test):
        return _is_content(node.node)
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _is_content(node.node)
        return (
            _is_message(node.node)
            and isinstance(node.arg, jinja2.nodes.Const)
            and node.arg.value == "content"
        )
    return isinstance(node, jinja2.nodes.Getattr) and _is_message(node.node) and node.attr == "content"


def _is_message(node: jinja2.nodes.Node) -> bool:
    return isinstance(node, jinja2.nodes.Name) and node.ctx == "load" and node.name in ("message", "msg", "m")


def shows_system_in_place(template: str) -> bool:
    """Whether a system message in the midst of a conversation is seen by the model. SGLang's probe."""
    from jinja2 import ext, sandbox

    probe = "__system_in_place__"
    said = [("system", "t"), ("user", "t"), ("system", probe), ("user", "t")]
    messages = [{"role": role, "content": content} for role, content in said]
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols]
    )
    try:
        return probe in environment.from_string(template).render(
            messages=messages, add_generation_prompt=False
        )
    except Exception:  # noqa: BLE001 - templates are programs, and fail in any way
        return False


def prepare(payload: Json, chat: ChatFacts, fmt: str, *, answer_follows: bool = True) -> Rendering:
    """SGLang's arguments to the chat template for the body of a chat request.

    Args:
        payload: a body that ``openai.parse_chat`` has accepted; it is not changed.
        chat: the server's settings.
        fmt: ``content_format`` of the template.
        answer_follows: whether the model generates from here. Otherwise a trailing answer is a completed one
            and is rendered as such.

    Raises:
        CannotRender: the request uses a feature that this module does not support.
    """
    messages = [_dump_message(message) for message in payload["messages"]]
    if any(message.get("tools") for message in messages):
        raise CannotRender("tools inside messages")
    rendered = [_for_template(message, fmt) for message in messages]
    prefix = None
    if (
        answer_follows
        and rendered[-1].get("role") == "assistant"
        and isinstance(rendered[-1].get("content"), str)
    ):
        content = rendered[-1]["content"]
        if payload.get("continue_final_message"):
            prefix = content
            rendered = rendered[:-1]
        else:
            rendered[-1] = {"role": "user", "content": content}
    kwargs = _template_kwargs(payload, chat)
    return Rendering(rendered, _tools(payload, chat.tools_as_given), kwargs, prefix or None)


def _dump_message(message: Json) -> Json:
    """The message as SGLang's pydantic models dump it: known fields only, in their order."""
    role = message["role"]
    content = message.get("content")
    if isinstance(content, list):
        content = [_dump_part(part) for part in content]
    if role == "user":
        return {"role": role, "content": content}
    dumped: Json = {"role": role.lower(), "content": content}
    for name in _GENERIC_FIELDS[1:]:
        dumped[name] = message.get(name)
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise CannotRender("tool_calls is not an array")
        dumped["tool_calls"] = [_dump_call(call) for call in calls]
        if dumped["role"] == "assistant":
            for call in dumped["tool_calls"]:
                _parse_arguments(call["function"])
    return dumped


def _dump_part(part: Json) -> Json:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] in _SHOWN.values():
        return part
    raise CannotRender(f"content of type {part['type']!r}")


def _dump_call(call: Any) -> Json:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise CannotRender("a tool call without a function")
    function = call["function"]
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": call.get("type", "function"),
        "function": {"name": function.get("name"), "arguments": function.get("arguments")},
    }


def _parse_arguments(function: Json) -> None:
    if isinstance(function["arguments"], str):
        try:
            arguments = orjson.loads(function["arguments"])
        except orjson.JSONDecodeError:
            raise CannotRender("arguments of a tool call are not valid JSON") from None
        if not isinstance(arguments, dict):
            raise CannotRender("arguments of a tool call are not an object")
        function["arguments"] = arguments


def _for_template(message: Json, fmt: str) -> Json:
    """The message as the template sees it: no nulls on top, content in the template's format."""
    content = message["content"]
    if content is None:
        content = ""
    if not isinstance(content, list) or fmt == "string":
        text = content if isinstance(content, str) else _join(content)
        return {name: value for name, value in {**message, "content": text}.items() if value is not None}
    processed = {name: value for name, value in message.items() if value is not None and name != "content"}
    processed["content"] = _join(content) if message["role"] == "tool" else content
    return processed


def _join(parts: list[Json]) -> str:
    return " ".join(part["text"] for part in parts if part["type"] == "text")


def _tools(payload: Json, as_given: bool) -> list[Json] | None:
    tools = payload.get("tools")
    choice = payload.get("tool_choice")
    if not tools or choice == "none":
        return None
    if not isinstance(tools, list):
        raise CannotRender("tools is not an array")
    dumped = [_dump_tool(tool, as_given) for tool in tools]
    if isinstance(choice, dict):
        function = choice.get("function")
        wanted = function.get("name") if isinstance(function, dict) else None
        return [tool for tool in dumped if tool["function"]["name"] == wanted] or None
    return dumped


def _dump_tool(tool: Any, as_given: bool) -> Json:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        raise CannotRender("a tool without a function")
    function = tool["function"]
    if tool.get("defer_loading") is not None or function.get("defer_loading") is not None:
        raise CannotRender("defer_loading")
    dumped = {name: function.get(name) for name in ("description", "name", "parameters")}
    strict = function.get("strict", None if as_given else False)
    if strict is not None:
        dumped["strict"] = strict
    if as_given:
        dumped = {name: dumped[name] for name in [*function, *dumped] if name in dumped}
    return {"type": tool.get("type", "function"), "function": dumped, "defer_loading": None}


def _template_kwargs(payload: Json, chat: ChatFacts) -> Json:
    """Keyword arguments of the template: the request's, the reasoning switches, the server's defaults."""
    given = payload.get("chat_template_kwargs")
    kwargs: Json = dict(given) if isinstance(given, dict) else {}
    if "chat_template" in kwargs:
        raise CannotRender("a chat template of the request's own")
    effort, thinking = _reasoning(payload)
    if thinking is not None:
        kwargs.setdefault("thinking", thinking)
        kwargs.setdefault("enable_thinking", thinking)
    effort = kwargs.pop("reasoning_effort", None) or effort
    for name, value in chat.default_template_kwargs:
        kwargs.setdefault(name, value)
    if effort is None:
        effort = kwargs.get("reasoning_effort")
    # A key in chat_template_kwargs goes before the field of the request.
    return {**({} if effort is None else {"reasoning_effort": effort}), **kwargs}


def _reasoning(payload: Json) -> tuple[Any, bool | None]:
    """(reasoning effort, whether to think) from ``reasoning_effort`` and ``reasoning``."""
    effort = payload.get("reasoning_effort")
    thinking: bool | None = None
    reasoning = payload.get("reasoning")
    if isinstance(reasoning, dict):
        asked = reasoning.get("effort")
        if asked is None:
            asked = reasoning.get("reasoning_effort")
        if asked is not None:
            effort = asked
        enabled = reasoning.get("enabled")
        if enabled is None:
            enabled = reasoning.get("enable", False)
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in {"1", "true", "yes", "y", "on"}
        if enabled:
            thinking = True
    if effort is not None:
        if not isinstance(effort, str):
            raise CannotRender("a reasoning effort that is a number")
        thinking = effort != "none"
    return effort, thinking


def first_picture(payload: Json) -> tuple[int, Json, Json] | None:
    """Where the pictures, videos and sounds of a conversation begin; None if it has none.

    Returns:
        The number of the first message with one; the conversation as the template sees it; and the same with
        a mark in place of the first picture. Up to there, the template renders both alike.
    """
    messages = payload["messages"]
    found = next((n for n, message in enumerate(messages) if any(map(_is_picture, _parts(message)))), None)
    if found is None:
        return None
    shown = [_with_parts(message, map(_shown, _parts(message))) for message in messages]
    parts = _parts(shown[found])
    place = next(n for n, part in enumerate(_parts(messages[found])) if _is_picture(part))
    marked = [*parts[:place], {"type": "text", "text": _MARK}, *parts[place + 1 :]]
    other = [*shown[:found], {**shown[found], "content": marked}, *shown[found + 1 :]]
    return found, {**payload, "messages": shown}, {**payload, "messages": other}


def _parts(message: Json) -> list[Json]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _with_parts(message: Json, parts: Iterable[Json]) -> Json:
    return {**message, "content": list(parts)} if isinstance(message.get("content"), list) else message


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in {*_SHOWN, *_SHOWN.values()}


def _shown(part: Json) -> Json:
    return {"type": _SHOWN.get(part["type"], part["type"])} if _is_picture(part) else part


def text_of(payload: Json) -> str:
    """A text form of a conversation; the text of its next turn starts with it.

    It represents the prompt when the tokens are unknown. A long part that is not text, such as a picture, is
    replaced by its digest: pictures stay distinct, and the prompt tree stores none.
    """
    head = orjson.dumps([payload.get("tools"), payload.get("chat_template_kwargs")])
    return (head + text_of_messages(payload["messages"])).decode()


def text_of_messages(messages: list[Json]) -> bytes:
    """The part of ``text_of`` for messages, encoded."""
    return orjson.dumps([_with_parts(each, map(_part, _parts(each))) for each in messages])[:-1]


def _part(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") == "text":
        return part
    raw = orjson.dumps(part)
    return part if len(raw) <= LONG_PART else hashlib.blake2b(raw, digest_size=16).hexdigest()
