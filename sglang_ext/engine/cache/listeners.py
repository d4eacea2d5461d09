"""Listeners of a cache's events: parts that come and go, such as returns and the agent."""

from __future__ import annotations

from typing import Any

from sglang_ext.wire import Message


class Listener:
    """A part's reactions to events; a part overrides the methods that concern it.

    All calls come in the scheduler's thread, at one place of the same pass on every rank. None may raise.
    """

    def request_ended(self, req: Any, tokens: Any) -> None:
        """The KV of these tokens of a request that has ended is in the tree."""

    def takes_command(self, message: Message) -> bool:
        """Carry out a command that is for this part; returns whether it was."""
        return False

    def before_clear(self) -> None:
        """The cache is about to be emptied: give up the transfers in flight."""

    def role_changed(self, role: str) -> None:
        """The server prefills or decodes from now on."""

    def before_end(self) -> None:
        """The cache is about to end."""


class Listeners:
    """The parts that listen to one cache, in the order in which they came."""

    def __init__(self) -> None:
        self._parts: list[Listener] = []

    def __repr__(self) -> str:
        return f"Listeners({', '.join(type(part).__name__ for part in self._parts)})"

    def add(self, part: Listener) -> None:
        """Pass events to ``part`` from now on."""
        self._parts.append(part)

    def remove(self, part: Listener) -> None:
        """Pass no more events to ``part``; it may have gone already."""
        if part in self._parts:
            self._parts.remove(part)

    def request_ended(self, req: Any, tokens: Any) -> None:
        for part in self._parts:
            part.request_ended(req, tokens)

    def takes_command(self, message: Message) -> bool:
        return any(part.takes_command(message) for part in self._parts)

    def before_clear(self) -> None:
        for part in self._parts:
            part.before_clear()

    def role_changed(self, role: str) -> None:
        for part in self._parts:
            part.role_changed(role)

    def before_end(self) -> None:
        for part in list(self._parts):  # some go by it
            part.before_end()
