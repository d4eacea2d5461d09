"""Waiting for processes and conditions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SMALL_SERVER = Path(__file__).with_name("small_server.py")
DEADLINE_S = 20.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until the condition holds; fails after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.01)


async def async_wait_for(condition: Callable[[], bool], what: str) -> None:
    """As wait_for, with the event loop running."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
