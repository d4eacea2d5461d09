"""Waiting for events without a notification: a condition and a deadline, never a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

POLL_SECONDS: Final = 0.1
"""Between two looks at a server, each of which is a request."""
LOOK_SECONDS: Final = 0.002
"""Seconds between two checks of a cheap condition."""


def wait_until(condition: Callable[[], T], *, seconds: float, what: str) -> T:
    """The first true value of ``condition``.

    Raises:
        TimeoutError: it stayed false; names ``what``.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)
    return value


async def until(condition: Callable[[], object], seconds: float = 30.0, what: str = "the condition") -> float:
    """Let the event loop go on until ``condition`` holds, which must be seen at once; how long that took.

    Raises:
        TimeoutError: it stayed false; names ``what``.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        await asyncio.sleep(LOOK_SECONDS)
    return time.monotonic() - began
