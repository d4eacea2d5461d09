"""Tasks that run beside whoever starts them.

An event loop holds its tasks only weakly: one that nobody else refers to may vanish before it has ended. And
what a task raises that nobody awaits is told when it is collected, if at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks(set[asyncio.Task[Any]]):
    """Those of one owner that have not ended.

    Args:
        on_error: told what a task raised, once it has ended by that.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        super().__init__()
        self._on_error = on_error

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run something on the event loop of this thread."""
        task = asyncio.create_task(work, name=name)
        self.keep(task)
        return task

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that runs already."""
        self.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        """Cancel all; returns when they have ended."""
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.discard(task)
        if self._on_error is not None and not task.cancelled():
            error = task.exception()
            if error is not None:
                self._on_error(error)
