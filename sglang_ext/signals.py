"""Signals: what one part tells whoever wants to know, without knowing them.

A part that needs another is given it when it is made. Where two would need each other, the one that is made
first has a signal, and the other one subscribes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Signal(Generic[P]):
    """Calls everyone who has subscribed, in that order, with what it is called with.

    Not thread-safe: everything happens in one thread. What a subscriber raises goes to the caller, and those
    after it are not told.
    """

    __slots__ = ("_subscribers",)

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[P, object], ...] = ()

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        """Call ``subscriber``, too, from now on."""
        self._subscribers = (*self._subscribers, subscriber)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for subscriber in self._subscribers:
            subscriber(*args, **kwargs)

    def __bool__(self) -> bool:
        """Whether anybody has subscribed."""
        return bool(self._subscribers)

    def __repr__(self) -> str:
        return f"Signal({len(self._subscribers)} subscribers)"
