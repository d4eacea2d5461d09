"""Repairs of prompts: parts that change from turn to turn without a meaning to the model.

The repaired body is sent to the server and tokenized by the router (``endpoints.repairing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import orjson

from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.validation import Json
from sglang_ext.router.clients.rules import Action, Rule, Where

_SYSTEM_ROLES = ("system", "developer")
_USER_ROLES = ("user", "tool")
_TEXTS = ("text", "input_text")
"""Types of a message's parts that are texts."""
MAX_PINNED_CHARACTERS = 256
BEGINNING_CHARACTERS = 512
"""A rule with ``at = "start"`` is looked for in so many."""

Pin = Callable[[str, int, str], str]
"""(name of a rule, how many of its matches came before, the text) -> the text that the session keeps."""


class Repair(msgspec.Struct, frozen=True):
    """The effect of one rule on one request."""

    rule: str
    changes: int
    """Parts of the prompt, or definitions of tools."""


def repair(dialect: Dialect, payload: Json, rules: Sequence[Rule], pin: Pin | None) -> tuple[Repair, ...]:
    """Apply rules to a body that was not checked yet, and return those that changed it.

    Args:
        payload: is changed.
        pin: of the request's session; None where it has none, and then nothing is pinned.
    """
    done = []
    for rule in rules:
        if rule.action is Action.SORT:
            changes = _sort_tools(payload)
        else:
            changes = _edit(dialect, payload, rule, pin)
        if changes:
            done.append(Repair(rule.name, changes))
    return tuple(done)


def system_beginnings(dialect: Dialect, payload: Json) -> list[str]:
    """The first ``BEGINNING_CHARACTERS`` of each text of the system's."""
    if not dialect.instructions_in and not dialect.messages_in:
        return []
    fields = [payload.get(name) for name in dialect.instructions_in]
    for name in dialect.messages_in:
        messages = payload.get(name)
        if type(messages) is list:
            fields += [
                message.get("content")
                for message in messages
                if type(message) is dict and message.get("role") in _SYSTEM_ROLES
            ]
    found = []
    for value in fields:
        for part in value if type(value) is list else (value,):
            text = part.get("text") if type(part) is dict else part
            if type(text) is str:
                found.append(text[:BEGINNING_CHARACTERS])
    return found


# -- parts of texts ------------------------------------------------------------------------------------


class _Edit:
    """Edits texts by one rule. moved: parts that go to the end of the last message."""

    def __init__(self, rule: Rule, pin: Pin | None, *, movable: bool) -> None:
        self._rule, self._pin, self._movable = rule, pin, movable
        self.changes = 0
        self.moved: list[str] = []
        self._found = 0

    def text(self, text: str) -> str:
        """A text as the rule leaves it."""
        pattern = self._rule.match
        assert pattern is not None
        if self._rule.at_start:
            found = pattern.match(text)
            return text if found is None else self._replaced(found) + text[found.end() :]
        return pattern.sub(self._replaced, text)

    def _replaced(self, found: Any) -> str:
        before: str = found.group()
        after = self._decide(found, before)
        self.changes += after != before
        return after

    def _decide(self, found: Any, before: str) -> str:
        match self._rule.action:
            case Action.DROP:
                return ""
            case Action.REPLACE:
                expanded: str = found.expand(self._rule.replacement)
                return expanded
            case Action.LAST if self._movable:
                self.moved.append(before.strip())
                return ""
            case Action.PIN if self._pin is not None and len(before) <= MAX_PINNED_CHARACTERS:
                at, self._found = self._found, self._found + 1
                return self._pin(self._rule.name, at, before)
        return before


def _edit(dialect: Dialect, payload: Json, rule: Rule, pin: Pin | None) -> int:
    last = _last_message(dialect, payload) if rule.action is Action.LAST else None
    edit = _Edit(rule, pin, movable=last is not None)
    if rule.where is Where.SYSTEM:
        for name in dialect.instructions_in:
            _edit_field(payload, name, edit)
    roles = _SYSTEM_ROLES if rule.where is Where.SYSTEM else _USER_ROLES
    for message in _messages(dialect, payload):
        if message.get("role") in roles:
            _edit_field(message, "content", edit)
    if last is not None and edit.moved:
        _append(last, edit.moved[-1])  # earlier ones are of earlier turns
    return edit.changes


def _edit_field(holder: Json, name: str, edit: _Edit) -> None:
    """Edit a text, or the texts among the parts in a field. Parts that are left empty go."""
    value = holder.get(name)
    if type(value) is str:
        holder[name] = edit.text(value)
    elif type(value) is list:
        kept = []
        for part in value:
            if type(part) is str:
                part = edit.text(part)
            elif type(part) is dict and part.get("type") in _TEXTS and type(part.get("text")) is str:
                before = part["text"]
                part["text"] = edit.text(before)
                if before and not part["text"]:
                    continue
            kept.append(part)
        holder[name] = kept


def _messages(dialect: Dialect, payload: Json) -> Iterator[Json]:
    for name in dialect.messages_in:
        messages = payload.get(name)
        if type(messages) is list:
            for message in messages:
                if type(message) is dict:
                    yield message


def _last_message(dialect: Dialect, payload: Json) -> Json | None:
    """The last message, if the model answers it and a text can be appended."""
    last = next(reversed(list(_messages(dialect, payload))), None)
    if last is None or last.get("role") not in _USER_ROLES:
        return None
    return last if type(last.get("content")) in (str, list) else None


def _append(message: Json, text: str) -> None:
    content = message["content"]
    if type(content) is str:
        message["content"] = f"{content}\n{text}" if content else text
        return
    kinds = [part.get("type") for part in content if type(part) is dict]
    content.append({"type": "input_text" if "input_text" in kinds else "text", "text": text})


# -- definitions of tools --------------------------------------------------------------------------------


def _sort_tools(payload: Json) -> int:
    """Sort tools by name, and the keys of their definitions; returns how many stand or read otherwise now."""
    tools = payload.get("tools")
    if type(tools) is not list or not all(type(tool) is dict for tool in tools):
        return 0
    ordered = sorted(tools, key=_tool_name)
    before = [orjson.dumps(tool) for tool in tools]
    after = [orjson.dumps(tool, option=orjson.OPT_SORT_KEYS) for tool in ordered]
    changes = sum(one != other for one, other in zip(before, after, strict=True))
    if changes:
        payload["tools"] = [orjson.loads(tool) for tool in after]
    return changes


def _tool_name(tool: Json) -> str:
    function = tool.get("function")
    name = function.get("name") if type(function) is dict else tool.get("name")
    return name if type(name) is str else ""
