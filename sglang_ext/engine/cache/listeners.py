"""Who is told what happens to a cache: parts that are there for a while, such as returns and the agent."""

from __future__ import annotations

from typing import Any


class Listener:
    """What a part may want to hear; whatever it does not define is nothing to it.

    All calls come in the scheduler's thread, at one place of the same pass on every rank. None may raise.
    """

    def request_ended(self, req: Any, tokens: Any) -> None:
        """The KV of these tokens of a request that has ended is in the tree."""

    def takes_command(self, payload: bytes) -> bool:
        """Whether a command is for this part, which has carried it out then."""
        return False

    def before_clear(self) -> None:
        """Everything is about to be forgotten: give up what is in flight."""

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
        """Tell it from now on."""
        self._parts.append(part)

    def remove(self, part: Listener) -> None:
        """Tell it nothing more; it may have gone already."""
        if part in self._parts:
            self._parts.remove(part)

    def request_ended(self, req: Any, tokens: Any) -> None:
        for part in self._parts:
            part.request_ended(req, tokens)

    def takes_command(self, payload: bytes) -> bool:
        return any(part.takes_command(payload) for part in self._parts)

    def before_clear(self) -> None:
        for part in self._parts:
            part.before_clear()

    def role_changed(self, role: str) -> None:
        for part in self._parts:
            part.role_changed(role)

    def before_end(self) -> None:
        for part in list(self._parts):  # some go by it
            part.before_end()
