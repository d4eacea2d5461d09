"""Tools of a conversation."""

from __future__ import annotations

from sglang_ext.router.api.job import Chat


def tool_names(chat: Chat | None) -> tuple[str, ...]:
    """The names of its tools, in their order."""
    tools = None if chat is None else chat.payload.get("tools")
    if not isinstance(tools, list):
        return ()
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return tuple(str(each.get("name")) for each in functions if isinstance(each, dict))
