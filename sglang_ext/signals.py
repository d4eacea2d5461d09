"""Signals: one part notifies its subscribers without importing or holding them.

A part that needs another gets it in its constructor. Where two parts would need each other, the first one
made has a signal, and the second one subscribes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Signal(Generic[P]):
    """Calls all subscribers, in the order of their subscription, with its own arguments.

    Not thread-safe: everything happens in one thread. An exception of a subscriber goes to the caller, and
    the subscribers after it are not called.
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
        """Whether there are subscribers."""
        return bool(self._subscribers)

    def __repr__(self) -> str:
        return f"Signal({len(self._subscribers)} subscribers)"
