"""An event loop on a thread of its own, beside SGLang's, which has none or is busy computing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CALL_SECONDS = 60.0


class LoopThread:
    """Started by the constructor; `close` ends it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name} alive={self._thread.is_alive()}>"

    def run(self, work: Coroutine[Any, Any, T], seconds: float = CALL_SECONDS) -> T:
        """Run something there and return what it returns; from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def close(self) -> None:
        """End the loop, cancelling what still runs on it."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()
